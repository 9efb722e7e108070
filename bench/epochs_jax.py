"""JAX in the rows `epoch` and `call-item`.

epoch      one jitted scan over a permutation made in it; each step gathers its sample from arrays on the device
call-item  the jitted step on slices of NumPy arrays (quicker from Python than slices of JAX arrays), float() each step
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .contenders_jax import read_state, step_function
from .epochs import ROW, EpochContender
from .models_jax import Form
from .rows import row_named


class JaxEpoch(EpochContender):
    def __init__(self, kind: str, name: str, out: Path) -> None:
        super().__init__(kind, name)
        self.out = out
        self.whole = kind == "epoch"

    def variants(self) -> list[str]:
        return ["one scan, gathers in it"] if self.kind == "epoch" else ["jitted step on NumPy slices, float() each step"]

    def make_ready(self, number: int) -> None:
        row, form = row_named(ROW), Form()
        self.initial, _, _ = read_state(row, self.out, form)
        step = step_function(row, form)
        self.y = self.y.astype(np.int32)
        self.step = jax.jit(step, donate_argnums=0)
        if self.kind == "epoch":
            self.on_device = jnp.array(self.x), jnp.array(self.y)
        self.key = jax.random.key(0)

        def epoch(state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            def one(state: Any, i: jax.Array) -> tuple[Any, jax.Array]:
                return step(state, x[i][None], y[i][None])

            return lax.scan(one, state, jax.random.permutation(key, len(x)))

        self.epoch = jax.jit(epoch, donate_argnums=0)
        self.reset()

    def reset(self) -> None:
        self.state = jax.tree.map(lambda a: jnp.array(a, copy=True), self.initial)

    def run_epoch(self, samples: int) -> Any:
        assert samples == len(self.x)
        self.key, now = jax.random.split(self.key)
        self.state, losses = self.epoch(self.state, now, *self.on_device)
        return jax.block_until_ready(losses)

    def run_calls(self, samples: int) -> list[float]:
        losses = []
        for i in range(samples):
            self.state, loss = self.step(self.state, self.x[i : i + 1], self.y[i : i + 1])
            losses.append(float(loss))
        return losses


def make(kind: str, name: str, out: Path) -> Any:
    return JaxEpoch(kind, name, out)
