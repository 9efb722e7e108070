"""A step on cpu is one native call: no Python frame runs and no torch operator is dispatched while it lasts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilework
from parity import batches
from tilework.runtime.devices import Call

pytestmark = pytest.mark.slow


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def frames_during(function) -> list[str]:
    frames: list[str] = []

    def profile(frame, event, arg):
        if event == "call":
            frames.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return frames


def prepared(session: tilework.Session, step: tilework.Step, num_steps: int):
    """A call of the fused step that only has to be executed, and the tensors that must stay alive meanwhile."""
    data = batches(step, num_steps)
    stacked = [torch.stack(parts).contiguous() for parts in zip(*data, strict=True)]
    bound = session._device.bind(
        Call(micro="step", num_steps=num_steps, inputs=tuple(f"input/{a.name}" for a in session.manifest.signature.inputs))
    )
    bound.point(stacked, [])
    return bound, stacked


# Models whose operators all have native code in the artifact. Others (flash attention, transposed and large convolutions)
# call torch's library for some operators, and torch dispatches inside those calls: see docs/architecture.md.
ALL_NATIVE = ["linear", "mlp", "residual", "conv_bn", "lstm", "gru", "tied", "dropout", "clipped"]
WITH_LIBRARY_CALLS = ["unet", "attention"]


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.full] if m == "gru" else []) for m in ALL_NATIVE])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_no_python_and_no_dispatch(session_of, name: str, num_steps: int) -> None:
    session, step = session_of(name, "cpu")
    native, _alive = prepared(session, step, num_steps)
    before = session.tensors()
    with Counter() as counter:
        frames = frames_during(lambda: native.execute())
    assert frames == ["<lambda>", "execute"]  # the call itself, and nothing inside it, whatever the number of steps
    assert counter.operators == []
    assert any(not torch.equal(t, before[k]) for k, t in session.tensors().items()), "the steps really ran"


@pytest.mark.parametrize("name", WITH_LIBRARY_CALLS)
def test_no_python_beside_library_calls(session_of, name: str) -> None:
    session, step = session_of(name, "cpu")
    native, _alive = prepared(session, step, 5)
    assert frames_during(lambda: native.execute()) == ["<lambda>", "execute"]


def test_the_demo_model_dispatches_nothing(workshop) -> None:
    from tilework.zoo.lenet import build

    step = build(batch_size=8)
    tilework.compile(step, workshop / "lenet.pef", options=tilework.Options(opt_level=1, programs="fused"), weights="inside")
    session = tilework.load(workshop / "lenet.pef")
    native, _alive = prepared(session, step, 2)
    with Counter() as counter:
        frames = frames_during(lambda: native.execute())
    assert frames == ["<lambda>", "execute"] and counter.operators == []


def test_the_counters_can_count(session_of) -> None:
    session, step = session_of("linear", "reference")
    data = batches(step, 1)[0]
    with Counter() as counter:
        frames = frames_during(lambda: session.run(*data))
    assert len(frames) > 10 and "aten.addmm.default" in counter.operators


def test_loading_needs_no_compiler(artifact) -> None:
    """With none in sight, and without what tracing and code generation would import. (How long it takes: bench, cold start.)"""
    code = (
        "import sys, tilework; s = tilework.load(sys.argv[1]);"
        "print(sorted(m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo', 'tilework.capture',"
        " 'tilework.plan', 'tilework.compiler'))))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PATH"} | {"PATH": "/nonexistent"}
    command = [sys.executable, "-c", code, str(artifact("conv_bn", "cpu"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_sessions_do_not_leak(session_of, artifact) -> None:
    """Sessions can be opened and closed many times: no files stay open, and native tensors are freed."""
    path = artifact("linear", "cpu")
    with tilework.load(path):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with tilework.load(path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before
