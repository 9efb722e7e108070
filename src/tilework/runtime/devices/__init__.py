"""One file per device. A device owns the memory of a session's buffers and runs programs over them; it knows nothing of models or
optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from ...artifact.fingerprint import Part
from ...artifact.random import next_seed
from ...artifact.reader import Artifact
from ...found import module_of
from ...tiles.page import EXEC, Slot

# A slice for each micro-batch; one slice, taken once for all of them; or one that is taken again for each, because a program
# of the call changes its buffer.
Taken = Literal["each", "once", "again"]


@dataclass(frozen=True)
class Call:
    """What one call does: `num_steps` times (`num_micro_batches` times `micro`, then `update`)."""

    micro: str
    update: str | None = None
    num_steps: int = 1
    num_micro_batches: int = 1
    inputs: tuple[str, ...] = ()  # buffers that get one slice of the caller's memory a micro-batch
    taken: tuple[Taken, ...] = ()  # for each input; none given: a slice each
    scheduled: tuple[str, ...] = ()  # hyperparameter buffers that get one value of the caller's a step
    outputs: tuple[str, ...] = ()  # buffers that are given to the caller's memory
    how: tuple[str, ...] = ()  # for each output: "all", a slice a micro-batch; "last", the last one; "sum", one slice
    zeroed: tuple[str, ...] = ()  # buffers set to zero before each step
    seeds: Literal["next", "keep", "own"] = "next"  # bwd keeps the seed of its fwd; infer has a stream of its own
    watched: tuple[str, ...] = ()  # losses: where one is not a number, the call ends
    restored: tuple[str, ...] = ()  # buffers that are then as they were before that step; so are the random numbers
    shown_loss: str | None = None  # the loss buffer that its programs write
    counts: bool = True  # its steps count as steps of the session: not those of fwd or bwd alone
    reduce: bool = False  # gradients are reduced over the replicas before `update`, on a device that can do so (join)

    @property
    def count(self) -> int:
        """Micro-batches in the whole call: how many slices the caller's tensors hold."""
        return self.num_steps * self.num_micro_batches


class NotANumber(Exception):
    """A watched loss was NaN; `step` counts from 0 within the call. The steps before it are done, and it has changed nothing."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Bound(Protocol):
    """A call made ready once, to be run many times: on dense tensors with `count` slices each, `num_steps` for schedules.
    Outputs that are sums must be zero before."""

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scheduled: Sequence[torch.Tensor] = ()
    ) -> None: ...


class Metered:
    """A bound call of a device that does not keep the page itself."""

    def __init__(self, bound: Bound, call: Call, page: Slot) -> None:
        self._bound, self._page = bound, page
        self._steps = call.num_steps if call.counts else 0

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scheduled: Sequence[torch.Tensor] = ()
    ) -> None:
        with self._page.during(EXEC):
            self._bound.run(inputs, outputs, scheduled)
        self._page.add_steps(self._steps)


Needs = Mapping[str, str | list[int | str]]


class Memory(Protocol):
    """The buffers of a session, wherever they are. What comes and goes are tensors of the host."""

    num_bytes: int
    buckets: Sequence[torch.Tensor]  # gradients that lie side by side, each bucket flat, in the device's own memory

    def read(self, buffer: str) -> torch.Tensor:
        """A copy."""

    def write(self, buffer: str, value: torch.Tensor) -> None:
        """`value` has the buffer's shape; it is converted to its type."""

    def fill(self, buffer: str, value: float) -> None: ...

    def synchronize(self) -> None:
        """Returns when all that was asked for before is done."""


class Device(Protocol):
    """A loaded artifact on one device."""

    replays: ClassVar[bool]  # whether it runs artifacts of other devices, by their graphs
    computes: ClassVar[bool]  # whether there are numbers to look at
    memory: Memory  # a buffer for each of the manifest's, zeroed; those of a bucket lie side by side

    def __init__(self, artifact: Artifact, num_threads: int | None) -> None: ...

    @staticmethod
    def fits(needs: Needs) -> list[Part]:
        """What the fingerprint's own part of this device needs, and what there is here."""

    def bind(self, call: Call) -> Bound: ...

    def meter(self, page: Slot) -> bool:
        """Whether the device keeps the page itself from now on."""

    def seed(self, base: int, counter: int = 0, inferred: int = 0) -> None:
        """The next micro-batch draws its random numbers from (base, counter), the one after from counter + 1. Those of
        inference draw from (inference_base(base), inferred), so that training does not notice them."""

    def random_state(self) -> tuple[int, int, int]:
        """(base, counter, inferred): what seed() takes to go on from here."""

    def close(self) -> None: ...


def inference_base(base: int) -> int:
    """Where inference's own stream of seeds starts: a hash, so that the two streams of a seed never run side by side."""
    return next_seed(base ^ 0x6A09E667F3BCC908, 0)


def rank_base(seed: int, rank: int) -> int:
    """Where a replica's streams start: rank 0 draws what a process alone would draw, the others numbers of their own."""
    return seed if rank == 0 else next_seed(seed ^ 0x3C6EF372FE94F82B, rank)


def device_class(name: str) -> type[Device]:
    return module_of("devices", name).Device  # type: ignore[no-any-return]
