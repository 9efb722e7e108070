"""What the house trusts: the compile cache and its key, flags for the native compiler, instruction sets, operators in a graph."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_memory import allocation
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import tilework
from models import MODELS
from tilework.artifact.fingerprint import features_in
from tilework.artifact.manifest import FORMAT_VERSION, Fingerprint
from tilework.artifact.reader import read_artifact
from tilework.compiler import codegen_cpu, toolchain
from tilework.compiler.backends.cpu import common_parts
from tilework.compiler.cache import Cache, cache_folder
from tilework.compiler.memory import plan_temporaries
from tilework.runtime import fitting
from tilework.runtime.devices import cpu, reference
from tilework.runtime.devices.reference import operator_named

OPTIONS = tilework.Options(opt_level=1)


# ---- sanitizers: TILEWORK_CXXFLAGS and TILEWORK_OWN_TEMPORARIES ----


def asan() -> str:
    """The path of AddressSanitizer's library."""
    found = subprocess.run([toolchain.compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("no AddressSanitizer on this machine")
    return str(Path(found).resolve())


def test_extra_flags_are_in_every_command(monkeypatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(toolchain, "run", lambda command, what: commands.append(list(command)))
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"")
    monkeypatch.setattr(toolchain, "empty_libraries", lambda folder: [])
    plain = toolchain.flags(OPTIONS)
    toolchain.shared_library("", OPTIONS, tmp_path, "m", None, tmp_path)
    assert "-Wl,-s" in commands[-1]
    monkeypatch.setenv("TILEWORK_CXXFLAGS", "-fsanitize=address -g '-DA=a b'")
    assert toolchain.flags(OPTIONS) == [*plain, "-fsanitize=address", "-g", "-DA=a b"]
    toolchain.shared_library("", OPTIONS, tmp_path, "m", None, tmp_path)
    for command in commands[-2:]:  # compile and link
        assert command.index("-fsanitize=address") < command.index("-g") < command.index("-DA=a b")
    assert "-Wl,-s" not in commands[-1]  # what -g has added stays
    monkeypatch.setenv("TILEWORK_CXXFLAGS", "-g 'never closed")
    with pytest.raises(tilework.UserError, match="TILEWORK_CXXFLAGS"):
        toolchain.flags(OPTIONS)


def test_extra_flags_make_another_precompiled_header(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "run", lambda command, what: Path(command[-1]).touch())
    plain = toolchain.precompiled_header(OPTIONS, tmp_path)
    monkeypatch.setenv("TILEWORK_CXXFLAGS", "-g")
    assert toolchain.precompiled_header(OPTIONS, tmp_path) != plain


def hand_made(own: bool, elements: int) -> str:
    """A program with two temporaries, whose kernel writes this many elements of each."""
    body = allocation("buf0", 20) + allocation("buf1", 20) + "    fill(buf0.data_ptr());\n    fill(buf1.data_ptr());\n"
    planned, count, size = plan_temporaries(body, "", own)
    return f"""
#include "{toolchain.KERNELS}/workspace.h"
static const int32_t cached_torch_dtype_float32 = 6;
__attribute__((noinline)) static void fill(void* to) {{
  for (volatile int i = 0; i < {elements}; i = i + 1) static_cast<float*>(to)[i] = 1;
}}
static tilework::{"Separate" if own else ""}Workspace<1, {count}> workspace;
extern "C" __attribute__((visibility("default"))) void run() {{
    AtenTensorHandle buffers[1] = {{}};
    workspace.prepared_for = buffers;  // no session, no buffers
    workspace.memory = static_cast<char*>(malloc({size} + 64));
{planned}
    workspace.release();
}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("own", "elements", "seen"), [(True, 21, True), (True, 20, False), (False, 21, False)])
def test_a_sanitizer_sees_a_kernel_that_leaves_its_temporary(
    monkeypatch, tmp_path: Path, own: bool, elements: int, seen: bool
) -> None:
    """21 elements of 20: within the planned block nobody sees it, because places are rounded to cache lines."""
    preload = asan()
    monkeypatch.setenv("TILEWORK_CXXFLAGS", "-fsanitize=address -g")
    code = toolchain.shared_library(hand_made(own, elements), OPTIONS, tmp_path, "m", None, cache_folder() / "headers")
    (tmp_path / "run.so").write_bytes(code)
    script = f"import torch, ctypes; ctypes.CDLL({str(tmp_path / 'run.so')!r}).run()"
    env = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == seen, done.stderr
    if seen:
        assert re.search(r"heap-buffer-overflow[\s\S]*WRITE of size 4[\s\S]* in fill.*m\.cpp:\d+[\s\S]*80-byte region",
                         done.stderr), done.stderr  # fmt: skip


# ---- the cache's key ----


def key() -> str:
    return Cache.key(common_parts(OPTIONS))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Pass(CustomGraphPass):
    def __init__(self, known_as: str | None) -> None:
        self.known_as = known_as

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str | None:
        return self.known_as


def test_the_key_knows_what_the_user_has_set_in_torch(monkeypatch) -> None:
    plain = key()
    assert key() == plain
    for name, value in (
        ("epilogue_fusion", False),
        ("cpp.enable_floating_point_contract_flag", "fast"),
        ("pattern_matcher", False),
    ):
        with config.patch({name: value}):
            assert key() != plain, name
    with deterministic():
        assert key() != plain
    with torch.backends.mkldnn.flags(enabled=False):
        assert key() != plain
    for name, value in (("TILEWORK_CXXFLAGS", "-g"), ("TILEWORK_OWN_TEMPORARIES", "1")):
        with monkeypatch.context() as m:
            m.setenv(name, value)
            assert key() != plain, name
    with config.patch({"compile_threads": 7, "trace.enabled": True, "fx_graph_cache": False}):
        assert key() == plain  # these change no code
    assert key() == plain


def test_the_key_knows_graph_passes_of_the_user_by_their_uuid() -> None:
    def with_pass(value: object) -> str:
        with config.patch({"post_grad_custom_pre_pass": value}):
            return key()

    assert with_pass(Pass("one")) == with_pass(Pass("one")) != with_pass(Pass("two"))
    same = Pass(None)
    assert with_pass(same) != with_pass(same)  # nobody knows what it does: never taken from the cache
    assert with_pass(print) != with_pass(print)


@pytest.mark.slow
def test_the_key_is_the_same_everywhere(artifact, tmp_path: Path) -> None:
    before = codegen_cpu.surroundings()
    graph = read_artifact(artifact("linear", "reference")).graphs["infer"]
    codegen_cpu.generate(graph, OPTIONS, tmp_path)
    assert codegen_cpu.surroundings() == before  # not changed by our own settings
    script = "from tilework.compiler import codegen_cpu; print(codegen_cpu.surroundings())"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(before), done.stderr


def test_temporaries_of_their_own_are_decided_when_code_is_generated(artifact, tmp_path: Path, monkeypatch) -> None:
    graph = read_artifact(artifact("mlp", "reference")).graphs["step"]
    planned = codegen_cpu.generate(graph, OPTIONS, tmp_path)
    monkeypatch.setenv("TILEWORK_OWN_TEMPORARIES", "1")
    own = codegen_cpu.generate(graph, OPTIONS, tmp_path)
    assert "tilework::Workspace<" in planned and "own_temporary" not in planned and "workspace.temporary(" in planned
    assert "tilework::SeparateWorkspace<" in own and "workspace.temporary(" not in own and "prepare(buffers, 0)" in own
    assert own.count("own_temporary(") == planned.count("workspace.temporary(")


# ---- whose cache it is ----


def refusal_of(folder: Path, cache: Path) -> tilework.MachineError:
    """What is said about this folder when this cache is opened."""
    with pytest.raises(tilework.MachineError) as e:
        Cache(cache)
    assert e.value.id == "cache-owner" and "TILEWORK_CACHE" in e.value.fix and f"{folder}: " in e.value.summary
    return e.value


@pytest.mark.parametrize("name", ["", "programs", "headers"])
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    Cache(tmp_path / "cache")
    folder = tmp_path / "cache" / name
    folder.chmod(mode)
    assert f"mode {mode:o}" in refusal_of(folder, tmp_path / "cache").found
    folder.chmod(0o755)
    Cache(tmp_path / "cache")


@pytest.mark.parametrize("name", ["", "programs"])
def test_a_cache_of_somebody_else_is_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    Cache(tmp_path / "cache")
    folder = tmp_path / "cache" / name
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert "belongs to user 12345" in refusal_of(folder, tmp_path / "cache").found
    monkeypatch.setattr(os, "geteuid", lambda: 4711)  # the effective user counts
    assert "not to you (4711)" in refusal_of(tmp_path / "cache", tmp_path / "cache").found


def test_links_are_followed_before_the_check(tmp_path: Path) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir()
    theirs.chmod(0o777)
    link.symlink_to(theirs)
    refusal_of(theirs, link)
    assert list(theirs.iterdir()) == []  # nothing was put there
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "programs").symlink_to(theirs)
    refusal_of(theirs, tmp_path / "cache")
    theirs.chmod(0o700)
    cache = Cache(link)
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert cache.folder == theirs


def test_a_new_cache_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Cache(tmp_path / "deep" / "cache")
    finally:
        os.umask(before)
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o777 == 0o700


# ---- instruction sets ----

ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes atomics cpuid sve bf16
CPU implementer\t: 0x41

processor\t: 1
Features\t: fp asimd evtstrm aes atomics cpuid bf16
"""
X86 = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 avx512f\nvmx flags\t: vnmi\nbugs\t\t: spectre_v1\n"


def test_features_are_read_on_both_architectures() -> None:
    assert features_in(X86) == {"fpu", "sse2", "avx", "avx2", "avx512f"}
    assert features_in(ARM) == {"fp", "asimd", "evtstrm", "aes", "atomics", "cpuid", "bf16"}  # what every core has
    assert features_in("processor\t: 0\n") == features_in("flags\t:\n") == set()


def test_what_native_code_may_use_is_recorded() -> None:
    has = features_in(ARM)
    assert toolchain.features_of("native", "aarch64", has) == ["aes", "asimd", "atomics", "bf16", "fp"]
    assert toolchain.features_of("baseline", "aarch64", has) == []
    assert toolchain.features_of("native", "x86_64", features_in(X86)) == ["avx", "avx2", "avx512f"]
    assert "fma" in toolchain.features_of("x86-64-v3", "x86_64", set())
    assert toolchain.march("native", "aarch64") == ["-march=native"] and toolchain.march("baseline", "aarch64") == [
        "-march=armv8-a"
    ]
    assert toolchain.march("x86-64-v3", "x86_64") == ["-march=x86-64-v3"] and toolchain.march("baseline", "x86_64") == [
        "-march=x86-64"
    ]
    # where nothing is known about features, nothing beyond the architecture's is used
    assert toolchain.march("native", "riscv64") == [] and toolchain.features_of("native", "riscv64", {"x"}) == []


def test_an_instruction_set_of_another_architecture_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(tilework.UserError, match="isa: found 'x86-64-v3'; known on aarch64: native, baseline") as e:
        tilework.Options(isa="x86-64-v3")
    assert e.value.id == "options"
    assert "-march=armv8-a" in toolchain.flags(tilework.Options(isa="baseline"))
    assert not any("x86" in flag or "AVX" in flag for flag in toolchain.flags(tilework.Options(isa="baseline")))


def test_an_artifact_for_a_better_arm_machine_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "machine_features", lambda: {"fp", "asimd"})
    needs = {"architecture": "aarch64", "features": ["asimd", "sve"], "glibc": [2, 17]}
    made = Fingerprint(format=list(FORMAT_VERSION), device="cpu", torch=[2, 11, 0], needs=needs, options={})
    part = next(p for p in fitting.compare(made, "cpu") if p.name == "instruction set")
    assert not part.ok and part.has == "all but sve" and "--isa baseline" in part.fix


# ---- operators that a graph may name ----


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_nothing_that_graphs_need_is_missing(artifact, name: str) -> None:
    graphs = read_artifact(artifact(name, "reference")).graphs
    for op in {node.op for graph in graphs.values() for node in graph.nodes}:
        operator_named(op)


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default", "aten.save.default", "aten._pin_memory.default", "aten.pin_memory.default",
        "aten.set_.source_Storage", "aten.set.source_Storage", "aten.resize_.default", "aten.resize.default",
        "aten._resize_output.default", "aten._reshape_alias.default", "aten._local_scalar_dense.default", "aten.item.default",
        "aten.record_stream.default", "aten.segment_reduce.default", "aten.data.default", "aten._print.default",
        "aten.add_.Tensor", "aten.add.out", "aten.rand.default", "aten.bernoulli.default", "aten.manual_seed.default",
        "aten.fbgemm_linear_fp16_weight.default", "aten._sparse_coo_tensor_unsafe.default", "aten.backward.default",
        "prims.device_put.default", "prims.resize.default", "prims.copy_to.default",
        "tilework.update_by_product.default", "tilework.called.default", "tilework.nothing.default",
        "inductor.resize_storage_bytes_.default", "profiler._record_function_enter_new.default", "aten.add", "aten.add.Nothing",
        "aten.add.Tensor.__class__", "aten.__class__.default", "os.system.default", "builtins.eval.x", "",
    ],
)  # fmt: skip
def test_operators_that_reach_outside_are_refused(name: str) -> None:
    with pytest.raises(tilework.UserError) as e:
        operator_named(name)
    assert e.value.id == "graph-operator"


