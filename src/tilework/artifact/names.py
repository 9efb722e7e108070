"""Names of buffers: what kind of memory it is, and what it is called there. `param/conv1.weight`, `hyper/opt0.g0.lr`.

Buffers that belong to one signature alone, and not to the first, begin with its name: `16:input/x`. In files and graphs these
are plain strings."""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    PARAM = "param"
    BUFFER = "buffer"  # a module's own: running statistics, masks
    STATE = "state"  # the optimizer's: <parameter>/<name>, and <group>/step
    HYPER = "hyper"
    CONST = "const"  # tensors that the model holds outside of its buffers
    RNG = "rng"
    GRAD = "grad"
    RAN = "ran"  # how often what a random number may leave out was not left out: a number for each such set of parameters
    INPUT_GRAD = "inputgrad"
    INPUT = "input"
    OUTPUT = "output"
    INFER = "infer"  # outputs in eval mode
    OUTGRAD = "outgrad"  # what backward starts from
    SAVED = "saved"  # what fwd keeps for bwd
    CHECK = "check"  # one number for each check of values: NaN where it fails
    NORM = "norm"  # of the gradients: count, how many steps; history, the newest of them (Options.grad_norm)

    def of(self, name: str, signature: str = "") -> str:
        """The buffer of this kind with that name."""
        return f"{signature}:{self.value}/{name}" if signature else f"{self.value}/{name}"


SEED = Kind.RNG.of("seed")
SUMMED = (Kind.GRAD, Kind.RAN)  # what micro-batches add to
WEIGHTS = (Kind.PARAM, Kind.BUFFER, Kind.STATE)  # what training changes, and a checkpoint holds
KEPT = (*WEIGHTS, *SUMMED, Kind.NORM)  # what one step leaves for the next
NORMS = 1024  # how many steps' gradient norms a session remembers
# The memory of one signature: everything whose shape may follow from the batch.
OWN = (Kind.INPUT, Kind.INPUT_GRAD, Kind.OUTPUT, Kind.INFER, Kind.OUTGRAD, Kind.SAVED, Kind.CHECK)


class Buffer(str):
    """A buffer's name, taken apart: Buffer(name).kind. Kind.PARAM.of(...) puts one together."""

    __slots__ = ()

    @property
    def signature(self) -> str:
        """Empty for what all signatures share, and for the first one's own."""
        return self.partition("/")[0].rpartition(":")[0]

    @property
    def kind(self) -> Kind:
        return Kind(self.partition("/")[0].rpartition(":")[2])

    @property
    def name(self) -> str:
        return self.partition("/")[2]


def is_kind(buffer: str, *kinds: Kind) -> bool:
    """False also for what is no buffer at all: the name of a node."""
    return buffer.partition("/")[0].rpartition(":")[2] in kinds


# ---- hyperparameters ----

_GROUP = re.compile(r"opt\d+\.g\d+\.(?!p$|p#)\w+$")


class Hyper(StrEnum):
    """What a hyperparameter belongs to."""

    GROUP = "group"  # of an optimizer: opt0.g1.lr
    CLIP = "clip"  # clip_norm, clip_value
    DROPOUT = "dropout"  # encoder.drop.p


def hyper_kind(name: str) -> Hyper:
    if name in ("clip_norm", "clip_value"):
        return Hyper.CLIP
    return Hyper.GROUP if _GROUP.match(name) else Hyper.DROPOUT
