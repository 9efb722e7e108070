"""JAX: a jitted step called from Python (jax-jit), and a jitted lax.scan over all steps of a pass (jax-scan).

Parameters, running statistics and optimizer state are one pytree, which is donated, as JAX's documentation recommends for
training loops. Data is on the device before timing. jax-scan is also tried with its loop unrolled, and image models in the
formulations of models_jax.Form. The number of threads follows the process's affinity,
which is the way that JAX's developers name for limiting it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .contender import Contender, Variant
from .models_jax import Arrays, Form, from_torch, images, loss_function
from .rows import Row, data_file

State = dict[str, Arrays]


class JaxContender(Contender):
    def variants(self, row: Row) -> list[Variant]:
        forms: list[Variant] = [{"layout": "", "rewrite": ""}]
        if row.spatial:
            forms = [{"layout": "nhwc", "rewrite": "windows by reshape"}, {"layout": "nhwc", "rewrite": ""},
                     {"layout": "nchw", "rewrite": ""}]  # fmt: skip
        if self.name == "jax-jit":
            return forms
        unrolled = f"unroll={min(8, row.steps_per_call)}"
        if row.spatial and row.large:  # inside a loop, XLA's CPU convolutions are many times slower: once is enough to show it
            return [*({**f, "unroll": unrolled} for f in forms), {**forms[0], "unroll": ""}]
        return [{**f, "unroll": u} for f in forms for u in ("", unrolled)]

    def make_ready(self, variant: Variant) -> None:
        row = self.row
        form = Form(variant["layout"] or "nhwc", bool(variant["rewrite"]))
        self.initial, x, y = read_state(row, self.out, form)
        step = step_function(row, form)
        if self.name == "jax-jit":
            self.step = jax.jit(step, donate_argnums=0)
            per_batch = zip(np.split(x, row.steps_per_call), np.split(y, row.steps_per_call), strict=True)
            self.batches = [(jnp.array(a), jnp.array(b)) for a, b in per_batch]
        else:
            self.loop = scan_function(step, int(variant["unroll"].removeprefix("unroll=") or 1))
            shape = (row.steps_per_call, row.batch)
            self.xs, self.ys = jnp.array(x.reshape(*shape, *x.shape[1:])), jnp.array(y.reshape(*shape, *y.shape[1:]))
        self.reset()

    def reset(self) -> None:
        self.state = jax.tree.map(lambda a: jnp.array(a, copy=True), self.initial)
        jax.block_until_ready(self.state)

    def run_pass(self) -> Any:
        if self.name == "jax-scan":
            self.state, losses = self.loop(self.state, self.xs, self.ys)
        else:
            losses, state, step = [], self.state, self.step
            for x, y in self.batches:
                state, loss = step(state, x, y)
                losses.append(loss)
            self.state = state
        jax.block_until_ready((self.state, losses))
        return losses


def read_state(row: Row, out: Path, form: Form) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray, np.ndarray]:
    """(what training changes, x, y) from the row's file, in the form's layout."""
    with np.load(data_file(out, row)) as stored:
        arrays = {k: stored[k] for k in stored.files}
    params = {k[6:]: from_torch(row.model, k[6:], v, form) for k, v in arrays.items() if k.startswith("param/")}
    stats = {k[7:]: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in arrays.items() if k.startswith("buffer/")}
    return (
        {"params": params, "stats": stats, **fresh_optimizer(row, params)},
        images(arrays["x"], form),
        images(arrays["y"], form),
    )


def fresh_optimizer(row: Row, params: dict[str, np.ndarray]) -> dict[str, Any]:
    zeros = {k: np.zeros_like(p) for k, p in params.items()}
    if row.optimizer.kind == "adamw":
        return {"first": zeros, "second": zeros, "count": np.zeros((), np.float32)}
    return {"first": zeros} if row.optimizer.momentum else {}


def step_function(row: Row, form: Form) -> Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]:
    """step(state, x, y) -> (state, loss), with torch.optim's SGD or AdamW written out."""
    gradient = jax.value_and_grad(loss_function(row.model, form), has_aux=True)
    o = row.optimizer
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, 0.01  # AdamW's defaults in PyTorch

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        (loss, stats), grads = gradient(state["params"], state["stats"], x, y)
        params = state["params"]
        if o.kind == "adamw":
            count = state["count"] + 1
            first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["first"], grads)
            second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state["second"], grads)
            short, long = 1 - beta1**count, jnp.sqrt(1 - beta2**count)
            new = jax.tree.map(
                lambda p, m, v: p * (1 - o.lr * decay) - o.lr / short * m / (jnp.sqrt(v) / long + eps), params, first, second
            )
            return {"params": new, "stats": stats, "first": first, "second": second, "count": count}, loss
        if not o.momentum:
            return {"params": jax.tree.map(lambda p, g: p - o.lr * g, params, grads), "stats": stats}, loss
        first = jax.tree.map(lambda m, g: o.momentum * m + g, state["first"], grads)
        return {"params": jax.tree.map(lambda p, m: p - o.lr * m, params, first), "stats": stats, "first": first}, loss

    return step


def scan_function(step: Callable[..., Any], unroll: int = 1) -> Callable[..., Any]:
    def loop(state: Any, xs: jax.Array, ys: jax.Array) -> tuple[Any, jax.Array]:
        return lax.scan(lambda s, batch: step(s, *batch), state, (xs, ys), unroll=unroll)

    return jax.jit(loop, donate_argnums=0)


def make(name: str, out: Path) -> Any:
    return JaxContender(name, out)