def test_the_list_of_operators_is_plain() -> None:
    """Sorted, each once, of torch's own, and none that changes its arguments in all of its forms."""
    text = (Path(reference.__file__).parent / "data" / "operators.txt").read_text()
    names = re.sub("#.*", "", text).split()
    assert names == sorted(set(names)) and len(names) > 900
    for name in names:
        assert re.fullmatch(r"(aten|prims)\.\w*[^_\W]_?_?", name) and (name.endswith("__") or not name.endswith("_")), name
        packet = getattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1], None)
        if packet is not None:  # every version of torch has its own
            assert any(not getattr(packet, o)._schema.is_mutable for o in packet.overloads()), name
    assert reference.allowed_operators() is reference.allowed_operators()  # read once


def test_our_own_operators_are_all_decided_on() -> None:
    """A new one is added to the list of the reference device, or here."""
    made = {s.name.removeprefix("tilework::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("tilework::")}
    allowed = {n.removeprefix("tilework.") for n in reference.allowed_operators() if n.startswith("tilework.")}
    only_in_native_code = {"called", "called_result", "random_bits_at", "store", "update_by_product"}
    only_before_the_plan = {"recompute_from"}
    assert made - only_in_native_code - only_before_the_plan == allowed


def test_a_view_stays_within_its_tensor() -> None:
    """as_strided is allowed, because torch holds it to the memory of its tensor."""
    x = torch.arange(6.0)
    as_strided = operator_named("aten.as_strided.default")
    assert as_strided(x, [2], [3], 1).tolist() == [1.0, 4.0]
    beyond = [([7], [1], 0), ([2], [6], 0), ([1], [1], 6), ([1], [1], -1), ([2], [-1], 3)]
    beyond += [([5], [1 << 62], 0), ([2, 2, 2], [(1 << 63) - 1, (1 << 63) - 1, 1], 0)]  # sums that overflow
    for size, stride, offset in beyond:
        for view in (as_strided, operator_named("aten.as_strided_copy.default")):
            with pytest.raises(RuntimeError):
                view(x, size, stride, offset)


# ---- what the docs say about it ----


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/artifact-format.md"])
def test_the_docs_say_that_loading_runs_code(page: str) -> None:
    text = " ".join((Path(__file__).parents[2] / page).read_text().lower().split())
    assert "an artifact is a program" in text and "native code" in text and "malice" in text
    assert re.search("load only (what|files that) you trust", text)
