"""Plain PyTorch, as people write it: scientists' models (FFT, linalg, gradients inside the model), and the idioms of forums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from judge import Case, case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

X = functools.partial(torch.randn)


def of(
    forward: Callable[..., Any], *inputs: Tensor, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    refused: str = "", missing: str = "", **parts: Any,
) -> Case:  # fmt: skip
    """A model of these parts (modules, parameters, plain values) whose forward(self, *inputs) -> loss is the function."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    Model.forward = forward  # type: ignore[method-assign]
    chosen = {"optimizer": optimizer} if optimizer else {}
    return Case(Model(), inputs, refused=refused, missing=missing, **chosen)


# ---- operators without generated code ----


@case("torch/embeddingbag")
def embeddingbag() -> Case:
    def forward(self: Any, ids: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.bag(ids, offsets)), y)

    return of(forward, torch.randint(0, 20, (9,)), torch.tensor([0, 2, 5]), torch.randint(0, 4, (3,)),
              bag=nn.EmbeddingBag(20, 8), out=nn.Linear(8, 4))  # fmt: skip


@case("torch/embedding-max_norm")
def max_norm() -> Case:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids)).square().mean()

    return of(forward, torch.randint(0, 20, (4, 5)), emb=nn.Embedding(20, 8, max_norm=1.0), out=nn.Linear(8, 4))


@case("torch/ctc")
def ctc() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor, x_lengths: Tensor, y_lengths: Tensor) -> Tensor:
        return F.ctc_loss(self.net(x).log_softmax(-1).transpose(0, 1), y, x_lengths, y_lengths)

    return of(forward, X(4, 30, 8), torch.randint(1, 10, (4, 6)), torch.tensor([30, 28, 30, 25]), torch.tensor([6, 5, 4, 6]),
              net=nn.Linear(8, 10))  # fmt: skip


@case("torch/ctc-int-lengths")
def ctc_lengths() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.ctc_loss(self.net(x).log_softmax(-1).transpose(0, 1), y, (30, 28, 30, 25), (6, 5, 4, 6))

    return of(forward, X(4, 30, 8), torch.randint(1, 10, (4, 6)), net=nn.Linear(8, 10))


@case("torch/cholesky-gp")
def gaussian_process() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        k = torch.exp(-0.5 * torch.cdist(x * self.scale.exp(), x * self.scale.exp()).square()) + 0.1 * torch.eye(x.shape[0])
        low = torch.linalg.cholesky(k)
        return 0.5 * y @ torch.cholesky_solve(y[:, None], low).squeeze(-1) + low.diagonal().log().sum()

    return of(forward, X(10, 3), X(10), scale=nn.Parameter(torch.zeros(3)))


@case("torch/linalg-solve-svd")
def solve() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        a = self.w @ self.w.T + torch.eye(6)
        return torch.linalg.solve(a, x.T).square().mean() + torch.linalg.svdvals(self.w).sum() + torch.linalg.slogdet(a)[1]

    return of(forward, X(4, 6), w=nn.Parameter(X(6, 6)))


@case("torch/matrix-exp-orthogonal")
def orthogonal() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x).tanh().square().mean()

    return of(forward, X(4, 6), net=nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)))


@case("torch/eigh-qr-pinv")
def eigh() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.w + self.w.T)
        q, _ = torch.linalg.qr(self.w)
        return values.square().mean() + (x @ vectors.abs()).mean() + (torch.linalg.pinv(self.w) @ q).square().mean()

    return of(forward, X(4, 5), w=nn.Parameter(X(5, 5)))


@case("torch/fno-real-params")
def fno() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x[:, None])
        f = torch.fft.rfft(h)
        f = torch.einsum("bim,iom->bom", f[..., :6], torch.view_as_complex(self.w))
        return F.mse_loss(self.down(F.gelu(torch.fft.irfft(f, n=x.shape[-1]) + self.skip(h)))[:, 0], y)

    return of(forward, X(3, 30), X(3, 30), up=nn.Conv1d(1, 4, 1), skip=nn.Conv1d(4, 4, 1), down=nn.Conv1d(4, 1, 1),
              w=nn.Parameter(X(4, 4, 6, 2) * 0.2))  # fmt: skip


