"""Operations on tensors that a program may have: products, views, indexing, in-place changes, reductions, arithmetic.

Each gets the writer, two earlier values and a number that decides all the rest; any number will do.
"""

from __future__ import annotations

from collections.abc import Callable

from phrases import ARITHMETIC, IN_PLACE, OTHER_TYPES, REDUCTIONS, TOGETHER, VIEWS
from writer import WORDS, Skip, Writer, indices, size

Operation = Callable[[Writer, str, str, int], object]
OPERATIONS: dict[str, Operation] = {}


def operation(f: Operation) -> Operation:
    OPERATIONS[f.__name__] = f
    return f


def choose(n: int, *ways: str) -> str:
    return ways[n % len(ways)]


# ---- products, of parameters above all ----


@operation
def product(w: Writer, x: str, y: str, n: int) -> None:
    x = w.dims(x, 1, n) if not w.shape(x) else x
    k, m = w.shape(x)[-1], size(n // 16)
    way = n % 16
    if way == 0:
        w.let(f"{x} @ {w.parameter(k, m, like=x)}")
    elif way == 1:
        r = 1 + n // 16 % 4
        w.let(f"{x} @ ({w.parameter(k, r, like=x)} @ {w.parameter(r, m, like=x)})")
    elif way == 2:
        w.let(f"{x} @ {w.parameter(m, k, like=x)}.t()")
    elif way == 3:  # tied
        p = w.parameter(k, m, like=x)
        w.let(f"torch.tanh({x} @ {p}) @ {p}.t()")
    elif way == 4:
        p = w.parameter(k, k, like=x)
        w.let(f"{x} * {p}.diagonal() + ({x} @ {p}) * 0.5")
    elif way == 5:
        w.let(f"{x} @ torch.outer({w.parameter(k, like=x)}, {w.parameter(m, like=x)})")
    elif way == 6:  # a low-rank addition to a frozen weight
        base, a, b = w.parameter(m, k, like=x, frozen=True), w.parameter(m, 2, like=x), w.parameter(2, k, like=x)
        w.let(f"F.linear({x}, {base} + ({a} @ {b}) * 0.5)")
    elif way == 7:
        x3 = w.dims(x, 3, n)
        q = w.parameter(m, w.shape(x3)[-1], like=x)
        w.let(f"({q} @ {x3}.mT).softmax(-1) @ {x3}")
    elif way == 8:
        p = w.parameter(k + 1, 2 * m, like=x)
        w.let(f"{x} @ {p}[1:, ::2]")
    elif way == 9:
        w.let(f"{x} @ {w.parameter(k, like=x)}")
    elif way == 10:
        p = w.parameter(k, k, like=x)
        w.let(f"({x} @ {p}) @ {p}")
    elif way == 11:
        p = w.parameter(k, k, like=x)
        w.let(f"{x} @ ({p} + {p}.t()) * 0.5 + {x} @ {p}.tril()")
    elif way == 12:
        p, q = w.parameter(k, m, like=x), w.parameter(m, k, like=x)
        w.let(f"{x} @ ({p} @ {q}) + {x} @ ({p} * {q}.t()) @ {q}")
    elif way == 13:
        x2 = w.dims(x, 2, n)
        bias, weight = w.parameter(m, like=x), w.parameter(w.shape(x2)[-1], m, like=x)
        w.let(f"torch.addmm({bias}, {x2}, {weight}, beta=0.5, alpha=2)")
    elif way == 14:
        x2 = w.dims(x, 2, n)
        w.let(f"torch.einsum('bi,ijk,bk->bj', {x2}, {w.parameter(w.shape(x2)[-1], 3, w.shape(x2)[-1], like=x)}, {x2})")
    else:
        p = w.parameter(k, m, like=x)
        w.let(f"{x} @ F.normalize({p}, dim=0) * {p}.norm(dim=0)")


@operation
def product_of_values(w: Writer, x: str, y: str, n: int) -> None:
    x, y = w.single(w.dims(x, 3, n)), w.single(w.dims(y, 3, n // 3))
    way = n % 6
    if way == 0:
        w.let(f"{x} @ {x}.mT * 0.3")
    elif way == 1:
        w.let(f"torch.bmm({x}.mT, {x}) * 0.3")
    elif way == 2:
        w.let(f"torch.einsum('bij,bkj->bik', {x}, {x}[:, ::2]) * 0.3")
    elif way == 3:
        w.let(f"({x}.flatten(1) @ {x}.flatten(1).t()).softmax(-1) @ {x}.flatten(1)")
    elif way == 4:
        w.let(f"torch.cdist({x}, {x} + 0.7) * 0.3")
    else:
        shape = w.shape(x)
        w.let(f"{x} @ {y}.flatten()[:1].expand({shape[0]}, {shape[2]}, {size(n // 6)})")


@operation
def reuse(w: Writer, x: str, y: str, n: int) -> None:
    """A parameter that is there already, in another place."""
    if not w.parameters:
        raise Skip
    p = w.parameters[n % len(w.parameters)]
    n //= len(w.parameters)
    if n % 4 == 0:
        w.let(f"{x} * (1 + {w.fit(p, w.shape(x))})")
    elif n % 4 == 1:
        w.let(f"{p} * {choose(n // 4, '2', f'{p}.detach()', f'{p}.mean()')} + {w.fit(x, w.shape(p))}")
    elif n % 4 == 2:
        w.let(f"{x} + {p}.square().mean() * 0.1")
    else:
        q = w.parameters[-1 - n % len(w.parameters)]
        w.let(f"{p}.flatten()[:4] * {q}.flatten()[-4:].sum()")


# ---- views ----


@operation
def view(w: Writer, x: str, y: str, n: int) -> None:
    x = w.dims(x, 2, n) if len(w.shape(x)) < 2 else x
    s, m = w.shape(x), n // 16
    sizes = {"rows": s[0], "columns": s[1], "last": s[-1], "s": ", ".join(map(str, s))}
    places = {"row": m % s[0], "column": m % s[1], "third": m % 3, "part": 1 + m % s[-1]}
    w.let(VIEWS[n % len(VIEWS)].format(x=x, **sizes, **places))


@operation
def together(w: Writer, x: str, y: str, n: int) -> None:
    s, m = w.shape(x), 1 + n // 8
    d = m % max(len(s), 1)
    twice = ", ".join("2" if i == d else "1" for i in range(len(s)))
    numbers = {"d": d, "m": m, "third": m % 3, "part": 1 + m % 3, "twice": twice, "s": ", ".join(map(str, s))}
    w.let(TOGETHER[n % len(TOGETHER)].format(x=x, o=w.fit(y, s), **numbers))


# ---- indexing ----


@operation
def index(w: Writer, x: str, y: str, n: int) -> None:
    x = w.dims(x, 2, n) if len(w.shape(x)) < 2 else x
    s, m = w.shape(x), n // 16
    first, last = indices(m, s[0]), indices(m, s[-1])
    plain = [i % s[-1] for i in last]
    way = n % 16
    if way == 0:
        w.let(f"{x}[..., {last}]")
    elif way == 1:
        w.let(f"{x}[{first}]")
    elif way == 2:
        w.let(f"{x}.index_select(-1, torch.tensor({plain}))")
    elif way == 3:
        w.let(f"{x}[:, {w.buffer(f'torch.tensor({indices(m, s[1])})')}]")
    elif way == 4:
        w.let(f"{x}.gather(-1, {x}.argsort(dim=-1, stable=True))")
    elif way == 5:
        p = w.parameter(WORDS, s[-1])
        w.let(f"{p}[{w.whole(m)} % {WORDS}]")
    elif way == 6:
        table = w.setup("e", f"nn.Embedding({WORDS}, {size(m)}{choose(m, '', ', padding_idx=0', ', scale_grad_by_freq=False')})")
        w.let(f"{table}({w.whole(m)} % {WORDS})")
    elif way == 7:
        w.let(f"torch.zeros({s[-1] + 1}).index_add(0, torch.tensor({plain}), {w.single(x)}.flatten()[0].expand({len(plain)}))")
    elif way == 8:
        w.let(f"{x}.take_along_dim({x}.argmax(-1, keepdim=True), -1)")
    elif way == 9:
        where = f"torch.tensor({[i % s[-1] for i in indices(m, s[-1], s[-1])]})"
        w.let(f"torch.zeros_like({x}).scatter_add(-1, {where}.expand({', '.join(map(str, s))}), {x})")
    elif way == 10:
        w.let(f"{x}[torch.arange({min(s[:2])}), torch.arange({min(s[:2])}).flip(0)]")
    elif way == 11:
        w.let(f"{x}.index_add(0, torch.tensor({[i % s[0] for i in first]}), {x}[{first}], alpha=0.5)")
    elif way == 12:
        rows = indices(m, s[0], 3)
        w.let(f"{x}.index_put((torch.tensor({rows}),), {x}[0] * 0.5, accumulate=True)")
    elif way == 13:
        w.let(f"F.embedding({w.whole(m)} % {WORDS}, {w.parameter(WORDS, size(m))} @ {w.parameter(size(m), size(m // 2))})")
    elif way == 14:
        w.let(f"F.one_hot({w.whole(m)} % {WORDS}, {WORDS}).to({x}.dtype) @ {w.parameter(WORDS, s[-1], like=x)}")
    else:
        p = w.parameter(s[-1], size(m), like=x)
        w.let(f"{x} @ {p}[:, {indices(m, size(m))}]")


# ---- in place ----


@operation
def in_place(w: Writer, x: str, y: str, n: int) -> None:
    x = w.dims(x, 2, n) if len(w.shape(x)) < 2 else x
    s, m = w.shape(x), n // 16
    start = choose(m, f"{x}.clone()", f"{x} * 0.75", f"torch.zeros_like({x})", f"{x} + 0", f"{x}.mT.clone().mT")
    # all different: which of two would win is not defined
    chosen = [k for k in range(s[-1]) if (k + m) % 3 == 0][::-1] or [-1]
    rows = [k % s[0] for k in indices(m, s[0])]
    numbers = {"i": m % s[-1], "column": m % s[1], "chosen": chosen, "count": len(chosen), "rows": rows}
    change = IN_PLACE[n % len(IN_PLACE)].format(x=x, o=w.fit(y, s), **numbers)
    w.let(f"NEW.{choose(m, 'clone()', 'contiguous()', 'sin()')}", before=f"NEW = {start}\n{change}")


@operation
def changed_after_use(w: Writer, x: str, y: str, n: int) -> None:
    """An earlier value itself is changed, after others have used it. Eager PyTorch refuses where it needs the old one."""
    if n % 8 == 7:
        change = choose(n // 8, "add_(0.5)", "mul_(0.5)", "clamp_(min=-0.5)", "neg_()")
        w.let(f"{x}.{change}", before=f"kept = {y} * 2")
    else:
        lines = [f"NEW = {x}[..., None].expand(*{x}.shape, 2).contiguous()", f"NEW[..., 1:].sub_({x}[..., None])"]
        w.let(f"NEW[..., 0] + {x}.sum() * 0.1", before="\n".join([*lines, "NEW.unsqueeze(0).mul_(0.5)"]))


# ---- reductions and arithmetic ----


@operation
def reduce(w: Writer, x: str, y: str, n: int) -> None:
    s, m = w.shape(x), n // 64
    if not s:
        raise Skip
    d = n // 32 % len(s)
    keep = choose(m, "", ", keepdim=True")
    w.let(REDUCTIONS[n % len(REDUCTIONS)].format(x=x, d=d, k=1 + m % s[d], keep=keep, second=m % 2))


@operation
def arithmetic(w: Writer, x: str, y: str, n: int) -> None:
    power = choose(n // 32, "0.5", "1.5", "3", "-1")
    w.let(ARITHMETIC[n % len(ARITHMETIC)].format(x=x, o=w.fit(y, w.shape(x)), power=power))


@operation
def other_types(w: Writer, x: str, y: str, n: int) -> None:
    w.let(OTHER_TYPES[n % len(OTHER_TYPES)].format(x=x, w=w.whole(n // 16)))
