"""The starters are programs as users write them, so they lie in apps/; the wheel carries them along."""

from pathlib import Path

from setuptools import setup

STARTERS = Path("../../apps/starters")
FOLDERS = ("shared", "logreg", "ffn_mnist", "res_ffn_mnist", "lenet", "boilerplate")

setup(data_files=[(f"share/tilework/starters/{f}", [str(p) for p in sorted((STARTERS / f).glob("*.py"))]) for f in FOLDERS])
