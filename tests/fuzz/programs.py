"""Whole training programs that nobody wrote: a recipe is drawn at random and becomes readable source text.

A recipe is plain data. Any recipe is a program: operations choose their operands among the values that are there, so one
can be taken away or changed without the rest falling apart, which is what shrinking needs.

    recipe = {"sizes": (3, 0), "input": 1, "operations": (("product", 0, 0, 17), ...), "optimizers": (...), ...}
    source(recipe)   the text of a module with build() -> tilework.Step
    make(recipe)     that step; called twice, it gives twins
"""

from __future__ import annotations

import functools
import linecache
from random import Random
from typing import Any

import layers  # noqa: F401  # registers its operations
import torch
from operations import OPERATIONS
from writer import PRELUDE, SIZES, WORDS, Skip, Writer, size

import tilework
from tilework.plan.options import PASSES

Recipe = dict[str, Any]

BATCHES = (4, 1, 2, 3, 7, 8, 9, 16, 17)
RULES = (
    "SGD({}, lr=0.05)", "SGD({}, lr=0.02, momentum=0.9)", "SGD({}, lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.1)",
    "SGD({}, lr=0.02, momentum=0.9, dampening=0.3)", "SGD({}, lr=0.02, weight_decay=0.1)", "SGD({}, lr=0.01, maximize=True)",
    "Adam({}, lr=1e-3, eps=1e-3)", "AdamW({}, lr=1e-3, eps=1e-4, amsgrad=True)", "RMSprop({}, lr=1e-3, eps=1e-2, centered=True)",
    "RMSprop({}, lr=1e-3, eps=1e-3, momentum=0.5)", "Adam({}, lr=1e-3, eps=1e-4, weight_decay=0.1, amsgrad=True)",
    "AdamW({}, lr=1e-3, maximize=True, eps=1e-3)",
)  # fmt: skip
LOSSES = ("inside", "first", "dict", "beside", "classes", "two")


_HEAVY = ("product", "index", "view", "in_place", "reduce", "arithmetic")  # what compilers get wrong most often
_KINDS = (*OPERATIONS, *_HEAVY)


def drawn(random: Random) -> Recipe:
    """One recipe. Not by hypothesis, whose generator varies one program for long: of 100 recipes of a strategy for the same
    data 56 were different in their operations (129 different operations in all); of 100 of these all are (586)."""
    one, many = random.choice, random.randrange
    return {
        "sizes": (many(len(BATCHES)), many(len(SIZES)), many(len(SIZES))),
        "input": many(4),  # (B, N), (B, M, N), (B, 2, M, N), (B, N) with a gradient of its own
        "operations": tuple((one(_KINDS), many(5), many(5), many(2048)) for _ in range(2 + many(8))),
        "loss": one(LOSSES),
        "objective": many(4),
        "optimizers": tuple(many(len(RULES)) for _ in range(1 + (many(4) == 3))),
        "groups": many(4) == 3,
        "clip": one(("", "", "", "clip_norm=0.1", "clip_value=0.01")),
        "micro": one((1, 1, 1, 1, 2, 3)),
        "variant": one(("fused",) * 17 + ("sections", "sections", "without", "without", "verified")),
        "without": one(PASSES),
        "piece_size": one((400, 400, 25, 10)),
    }


def source(recipe: Recipe) -> str:
    return _source(repr(recipe))


@functools.lru_cache(maxsize=4096)
def _source(text: str) -> str:
    recipe: Recipe = eval(text)
    state = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for careful in (False, True):
            torch.manual_seed(1)
            w = _written(recipe, careful)
            if careful or _trains(w):
                return _text(recipe, w)
    finally:
        torch.random.set_rng_state(state)
        torch.set_num_threads(threads)
    raise AssertionError


def _inputs(recipe: Recipe) -> dict[str, str]:
    b, n, m = BATCHES[recipe["sizes"][0]], size(recipe["sizes"][1]), size(recipe["sizes"][2])
    shape = {0: f"{b}, {n}", 1: f"{b}, {m}, {n}", 2: f"{b}, 2, {m}, {min(n, 9)}", 3: f"{b}, {n}"}[recipe["input"]]
    return {
        "x": f"torch.randn({shape}{', requires_grad=True' if recipe['input'] == 3 else ''})",
        "ids": f"torch.randint(0, {WORDS}, ({b}, {1 + m % 5}))",
        "flags": f"torch.rand({b}) > 0.5",
    }


def _written(recipe: Recipe, careful: bool) -> Writer:
    w = Writer()
    for name, text in _inputs(recipe).items():
        w.scope[name] = eval(text, {"torch": torch})
    w.floats, w.ints, w.bools = ["x"], ["ids"], ["flags"]
    for kind, first, second, number in recipe["operations"]:
        if careful and kind == "changed_after_use":
            continue
        x = w.pick(first)
        y = w.pick(second)
        before = len(w.forward)
        try:
            OPERATIONS[kind](w, x, y, number)
        except (
            Skip,
            RuntimeError,
            IndexError,
            ValueError,
            TypeError,
            AttributeError,
            AssertionError,
            NotImplementedError,
            SyntaxError,
        ):
            del w.forward[before:]
    return w


