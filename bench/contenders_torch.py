"""PyTorch: eager, torch.compile of the model, torch.compile of the whole step, and the same with max-autotune.

eager             zero_grad(set_to_none=True), forward, backward, optimizer.step(); the optimizer by default or fused=True
compile-model     the model through torch.compile, the rest as in eager
compile-step      the whole step through torch.compile, in one of two documented ways:
                  "step": forward, backward and a compiled optimizer.step() in one compiled function. PyTorch breaks the
                  graph at backward(). The learning rate is a tensor, so that changing it compiles nothing again.
                  "functional": torch.func.grad_and_value and the update written out, as one unbroken graph.
compile-step-max  the same two with mode="max-autotune"

Images are tried with channels first and with channels last (memory_format), in full runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .contender import Contender, Variant
from .models import Loss, optimizer_for, read_data
from .rows import Row

Step = Callable[[Tensor, Tensor], Tensor]


class TorchContender(Contender):
    def __init__(self, name: str, out: Path) -> None:
        super().__init__(name, out)
        # More compiled forms of one function than this would silently run in eager mode: make that an error.
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def variants(self, row: Row) -> list[Variant]:
        layouts = ["", "channels_last"] if row.spatial else [""]
        if self.name in ("eager", "compile-model"):
            return [{"optimizer": o, "layout": m} for m in layouts for o in ("", "fused")]
        mode = "max-autotune" if self.name == "compile-step-max" else ""
        return [{"form": f, "layout": m, "mode": mode} for m in layouts for f in ("functional", "step")]

    def make_ready(self, variant: Variant) -> None:
        torch._dynamo.reset()  # models of one class share their code: what earlier rows compiled must not be looked through
        model, loss, x, y = read_data(self.row, self.out)
        if variant["layout"]:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last)
        self.model = model
        self.batches = list(zip(x.split(self.row.batch), y.split(self.row.batch), strict=True))
        self.state: list[Tensor] = [*model.parameters(), *model.buffers()]
        self.initial = [t.detach().clone() for t in self.state]
        self.optimizer: torch.optim.Optimizer | None = None
        if variant.get("form") == "functional":
            self.step = self._functional(model, loss, variant["mode"] or None)
            return
        if self.name.startswith("compile-step"):
            self.optimizer = optimizer_for(self.row, model.parameters(), lr=torch.tensor(self.row.optimizer.lr))
            self.step = torch.compile(self._plain(model, loss), mode=variant["mode"] or None)
            return
        fused = {"fused": True} if variant["optimizer"] else {}
        self.optimizer = optimizer_for(self.row, model.parameters(), **fused)
        self.step = self._plain(torch.compile(model) if self.name == "compile-model" else model, loss)

    def _plain(self, model: Callable[[Tensor], Tensor], loss: Loss) -> Step:
        optimizer = self.optimizer
        assert optimizer is not None

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    def _functional(self, model: nn.Module, loss: Loss, mode: str | None) -> Step:
        params = {k: p.detach() for k, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        update, own = functional_update(self.row, params)
        self.state += own
        self.initial += [t.clone() for t in own]

        def forward(p: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            changed = {k: b.clone() for k, b in buffers.items()}  # torch.func: what forward changes must be its own
            value = loss(torch.func.functional_call(model, {**p, **changed}, (x,)), y)
            return value, (value, changed)

        gradient = torch.func.grad(forward, has_aux=True)

        def step(x: Tensor, y: Tensor) -> Tensor:
            grads, (value, changed) = gradient(params, x, y)
            update(params, grads)
            for k, b in buffers.items():
                b.copy_(changed[k])
            return value

        return torch.compile(step, fullgraph=True, mode=mode)

    def reset(self) -> None:
        with torch.no_grad():
            for tensor, value in zip(self.state, self.initial, strict=True):
                tensor.copy_(value)
            for entry in self.optimizer.state.values() if self.optimizer else ():
                for value in entry.values():
                    if isinstance(value, Tensor):
                        value.zero_()  # momentum, moments and the count of steps

    def run_pass(self) -> list[Tensor]:
        step = self.step
        return [step(x, y) for x, y in self.batches]


def functional_update(
    row: Row, params: dict[str, Tensor]
) -> tuple[Callable[[dict[str, Tensor], dict[str, Tensor]], None], list[Tensor]]:
    """(update(params, grads), its state): torch.optim.SGD or AdamW with the row's settings, written out."""
    lr, momentum = torch.tensor(row.optimizer.lr), row.optimizer.momentum
    first = {k: torch.zeros_like(p) for k, p in params.items()}

    def sgd(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
        for k, p in params.items():
            step = first[k].mul_(momentum).add_(grads[k]) if momentum else grads[k]
            p.sub_(lr * step)

    if row.optimizer.kind == "sgd":
        return sgd, list(first.values()) if momentum else []
    second = {k: torch.zeros_like(p) for k, p in params.items()}
    count = torch.zeros(())
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, 0.01

    def adamw(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
        count.add_(1)
        short, long = 1 - beta1**count, (1 - beta2**count).sqrt()  # what the moments lack in the first steps
        for k, p in params.items():
            m = first[k].mul_(beta1).add_((1 - beta1) * grads[k])
            v = second[k].mul_(beta2).add_((1 - beta2) * grads[k] * grads[k])
            p.mul_(1 - lr * decay).sub_(lr / short * m / (v.sqrt() / long + eps))

    return adamw, [*first.values(), *second.values(), count]


def make(name: str, out: Path) -> Any:
    return TorchContender(name, out)
