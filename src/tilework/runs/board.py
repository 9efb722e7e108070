"""What TensorBoard shows of a run: loss, the norm of the gradients, learning rate, samples per second, memory; on request also
the values of the parameters, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import MachineError


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """What this process has in memory now; None where the system does not tell."""
    try:
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


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

    def add_memory(self, step: int, session: int) -> None:
        """In MB: what the session has planned, and what the process has in memory."""
        self._writer.add_scalar("memory/session_planned_mb", session / 1e6, step)
        resident = resident_bytes()
        if resident is not None:
            self._writer.add_scalar("memory/process_resident_mb", resident / 1e6, step)

    def add_parameters(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        for name, values in parameters.items():
            if values.numel() and not values.is_complex():
                self._writer.add_histogram(f"parameters/{name}", values.float(), step)

    def add_picture(self, step: int, picture: np.ndarray) -> None:
        """Bytes [height, width, 3]."""
        self._writer.add_image("samples/input, target, prediction", picture, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()
