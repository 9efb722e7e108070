"""Layers that a program may have: convolutions, pooling, normalisation, attention, recurrence, dropout, buffers, hooks."""

from __future__ import annotations

from operations import choose, operation
from phrases import CHANCE, CRITERIA, POOLING
from writer import Skip, Writer, indices, size

# fmt: off
ACTIVATIONS = (
    "relu", "gelu", "silu", "tanh", "sigmoid", "elu", "softplus", "hardswish", "leaky_relu", "mish", "hardtanh", "relu6",
    "softsign", "selu", "logsigmoid", "tanhshrink", "hardsigmoid", "celu",
)
# fmt: on


@operation
def activation(w: Writer, x: str, y: str, n: int) -> None:
    if n % 20 == 19:
        w.let(f"F.prelu({w.single(w.dims(x, 2, n))}, {w.parameter(1)})")
    elif n % 20 == 18:
        w.let(f"F.glu(torch.cat([{x}, {x}.cos()], -1), -1)")
    else:
        w.let(f"F.{ACTIVATIONS[n % 20]}({x})")


@operation
def linear(w: Writer, x: str, y: str, n: int) -> None:
    x = w.single(w.dims(x, 2, n) if not w.shape(x) else x)
    k, m = w.shape(x)[-1], size(n // 4)
    again = [name for name, features in w.modules if features == k]
    if n % 4 == 1 and again:
        w.let(f"{again[-1]}({x})")
        return
    layer = w.setup("m", f"nn.Linear({k}, {k if n % 4 == 2 else m}{choose(n // 8, '', ', bias=False')})")
    w.modules.append((layer, k))
    if n % 4 == 2:
        w.let(f"{layer}(torch.tanh({layer}({x})))")
    elif n % 4 == 3:
        w.let(f"F.linear(torch.tanh({layer}({x})), {layer}.weight.t())")
    else:
        w.let(f"{layer}({x})")


@operation
def convolution(w: Writer, x: str, y: str, n: int) -> None:
    two = n % 2 == 1
    x = w.single(w.dims(x, 4 if two else 3, n // 2))
    s = w.shape(x)
    n //= 2
    kernel = min(1 + n % 4, s[-1], s[-2] if two else 9)
    n //= 4
    groups = 2 if s[1] % 2 == 0 and n % 3 == 2 else s[1] if n % 3 == 1 and s[1] <= 9 else 1
    out = groups * (1 + n % 5)
    extra = choose(
        n // 3,
        "",
        ", stride=2",
        ", padding=1",
        ", padding=1, stride=2",
        ", padding=2, dilation=2",
        ', padding="same"',
        ", bias=False",
        ', padding=1, padding_mode="circular"',
    )
    if n % 7 == 6:
        kind = f"nn.ConvTranspose{2 if two else 1}d({s[1]}, {out}, {kernel}, stride={1 + n % 2}, groups={groups})"
        w.let(f"{w.setup('c', kind)}({x})")
        return
    layer = w.setup("c", f"nn.Conv{2 if two else 1}d({s[1]}, {out}, {kernel}{extra}, groups={groups})")
    w.let(f"{layer}({x})" if n % 5 or out != s[1] else f"{layer}(torch.tanh({layer}({x})))")


@operation
def pooling(w: Writer, x: str, y: str, n: int) -> None:
    two = n % 2 == 1
    x = w.single(w.dims(x, 4 if two else 3, n // 2))
    s, m = w.shape(x), n // 32
    k = min(1 + m % 3, s[-1], s[-2] if two else 9)
    kinds = {"n": 2, "linear": "bilinear", "size": (5, 3), "margins": (1, 2, 0, 1)}
    if not two:
        kinds = {"n": 1, "linear": "linear", "size": 5, "margins": (1, 2)}
    w.let(POOLING[n // 2 % len(POOLING)].format(x=x, k=k, half=k // 2, fourth=1 + m % 4, **kinds))


@operation
def normalise(w: Writer, x: str, y: str, n: int) -> None:
    x = w.single(x)
    way, m = n % 8, n // 8
    last = w.shape(x)[-1] if w.shape(x) else 1
    if way == 0:
        w.let(f"{w.setup('n', f'nn.LayerNorm({last}, eps=1e-2)')}({x})")
    elif way in (1, 2):
        x = w.dims(x, 2 + m % 2, m)
        s = w.shape(x)
        if s[0] * (s[2] if len(s) > 2 else 1) < 2:
            raise Skip
        more = choose(m // 2, "", ", affine=False", ", momentum=None", ", track_running_stats=False", ", momentum=0.5")
        layer = w.setup("n", f"nn.BatchNorm1d({s[1]}, eps=1e-2{more})")
        w.let(f"{layer}({x})" if way == 1 else f"{layer}(torch.tanh({layer}({x})))")
    elif way == 3:
        x = w.dims(x, 3, m)
        c = w.shape(x)[1]
        w.let(f"{w.setup('n', f'nn.GroupNorm({2 if c % 2 == 0 else 1}, {c}, eps=1e-2)')}({x})")
    elif way == 4:
        w.let(f"F.rms_norm({x}, ({last},), weight=1 + {w.parameter(last)}, eps=1e-2)")
    elif way == 5:
        x = w.dims(x, 4, m)
        w.let(f"{w.setup('n', f'nn.BatchNorm2d({w.shape(x)[1]}, eps=1e-2)')}({x})")
    elif way == 6:
        w.let(f"F.layer_norm({x}, ({last},), {w.parameter(last)}, {w.parameter(last)} * 0.5, eps=1e-2)")
    else:
        x = w.dims(x, 3, m)
        if w.shape(x)[-1] < 2:
            raise Skip
        w.let(f"F.instance_norm({x}, eps=1e-2)")


@operation
def attention(w: Writer, x: str, y: str, n: int) -> None:
    x = w.single(w.dims(x, 3, n))
    b, t, k = w.shape(x)
    way, m = n % 8, n // 8
    if way == 0:
        w.let(f"F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)")
    elif way == 1:
        q, v = w.parameter(k, k), w.parameter(k, size(m))
        w.let(f"F.scaled_dot_product_attention({x} @ {q}, {x}, {x} @ {v})")
    elif way == 2:
        mask = w.buffer(f"torch.ones({t}, {t}).tril().bool()")
        w.let(f"F.scaled_dot_product_attention({x}[:, None], {x}[:, None], {x}[:, None], attn_mask={mask})[:, 0]")
    elif way == 3:
        w.let(f"F.scaled_dot_product_attention({x}, {x}, {x}.flip(1), attn_mask={w.parameter(t, t)})")
    elif way == 4:
        heads = 2 if k % 2 == 0 else 1
        layer = w.setup(
            "a", f"nn.MultiheadAttention({k}, {heads}, batch_first=True{choose(m, '', ', dropout=0.2', ', bias=False')})"
        )
        w.let(f"{layer}({x}, {x}, {x}{choose(m, ', need_weights=False', '')})[0]")
    elif way == 5:
        w.let(f"F.scaled_dot_product_attention({w.parameter(1, size(m), k)}.expand({b}, -1, -1), {x}, {x}, dropout_p=0.1)")
    elif way == 6:
        a = indices(m, k, min(2, k))
        w.let(f"F.scaled_dot_product_attention({x}[..., {a}], {x}[..., {a}].flip(1), {x}, scale=0.7)")
    else:
        heads, key, value = f"{x}.unflatten(-1, (-1, 1)).transpose(1, 2)", f"{x}[:, None, :, :1]", f"{x}[:, None, :, -1:]"
        w.let(f"F.scaled_dot_product_attention({heads}, {key}, {value}, is_causal=True).transpose(1, 2).flatten(2)")


@operation
def recurrent(w: Writer, x: str, y: str, n: int) -> None:
    x = w.single(w.dims(x, 3, n))
    _, t, k = w.shape(x)
    if t > 5:
        x = f"{x}[:, :{2 + n % 4}]"
    kind, m, h = choose(n, "GRU", "LSTM", "RNN", "GRU", "GRUCell", "LSTMCell"), n // 6, size(n // 24)
    if kind.endswith("Cell"):
        state = "" if kind == "GRUCell" else "[0]"
        cell = w.setup("r", f"nn.{kind}({k}, {h})")
        first = f"{cell}({x}[:, 0])"
        w.let(f"{cell}({x}[:, -1], {first}){state}")
        return
    more = choose(
        m,
        "",
        ", bidirectional=True",
        ", num_layers=2",
        ", num_layers=2, dropout=0.2",
        ", bias=False",
        ", nonlinearity='relu'" if kind == "RNN" else "",
    )
    layer = w.setup("r", f"nn.{kind}({k}, {h}, batch_first=True{more})")
    part = choose(m // 2, "[0]", "[0][:, -1]", "[0].flip(1)", "[0].amax(1)", "[1]" + ("[0]" if kind == "LSTM" else ""))
    w.let(f"{layer}({x}){part}")


@operation
def chance(w: Writer, x: str, y: str, n: int) -> None:
    phrase = CHANCE[n % len(CHANCE)]
    if "self.drop" in phrase:
        phrase = phrase.replace("self.drop", w.setup("d", "nn.Dropout(0.25)"))
    w.let(phrase.format(x=x, x3=w.single(w.dims(x, 3, n)), last=w.shape(x)[-1] if w.shape(x) else 1))


@operation
def remembered(w: Writer, x: str, y: str, n: int) -> None:
    """Buffers that forward changes."""
    way = n % 7
    s = w.shape(x)
    shape = ", ".join(map(str, s[1:])) if len(s) > 1 else "1"
    mean = f"{x}.detach().mean(0)" if len(s) > 1 else f"{x}.detach().mean().reshape(1)"
    if way == 0:
        b = w.buffer("torch.zeros((), dtype=torch.long)")
        w.run(f"{b}.add_(1)")
        w.let(f"{x} * (1 + {b} * 0.1)")
    elif way == 1:
        b = w.buffer(f"torch.zeros({shape}, dtype={w.of(x).dtype})")
        w.run(f"{b}.mul_(0.9).add_({mean}, alpha=0.1)")
        w.let(f"{x} - {b}")
    elif way == 2:
        b = w.buffer(f"torch.ones({shape}, dtype={w.of(x).dtype})")
        w.run(f"{b} = 0.9 * {b} + 0.1 * {mean}")
        w.let(f"{x} * {b}")
    elif way == 3:
        b = w.buffer("torch.zeros(4)")
        w.let(f"{x} + {b}.sum()", before=f"NEW = {x} * {b}[0]\n{b}[1:].add_({x}.detach().mean().float())\n{b}[0] += 0.5")
    elif way == 4:
        b = w.buffer("torch.zeros(3, dtype=torch.long)")
        w.run(f"{b}.copy_(torch.roll({b}, 1)); {b}[0] = ({x} > 0).sum()")
        w.let(f"{x} + {b}.float().mean() * 0.01")
    elif way == 5:
        b = w.buffer(f"torch.zeros({5}, dtype={w.of(x).dtype})")
        places = f"{w.whole(n // 7)}.flatten() % 5"
        w.run(f"{b}.index_add_(0, {places}, torch.ones_like({places}, dtype={w.of(x).dtype}))")
        w.let(f"{x} + {b}.softmax(0)[1]")
    else:
        b = w.buffer("torch.tensor(True)")
        w.run(f"{b}.logical_not_()")
        w.let(f"torch.where({b}, {x}, {x} * 0.5)")


@operation
def special(w: Writer, x: str, y: str, n: int) -> None:
    """Checkpointed blocks, hooks, functions with a backward of their own, detach, no_grad."""
    way, m = n % 10, n // 10
    if way in (0, 1):
        x = w.single(w.dims(x, 2, m) if not w.shape(x) else x)
        p = w.parameter(w.shape(x)[-1], size(m))
        inner = choose(way, f"torch.tanh(t @ {p})", f"F.dropout(torch.tanh(t @ {p}), 0.3)")
        w.let(f"checkpoint(block, {x}, use_reentrant=False)", before=f"def block(t):\n    return {inner}")
    elif way == 2:
        w.let(f"{w.need('Reversed')}.apply({x})")
    elif way == 3:
        w.let(f"{w.need('Rounded')}.apply({x})")
    elif way == 4:
        w.let(f"{w.need('Weighted')}.apply({x}, {w.parameter(w.shape(x)[-1] if w.shape(x) else 1, like=x)})")
    elif way == 5:
        layer = w.setup("m", f"nn.Linear({w.shape(x)[-1] if w.shape(x) else 1}, {size(m)})")
        hook = choose(
            m, "register_forward_hook(lambda m, i, o: o * 0.5 + 1)", "register_forward_pre_hook(lambda m, i: (i[0].flip(0),))"
        )
        w.init.append(f"{layer}.{hook}")
        w.let(f"{layer}({w.single(w.dims(x, 2, m) if not w.shape(x) else x)})")
    elif way == 6:
        change = choose(m, "g * 0.5", "g.clamp(-0.01, 0.01)", "g.flip(0) if g.dim() else g")
        hook = f"if NEW.requires_grad:\n    NEW.register_hook(lambda g: {change})"
        w.let("NEW * 2", before=f"NEW = {x} * 0.5\n{hook}")
    elif way == 7:
        w.let(f"{x} - NEW * 0.5", before=f"with torch.no_grad():\n    NEW = ({x} * 2).softmax(0)")
    elif way == 8:
        w.let(f"{x}.relu() + ({x} - {x}.detach()) * 0.3")
    else:
        w.let(f"torch.where({x}.detach() > 0, {x}, 0.1 * {w.single(x)}.exp().clamp(max=2))")


@operation
def criterion(w: Writer, x: str, y: str, n: int) -> None:
    x = w.single(w.dims(x, 2, n))
    b, k = w.shape(x)
    w.let(CRITERIA[n % len(CRITERIA)].format(x=x, b=b, k=k))
