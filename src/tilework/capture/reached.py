"""Which parameters have a gradient, where random numbers leave parts of the model out: for each, a formula over what is called.

torch leaves a parameter alone in a step in which no gradient reaches it. Gradients take the paths of the autograd graph; a part
that may be left out is a choice between two of them. A formula is a set of terms, any of which is enough; a term is a set of
numbers, all of which are needed: i + 1 for "part i is called", -(i + 1) for "part i is left out"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

Term = frozenset[int]
Formula = frozenset[Term]
ALWAYS: Formula = frozenset({frozenset()})
_MOST = 200  # terms of one formula; more than any stack of layers has


def any_of(a: Formula, b: Formula) -> Formula:
    """The shortest terms: without those that others imply, and with both sides of a choice made one."""
    terms = set(a | b)
    todo = list(terms)
    while todo:
        term = todo.pop()
        for x in term:
            if (term - {x}) | {-x} in terms and term - {x} not in terms:
                terms.add(term - {x})
                todo.append(term - {x})
    least = frozenset(t for t in terms if not any(other < t for other in terms))
    if len(least) > _MOST:
        raise UserError(
            "capture-chance",
            "too many random branches decide together whether a parameter has a gradient",
            expected=f"at most {_MOST} ways in which it has one",
            fix="choose with tensors: x + layer(x) * (torch.rand(()) > p)",
        )
    return least


def all_of(formula: Formula, literal: int) -> Formula:
    return frozenset(term | {literal} for term in formula if -literal not in term)


def holds(formula: Formula, left_out: Collection[int]) -> bool:
    return any(all((abs(x) - 1 in left_out) == (x < 0) for x in term) for term in formula)


def as_tensor(formula: Formula, skips: Mapping[int, Tensor]) -> Tensor:
    """1 where it holds, 0 where not. `skips`: whether each part is left out, 0-dim bool tensors."""
    total: Tensor | None = None
    for term in sorted(formula, key=sorted):
        every: Tensor | None = None
        for x in sorted(term):
            value = skips[-x - 1] if x < 0 else ~skips[x - 1]
            every = value if every is None else every & value
        assert every is not None
        total = every if total is None else total | every
    assert total is not None
    return total.to(torch.float32)


def reached(sources: Iterable[Tensor], choices: Mapping[Any, int]) -> dict[int, Formula]:
    """id of each leaf of the autograd graph -> when a gradient from the sources reaches it. `choices`: the nodes that choose
    between what stands for a part (their first input) and the part's result (their second), with the part's number."""
    starts = [o.grad_fn for o in sources if o.grad_fn is not None]
    formulas: dict[Any, Formula] = dict.fromkeys(starts, ALWAYS)
    found: dict[int, Formula] = {}
    waits = _users(starts)
    ready = [fn for fn in formulas if not waits[fn]]
    while ready:
        fn = ready.pop()
        here = formulas[fn]
        if hasattr(fn, "variable"):
            found[id(fn.variable)] = here
        for n, (after, _) in enumerate(fn.next_functions):
            if after is None:
                continue
            part = choices.get(fn)
            there = here if part is None else all_of(here, -(part + 1) if n == 0 else part + 1)
            formulas[after] = any_of(formulas.get(after, frozenset()), there)
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return found


def _users(starts: Sequence[Any]) -> Counter[Any]:
    """How many edges lead to each node."""
    count: Counter[Any] = Counter()
    todo, seen = list(starts), set(starts)
    while todo:
        fn = todo.pop()
        for after, _ in fn.next_functions:
            if after is not None:
                count[after] += 1
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return count
