"""A Graph to C++: Inductor writes the kernels and the calls between them, we keep its body and drop its container.

Inductor's ahead-of-time output is one wrapper.cpp: about 600 lines of container that cost 4 s of g++ each, input checks,
a `run_impl` and the kernels. A program here is a plain function over borrowed tensor handles, so only the body of
`run_impl` and the kernels are kept. The places we cut at are checked; a version of torch that writes something else
stops with our bug, not with wrong code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codecache import code_hash
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner, get_cpp_wrapper_config
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from ..artifact.graph import Graph
from ..errors import BugError
from ..plan.options import Options
from ..process import alone, without_warnings
from . import inductor_fixes, lowerings
from .calls import program_of_calls, table_of_calls
from .known import known
from .memory import families, own_temporaries, plan_temporaries, unknown_form
from .to_fx import to_fx

SIMD_BITS = {"x86-64-v3": 256, "x86-64-v4": 512, "baseline": 0}


@contextmanager
def _inductor_cache(folder: Path) -> Iterator[None]:
    """Inductor keeps its own files (header probes, instruction-set checks) in our cache instead of /tmp. Not where other threads
    run, whose compiles would find themselves there too."""
    if not alone():
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warnings about missing C entry points become our own error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def settings(options: Options) -> dict[str, Any]:
    """Inductor's options. They are part of the cache key."""
    chosen: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.package_cpp_only": True,
        # Loops are divided among this machine's cores at most; a session with fewer threads uses fewer (see slim). A loop
        # is divided only where each thread gets this many elements: waking another thread costs some microseconds.
        "cpp.threads": max(2, len(os.sched_getaffinity(0))),
        "cpp.min_chunk_size": 4096,
        "fx_graph_cache": False,
        "emulate_precision_casts": True,  # x.bfloat16().float() rounds, as in eager PyTorch
        "joint_graph_constant_folding": False,  # x * 0 is not 0 where x is not a number
        # Loops that share a buffer are tried for fusion with this many neighbours; all loops of an optimizer share one.
        "max_fusion_buffer_group_pairwise_attempts": 16,
        "cpp.vec_isa_ok": True,  # our own flags say what the machine has: no test programs have to be compiled
    }
    if options.isa in SIMD_BITS:
        chosen["cpp.simdlen"] = SIMD_BITS[options.isa] or 1
    return chosen


