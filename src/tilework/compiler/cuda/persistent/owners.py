"""Which block computes what. Blocks wait for each other where one needs what another has made, and that takes about as long as a
stage. So each stage is divided in the way that makes most of what it needs the block's own, and what is small and needed by
everybody is computed by every block for itself.

Nothing here is guessed: which element is touched by which block is computed, for every access and every way to divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .formulas import NotSmall
from .stages import Access, Loop, Memory, Stage, Stages, coordinates, elements

BARRIER = 1.15  # us: blocks of a whole GPU wait for each other; measured on an H200
SYNC = 0.05  # us: threads of a block
STAGE = 0.25  # us: what a stage takes whatever it computes
FAR = 0.35  # us: to read what another block has written
PACE = 0.012  # us: an element of a thread's share
MOST_ENUMERATED = 3_000_000  # elements of an access; with more, it is taken for one of everybody's
MOST_REPEATED = 20_000  # operations that every block may do for itself
MOST_STAGES = 150  # of a kernel
MOST_TRIALS = 400  # plans that are looked at
MOST_PRIVATE = 160 << 10  # bytes that every block may have for itself


@dataclass(frozen=True)
class Split:
    """How a stage's elements are divided among blocks: by a coordinate, (x // stride) % size. A size of 0: not divided, every
    block computes all for itself."""

    stride: int
    size: int

    @property
    def repeated(self) -> bool:
        return self.size == 0


REPEATED = Split(1, 0)


@dataclass(frozen=True)
class Owned:
    """The plan of a kernel."""

    blocks: int
    order: tuple[int, ...]  # stages, as they come; what follows is by stage
    splits: tuple[Split, ...]
    before: tuple[str, ...]  # of each stage: "", "block" (its threads wait), "grid" (all blocks wait)
    private: frozenset[str]  # memories of which every block has its own
    homes: dict[
        str, tuple[tuple[int, int], ...]
    ]  # memory of which each block alone touches a part: by block, from where to where
    far: frozenset[tuple[int, str]]  # (stage, memory): read from where other blocks write
    estimate: float  # us a step

    @property
    def num_barriers(self) -> int:
        return self.before.count("grid")


def owned(made: Stages, blocks: int, threads: int, room: int = MOST_PRIVATE) -> Owned:
    """`room`: bytes of shared memory in which a block may keep what it alone touches."""
    planner = _Planner(made, blocks, threads)
    plan = planner.best()
    taken = bytes_of([made.memories[m] for m in plan.private])
    return planner.at_home(plan, room - taken)


@dataclass
class _Touch:
    """By element, the first and the last block that touches it; None: any of them."""

    first: np.ndarray[Any, Any] | None
    last: np.ndarray[Any, Any] | None


class _Planner:
    def __init__(self, made: Stages, blocks: int, threads: int) -> None:
        self.made, self.blocks, self.threads = made, blocks, threads
        self.stages = made.stages
        self.written = {a.memory for s in self.stages for _, a in s.touched() if a.write}
        self.touched = [frozenset({a.memory for _, a in s.touched()} & self.written) for s in self.stages]
        self.read = {a.memory for s in self.stages for _, a in s.touched() if not a.write}
        self._elements: dict[tuple[int, int], Any] = {}
        self._touches: dict[tuple[int, Split], dict[tuple[str, bool], _Touch]] = {}
        self._clashes: dict[tuple[Any, ...], bool] = {}
        self._plans: dict[tuple[Split, ...], Owned] = {}

    def best(self) -> Owned:
        if len(self.stages) > MOST_STAGES:
            raise NotSmall(f"{len(self.stages)} stages")
        if self.blocks == 1:
            return self._planned(tuple(REPEATED for _ in self.stages))
        small = [self._may_repeat(s) for s in self.stages]
        divided = tuple(self._plain(s) for s in self.stages)
        repeated = tuple(REPEATED if ok else self._plain(s) for s, ok in zip(self.stages, small, strict=True))
        along = range(len(self.stages))
        found = [self._improved(divided, along), self._improved(repeated, along), self._improved(repeated, along[::-1])]
        return min(found, key=lambda plan: plan.estimate)

    def _improved(self, splits: tuple[Split, ...], along: range) -> Owned:
        """One stage after the other gets the split that is best with the others as they are; two rounds."""
        plan = self._planned(splits)
        trials = 0
        for _ in range(2):
            before = plan.estimate
            for i in along:
                for split in self._ways(self.stages[i]):
                    if split == plan.splits[i] or trials * len(self.stages) > MOST_TRIALS * 20:
                        continue
                    trials += 1
                    trial = self._planned((*plan.splits[:i], split, *plan.splits[i + 1 :]))
                    if trial.estimate < plan.estimate - 1e-9:
                        plan = trial
            if plan.estimate >= before - 1e-9:
                break
        return plan

    # ---- ways to divide ----

    def _plain(self, stage: Stage) -> Split:
        return Split(1, stage.numel)

    def _ways(self, stage: Stage) -> list[Split]:
        found = {Split(1, stage.numel)}
        for loop in stage.loops:
            if math.prod(loop.sizes) == stage.numel:
                for i, size in enumerate(loop.sizes):
                    if size > 1:
                        found.add(Split(math.prod(loop.sizes[i + 1 :]), size))
        ways = sorted(found, key=lambda s: (s.stride, s.size))
        return [*ways, REPEATED] if self._may_repeat(stage) else ways

    def _may_repeat(self, stage: Stage) -> bool:
        """Small, and what it writes can lie in every block. The caller's own inputs and outputs are there once."""
        memories = [self.made.memories[a.memory] for _, a in stage.touched() if a.write]
        return stage.work <= MOST_REPEATED and all(m.num_bytes <= 32 << 10 for m in memories)

    # ---- a plan for given splits ----

    def _planned(self, splits: tuple[Split, ...]) -> Owned:
        if splits not in self._plans:
            self._plans[splits] = self._plan(splits)
        return self._plans[splits]

    def _plan(self, splits: tuple[Split, ...]) -> Owned:
        splits, private = self._settled(splits)
        order = self._ordered(splits, private)
        before, far = self._barriers(order, splits, private)
        cost = sum(
            self._cost(stage, split) + (FAR if any((i, m) in far for m in self.made.memories) else 0)
            for i, (stage, split) in enumerate(zip(self.stages, splits, strict=True))
        )
        cost += before.count("grid") * BARRIER + before.count("block") * SYNC
        return Owned(self.blocks, order, splits, before, private, {}, far, round(cost, 3))

    def at_home(self, plan: Owned, room: int) -> Owned:
        """The plan, with memories in the blocks that alone touch them, as far as there is room (bytes a block): large ones
        first."""
        homes: dict[str, tuple[tuple[int, int], ...]] = {}
        if self.blocks == 1:
            return plan
        for memory in sorted(self.written & self.read - plan.private, key=lambda m: -self.made.memories[m].num_bytes):
            parts = self._parts(memory, plan.splits)
            size = self.made.memories[memory].size
            most = max((end - begin for begin, end in parts), default=0) * size if parts else 0
            if parts and -(-most // 16) * 16 <= room:
                homes[memory] = parts
                room -= -(-most // 16) * 16
        return replace(plan, homes=homes)

    def _parts(self, memory: str, splits: tuple[Split, ...]) -> tuple[tuple[int, int], ...] | None:
        """By block, the elements that it alone touches; None where blocks share some, or where they do not lie together."""
        owner = np.full(self.made.memories[memory].num_elements, -1, np.int16)
        for i, split in enumerate(splits):
            for write in (False, True):
                touch = self._touch(i, split).get((memory, write))
                if touch is None:
                    continue
                if touch.first is None or touch.last is None:
                    return None
                there = touch.last >= 0
                if (touch.first[there] != touch.last[there]).any():
                    return None
                if ((owner[there] >= 0) & (owner[there] != touch.first[there])).any():
                    return None
                owner[there] = touch.first[there]
        parts = []
        for block in range(self.blocks):
            mine = np.flatnonzero(owner == block)
            if len(mine) and mine[-1] - mine[0] + 1 != len(mine):
                return None
            parts.append((int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0))
        return tuple(parts)

    def _settled(self, splits: tuple[Split, ...]) -> tuple[tuple[Split, ...], frozenset[str]]:
        """A memory is every block's own if all that write it are repeated. A repeated stage whose results cannot be is
        divided."""
        while True:
            writers: dict[str, set[bool]] = {}
            for stage, split in zip(self.stages, splits, strict=True):
                for _, access in stage.touched():
                    if access.write:
                        writers.setdefault(access.memory, set()).add(split.repeated)
            private = {m for m, kinds in writers.items() if kinds == {True} and m in self.read}
            total = sum(self.made.memories[m].num_bytes for m in private)
            mixed = {m for m, kinds in writers.items() if len(kinds) == 2}
            if self.blocks > 1 and total > MOST_PRIVATE:
                mixed |= set(sorted(private, key=lambda m: -self.made.memories[m].num_bytes)[:1])
            if not mixed:
                return splits, frozenset(private)
            splits = tuple(
                self._plain(stage) if split.repeated and any(a.write and a.memory in mixed for _, a in stage.touched()) else split
                for stage, split in zip(self.stages, splits, strict=True)
            )

    def _cost(self, stage: Stage, split: Split) -> float:
        share = stage.work if split.repeated else stage.work / min(self.blocks, max(1, split.size))
        return STAGE + share / self.threads * PACE

    def _ordered(self, splits: tuple[Split, ...], private: frozenset[str]) -> tuple[int, ...]:
        """Between two barriers as many stages as can be there."""
        count = len(self.stages)
        needs = [
            {
                j
                for j in range(i)
                if self._clash(j, i, splits, private, across=False) or self._clash(j, i, splits, private, across=True)
            }
            for i in range(count)
        ]
        left, order = list(range(count)), list[int]()
        while left:
            together: list[int] = []
            while True:
                ready = [i for i in left if not needs[i] & set(left)
                         and not any(self._clash(j, i, splits, private, across=True) for j in together)]  # fmt: skip
                if not ready:
                    break
                together.append(ready[0])
                left.remove(ready[0])
            order += together
        return tuple(order)

    def _barriers(
        self, order: Sequence[int], splits: tuple[Split, ...], private: frozenset[str]
    ) -> tuple[tuple[str, ...], frozenset[tuple[int, str]]]:
        """What each stage must wait for. Two rounds of the loop: what one step leaves concerns the next."""
        count = len(self.stages)
        before: list[str] = [""] * count
        since_grid: list[int] = []
        since_block: list[int] = []
        for i in [*order, *order]:
            grid = before[i] == "grid" or any(self._clash(j, i, splits, private, across=True) for j in since_grid)
            block = before[i] == "block" or any(self._clash(j, i, splits, private, across=False) for j in since_block)
            if grid:
                before[i] = "grid"
                since_grid, since_block = [], []
            elif block:
                before[i] = before[i] or "block"
                since_block = []
            since_grid.append(i)
            since_block.append(i)
        far = set()
        for i, stage in enumerate(self.stages):
            for memory in {a.memory for _, a in stage.touched() if not a.write and a.memory in self.written} - private:
                if any(self._meets(j, True, i, False, memory, splits, across=True) for j in range(count)):
                    far.add((i, memory))
        return tuple(before), frozenset(far)

    def _clash(self, j: int, i: int, splits: tuple[Split, ...], private: frozenset[str], *, across: bool) -> bool:
        """Whether stage i must come after stage j is complete: in other blocks, or in other threads of the same."""
        shared = self._shared(j, i)
        if not shared:
            return False
        key = (j, splits[j], i, splits[i], across, shared & private if across else None)
        if key not in self._clashes:
            self._clashes[key] = any(
                self._meets(j, first, i, second, memory, splits, across=across)
                for memory in shared
                if not (across and memory in private)
                for first, second in ((True, False), (False, True), (True, True))
            )
        return self._clashes[key]

    def _shared(self, j: int, i: int) -> frozenset[str]:
        """Memories that both touch, and somebody writes."""
        return self.touched[j] & self.touched[i]

    def _meets(self, j: int, first: bool, i: int, second: bool, memory: str, splits: tuple[Split, ...], *, across: bool) -> bool:
        """Whether one element is touched by both, in different blocks (`across`) or at all."""
        a, b = self._touch(j, splits[j]).get((memory, first)), self._touch(i, splits[i]).get((memory, second))
        if a is None or b is None:
            return False
        if not across:
            return True
        if a.first is None or b.first is None or a.last is None or b.last is None:
            return True
        both = (a.last >= 0) & (b.last >= 0)
        alone = (a.first == a.last) & (b.first == b.last) & (a.first == b.first)
        return bool((both & ~alone).any())

    # ---- who touches what ----

    def _touch(self, number: int, split: Split) -> dict[tuple[str, bool], _Touch]:
        key = (number, split)
        if key not in self._touches:
            self._touches[key] = self._count(self.stages[number], split)
        return self._touches[key]

    def _count(self, stage: Stage, split: Split) -> dict[tuple[str, bool], _Touch]:
        found: dict[tuple[str, bool], _Touch] = {}
        for loop, access in stage.touched():
            if access.memory not in self.written:
                continue
            key = (access.memory, access.write)
            memory = self.made.memories[access.memory]
            touch = found.setdefault(
                key, _Touch(np.full(memory.num_elements, self.blocks, np.int16), np.full(memory.num_elements, -1, np.int16))
            )
            where = self._where(stage, loop, access)
            if where is None or touch.first is None or touch.last is None:
                found[key] = _Touch(None, None)
                continue
            x, at = where
            if split.repeated:
                touch.first[at] = 0
                touch.last[at] = self.blocks - 1
            else:
                block = (((x // split.stride) % split.size) * self.blocks // split.size).astype(np.int16)
                np.minimum.at(touch.first, at, block)
                np.maximum.at(touch.last, at, block)
        return found

    def _where(self, stage: Stage, loop: Loop, access: Access) -> tuple[Any, Any] | None:
        """(the stage's x, the element) for everything that an access touches."""
        key = (id(loop), id(access))
        if key not in self._elements:
            self._elements[key] = self._enumerated(stage, loop, access)
        return self._elements[key]  # type: ignore[no-any-return]

    def _enumerated(self, stage: Stage, loop: Loop, access: Access) -> tuple[Any, Any] | None:
        rows = stage.rnumel if (loop.inner and not _reduced(loop, access)) or _inside(loop, stage) else 1
        if access.index is None or stage.numel * rows > MOST_ENUMERATED:
            return None
        x = np.arange(stage.numel)[:, None]
        r = np.arange(rows)[None, :]
        values = coordinates(loop, stage, x, r)
        at = np.broadcast_to(elements(access, values), (stage.numel, rows))
        memory = self.made.memories[access.memory]
        xs = np.broadcast_to(x, at.shape)
        ok = (at >= 0) & (at < memory.num_elements)  # what a mask leaves out lies outside
        pairs = np.unique(np.stack([xs[ok], at[ok]]), axis=1) if rows > 1 else np.stack([xs[ok], at[ok]])
        return pairs[0], pairs[1]


def _reduced(loop: Loop, access: Access) -> bool:
    """A sum is stored once for all its summands."""
    inner = {s.name for s in loop.symbols[1]}
    return access.write and access.index is not None and not any(s.name in inner for s in access.index.free_symbols)


def _inside(loop: Loop, stage: Stage) -> bool:
    """A loop without sums of its own that runs over the summands of its stage."""
    return not loop.inner and stage.rnumel > 1 and math.prod(loop.sizes) == stage.numel * stage.rnumel


def bytes_of(memories: Sequence[Memory]) -> int:
    return sum(-(-m.num_bytes // 16) * 16 for m in memories)


def lanes(stage: Stage, split: Split, blocks: int, threads: int) -> int:
    """Threads that sum up one element together: a power of two, so many that all of a block have something to do."""
    if stage.rnumel == 1:
        return 1
    mine = stage.numel if split.repeated else math.ceil(stage.numel / min(blocks, split.size))
    found = 1
    while found * 2 * mine <= threads and found < stage.rnumel:
        found *= 2
    return found
