"""A sample of the models in docs/coverage.md, five steps beside eager PyTorch. All of them: make coverage, make test-full."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import cases_torch  # noqa: F401
import cases_transformers  # noqa: F401
from judge import CASES, all_cases, run

pytestmark = pytest.mark.slow

FULL = os.environ.get("TILEWORK_FULL") == "1"
# On cpu, one for each cause for which models were refused before.
SAMPLE = ["torch/ctc", "torch/fno-2d-complex-params", "torch/pinn-double-backward", "torch/vae-distributions",
          "torch/cholesky-gp", "torch/moe-loop-over-experts", "torch/old-weight_norm", "torch/optimizer-NAdam",
          "hf/gpt2"]  # fmt: skip
QUICK = [name for name in CASES if name.startswith("torch/")] + [
    "hf/electra",
    "hf/mixtral",
    "hf/opt",
    "hf/clip",
    "hf/wav2vec2-cls-without-masks",
]


@pytest.mark.parametrize("name", all_cases() if FULL else SAMPLE)
def test_on_cpu(name: str, tmp_path: Path) -> None:
    _judge(name, tmp_path, device="cpu", programs="fused", opt_level=1)


@pytest.mark.parametrize("name", QUICK)
def test_on_reference(name: str, tmp_path: Path) -> None:
    """No native code: what is captured, and whether it is right."""
    _judge(name, tmp_path, device="reference", programs="fused")


def _judge(name: str, tmp_path: Path, **options: object) -> None:
    torch.set_num_threads(1)
    case = CASES[name]()
    expected = case.refused or case.missing
    outcome = run(name, tmp_path, **options)
    if expected:
        assert outcome.verdict == "refused", outcome
        assert "cases_" in outcome.detail or "site-packages" in outcome.detail, "the user's line is not named"
    else:
        assert outcome.trains, f"{outcome.verdict}: {outcome.detail}"
