"""The compiled program and its sessions: where an executor meets the engine."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import tilework
from tilework.errors import TileworkError
from tilework.parallel import Replicas, launched, start
from tilework.parallel.group import equal
from tilework.tiles.keep import kept

from .adapter import Traced
from .batches import Batches
from .enums import ReductionType
from .errors import Error, from_engine
from .options import Options

_STAGES = 8  # lines of a compile's report, about


def compile_to(path: Path, traced: Traced, inputs: Sequence[Tensor], options: Options, batches: Batches, optimizer: Any,
               clip_norm: float | None, metadata: dict[str, Any]) -> None:  # fmt: skip
    """One signature: the training step, or inference."""
    training = optimizer is not None
    reduction = options.Training.accumulation_and_replication_reduction_type
    try:
        step = tilework.Step(
            model=traced, inputs=tuple(inputs), loss=0 if training else None, optimizer=optimizer, clip_norm=clip_norm,
            num_micro_batches=batches.accumulation, accumulate="mean" if reduction == ReductionType.Mean else "sum",
            train=training, metadata={"poptorch": metadata},
        )  # fmt: skip
        settings = tilework.Options(
            device=os.environ.get("TILEWORK_DEVICE", "cpu"),
            num_replicas=max(batches.replicas, instances(options)) if training else 1,
            programs="fused",
            keep_gradients=bool(options.anchored_tensors),
            disable=() if recomputes(options) else ("recompute",),
        )
        cache = options.executable_cache_dir or None
        with Progress(enabled=options.show_compilation_progress_bar) as progress:
            tilework.compile(step, path, options=settings, weights="none", report=progress.line, cache=cache)
    except TileworkError as e:
        raise from_engine(e) from e


def recomputes(options: Options) -> bool:
    """Whether poptorch.recomputationCheckpoint counts. By default it does."""
    return bool(options._Popart._values.get("autoRecomputation", 1))


def instances(options: Options) -> int:
    """Processes that train together, as the options say."""
    return int(options.Distributed.numProcesses)


def require_launched(processes: int) -> None:
    """Alone, each process would train on its part of the data, and nothing would reduce the gradients."""
    found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else launched().size
    if found != processes:
        raise Error("poptorch-processes", "The processes that the options name were not started together",
                    found=f"{processes} in options.Distributed (configureProcessId), {found} started by a launcher",
                    expected=f"{processes} processes that train together",
                    fix=f"start the program with poprun --num-instances={processes} or mpirun -n {processes}; to train alone, "
                    "options.Distributed.disable()")  # fmt: skip


def partition() -> str | None:
    """The tiles of the partition that the environment names, if `vipu create` has made it here. Nobody else's is waited for."""
    name = os.environ.get("IPUOF_VIPU_API_PARTITION_ID", "")
    try:
        return f"of:{name}" if name and kept(name) is not None else None
    except TileworkError as e:
        raise from_engine(e) from e


class Progress:
    """The bar of a compile, on standard error."""

    def __init__(self, *, enabled: bool) -> None:
        self.bar: Any = None
        self.enabled = enabled

    def __enter__(self) -> Progress:
        if self.enabled:
            self.bar = tqdm(
                total=100, desc="Graph compilation", bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
            )
        return self

    def line(self, _: str) -> None:
        if self.bar is not None:
            self.bar.update(min(100 // _STAGES, 99 - self.bar.n))

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.bar is not None:
            if kind is None:
                self.bar.update(100 - self.bar.n)
            self.bar.close()


class Folder:
    """Where an executor's program lies: a folder of its own, gone with it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="poptorch-"))
        self._end = weakref.finalize(self, shutil.rmtree, str(self.path), ignore_errors=True)

    def remove(self) -> None:
        self._end()


class Device:
    """Sessions of a program: one, or one for each replica."""

    def __init__(
        self, path: Path, batches: Batches, *, training: bool, seed: int, average: bool, nan_error: bool, processes: int = 1
    ) -> None:
        self.replicas: Replicas | None = None
        settings: dict[str, Any] = {"weights": False, "nan_error": nan_error, "tiles": partition()}
        if training and processes > 1:
            require_launched(processes)
        try:
            group = start(expected=processes) if training and processes > 1 else None
            if training and batches.replicas > 1:
                self.replicas = Replicas(path, batches.replicas, group=group, average=average, seed=seed, **settings)
                self.sessions = self.replicas.sessions
            else:
                self.sessions = [tilework.load(path, seed=seed, **settings)]
                if group is not None:
                    self.sessions[0].join(group, average=average)
        except TileworkError as e:
            raise from_engine(e) from e
        self.session = self.sessions[0]
        self.batches = batches

    def upload(self, model: nn.Module, optimizer: Any = None) -> None:
        self._each(lambda session, _: session.to_device(model, optimizer))

    def write(self, tensors: Sequence[Mapping[str, Tensor]], *, same: bool = True) -> None:
        """tensors[replica] into each session: what else it has stays its own. same: the first replica's count everywhere."""

        def act(session: tilework.Session, rank: int) -> None:
            new = {name: t.detach().clone() for name, t in tensors[rank].items()}
            if same and session.group is not None and session.group.size > 1:
                equal(session.group, list(new.values()))
            before = session.snapshot()
            session.restore(replace(before, tensors={**before.tensors, **new}))

        self._each(act)

    def set(self, values: dict[str, float]) -> None:
        self._each(lambda session, _: session.set(values))

    def seed(self, state: Sequence[int]) -> None:
        self._each(lambda session, _: session.seed(*state))

    def download(self, model: nn.Module, but: Collection[int] = ()) -> None:
        """Into the model's tensors, except those with these ids."""
        if not but:
            self.session.to_host(model)
            return
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.session.to_host({name: torch.empty_like(t) if id(t) in but else t for name, t in tensors.items()})

    def _each(self, act: Any) -> list[Any]:
        try:
            return self.replicas.each(act) if self.replicas is not None else [act(self.session, 0)]
        except TileworkError as e:
            raise from_engine(e) from e

    def train(self, inputs: Sequence[Tensor], asked: str) -> list[Sequence[Tensor]]:
        """Raw outputs of each replica."""
        batches = self.batches
        if self.replicas is None:
            return [self._run(self.session, inputs, asked)]
        shares = [[batches.share(t, r).contiguous() for t in inputs] for r in range(batches.replicas)]
        return self._each(lambda session, rank: session.run(*shares[rank], num_steps=batches.iterations, outputs=asked).raw)

    def _run(self, session: tilework.Session, inputs: Sequence[Tensor], asked: str) -> Sequence[Tensor]:
        try:
            return session.run(*inputs, num_steps=self.batches.iterations, outputs=asked).raw
        except TileworkError as e:
            raise from_engine(e) from e

    def infer(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """[batches, ...] of each output, all replicas' in their order."""
        count = self.batches.blocks
        try:
            found = self.session.infer(*inputs, num_batches=count)
        except TileworkError as e:
            raise from_engine(e) from e
        if count == 1:
            return [t.unsqueeze(0) for t in found]
        kinds = [a.type.shape for a in self.session.manifest.signature.infer_outputs]
        return [t.reshape(count, *shape) for t, shape in zip(found, kinds, strict=True)]

    def close(self) -> None:
        if self.replicas is not None:
            self.replicas.close()
        else:
            self.session.close()


def seed_of(options: Options) -> int:
    return int(options.random_seed if options.random_seed is not None else torch.initial_seed()) % 2**31
