"""What TensorBoard shows of a run: loss, the norm of the gradients, learning rate, samples per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import MachineError


class Board:
    def __init__(self, folder: Path, step: int) -> None:
        """`step`: what was written for later ones, by a run that is continued from here, is forgotten."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise MachineError("board-package", "--log-dir needs the package tensorboard", found="it is not installed",
                               fix="pip install 'tilework[board]'") from e  # fmt: skip
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def add(
        self, first: int, losses: Sequence[float], rate: float, hyper: Mapping[str, float], norms: Sequence[float] = ()
    ) -> None:
        """Of the steps of one call; `first` is the number of the first of them."""
        for i, loss in enumerate(losses):
            self._writer.add_scalar("train/loss", loss, first + i)
        for i, norm in enumerate(norms):
            self._writer.add_scalar("train/grad_norm", norm, first + i)
        last = first + len(losses) - 1
        self._writer.add_scalar("train/samples_per_second", rate, last)
        for name, value in hyper.items():
            if name.split(".")[-1] == "lr":
                self._writer.add_scalar(f"train/{name}", value, last)

    def close(self) -> None:
        self._writer.close()
