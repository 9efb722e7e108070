"""Options: everything that a user can choose about a compile, checked once at the edge."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError, did_you_mean
from ..found import device_names

PASSES = ("fuse", "join", "recompute", "sums", "small_convolutions", "products", "updates", "channels_last", "pieces")


GPUS = ("native", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def known_isas(architecture: str, device: str = "cpu") -> tuple[str, ...]:
    """Instruction sets that code can be compiled for on a machine of this architecture."""
    if device == "cuda":
        return GPUS
    return ("native", "x86-64-v3", "x86-64-v4", "baseline") if architecture == "x86_64" else ("native", "baseline")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that can be chosen about a compile."""

    device: str = "cpu"  # cpu, cuda, reference, null, or one from another package
    programs: Literal["all", "fused", "sections"] = "all"  # what to build: the fused step, its sections one by one, or both
    isa: str = "native"  # of native code: x86-64-v3, x86-64-v4, baseline; of a GPU: sm_90 and the like
    tf32: bool = False  # cuda: float32 products and convolutions with 10 bits of the mantissa, several times as fast
    whole_loop: bool = True  # cuda: small steps become one kernel for all steps of a call
    opt_level: int = 3  # of the native compiler; 1 compiles faster, runs a little slower
    keep_momentum: bool = False  # reserve momentum buffers even if the optimizer has no momentum yet
    keep_gradients: bool = False  # the fused step keeps gradients, so that they can be read
    grad_norm: bool = False  # the norm of all gradients of each step, before clipping: session.grad_norm
    # With several replicas the update is a separate program, so that gradients can be reduced before it. Such an artifact runs
    # with any number of replicas.
    num_replicas: int = 1  # how many replicas to plan for
    num_shards: int = 1  # parts of the update that replicas can share out, each keeping its own parts' optimizer state
    # Statistics of all replicas in every batch normalization; without it, in those of nn.SyncBatchNorm alone.
    sync_batch_norm: bool = False
    piece_size: int = 400  # longer programs (in operators) are compiled in pieces, on several cores
    disable: tuple[str, ...] = ()  # planning passes to turn off

    def __post_init__(self) -> None:
        problems = []
        if self.device not in device_names():
            problems.append(f"device: found {self.device!r}; {did_you_mean(self.device, device_names())}")
        if self.programs not in ("all", "fused", "sections"):
            problems.append(f"programs: found {self.programs!r}; known: all, fused, sections")
        here = platform.machine()
        isas = known_isas(here, self.device)
        if self.isa not in isas:
            problems.append(
                f"isa: found {self.isa!r}; known {'of GPUs' if self.device == 'cuda' else f'on {here}'}: {', '.join(isas)}"
            )
        if self.tf32 and self.device != "cuda":
            problems.append("tf32: only GPUs have it; found device " + repr(self.device))
        if self.opt_level not in (0, 1, 2, 3):
            problems.append(f"opt_level: found {self.opt_level}, expected 0 to 3")
        if self.num_replicas < 1:
            problems.append(f"num_replicas: found {self.num_replicas}, expected 1 or more")
        if not 1 <= self.num_shards <= 256:
            problems.append(f"num_shards: found {self.num_shards}, expected 1 to 256")
        if self.num_shards > 1 and self.num_replicas == 1:
            problems.append("num_shards: needs num_replicas=2 or more; one replica has nobody to share with")
        if self.sync_batch_norm and self.num_replicas == 1:
            problems.append("sync_batch_norm: needs num_replicas=2 or more; one replica has nobody to share with")
        if self.piece_size < 1:
            problems.append(f"piece_size: found {self.piece_size}, expected 1 or more")
        problems += [f"disable: no pass {p!r}; {did_you_mean(p, PASSES)}" for p in self.disable if p not in PASSES]
        if problems:
            raise UserError("options", "the compile options are wrong:\n    " + "\n    ".join(problems))