@case("torch/fno-2d-complex-params")
def fno2d() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        f = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", f[:, :, :4, :4], self.w)
        out = torch.zeros(2, 3, 12, 7, dtype=torch.cfloat)
        out[:, :, :4, :4] = low
        return F.mse_loss(torch.fft.irfft2(out, s=(12, 12)) + self.skip(x), y)

    return of(forward, X(2, 3, 12, 12), X(2, 3, 12, 12), skip=nn.Conv2d(3, 3, 1),
              w=nn.Parameter(torch.randn(3, 3, 4, 4, dtype=torch.cfloat) * 0.2))  # fmt: skip


@case("torch/fft-prime-size")
def fft() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (torch.fft.fft(self.net(x)).abs() * self.mask).mean()

    return of(forward, X(3, 17), net=nn.Linear(17, 17), mask=nn.Parameter(torch.rand(17)))


@case("torch/stft")
def stft() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        spec = torch.stft(self.net(x), n_fft=16, hop_length=4, window=self.window, return_complex=True)
        return spec.abs().clamp(min=1e-3).log().mean()

    made = of(forward, X(2, 64), net=nn.Linear(64, 64))
    made.model.register_buffer("window", torch.hann_window(16))
    return made


@case("torch/complex-network")
def complex_network() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.complex(x, x.flip(-1)) @ self.w
        return (h.real.relu() + 1j * h.imag.relu()).abs().mean()

    return of(forward, X(4, 6), w=nn.Parameter(torch.randn(6, 5, dtype=torch.cfloat)))


# ---- gradients inside the model ----


def _mlp(n: int, out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out))


@case("torch/pinn-double-backward")
def pinn() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + u).square().mean() + self.net(torch.zeros(1, 1)).square().sum()

    return of(forward, X(16, 1), net=_mlp(1))


@case("torch/gradient-penalty")
def penalty() -> Case:
    def forward(self: Any, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        grads = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)[0]
        return self.net(fake).mean() - self.net(real).mean() + 10 * (grads.norm(2, dim=1) - 1).square().mean()

    return of(forward, X(8, 5), X(8, 5), net=_mlp(5))


@case("torch/maml-inner-step")
def maml() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        params = dict(self.net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(self.net, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        moved = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, moved, (x,)), y)

    return of(forward, X(8, 3), X(8, 1), net=_mlp(3))


@case("torch/func-grad-vmap")
def per_sample() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        params = dict(self.net.named_parameters())

        def energy(point: Tensor) -> Tensor:
            return torch.func.functional_call(self.net, params, (point,)).sum()

        forces = torch.func.vmap(torch.func.grad(energy))(x)
        return (forces - x).square().mean()

    return of(forward, X(6, 3), net=_mlp(3))


@case("torch/jacrev-hessian")
def hessian() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.func.hessian(lambda p: self.net(p).sum())(x[0]).square().mean() + self.net(x).mean()

    return of(forward, X(2, 3), net=_mlp(3))


@case("torch/checkpoint-reentrant")
def reentrant() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        return checkpoint(self.block, h, use_reentrant=True).square().mean()

    return of(forward, X(4, 6), first=nn.Linear(6, 6), block=nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)))


@case("torch/checkpoint")
def checkpointed() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=False).square().mean()

    return of(forward, X(4, 6), first=nn.Linear(6, 6), block=nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)))


# ---- programs as people write them ----


@case("torch/layerdrop")
def layerdrop() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.3:
                continue
            x = x + layer(x)
        return x.square().mean()

    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    return of(forward, X(4, 6), layers=layers)


@case("torch/layerdrop-zero")
def layerdrop_zero() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.0:
                continue
            x = x + layer(x)
        return x.square().mean()

    return of(forward, X(4, 6), layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))


