"""Writes a program line by line and runs each line as it goes: so shapes, dtypes and sizes of values are simply known.

A line that eager PyTorch refuses, or whose values are not finite or too many, is left out. What grows is scaled down at once,
so that a program stays numerically tame however its operations follow each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (8, 1, 2, 3, 5, 7, 9, 15, 16, 17, 31, 32, 33)  # vector widths, one less, one more; the first is where shrinking ends
WORDS = 7  # integers among the inputs are below this
_LARGEST = 4096  # elements of a value

PRELUDE = {
    "Reversed": """class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 1.5

    @staticmethod
    def backward(ctx, g):
        return -0.25 * g
""",
    "Rounded": """class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return torch.round(t * 2) / 2

    @staticmethod
    def backward(ctx, g):
        return g
""",
    "Weighted": """class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, w):
        ctx.save_for_backward(t, w)
        return t * w

    @staticmethod
    def backward(ctx, g):
        t, w = ctx.saved_tensors
        return g * w, (g * t).sum_to_size(w.shape)
""",
}


class Skip(Exception):
    """This operation cannot be written here."""


class Writer:
    def __init__(self) -> None:
        self.model = nn.Module()
        self.scope: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "self": self.model}
        exec("from torch.utils.checkpoint import checkpoint", self.scope)
        self.init: list[str] = []
        self.forward: list[str] = []
        self.prelude: list[str] = []
        self.floats: list[str] = []
        self.ints: list[str] = []
        self.bools: list[str] = []
        self.used: set[str] = set()
        self.parameters: list[str] = []  # expressions of parameters, to be used again
        self.modules: list[tuple[str, int]] = []  # (expression, features in) of linear layers
        self.count = 0

    # ---- what there is ----

    def of(self, expression: str) -> Any:
        return eval(expression, self.scope)

    def shape(self, expression: str) -> tuple[int, ...]:
        return tuple(self.of(expression).shape)

    def pick(self, k: int) -> str:
        """An earlier value; 0 is the latest."""
        name = self.floats[-1 - k % len(self.floats)]
        self.used.add(name)
        return name

    def whole(self, k: int) -> str:
        return self.ints[-1 - k % len(self.ints)] if self.ints else "0"

    # ---- what is made ----

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def setup(self, prefix: str, text: str) -> str:
        """An attribute of the module: self.<name> = text."""
        name = self.name(prefix)
        line = f"self.{name} = {text}"
        exec(line, self.scope)
        self.init.append(line)
        return f"self.{name}"

    def buffer(self, text: str) -> str:
        name = self.name("b")
        line = f'self.register_buffer("{name}", {text})'
        exec(line, self.scope)
        self.init.append(line)
        return f"self.{name}"

    def parameter(self, *shape: int, scale: float = 0.3, like: str | None = None, frozen: bool = False) -> str:
        size = ", ".join(map(str, shape)) if shape else "()"
        double = ", dtype=torch.float64" if like and self.of(like).dtype == torch.float64 else ""
        rest = ", requires_grad=False" if frozen else ""
        made = self.setup("p", f"nn.Parameter(torch.randn({size}{double}) * {scale}{rest})")
        if not frozen:
            self.parameters.append(made)
        return made

    def run(self, text: str) -> None:
        """Lines without a value of their own."""
        exec(text, self.scope)
        self.forward += text.split("\n")

    def let(self, expression: str, before: str = "") -> str:
        """A new value. `before` are lines that belong to it, with NEW for its name."""
        name = self.name("v")
        before = before.replace("NEW", name)
        line = f"{name} = {expression}".replace("NEW", name)
        scope = dict(self.scope)
        if before:
            exec(before, scope)
        exec(line, scope)
        value = scope[name]
        if not isinstance(value, Tensor) or value.numel() > _LARGEST or value.numel() == 0 or value.dim() > 5:
            raise Skip
        self.scope.update({k: v for k, v in scope.items() if k != "__builtins__"})
        self.forward += before.split("\n") if before else []
        self.forward.append(line)
        if value.dtype == torch.bool:
            self.bools.append(name)
        elif not value.is_floating_point():
            self.ints.append(name)
        else:
            self._tame(name, value)
            self.floats.append(name)
        return name

    def _tame(self, name: str, value: Tensor) -> None:
        if not bool(torch.isfinite(value).all()):
            self.forward.pop()
            raise Skip
        largest = float(value.detach().abs().max())
        if largest > 3:
            factor = 2.0 ** -int(torch.tensor(largest).log2().ceil())
            self.run(f"{name} = {name} * {factor}")

    def need(self, piece: str) -> str:
        if piece not in self.prelude:
            self.prelude.append(piece)
            exec(PRELUDE[piece], self.scope)
        return piece

    # ---- values in the shape that an operation wants ----

    def single(self, x: str) -> str:
        return f"{x}.float()" if self.of(x).dtype == torch.float64 else x

    def dims(self, x: str, d: int, how: int = 0) -> str:
        """An expression for x with exactly d dimensions."""
        shape = self.shape(x)
        n = len(shape)
        if n > d:
            return f"{x}.flatten(0, {n - d})" if how % 2 else f"{x}.flatten({d - 1})"
        if n < d:
            at = ["-1", "0", "1"][how % 3] if n else "0"
            for _ in range(d - n):
                x = f"{x}.unsqueeze({at})"
        return x

    def fit(self, y: str, shape: tuple[int, ...]) -> str:
        """An expression for y that broadcasts to this shape."""
        for way in ("{0}", "{0}.mT", "{0}.mean(0)", "{0}.sum(-1, keepdim=True)", "{0}[..., :1]", "{0}.mean(-1)"):
            expression = way.format(y)
            try:
                if torch.broadcast_shapes(self.shape(expression), shape) == shape:
                    return expression
            except (RuntimeError, IndexError):
                continue
        return f"{y}.mean()"

    def sinks(self) -> list[str]:
        """Values that nothing has used yet: what a loss is made of."""
        return [f for f in self.floats if f not in self.used]


def size(n: int) -> int:
    return SIZES[n % len(SIZES)]


def indices(n: int, extent: int, count: int | None = None) -> list[int]:
    """A list of indices, some repeated, some negative."""
    count = 1 + n % (extent + 2) if count is None else count
    found = [(n + (n % 5 + 1) * k) % extent for k in range(count)]
    return [i - extent if n % 3 == 0 and k % 2 else i for k, i in enumerate(found)]
