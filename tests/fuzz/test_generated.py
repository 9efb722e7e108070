"""Whole programs that nobody wrote, beside eager PyTorch. By hand, with shrinking: tests/fuzz/run.py.

`make test` runs the same 40 programs every time, so that the compile cache makes a second run quick: all of them on the
reference device, every fifth on the cpu device as it ships. TILEWORK_FULL=1 runs 10 000 from a new seed, which is printed;
TILEWORK_FUZZ_CPU says how many of them run on cpu (default: every fifth), TILEWORK_FUZZ_SEED repeats a run.
"""

from __future__ import annotations

import collections
import os
import secrets
import sys
from pathlib import Path
from random import Random

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from compare import Differs, check
from programs import drawn, source

pytestmark = pytest.mark.slow

FULL = os.environ.get("TILEWORK_FULL") == "1"
PROGRAMS, CHUNKS = (10_000, 100) if FULL else (40, 10)
ON_CPU = int(os.environ.get("TILEWORK_FUZZ_CPU", PROGRAMS // 5))
SEED = os.environ.get("TILEWORK_FUZZ_SEED", secrets.token_hex(4) if FULL else "make test")  # a worker's own; each test prints it


def on_cpu(i: int) -> bool:
    return i * ON_CPU // PROGRAMS != (i + 1) * ON_CPU // PROGRAMS


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs(chunk: int, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    print("TILEWORK_FUZZ_SEED:", SEED)
    wrong, refused = [], collections.Counter()
    numbers = range(chunk, PROGRAMS, CHUNKS)
    for i in numbers:
        recipe = drawn(Random(f"{SEED}/{i}"))
        try:
            outcome = check(recipe, tmp_path, ("reference", "cpu") if on_cpu(i) else ("reference",))
        except Differs as e:
            wrong.append(f"program {SEED}/{i}: {e}")
        except Exception as e:
            wrong.append(f"program {SEED}/{i}: {type(e).__name__}: {e}\n{source(recipe)}\n{recipe}")
        else:
            refused[outcome.refused] += bool(outcome.refused)
    print("refused:", dict(+refused))
    assert not wrong, f"{len(wrong)} of {len(numbers)} programs\n\n" + "\n\n".join(wrong[:5])
    assert sum(refused.values()) <= 0.2 * len(numbers), f"too many programs were refused: {refused}"