@case("torch/stochastic-depth")
def stochastic_depth() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            keep = torch.empty(x.shape[0], 1).bernoulli_(0.8)
            x = x + layer(x) * keep / 0.8
        return x.square().mean()

    return of(forward, X(4, 6), layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))


@case("torch/vae-distributions")
def vae() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        mean, scale = self.encode(x).chunk(2, -1)
        q = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3)
        z = q.rsample()
        prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
        return F.mse_loss(self.decode(z), x) + 0.1 * torch.distributions.kl_divergence(q, prior).mean()

    return of(forward, X(6, 8), encode=nn.Linear(8, 6), decode=nn.Linear(3, 8))


@case("torch/policy-gradient-categorical")
def policy() -> Case:
    def forward(self: Any, state: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        pi = torch.distributions.Categorical(logits=self.net(state))
        return -(pi.log_prob(action) * reward).mean() - 0.01 * pi.entropy().mean()

    return of(forward, X(8, 4), torch.randint(0, 3, (8,)), X(8), net=_mlp(4, 3))


@case("torch/nn.Transformer")
def transformer() -> Case:
    def forward(self: Any, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.net(self.emb(source), self.emb(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        return F.cross_entropy(self.out(out).flatten(0, 1), y.flatten())

    net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    return of(forward, torch.randint(1, 20, (2, 6)), torch.randint(1, 20, (2, 5)), torch.randint(0, 20, (2, 5)), net=net,
              emb=nn.Embedding(20, 16), out=nn.Linear(16, 20))  # fmt: skip


@case("torch/transformer-encoder-padding-mask")
def encoder() -> Case:
    def forward(self: Any, x: Tensor, pad: Tensor) -> Tensor:
        return self.net(x, src_key_padding_mask=pad).square().mean()

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return of(forward, X(2, 6, 16), torch.arange(6).expand(2, 6) > 4, net=nn.TransformerEncoder(layer, 2))


@case("torch/boolean-mask-loss")
def masked_loss() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        per_token = F.cross_entropy(self.net(x).transpose(1, 2), y, reduction="none")
        return per_token[mask].mean()

    return of(forward, X(3, 5, 8), torch.randint(0, 4, (3, 5)), torch.rand(3, 5) > 0.3, net=nn.Linear(8, 4))


@case("torch/boolean-mask-both-sides")
def masked_both() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.mse_loss(self.net(x).squeeze(-1)[mask], y[mask])

    return of(forward, X(3, 5, 8), X(3, 5), torch.rand(3, 5) > 0.3, net=nn.Linear(8, 1))


@case("torch/boolean-mask-assign")
def mask_assign() -> Case:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        h = self.net(x)
        h[mask] = 0.0
        return h.square().mean()

    return of(forward, X(4, 6), torch.rand(4) > 0.5, net=nn.Linear(6, 6))


@case("torch/old-weight_norm")
def old_weight_norm() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).square().mean()

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrap = torch.nn.utils.weight_norm
        parts = {"a": wrap(nn.Linear(6, 8)), "b": wrap(nn.Linear(8, 2), dim=None)}
    made = of(forward, X(4, 6), **parts)
    for module in (made.model.a, made.model.b):  # its hook leaves a tensor that copy.deepcopy refuses
        module.weight = module.weight.detach()
    return made


@case("torch/weight_norm")
def weight_norm() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    wrap = torch.nn.utils.parametrizations.weight_norm
    return of(forward, X(4, 6), net=nn.Sequential(wrap(nn.Linear(6, 8)), nn.ReLU(), wrap(nn.Linear(8, 2))))


@case("torch/spectral_norm")
def spectral_norm() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    return of(forward, X(4, 6), net=torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)))


@case("torch/lstm-packed-sequence")
def packed() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        sequence = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 3], batch_first=True)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.net(sequence)[0], batch_first=True)
        return h.square().mean()

    return of(forward, X(3, 6, 4), net=nn.LSTM(4, 5, batch_first=True))


