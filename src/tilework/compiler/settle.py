"""What is built must compute what the model computes. Where it does not, it is built again with less: a pass left out, the guilty
operator called through torch's dispatcher instead of generated, at last a program of calls alone. What is right is kept.

The compiler cannot run what it builds; it is given a judge who can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..artifact.graph import Graph
from ..errors import BugError
from ..plan.aliases import is_view
from ..plan.options import PASSES, Options
from ..plan.plan import Plan
from .backends import Built, backend_for

Called = dict[str, tuple[str, ...]]  # program -> operators that are called through the dispatcher


@dataclass(frozen=True)
class Made:
    plan: Plan
    built: Built


@dataclass(frozen=True)
class Verdict:
    """What a judge found when it ran one step beside eager PyTorch."""

    wrong: dict[str, str]  # program -> the first tensor that differs, in words
    note: str  # what was compared: "on the example inputs", or why nothing was
    compared: bool = True


@dataclass(frozen=True)
class Settled:
    made: Made
    note: str
    compared: bool = True
    retreats: list[str] = field(default_factory=list)  # what was given up to be right, in words


class Settling:
    def __init__(
        self,
        options: Options,
        make: Callable[[Options, Called], Made],
        judge: Callable[[Made], Verdict],
        report: Callable[[str], None],
    ) -> None:
        self.options, self.make, self.judge, self.report = options, make, judge, report
        self.called: Called = {}
        self.retreats: list[str] = []

    def settle(self) -> Settled:
        made = self.make(self.options, {})
        self.report("comparing one step with eager PyTorch")
        verdict = self.judge(made)
        if not verdict.wrong:
            return Settled(made, verdict.note, verdict.compared)
        if (
            not backend_for(self.options.device).generates
            or self.judge(self.make(replace(self.options, device="reference"), {})).wrong
        ):
            raise _failed(verdict, "the graph that was captured from the model")
        self.report("the native code is wrong here: trying with less")
        made, verdict = self._without_a_pass(made, verdict)
        while verdict.wrong:
            program = next(iter(verdict.wrong))
            forward = made.plan.siblings(program).get("fwd", "")
            backward = made.plan.roles[program] == "bwd"
            if "*" in self.called.get(program, ()) and backward and "*" not in self.called.get(forward, ()):
                # fwd looks right, but what it keeps for bwd cannot be
                self.called[forward] = ("*",)
                self.retreats.append(f"{forward}: all operators called through torch's dispatcher ({verdict.wrong[program]})")
                made, verdict = self._attempt(self.options, self.called)
            elif "*" in self.called.get(program, ()):
                raise _failed(verdict, f"program {program}")
            else:
                made, verdict = self._by_calls(program, made, verdict)
        return Settled(made, verdict.note, verdict.compared, self.retreats)

    def _attempt(self, options: Options, called: Called) -> tuple[Made, Verdict]:
        made = self.make(options, called)
        return made, self.judge(made)

    def _without_a_pass(self, made: Made, verdict: Verdict) -> tuple[Made, Verdict]:
        """One pass off at a time. The first that makes everything right stays off."""
        for name in (p for p in reversed(PASSES) if p not in self.options.disable and p != "fuse"):
            options = replace(self.options, disable=(*self.options.disable, name))
            trial = self.make(options, {})
            if _digests(trial.plan) == _digests(made.plan):
                continue  # it has nothing to do here
            self.report(f"without pass {name}")
            found = self.judge(trial)
            if not found.wrong:
                self.options = options
                self.retreats.append(f"pass {name} left out ({_first(verdict)})")
                return trial, found
        return made, verdict

    def _by_calls(self, program: str, made: Made, verdict: Verdict) -> tuple[Made, Verdict]:
        """Looks for the operator that is to blame; calls it, or as much as is needed, in this program."""
        why = verdict.wrong[program]
        kinds = _callable(made.plan.programs[program])
        best: tuple[tuple[str, ...], Made, Verdict] | None = None

        def right(those: tuple[str, ...]) -> bool:
            nonlocal best
            self.report(f"{program}: calling {len(those) if '*' not in those else 'all'} operators through torch's dispatcher")
            trial, found = self._attempt(self.options, {**self.called, program: those})
            if program in found.wrong:
                return False
            best = (those, trial, found)
            return True

        if right(kinds):
            low, high = 0, len(kinds)  # the first `high` operators suffice, the first `low` do not
            while high - low > 1:
                middle = (low + high) // 2
                if right(kinds[:middle]):
                    high = middle
                else:
                    low = middle
            if high == 1 or not right((kinds[high - 1],)):
                right(kinds[:high])
        elif not right(("*",)):
            self.called[program] = ("*",)
            self.options = replace(self.options, disable=tuple(p for p in PASSES if p not in ("fuse", "join")))
            made, verdict = self._attempt(self.options, self.called)
            self.retreats.append(f"{program}: all operators called, and no passes ({why})")
            return made, verdict
        assert best is not None
        self.called[program], made, verdict = best
        those = "all operators" if "*" in best[0] else ", ".join(best[0])
        self.retreats.append(f"{program}: {those} called through torch's dispatcher ({why})")
        return made, verdict


def _callable(graph: Graph) -> tuple[str, ...]:
    """Operators that can be called amid generated code, in the order of their first use."""
    return tuple(
        dict.fromkeys(n.op for n in graph.nodes if n.op != "getitem" and not n.op.startswith("tilework.") and not is_view(n.op))
    )


def _digests(plan: Plan) -> dict[str, tuple[str, str, bool]]:
    return {name: (graph.digest(), graph.abi(), name in plan.cuts) for name, graph in plan.programs.items()}


def _first(verdict: Verdict) -> str:
    return next(iter(verdict.wrong.values()))


def _failed(verdict: Verdict, what: str) -> BugError:
    return BugError(
        "verify-failed",
        f"{what} does not compute what the model computes in eager PyTorch; no artifact was written",
        found=_first(verdict),
        expected="the numbers of eager PyTorch, up to rounding",
        fix="report this, with the model if you can. verify=False (--no-verify) writes it all the same, to look into it",
    )
