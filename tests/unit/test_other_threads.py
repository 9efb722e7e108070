"""A capture or a compile in one thread changes nothing for the others."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilework


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
        self.layer = nn.LSTM(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.attention(x, x, x, need_weights=False)[0])[0].square().mean()


def compiled(path: Path) -> None:
    model = Attention()
    step = tilework.Step(model=model, inputs=(torch.randn(2, 5, 16),), loss=0, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    tilework.compile(step, path, options=tilework.Options(device="reference"), verify=False)


@pytest.mark.slow
def test_captures_at_once_leave_torch_as_it_was(tmp_path: Path) -> None:
    """Several at once, beside a model that trains: afterwards everything is torch's own, and what ran meanwhile was too."""
    before = F.dropout, F.scaled_dot_product_attention, torch.utils.checkpoint.CheckpointFunction, torch.backends.mkldnn.enabled
    failures: list[BaseException] = []
    over = threading.Event()
    seen: set[bool] = set()

    def capture(i: int) -> None:
        try:
            for k in range(2):
                compiled(tmp_path / f"{i}-{k}.pef")
        except BaseException as e:
            failures.append(e)

    def train() -> None:
        model = Attention()
        x = torch.ones(64, 5, 16)
        while not over.is_set():
            model(x).backward()
            seen.add(bool((F.dropout(torch.ones(1000), 0.5) == 0).any()))  # drops some, by torch's own generator

    threads = [threading.Thread(target=capture, args=(i,)) for i in range(3)]
    beside = threading.Thread(target=train)
    for t in (beside, *threads):
        t.start()
    for t in threads:
        t.join()
    over.set()
    beside.join()
    assert not failures, failures
    assert seen == {True}
    after = F.dropout, F.scaled_dot_product_attention, torch.utils.checkpoint.CheckpointFunction, torch.backends.mkldnn.enabled
    assert after == before


def test_fixes_to_inductor_are_for_our_code_alone() -> None:
    from torch._inductor import lowering, sizevars

    from tilework.compiler.inductor_fixes import applied

    asked: list[bool] = []

    def elsewhere() -> None:
        asked.append(lowering.needs_fallback_due_to_atomic_add_limitations(torch.float32))

    plain = lowering.needs_fallback_due_to_atomic_add_limitations(torch.float32)
    with applied():
        assert lowering.needs_fallback_due_to_atomic_add_limitations(torch.float32)
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert asked == [plain] == [lowering.needs_fallback_due_to_atomic_add_limitations(torch.float32)] == [False]
    assert sizevars.sympy.simplify is not None


COLLECTED_MEANWHILE = """
import faulthandler, gc, threading, time
from tilework.process import alone

faulthandler.dump_traceback_later(60, exit=True)

class Loader:
    def __init__(self):
        self.itself = self

    def __del__(self):  # as a DataLoader's, which waits for its workers
        time.sleep(0.001)

def others():
    while not done:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

done = []
threads = [threading.Thread(target=others) for _ in range(4)]
for thread in threads:
    thread.start()
gc.set_threshold(1)
for _ in range(300):
    Loader()
    alone()
done.append(True)
"""


def test_garbage_of_a_loader_while_threads_begin_and_end() -> None:
    """Python before 3.11.9 stops for ever when it collects garbage while it lists the threads' frames (gh-106883)."""
    done = subprocess.run([sys.executable, "-c", COLLECTED_MEANWHILE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


FIRST = """
import sys, threading
from tilework.artifact.reader import read_artifact
sys.setswitchinterval(1e-6)
begin, found = threading.Barrier(8), []
def load():
    begin.wait()
    found.append(read_artifact(sys.argv[1]).manifest.signature.name)
threads = [threading.Thread(target=load) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert len(found) == 8
"""


@pytest.mark.parametrize("attempt", range(4))
def test_a_process_that_loads_first_in_several_threads(attempt: int, tmp_path: Path) -> None:
    """The library that decodes the manifest crashed where two threads were the first to meet a type."""
    step = tilework.Step(model=nn.Linear(3, 2), inputs=torch.randn(4, 3), targets=torch.randn(4, 2), loss=nn.MSELoss())
    path = tilework.compile(step, tmp_path / "a.pef", options=tilework.Options(device="reference")).path
    done = subprocess.run([sys.executable, "-c", FIRST, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