@case("torch/lstm-lm")
def lstm() -> Case:
    def forward(self: Any, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.net(self.emb(ids))[0]).transpose(1, 2), y)

    return of(forward, torch.randint(0, 20, (3, 12)), torch.randint(0, 20, (3, 12)), emb=nn.Embedding(20, 8),
              net=nn.LSTM(8, 12, num_layers=2, dropout=0.1, batch_first=True), out=nn.Linear(12, 20))  # fmt: skip


@case("torch/gru-bidirectional")
def gru() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x)[0].square().mean()

    return of(forward, X(3, 12, 6), net=nn.GRU(6, 8, bidirectional=True, batch_first=True))


@case("torch/moe-top2-dense")
def moe() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        gates = torch.zeros(x.shape[0], 4).scatter(-1, chosen, weights)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return (gates[..., None] * out).sum(1).square().mean()

    return of(forward, X(8, 6), gate=nn.Linear(6, 4), experts=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))


@case("torch/moe-loop-over-experts")
def moe_loop() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1)
        best = chosen.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = best == i
            out[mask] = expert(x[mask]) * chosen[mask, i : i + 1]
        return out.square().mean()

    return of(forward, X(8, 6), gate=nn.Linear(6, 4), experts=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))


@case("torch/checks-values")
def checks() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= 4:
            raise ValueError("labels must be smaller than 4")
        assert torch.isfinite(x).all(), "x is not finite"
        return F.cross_entropy(self.net(x), y)

    return of(forward, X(4, 6), torch.randint(0, 4, (4,)), net=nn.Linear(6, 4))


@case("torch/non-tensor-outputs")
def non_tensors() -> Case:
    class Cache:
        def __init__(self, h: Tensor) -> None:
            self.h = h

    def forward(self: Any, x: Tensor) -> Any:
        h = self.net(x)
        return {"loss": h.square().mean(), "cache": Cache(h), "name": "net"}

    return of(forward, X(4, 6), net=nn.Linear(6, 4))


@case("torch/advanced-index-matmul")
def advanced_index() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.net(x)[..., [3, 5, 7]] @ self.w).square().mean()

    return of(forward, X(4, 6), net=nn.Linear(6, 8), w=nn.Parameter(X(3, 3)))


@case("torch/autograd.Function")
def custom_function() -> Case:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * grad.clamp(-0.1, 0.1)

    def forward(self: Any, x: Tensor) -> Tensor:
        return Square.apply(self.net(x)).mean()

    return of(forward, X(4, 6), net=nn.Linear(6, 4))


@case("torch/batchnorm-dropout-cnn")
def cnn() -> Case:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(),
                        nn.Linear(8 * 9, 4))  # fmt: skip
    return Case(net, (X(4, 3, 8, 8),), (torch.randint(0, 4, (4,)),), F.cross_entropy)


@case("torch/unet3d")
def unet3d() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        low = self.down(x)
        return self.out(torch.cat([F.interpolate(low, scale_factor=2, mode="trilinear"), x], 1)).square().mean()

    return of(forward, X(2, 2, 8, 8, 8), down=nn.Conv3d(2, 4, 2, stride=2), out=nn.Conv3d(6, 1, 1))


@case("torch/grid_sample")
def grid_sample() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        theta = self.net(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False).square().mean()

    return of(forward, X(3, 2, 6, 6), net=nn.Linear(72, 6))


@case("torch/neural-ode-rk4")
def ode() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            a = self.net(x)
            b = self.net(x + 0.05 * a)
            c = self.net(x + 0.05 * b)
            x = x + 0.1 / 6 * (a + 2 * b + 2 * c + self.net(x + 0.1 * c))
        return x.square().mean()

    return of(forward, X(6, 4), net=_mlp(4, 4))


@case("torch/sinkhorn-logsumexp")
def sinkhorn() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(self.net(x), y)
        f = g = torch.zeros(8)
        for _ in range(5):
            f = -(g - cost).logsumexp(1)
            g = -(f[:, None] - cost).logsumexp(0)
        return ((f[:, None] + g - cost).exp() * cost).sum()

    return of(forward, X(8, 3), X(8, 2), net=nn.Linear(3, 2))


