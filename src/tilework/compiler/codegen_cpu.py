"""A Graph to C++: Inductor writes the kernels and the calls between them, we keep its body and drop its container.

Inductor's ahead-of-time output is one wrapper.cpp: about 600 lines of container that cost 4 s of g++ each, input checks,
a `run_impl` and the kernels. A program here is a plain function over borrowed tensor handles, so only the body of
`run_impl` and the kernels are kept. The places we cut at are checked; a version of torch that writes something else
stops with our bug, not with wrong code.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
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
from ..errors import BugError, Place, UserError
from ..plan.options import Options
from . import lowerings
from .memory import families, plan_temporaries
from .to_fx import to_fx

SIMD_BITS = {"x86-64-v3": 256, "x86-64-v4": 512, "baseline": 0}


@contextmanager
def _inductor_cache(folder: Path) -> Iterator[None]:
    """Inductor keeps its own files (header probes, instruction-set checks) in our cache instead of /tmp."""
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
        "cpp.min_chunk_size": 8192,
        "fx_graph_cache": False,
        # Loops that share a buffer are tried for fusion with this many neighbours; all loops of an optimizer share one.
        "max_fusion_buffer_group_pairwise_attempts": 16,
        "cpp.vec_isa_ok": True,  # our own flags say what the machine has: no test programs have to be compiled
    }
    if options.isa in SIMD_BITS:
        chosen["cpp.simdlen"] = SIMD_BITS[options.isa] or 1
    return chosen


def generate(graph: Graph, options: Options, scratch: Path) -> str:
    """C++ source of one program."""
    mode = FakeTensorMode(static_shapes=True, shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    lowerings.register()
    with torch.no_grad(), warnings.catch_warnings(), _inductor_cache(scratch):
        warnings.simplefilter("ignore")
        try:
            files = _inductor(to_fx(graph, mode), mode, settings(options))
        except Exception as e:
            raise _unsupported(graph, e) from e
    wrapper = next(f for f in files if str(f).endswith(".cpp"))
    return slim(Path(wrapper).read_text(), graph)


def _inductor(module: torch.fx.GraphModule, mode: FakeTensorMode, chosen: dict[str, Any]) -> Any:
    """Inductor's ahead-of-time output for a graph of its own operators: the names of the files that it wrote."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    output = {"cpp_wrapper": True, "aot_inductor.output_path": code_hash(module.code)}
    with (
        config.patch(get_cpp_wrapper_config()),
        config.patch({**chosen, **output}),
        V.set_aot_compilation(True),
        V.set_fake_mode(mode),
    ):
        module = _recursive_joint_graph_passes(module, input_device=torch.device("cpu"))
        made: Any = compile_fx_inner(module, inputs, is_inference=True, cpp_wrapper=True)
        return made.filename


def _unsupported(graph: Graph, error: Exception) -> Exception:
    """Inductor names the operator it cannot lower; we find the user's line that asked for it."""
    text = str(error)
    for node in graph.nodes:
        if node.op in text and node.where:
            return UserError(
                "compile-operator",
                f"the cpu device has no code for operator {node.op}",
                places=[Place(node.where, node.source, text.splitlines()[0], "write it with other PyTorch operators")],
            )
    complex_values = [n for n in graph.nodes if n.where and any(t is not None and "complex" in t.dtype for t in n.types)]
    if complex_values:
        return UserError(
            "compile-operator",
            "the cpu device has no code for complex numbers",
            places=[Place(n.where, n.source, f"{n.op} makes them", "write it with real numbers") for n in complex_values[:3]],
            fix="use other operators, or compile for the device `reference` (--device, TILEWORK_DEVICE)",
        )
    return BugError(
        "compile-inductor",
        f"program {graph.name} could not be turned into C++: {type(error).__name__}: {text.splitlines()[0] if text else ''}",
        fix="compile with --device reference to go on, and report this",
    )


_RUN = re.compile(r"\nvoid AOTInductorModel::run_impl\(.*?\n\) \{\n(.*?)\n\} // AOTInductorModel::run_impl\n", re.S)
_DECLARED = re.compile(r'^extern "C" .*?\(.*?\);$|^CACHE_TORCH_\w+\(\w+\);$|^static constexpr .*?;$', re.S | re.M)
_INPUT = re.compile(r"^ *auto (\w+) = std::move\(inputs\[(\d+)\]\);$", re.M)
_OMIT = re.compile(
    r"^ *(?:if \(_check_aoti_runtime_check_inputs_env\(\)\).*|__check_inputs_outputs\(.*|inputs\.clear\(\);|"
    r"auto inputs = steal_from_raw_handles.*|\[\[maybe_unused\]\] auto& kernels = .*)$\n",
    re.M,
)


def slim(text: str, graph: Graph) -> str:
    """Cuts Inductor's wrapper.cpp down to `int tilework_run_<program>(AtenTensorHandle* buffers, char* error, size_t size)`.
    All names carry the program's, so that several programs can share a library."""

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
    body, num_temporaries, bytes_needed = plan_temporaries(body, declarations)
    kernels = _hoisted(kernels, body)
    kernels = re.sub(r"num_threads\((\d+)\)", r"num_threads(std::min(\1, omp_get_max_threads()))", kernels)
    name = graph.name
    kernels, declarations, body = (re.sub(r"\bcpp_fused_", f"{name}_cpp_fused_", t) for t in (kernels, declarations, body))
    include, kernels = kernels.split("\n", 1)
    return f"""// Tilework program {name}
{include}
namespace program_{name} {{
using namespace torch::aot_inductor;
{kernels}
{declarations}
static tilework::Workspace<{len(graph.buffers)}, {num_temporaries}> workspace;
static void run(AtenTensorHandle* buffers) {{
    workspace.prepare(buffers, {bytes_needed});
{body}
}}
}}  // namespace program_{name}
extern "C" __attribute__((visibility("default"))) const char tilework_abi_{name}[] = "{graph.abi()}";
extern "C" __attribute__((visibility("default"))) void tilework_release_{name}() {{ program_{name}::workspace.release(); }}
extern "C" __attribute__((visibility("default"))) int tilework_run_{name}(
    AtenTensorHandle* buffers, char* error, size_t size) {{
  try {{
    program_{name}::run(buffers);
    return 0;
  }} catch (const std::exception& e) {{
    snprintf(error, size, "%s", e.what());
    return 1;
  }}
}}
"""


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


def _needs_dispatcher(body: str, graph: Graph) -> Exception:
    """Operators without a plain C entry would need Python's dispatcher at run time."""
    names = sorted(set(re.findall(r"torch\.ops\.([\w.]+)", body)) & {n.op for n in graph.nodes}) or ["unknown"]
    nodes = [n for n in graph.nodes if n.op in names and n.where]
    return UserError(
        "compile-operator",
        f"the cpu device has no native code for: {', '.join(names)}",
        places=[Place(n.where, n.source, f"{n.op} has no native entry point", "use other PyTorch operators") for n in nodes],
        fix="use other operators, or compile for the device `reference` (--device, TILEWORK_DEVICE)",
    )