def surroundings() -> dict[str, str]:
    """What the user may have set in torch that changes the code which Inductor writes. Part of the cache key, so it is to be
    asked before generate(), which changes Inductor's configuration while it works."""
    ignored = tuple(prefix for prefix in config._cache_config_ignore_prefix if "custom" not in prefix)
    values = config.get_config_copy()
    asked = [k for k in sorted(values) if ("custom" in k and "pass" in k) or not k.startswith(("_", *ignored))]
    spelt = "\n".join(f"{k} = {_spelt(values[k])}" for k in asked)
    return {
        "inductor": hashlib.sha256(spelt.encode()).hexdigest(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "filled": str(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        "matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn": str(torch.backends.mkldnn.enabled),  # type: ignore[attr-defined]
    }


def _spelt(value: Any) -> str:
    """A setting as text, the same in every process. Code of the user's (a graph pass, say) is known by its uuid(), which is
    Inductor's own convention; without one it may do anything, and so it is never the same as before."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_spelt(k)}: {_spelt(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_spelt, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_spelt, value))) + "}"
    known = value.uuid() if hasattr(value, "uuid") and not isinstance(value, type) else None
    return f"{type(value).__qualname__} {known!r}" if known is not None else os.urandom(16).hex()


def generate(graph: Graph, options: Options, scratch: Path, called: Collection[str] = (), *, piece: bool = False) -> str:
    """C++ source of one program, or of a piece of one. Operators named in `called` go through torch's dispatcher; "*" stands for
    all of them."""
    if "*" in called:
        return program_of_calls(graph)
    never = set(known(graph))
    calls = [n for n in graph.nodes if n.op in called or n.name in never]
    mode = FakeTensorMode(static_shapes=True, shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    lowerings.register()
    with torch.no_grad(), without_warnings(), _inductor_cache(scratch), inductor_fixes.applied():
        try:
            files = _inductor(to_fx(graph, mode, calls), mode, settings(options))
        except Exception as e:
            raise _no_code(graph, e) from e
    wrapper = next(f for f in files if str(f).endswith(".cpp"))
    return slim(Path(wrapper).read_text(), graph, table_of_calls(calls) if calls else "", piece)


def _inductor(module: torch.fx.GraphModule, mode: FakeTensorMode, chosen: dict[str, Any]) -> Any:
    """Inductor's ahead-of-time output for a graph of its own operators: the names of the files that it wrote."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    # Inductor notes in the metadata what it has made: in a dict of ours, or the user's configuration would change for good.
    output = {"cpp_wrapper": True, "aot_inductor.output_path": code_hash(module.code), "aot_inductor.metadata": {}}
    with (
        config.patch(get_cpp_wrapper_config()),
        config.patch({**chosen, **output}),
        V.set_aot_compilation(True),
        V.set_fake_mode(mode),
    ):
        module = _recursive_joint_graph_passes(module, input_device=torch.device("cpu"))
        made: Any = compile_fx_inner(module, inputs, is_inference=True, cpp_wrapper=True)
        return made.filename


class NoCode(Exception):
    """There is no native code for a program as it is. `operators`: those that Inductor cannot do; none where it does not say."""

    def __init__(self, program: str, operators: Collection[str], why: str) -> None:
        super().__init__(f"program {program} could not be turned into native code: {why}")
        self.program, self.operators = program, tuple(operators)


def _no_code(graph: Graph, error: Exception) -> NoCode:
    text = str(error)
    named = {n.op for n in graph.nodes if n.op in text and not n.op.startswith("tilework.")}
    complex_values = {n.op for n in graph.nodes if any(t is not None and "complex" in t.dtype for t in n.types)}
    return NoCode(
        graph.name, named if not complex_values else (), f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    )


_RUN = re.compile(r"\nvoid AOTInductorModel::run_impl\(.*?\n\) \{\n(.*?)\n\} // AOTInductorModel::run_impl\n", re.S)
_DECLARED = re.compile(r'^extern "C" .*?\(.*?\);$|^CACHE_TORCH_\w+\(\w+\);$|^static constexpr .*?;$', re.S | re.M)
_INPUT = re.compile(r"^ *auto (\w+) = std::move\(inputs\[(\d+)\]\);$", re.M)
_OMIT = re.compile(
    r"^ *(?:if \(_check_aoti_runtime_check_inputs_env\(\)\).*|__check_inputs_outputs\(.*|inputs\.clear\(\);|"
    r"auto inputs = steal_from_raw_handles.*|\[\[maybe_unused\]\] auto& kernels = .*)$\n",
    re.M,
)


def slim(text: str, graph: Graph, calls: str = "", piece: bool = False) -> str:
    """Cuts Inductor's wrapper.cpp down to `int tilework_run_<program>(AtenTensorHandle* buffers, char* error, size_t size)`, or
    to the three names that assemble.py calls a piece by. All names carry the program's, so that several can share a library."""

    def expect(found: Any, what: str) -> Any:
        if not found:
            raise BugError(
                "compile-wrapper",
                f"torch {torch.__version__} wrote a wrapper that this version of Tilework does not know: no {what}",
                fix="use torch 2.11 to 2.13",
            )
        return found

    run = expect(_RUN.search(text), "run_impl")
    body, kernels = run.group(1) + "\n", text[run.end() :]
    kernels = kernels[expect(re.search(r"#include .*cpp_prefix\.h", kernels), "cpp_prefix.h").start() :]
    head_start = expect(text.find('} // extern "C"') + 1, "interface") - 1
    head = text[head_start : text.find("namespace torch::aot_inductor {", head_start)]
    declarations = "\n".join(_DECLARED.findall(head))
    if "proxy_executor" in body:
        raise _needs_dispatcher(body, graph)
    if "constants_" in body:
        raise BugError("compile-constants", f"program {graph.name}: the generated code has constants of its own")
    names = {int(i): name for name, i in _INPUT.findall(body)}
    expect(sorted(names) == list(range(len(graph.buffers))), "list of inputs")
    body = _OMIT.sub("", body)
    body = _INPUT.sub(r"    const tilework::Borrowed& \1 = workspace.borrowed[\2];", body)
    for name in names.values():
        body = re.sub(rf"^ *{name}\.reset\(\);$\n", "", body, flags=re.M)
    body = body.replace("this->device_idx_", "0")
    expect("this->" not in body, "independent body")
    kernels, checked = _careful(kernels)
    for name in checked:
        body = re.sub(rf"^( *{name}\(.*\);)$", r"\1\n    tilework::check();", body, flags=re.M)
    # Inductor does not look at what some of its calls return: an index out of range would go unnoticed.
    body = re.sub(r"^( *)(aoti_torch_\w+\(.*\));$", r"\1AOTI_TORCH_ERROR_CODE_CHECK(\2);", body, flags=re.M)
    unknown = unknown_form(body) or _unknown_loop(kernels)
    if unknown:
        raise NoCode(graph.name, (), f"the generated code has a line of a form that is not known here: {unknown[:200]}")
    own = own_temporaries()
    body, num_temporaries, bytes_needed = plan_temporaries(body, declarations, own)
    kernels = _hoisted(kernels, body)
    kernels = re.sub(r"num_threads\((\d+)\)", r"num_threads(std::min(\1, omp_get_max_threads()))", kernels)
    name = graph.name
    kernels, declarations, body = (re.sub(r"\bcpp_fused_", f"{name}_cpp_fused_", t) for t in (kernels, declarations, body))
    include, kernels = kernels.split("\n", 1)
    workspace = f"tilework::{'Separate' if own else ''}Workspace<{len(graph.buffers)}, {num_temporaries}>"
    return f"""// Tilework program {name}
{include}
namespace program_{name} {{
using namespace torch::aot_inductor;
{kernels}
{declarations}
{calls}
using Workspace = {workspace};
static void run(Workspace& workspace) {{
{body}
}}
}}  // namespace program_{name}
""" + (_piece_entry(name, bytes_needed) if piece else program_entry(graph, _WHOLE.format(name=name, bytes=bytes_needed), name))


_WHOLE = """
static program_{name}::Workspace workspace;
static void release() {{ workspace.release(); }}
static void run(AtenTensorHandle* buffers) {{
  workspace.prepare(buffers, {bytes});
  program_{name}::run(workspace);
}}
"""


def program_entry(graph: Graph, code: str, name: str) -> str:
    """The three names that a program is known by. `code` defines run(buffers) and release()."""
    return f"""
namespace entry_{name} {{{code}}}
extern "C" __attribute__((visibility("default"))) const char tilework_abi_{name}[] = "{graph.abi()}";
extern "C" __attribute__((visibility("default"))) void tilework_release_{name}() {{ entry_{name}::release(); }}
extern "C" __attribute__((visibility("default"))) int tilework_run_{name}(
    AtenTensorHandle* buffers, char* error, size_t size) {{
  try {{
    entry_{name}::run(buffers);
    return 0;
  }} catch (const std::exception& e) {{
    snprintf(error, size, "%s", e.what());
    return 1;
  }}
}}
"""


def _piece_entry(name: str, bytes_needed: int) -> str:
    return f"""
extern "C" const size_t tilework_bytes_{name} = {bytes_needed};
extern "C" void tilework_drop_{name}(void* workspace) {{
  auto* own = static_cast<program_{name}::Workspace*>(workspace);
  own->release();
  delete own;
}}
extern "C" void tilework_piece_{name}(void*& workspace, AtenTensorHandle* buffers, char* memory) {{
  if (!workspace) workspace = new program_{name}::Workspace;
  auto& own = *static_cast<program_{name}::Workspace*>(workspace);
  own.prepare_in(memory, buffers);
  program_{name}::run(own);
}}
"""


_LOOP = re.compile(r"^ *#pragma omp (?!(?:parallel(?: num_threads\(\d+\))?|for(?: collapse\(\d+\))?|single|simd.*)$).*", re.M)


def _unknown_loop(kernels: str) -> str:
    """A form of parallel loop that kernels/team.cpp does not know: one that divides its work as it goes, say."""
    found = _LOOP.search(kernels)
    return found.group(0).strip() if found else ""


def _careful(kernels: str) -> tuple[str, list[str]]:
    """Index checks inside parallel loops must not throw there, which would end the process. They note the failure and skip
    the element; the body asks for it right after the kernel. Returns the kernels concerned."""
    parts = re.split(r'(?=^extern "C")', kernels, flags=re.M)
    checked = []
    for i, part in enumerate(parts):
        if "#pragma omp" in part and "AOTI_TORCH_CHECK" in part:
            noted = r"if (!(\1)) { tilework::failure = \2; continue; }"
            parts[i] = re.sub(r'AOTI_TORCH_CHECK\((.*), (".*?")\);$', noted, part, flags=re.M)
            checked += re.findall(r'^extern "C"\s+void\s+(\w+)\(', part, re.M)
    return "".join(parts), checked


_KERNEL = re.compile(r'^extern "C"\s+void\s+(\w+)\((.*?)\)\s*\{\n', re.M | re.S)
_POINTER = re.compile(r"(const )?\w+\* ?(\w+)")


def _hoisted(kernels: str, body: str) -> str:
    """Scalars that a kernel reads from memory (hyperparameters, say) are read once, before its loops. The compiler cannot
    see that the loops' stores do not change them; we can, from the call: their memory is not among that written."""
    family = families(body)
    parts = re.split(r'(?=^extern "C")', kernels, flags=re.M)
    for i, part in enumerate(parts):
        head = _KERNEL.match(part)
        if not head:
            continue
        parameters = _POINTER.findall(head.group(2))
        fixed = {name for const, name in parameters if const}
        for call in re.findall(rf"^ *{head.group(1)}\((.*)\);$", body, re.M):
            names = re.findall(r"\([^()]*\*\)\((\w+)\.data_ptr\(\)\)", call)
            if len(names) != len(parameters):
                fixed = set()
                break
            memory = [family.get(name, name) for name in names]
            written = {m for m, (const, _) in zip(memory, parameters, strict=True) if not const}
            fixed -= {name for m, (_, name) in zip(memory, parameters, strict=True) if m in written}
        rest, lines = part[head.end() :], []
        for name in sorted(fixed):
            for index in sorted(set(re.findall(rf"\b{name}\[static_cast<int64_t>\((\d+)L\)\]", rest)), key=int):
                lines.append(f"    const auto {name}_at{index} = {name}[{index}];")
                rest = rest.replace(f"{name}[static_cast<int64_t>({index}L)]", f"{name}_at{index}")
        parts[i] = part[: head.end()] + "".join(line + "\n" for line in lines) + rest
    return "".join(parts)


def _needs_dispatcher(body: str, graph: Graph) -> NoCode:
    """Operators without a plain C entry, for which Inductor would ask Python at run time. Where it made such a one out of others
    (zeros, out of the gradient of a slice), those that have complex results: only they become operators without an entry."""
    names = set(re.findall(r"torch\.ops\.([\w.]+)", body)) & {n.op for n in graph.nodes}
    if not names:
        found = [n.op for n in graph.nodes if any(t is not None and "complex" in t.dtype for t in n.types)]
        names = {op for op in found if op != "getitem" and not op.startswith("tilework.")}
    return NoCode(graph.name, names, "no native entry point")