@case("torch/gan-two-optimizers")
def gan() -> Case:
    def forward(self: Any, z: Tensor, real: Tensor) -> Tensor:
        fake = self.g(z)
        return F.softplus(self.d(fake)).mean() + F.softplus(-self.d(real)).mean()

    return of(forward, X(6, 3), X(6, 4), g=_mlp(3, 4), d=_mlp(4))


@case("torch/contrastive-clip-loss")
def contrastive() -> Case:
    def forward(self: Any, a: Tensor, b: Tensor) -> Tensor:
        logits = F.normalize(self.a(a), dim=-1) @ F.normalize(self.b(b), dim=-1).T * self.scale.exp()
        labels = torch.arange(a.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return of(forward, X(6, 5), X(6, 7), a=nn.Linear(5, 4), b=nn.Linear(7, 4), scale=nn.Parameter(torch.tensor(1.0)))


@case("torch/vmap-ensemble")
def ensemble() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda w, b: F.linear(x, w, b).tanh())(self.w, self.b).mean(0).square().mean()

    return of(forward, X(4, 6), w=nn.Parameter(X(3, 5, 6)), b=nn.Parameter(X(3, 5)))


@case("torch/sort-topk-cumsum")
def sort_topk() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.net(x)
        return h.sort(-1).values.cumsum(-1).mean() + h.topk(3).values.square().mean() + h.median(-1).values.mean()

    return of(forward, X(4, 6), net=nn.Linear(6, 8))


@case("torch/float64")
def float64() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    return of(forward, X(4, 6, dtype=torch.float64), net=_mlp(6).double())


@case("torch/lora-tied-frozen")
def lora() -> Case:
    def forward(self: Any, ids: Tensor, y: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.base(h) + self.b(self.a(h))
        return F.cross_entropy((h @ self.emb.weight.T).flatten(0, 1), y.flatten())

    base = nn.Linear(8, 8).requires_grad_(False)
    return of(forward, torch.randint(0, 20, (3, 5)), torch.randint(0, 20, (3, 5)), emb=nn.Embedding(20, 8), base=base,
              a=nn.Linear(8, 2, bias=False), b=nn.Linear(2, 8, bias=False))  # fmt: skip


def _rule(name: str, **kwargs: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, **kwargs)


def _with_rule(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)

    return of(forward, X(8, 5), X(8, 2), net=_mlp(5, 2), optimizer=optimizer)


for _name, _kwargs in {
    "Adam": {"lr": 1e-3}, "AdamW": {"lr": 1e-3}, "RMSprop": {"lr": 1e-3}, "Adagrad": {"lr": 1e-2}, "NAdam": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3}, "Adadelta": {"lr": 1.0}, "RAdam": {"lr": 1e-3},
}.items():  # fmt: skip
    case(f"torch/optimizer-{_name}")(functools.partial(_with_rule, _rule(_name, **_kwargs)))


@case("torch/optimizer-Muon")
def muon() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss((x @ self.a).tanh() @ self.b, y)

    return of(forward, X(8, 5), X(8, 2), a=nn.Parameter(X(5, 6)), b=nn.Parameter(X(6, 2)), optimizer=_rule("Muon", lr=1e-2))


# ---- what a static compiler must refuse ----


@case("torch/data-dependent-if")
def data_dependent_if() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.net(x)
        return h.sum() if h.sum() > 0 else h.square().mean()

    return of(forward, X(4, 6), net=nn.Linear(6, 4), refused="a branch that depends on values")


@case("torch/data-dependent-shape")
def data_dependent_shape() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        kept = x[x.sum(-1) > 0]
        return torch.cumsum(self.net(kept), 0).square().mean()

    return of(forward, X(4, 6), net=nn.Linear(6, 4), refused="a shape that depends on values")