def _trains(w: Writer) -> bool:
    """Whether eager PyTorch can go backward: it refuses where a value that it needs was changed in place."""
    try:
        total = sum(w.of(v).double().square().sum() for v in w.floats)
        if total.requires_grad:  # type: ignore[union-attr]
            total.backward(retain_graph=True)  # type: ignore[union-attr]
    except RuntimeError:
        return False
    return True


def _learns(w: Writer, values: list[str]) -> bool:
    """Whether some parameter has a gradient."""
    total, params = sum(w.of(v).double().sum() for v in values), [p for p in w.model.parameters() if p.requires_grad]
    if not params or not total.requires_grad:  # type: ignore[union-attr]
        return False
    grads = torch.autograd.grad(total, params, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]
    return any(g is not None for g in grads)


def _text(recipe: Recipe, w: Writer) -> str:
    sinks = [v for v in w.sinks() if w.of(v).requires_grad] or [w.floats[-1]]
    if not _learns(w, sinks):
        w.run(f"{sinks[-1]} = {sinks[-1]} * {w.parameter(1)}")
    ways = ("{}.mean()", "{}.square().mean()", "{}.tanh().sum() * 0.01", "{0}.abs().mean() + {0}.flatten().logsumexp(0) * 0.1")
    objective = " + ".join(ways[(recipe["objective"] + i) % 4].format(v) for i, v in enumerate(sinks))
    outputs = [v for v in (w.floats[-1], w.ints[-1], w.bools[-1]) if v not in ("x", "ids", "flags")]
    kind, b = recipe["loss"], BATCHES[recipe["sizes"][0]]
    loss, targets, returned = '"auto"', "()", "loss"
    if kind == "first":
        loss, returned = "0", ", ".join(["loss", *outputs]) + ","
    elif kind == "dict":
        loss, returned = '"loss"', "{" + "".join(f'"{v}": {v}, ' for v in outputs) + '"loss": loss}'
    elif kind == "two":
        loss, returned = "[0, 1]", f"loss, {sinks[0]}.square().mean() * 0.5"
    elif kind in ("beside", "classes"):
        rows = next((v for v in reversed(w.floats) if w.shape(v) and w.shape(v)[0] == b and w.of(v).requires_grad), None)
        if rows is not None and kind == "beside":
            shape = ", ".join(map(str, w.shape(rows)))
            returned, targets = f"{rows}, loss", f"(torch.randn({shape}, dtype={w.of(rows).dtype}),)"
            loss = "lambda out, t: F.mse_loss(out[0], t) + out[1]"
        elif rows is not None:
            returned, targets = f"{w.dims(rows, 2)}, loss", f"(torch.randint(0, {w.shape(w.dims(rows, 2))[1]}, ({b},)),)"
            loss = "lambda out, t: F.cross_entropy(out[0], t) + out[1]"
    body = [*w.forward, f"loss = {objective}", f"return {returned}"]
    lines = [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "from torch.utils.checkpoint import checkpoint",
        "",
        "import tilework",
        "",
    ]
    lines += [PRELUDE[p] for p in w.prelude]
    lines += [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in w.init),
        "",
    ]
    lines += [
        "    def forward(self, x, ids, flags):",
        *(f"        {line}" for line in body),
        "",
        "",
        "def build():",
        "    torch.manual_seed(1)",
    ]
    lines += ["    model = Model()", "    params = [p for p in model.parameters() if p.requires_grad]"]
    lines += [f"    {name} = {text}" for name, text in _inputs(recipe).items()]
    lines += _optimizers(recipe)
    more = "".join(
        f", {text}" for text in (recipe["clip"], f"num_micro_batches={recipe['micro']}" if recipe["micro"] > 1 else "") if text
    )
    lines += [
        f"    inputs, targets = (x, ids, flags), {targets}",
        f"    return tilework.Step(model=model, inputs=inputs, targets=targets, loss={loss}, optimizer=optimizers{more})",
        "",
    ]
    return "\n".join(lines)


def _optimizers(recipe: Recipe) -> list[str]:
    rules, made = recipe["optimizers"], []
    for i, rule in enumerate(rules):
        own = "params" if len(rules) == 1 else f"params[{i}::{len(rules)}]"
        if i:  # there may be no parameter for it
            own = f"params[{i}::{len(rules)}] or [nn.Parameter(torch.zeros(1))]"
        if recipe["groups"]:
            own = f'[{{"params": ({own})[::2]}}, {{"params": ({own})[1::2], "lr": 0.003}}]'
        made.append(f"torch.optim.{RULES[rule].format(own)}")
    return [f"    optimizers = [{', '.join(made)}]"]


def make(recipe: Recipe, *, plain: bool = False) -> tilework.Step:
    """plain: checkpointed blocks are simply called, which must not change a number."""
    text = source(recipe)
    name = f"<fuzz-{hash(text) & 0xFFFFFFFF:x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # so that errors can show the lines
    scope: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(text, name, "exec"), scope)
    if plain:
        scope["checkpoint"] = lambda block, *values, use_reentrant: block(*values)
    return scope["build"]()
