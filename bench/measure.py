"""The measuring process: it checks that the contenders do the same arithmetic, and times them in turn.

Never two at a time: a contender gets a command only when the one before has answered. Between two slices there is a short
pause, because idle OpenMP threads spin for some milliseconds before they sleep; telling them not to would change what is
measured. Each round starts with another contender, so that none always runs after the same neighbour. A slice during which
other processes used the cores is repeated, as often as there are slices; a row that stays noisy is marked.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

from .processes import ContenderError, CpuClock, Workers
from .rows import CHECKED_STEPS

PAUSE_SECONDS = 0.05
TRIAL_SECONDS, TRIALS, MAX_TRIALS = 0.2, 3, 8  # of each variant; the best of the trials counts
LARGE_ROUNDS = 5  # for rows whose slices take seconds
MIN_ROUNDS, ENOUGH_SECONDS = 3, 90.0  # a contender that has had this long in a row runs no more rounds than these
NOISY = 0.08  # of the cores' time used by other processes. Less is not told from the clock's ticks in a short slice


class WrongArithmetic(Exception):
    """A contender's losses are not those of eager PyTorch."""


def summary(seconds: list[float]) -> dict[str, Any]:
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    return {"median": statistics.median(seconds), "min": min(seconds), "iqr": high - low, "rounds": seconds}


def check_losses(losses: dict[str, list[float]], rtol: float) -> dict[str, float]:
    """The largest relative error of each contender's losses; WrongArithmetic where it is over rtol.

    Compared with eager PyTorch, or, where that is not among them, with the first.
    """
    errors: dict[str, float] = {}
    reference = "eager" if "eager" in losses else next(iter(losses), "")
    for name, own in losses.items():
        pairs = zip(own, losses[reference], strict=True)
        errors[name] = max(abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) else math.inf for a, b in pairs)
        if not errors[name] <= rtol:
            raise WrongArithmetic(f"the losses of {name} are {own}; those of {reference} are {losses[reference]} (rtol {rtol})")
    return errors


@dataclass(frozen=True)
class Slice:
    seconds: float  # a step
    steps: int
    others: float  # share of the cores that other processes used meanwhile


def time_slice(workers: Workers, name: str, seconds: float) -> Slice:
    time.sleep(PAUSE_SECONDS)
    clock = CpuClock(workers)
    answer = workers.get(name).call("time", seconds=seconds)
    return Slice(answer["seconds"], answer["steps"], clock.others())


def fastest_variant(workers: Workers, name: str, row: str, large: bool, **start: Any) -> dict[str, Any]:
    """Make a contender ready in the fastest of its variants: that one in words, and what each took, or why it failed."""
    s, worker = workers.settings, workers.get(name)
    trials: dict[str, float | str] = {}
    variants = worker.call("start", row=row, **start)[: 1 if s.quick else None]
    end = time.perf_counter() + s.prepare_limit
    for number, variant in enumerate(variants):
        try:
            worker.call("build", max(1.0, end - time.perf_counter()), number=number)
            if len(variants) == 1:
                return {"setting": variant, "trials": {}}
            tried = [time_slice(workers, name, TRIAL_SECONDS) for _ in range(1 if large else TRIALS)]
            while min(one.others for one in tried) > NOISY and len(tried) < MAX_TRIALS:
                tried.append(time_slice(workers, name, TRIAL_SECONDS))
            trials[variant] = min(one.seconds for one in tried)
        except ContenderError as e:  # a variant that a framework cannot run is out of the choice, and said
            if not worker.alive or len(variants) == 1:
                raise
            trials[variant] = str(e)[:300]
    worked = {v: t for v, t in trials.items() if isinstance(t, float)}
    if not worked:
        raise ContenderError(f"no variant works: {trials}")
    best = min(worked, key=lambda v: worked[v])
    if best != variants[-1]:
        worker.call("build", s.prepare_limit, number=variants.index(best))
    return {"setting": best, "trials": trials}


def time_in_turn(workers: Workers, names: list[str], rounds: int) -> tuple[dict[str, list[Slice]], dict[str, str]]:
    """The slices of each contender, and why it failed where it did."""
    slices: dict[str, list[Slice]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    spent = dict.fromkeys(names, 0.0)
    patience = rounds * len(names)  # as many repeats as there are slices, in all
    for number in range(rounds if names else 0):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            try:
                while name in slices and (number < MIN_ROUNDS or spent[name] < ENOUGH_SECONDS):
                    one = time_slice(workers, name, workers.settings.slice_seconds)
                    if one.others <= NOISY or patience == 0:
                        slices[name].append(one)
                        break
                    patience -= 1
            except ContenderError as e:
                failed[name] = f"failed while timed: {e}"
                del slices[name]
            spent[name] += time.perf_counter() - begin
    return slices, failed


def measure_row(
    row: str, contenders: list[str], workers: Workers, rtol: float, large: bool = False, **start: Any
) -> dict[str, Any]:
    """Prepare, check, time: a row of the result. Contenders that fail are left out with the reason."""
    s = workers.settings
    ready: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    losses: dict[str, list[float]] = {}
    for name in contenders:
        if (name, row) in s.skip:
            skipped[name] = "left out by --skip"
            continue
        begin = time.perf_counter()
        try:
            found = fastest_variant(workers, name, row, large, **start)
            losses[name] = workers.get(name).call("losses", n=CHECKED_STEPS)
        except ContenderError as e:
            skipped[name] = str(e)
            s.report(f"  {row:<10} {name:<17} left out: {str(e)[:200]}")
            continue
        ready[name] = {**found, "prepare_seconds": round(time.perf_counter() - begin, 2)}
        s.report(f"  {row:<10} {name:<17} ready in {ready[name]['prepare_seconds']:.1f} s ({found['setting']})")
    errors = check_losses(losses, rtol)
    slices, failed = time_in_turn(workers, list(ready), min(s.rounds, LARGE_ROUNDS) if large else s.rounds)
    skipped |= failed
    everyone = [one.others for own in slices.values() for one in own]
    others = statistics.mean(everyone) if everyone else 0.0
    if others > NOISY:
        s.report(f"  {row:<10} noisy: other processes used {others:.0%} of the cores")
    result = {}
    for name, own in slices.items():
        result[name] = {
            **summary([one.seconds for one in own]),
            **ready[name],
            "steps_a_slice": own[-1].steps,
            "loss_error": errors.get(name),
        }
        r = result[name]
        s.report(f"  {row:<10} {name:<17} {r['median'] * 1e6:12.1f} us a step  (IQR {r['iqr'] / r['median']:.1%})")
    return {"unit": "seconds a step", "contenders": result, "skipped": skipped, "others_busy": round(others, 3)}
