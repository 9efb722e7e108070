"""The same models in plain JAX: arrays in a dictionary, functions from jax.numpy and jax.lax, no further library.

Parameters have PyTorch's names. They are brought into the form that JAX code usually keeps (`from_torch`): matrices
[in, out], filters HWIO with channels last. `Form` says which of the formulations to use; they compute the same.

    layout   "nhwc" (what XLA's CPU convolutions take as it is) or "nchw"
    rewrite  False: reduce_window for max pooling and conv_transpose for up-sampling, as the documentation has them;
             True: both by reshape (the windows do not overlap), for which XLA makes better code on a CPU
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Form:
    layout: str = "nhwc"
    rewrite: bool = False

    @property
    def last(self) -> bool:
        return self.layout == "nhwc"

    @property
    def channel_axis(self) -> int:
        return 3 if self.last else 1

    @property
    def dims(self) -> tuple[str, str, str]:
        return ("NHWC", "HWIO", "NHWC") if self.last else ("NCHW", "OIHW", "NCHW")


def linear(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    out = x @ p[f"{name}.weight"]
    return out + p[f"{name}.bias"] if f"{name}.bias" in p else out


def per_channel(value: jax.Array, form: Form) -> jax.Array:
    return value if form.last else value[:, None, None]


def conv(p: Arrays, name: str, x: jax.Array, form: Form, padding: int) -> jax.Array:
    pads = ((padding, padding), (padding, padding))
    out = lax.conv_general_dilated(x, p[f"{name}.weight"], (1, 1), pads, dimension_numbers=form.dims)
    return out + per_channel(p[f"{name}.bias"], form) if f"{name}.bias" in p else out


def max_pool(x: jax.Array, form: Form) -> jax.Array:
    """The largest of each 2 x 2 window; an odd last line is left out."""
    if not form.rewrite:
        window = (1, 2, 2, 1) if form.last else (1, 1, 2, 2)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    if form.last:
        n, h, w, c = x.shape
        return x[:, : h // 2 * 2, : w // 2 * 2].reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))
    n, c, h, w = x.shape
    return x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))


def up_conv(p: Arrays, name: str, x: jax.Array, form: Form) -> jax.Array:
    """Transposed convolution, 2 x 2 with stride 2. The filter is HW + (in, out) with channels last, else in, out + HW."""
    w, bias = p[f"{name}.weight"], per_channel(p[f"{name}.bias"], form)
    if not form.rewrite:  # lax wants the filter of the convolution this is the gradient of: flipped, for stride 2 as for any
        flipped = w[::-1, ::-1] if form.last else w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
        return lax.conv_transpose(x, flipped, (2, 2), "VALID", dimension_numbers=form.dims) + bias
    if form.last:
        n, h, v, _ = x.shape
        out = jnp.einsum("nhvi,abio->nhavbo", x, w)
        return out.reshape(n, 2 * h, 2 * v, w.shape[3]) + bias
    n, _, h, v = x.shape
    out = jnp.einsum("nihv,ioab->nohavb", x, w)
    return out.reshape(n, w.shape[1], 2 * h, 2 * v) + bias


def batch_norm(p: Arrays, stats: Arrays, new: Arrays, name: str, x: jax.Array, form: Form) -> jax.Array:
    """In training: normalised by the batch; running mean and variance move by a tenth, as in PyTorch."""
    axes = (0, 1, 2) if form.last else (0, 2, 3)
    mean, var = x.mean(axes), x.var(axes)
    count = x.size // mean.size
    new[f"{name}.running_mean"] = 0.9 * stats[f"{name}.running_mean"] + 0.1 * mean
    new[f"{name}.running_var"] = 0.9 * stats[f"{name}.running_var"] + 0.1 * var * (count / (count - 1))
    new[f"{name}.num_batches_tracked"] = stats[f"{name}.num_batches_tracked"] + 1
    scale = p[f"{name}.weight"] * lax.rsqrt(var + 1e-5)
    return x * per_channel(scale, form) + per_channel(p[f"{name}.bias"] - mean * scale, form)


def layer_norm(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def logreg(p: Arrays, stats: Arrays, x: jax.Array, form: Form) -> tuple[jax.Array, Arrays]:
    return linear(p, "linear", x), stats


def ffn(p: Arrays, stats: Arrays, x: jax.Array, form: Form) -> tuple[jax.Array, Arrays]:
    x = jax.nn.relu(linear(p, "fc1", x))
    return linear(p, "fc3", jax.nn.relu(linear(p, "fc2", x))), stats


def lenet(p: Arrays, stats: Arrays, x: jax.Array, form: Form) -> tuple[jax.Array, Arrays]:
    x = max_pool(jax.nn.relu(conv(p, "conv1", x, form, 2)), form)
    x = max_pool(jax.nn.relu(conv(p, "conv2", x, form, 0)), form)
    x = jax.nn.relu(linear(p, "fc1", x.reshape(x.shape[0], -1)))
    return linear(p, "fc3", jax.nn.relu(linear(p, "fc2", x))), stats


def unet(p: Arrays, stats: Arrays, x: jax.Array, form: Form) -> tuple[jax.Array, Arrays]:
    new: Arrays = {}

    def double(name: str, x: jax.Array) -> jax.Array:
        for i in (1, 2):
            x = conv(p, f"{name}.conv{i}", x, form, 1)
            x = jax.nn.relu(batch_norm(p, stats, new, f"{name}.norm{i}", x, form))
        return x

    levels = sum(k.startswith("down.") and k.endswith("conv1.weight") for k in p)
    kept = []
    for level in range(levels):
        x = double(f"down.{level}", x if level == 0 else max_pool(x, form))
        kept.append(x)
    for level in range(levels - 1):
        joined = jnp.concatenate((kept[-2 - level], up_conv(p, f"up.{level}", x, form)), form.channel_axis)
        x = double(f"after.{level}", joined)
    return conv(p, "head", x, form, 0), new


def lstm(p: Arrays, stats: Arrays, x: jax.Array, form: Form) -> tuple[jax.Array, Arrays]:
    """All inputs in one product; a scan over time for the rest."""
    inputs = x @ p["layer.weight_ih_l0"] + p["layer.bias_ih_l0"] + p["layer.bias_hh_l0"]
    nothing = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)

    def one(state: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        i, f, g, o = jnp.split(now + state[0] @ p["layer.weight_hh_l0"], 4, axis=-1)
        cell = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    (last, _), _ = lax.scan(one, (nothing, nothing), inputs.swapaxes(0, 1))
    return linear(p, "head", last), stats


def gpt(p: Arrays, stats: Arrays, x: jax.Array, form: Form) -> tuple[jax.Array, Arrays]:
    heads = 8
    h = p["embed.weight"][x] + p["position.weight"]
    n, tokens, width = h.shape
    for i in range(sum(k.endswith("qkv.weight") for k in p)):
        name = f"blocks.{i}"
        qkv = linear(p, f"{name}.qkv", layer_norm(p, f"{name}.norm1", h)).reshape(n, tokens, 3, heads, width // heads)
        mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        h = h + linear(p, f"{name}.project", mixed.reshape(n, tokens, width))
        wide = linear(p, f"{name}.widen", layer_norm(p, f"{name}.norm2", h))
        h = h + linear(p, f"{name}.narrow", jax.nn.gelu(wide, approximate=False))
    return linear(p, "head", layer_norm(p, "norm", h)), stats


MODELS: dict[str, Callable[[Arrays, Arrays, jax.Array, Form], tuple[jax.Array, Arrays]]] = {
    "logreg": logreg,
    "ffn": ffn,
    "lenet": lenet,
    "unet": unet,
    "lstm": lstm,
    "gpt": gpt,
}


def cross_entropy(scores: jax.Array, y: jax.Array, class_axis: int) -> jax.Array:
    logs = jax.nn.log_softmax(scores, axis=class_axis)
    return -jnp.take_along_axis(logs, jnp.expand_dims(y, class_axis), axis=class_axis).mean()


def loss_function(model: str, form: Form) -> Callable[[Arrays, Arrays, jax.Array, jax.Array], tuple[jax.Array, Arrays]]:
    apply = MODELS[model]
    class_axis = form.channel_axis if model == "unet" else -1

    def loss(params: Arrays, stats: Arrays, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Arrays]:
        scores, stats = apply(params, stats, x, form)
        return cross_entropy(scores, y, class_axis), stats

    return loss


def from_torch(model: str, name: str, value: np.ndarray, form: Form) -> np.ndarray:
    """A parameter of the PyTorch model in the form that the functions above take."""
    if value.ndim == 4 and form.last:
        up = name.startswith("up.")  # PyTorch keeps these in, out, h, w; all others out, in, h, w
        return np.ascontiguousarray(value.transpose(2, 3, 0, 1) if up else value.transpose(2, 3, 1, 0))
    if value.ndim != 2 or name in ("embed.weight", "position.weight"):
        return value
    if model == "lenet" and name == "fc1.weight" and form.last:  # its columns follow the flattened image: c, h, w -> h, w, c
        value = value.reshape(-1, 16, 5, 5).transpose(0, 2, 3, 1).reshape(len(value), -1)
    return np.ascontiguousarray(value.T)


def images(x: np.ndarray, form: Form) -> np.ndarray:
    """Samples, where they are images, from PyTorch's NCHW to the form's layout; token numbers and labels as int32."""
    if x.dtype == np.int64:
        return x.astype(np.int32)
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 and form.last else x
