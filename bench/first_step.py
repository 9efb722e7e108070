"""A new process up to its first finished training step: python -m bench.first_step CONTENDER ROW OUT CORES START [prepare]

cold_start.py starts it, times it, and names START: the monotonic clock of the machine just before. It prints one line:

    whole    seconds from START until the first step's loss is known
    beyond   the same from the moment that the framework (torch, or jax) is imported; Tilework's own import counts
    loss     to see that all computed the same

With `prepare` it makes what the later runs start from: the artifact, the exported function, the caches. One mini-batch and
the initial weights are read with NumPy before the framework is imported, the same for all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .rows import Row, data_file, row_named

CONTENDERS = ("tilework", "eager", "compile-model", "jax-cache", "jax-export")


def with_tilework(row: Row, out: Path, arrays: dict[str, np.ndarray], prepare: bool) -> tuple[float, float]:
    import torch

    begin = time.monotonic()
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    path = out / "artifacts" / f"cold-{row.name}.pef"
    if prepare:
        import tilework
        from bench.models import optimizer_for, read_data

        model, loss, _, _ = read_data(row, out)
        step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=loss,
                             optimizer=optimizer_for(row, model.parameters()))  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        tilework.compile(step, path, options=tilework.Options(programs="fused"))
    from tilework import load

    return begin, load(path).run(x, y).loss.item()


def with_torch(row: Row, arrays: dict[str, np.ndarray], compiled: bool) -> tuple[float, float]:
    import torch

    begin = time.monotonic()
    from bench.models import build, optimizer_for

    model, loss_function = build(row)
    model.load_state_dict({k.split("/", 1)[1]: torch.from_numpy(v) for k, v in arrays.items() if "/" in k})
    optimizer = optimizer_for(row, model.parameters())
    called: Any = torch.compile(model) if compiled else model
    loss = loss_function(called(torch.from_numpy(arrays["x"])), torch.from_numpy(arrays["y"]))
    loss.backward()
    optimizer.step()
    return begin, loss.item()


def with_jax(row: Row, out: Path, arrays: dict[str, np.ndarray], exported: bool, prepare: bool) -> tuple[float, float]:
    import jax
    import jax.numpy as jnp

    begin = time.monotonic()
    jax.config.update("jax_compilation_cache_dir", str((out / "cache" / "jax-cold").resolve()))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    from bench.contenders_jax import fresh_optimizer, step_function
    from bench.models_jax import Form, from_torch, images

    form = Form()
    params = {k[6:]: from_torch(row.model, k[6:], v, form) for k, v in arrays.items() if k.startswith("param/")}
    state = jax.tree.map(jnp.array, {"params": params, "stats": {}, **fresh_optimizer(row, params)})
    x, y = jnp.array(images(arrays["x"], form)), jnp.array(images(arrays["y"], form))
    path = out / "artifacts" / f"cold-{row.name}.jax"
    if exported and not prepare:
        import jax.export

        step = jax.jit(jax.export.deserialize(bytearray(path.read_bytes())).call, donate_argnums=0)
    else:
        step = jax.jit(step_function(row, form), donate_argnums=0)
    if exported and prepare:
        import jax.export

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jax.export.export(step)(state, x, y).serialize())
    _, loss = step(state, x, y)
    return begin, float(loss)


def main() -> None:
    contender, name, folder, cores, start = sys.argv[1:6]
    prepare = sys.argv[6:] == ["prepare"]
    os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    row, out = row_named(name), Path(folder)
    with np.load(data_file(out, row)) as stored:
        arrays = {k: stored[k][: row.batch] if k in ("x", "y") else stored[k] for k in stored.files}
    if contender == "tilework":
        begin, loss = with_tilework(row, out, arrays, prepare)
    elif contender in ("eager", "compile-model"):
        begin, loss = with_torch(row, arrays, contender == "compile-model")
    else:
        begin, loss = with_jax(row, out, arrays, contender == "jax-export", prepare)
    now = time.monotonic()
    print("RESULT", json.dumps({"whole": now - float(start), "beyond": now - begin, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
