"""Programs that once gave wrong numbers, or none, without a word."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from test_programs import Net, batch, eager_steps, net, same_weights
from torch import nn

import tilework
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args, parse_yaml_to_args

pytestmark = pytest.mark.slow


class Reduced(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.fc, self.reduction = nn.Linear(6, 3), reduction

    def forward(self, x, y):
        out = self.fc(x)
        return (out.sum() * 0 if self.reduction == "host" else F.cross_entropy(out, y, reduction=self.reduction)), out


@pytest.mark.parametrize("sections", ["together", "apart", "seeded"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_micro_batches_are_the_whole_batch(compiled, reduction, sections) -> None:
    """-mb, whatever the loss does over the batch, and however the sections are run."""

    def make(args):
        torch.manual_seed(0)
        model = Reduced(reduction)
        samba.from_torch_model_(model)
        inputs = (samba.randn(8, 6, name="x", batch_dim=0), samba.randint(3, (8,), name="y", batch_dim=0))
        return model, inputs, samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make, "-b", "8", "-mb", "2")
    host = copy.deepcopy(model)
    x, y = batch(8)
    weights = torch.rand(8) if reduction == "none" else torch.tensor(0.5)
    loss, _ = host(x, y)
    (loss * (weights if sections == "seeded" else 1)).sum().backward()
    if sections == "together":
        found, _ = samba.session.run([x, y], model.output_tensors)
    elif sections == "seeded":
        model.output_tensors[0].sn_grad = weights
        found, _ = samba.session.run([x, y], model.output_tensors)
    else:
        found, _ = samba.session.run([x, y], model.output_tensors, section_types=["fwd"])
        samba.session.run([x, y], model.output_tensors, section_types=["bckwd"])
        samba.session.run([x, y], model.output_tensors, section_types=["opt"])
    assert torch.allclose(found, loss, atol=1e-5)
    assert torch.allclose(model.fc.weight.sn_grad, host.fc.weight.grad, atol=1e-5)
    torch.optim.SGD(host.parameters(), 0.1).step()
    same_weights(host, model)


def test_several_mini_batches_need_all_sections(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4", "--mapping", "spatial", "--num-spatial-batches", "3")
    x, y = batch(12)
    samba.session.run([x, y], model.output_tensors, section_types=["fwd"])
    with pytest.raises(tilework.UserError, match="several mini-batches"):
        samba.session.run([x, y], model.output_tensors, section_types=["bckwd", "opt"])


def test_a_seed_stays(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4", compile_kwargs=None)
    x, y = batch()
    model.output_tensors[0].sn_grad = torch.tensor(0.25)
    found = []
    for _ in range(2):
        samba.session.run([x, y], model.output_tensors, section_types=["fwd", "bckwd"])
        found.append(model.fc1.weight.sn_grad)
    assert torch.equal(*found) and float(model.output_tensors[0].sn_grad) == 0.25


class Other(Net):
    def forward(self, x, y):
        out = self.fc2(self.drop(torch.relu(self.fc1(x))))
        return self.criterion(out, y), out


class Swapped(Net):
    def forward(self, x, y):
        loss, out = Net.forward(self, x, y)
        return out, loss


class Noted(Net):
    def forward(self, x, y):
        "Another text, the same numbers."
        out = self.fc2(self.drop(torch.tanh(self.fc1(x))))
        return self.criterion(out, y), out


@pytest.mark.parametrize(("edited", "fits"), [(Other, False), (Swapped, False), (Noted, True), ("smoothing", False),
                                              ("frozen", False)])  # fmt: skip
def test_a_pef_of_another_model(compiled, tmp_path, edited, fits) -> None:
    """forward was edited, a setting changed or a parameter frozen since the PEF was compiled."""
    compiled(net, "-b", "4")
    samba.session.reset()
    args = parse_app_args(["run", "--pef", str(tmp_path / "m" / "m.pef"), "-b", "4"])
    model = edited() if isinstance(edited, type) else Net()
    if edited == "smoothing":
        model.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    type(model).__name__ = "Net"
    if edited == "frozen":
        model.fc1.bias.requires_grad_(False)
    model, inputs, optimizer = net(args, model)
    if fits:
        samba.utils.trace_graph(model, inputs, optimizer, pef=args.pef)
    else:
        with pytest.raises(tilework.UserError, match=r"computes something else|compiled for something else"):
            samba.utils.trace_graph(model, inputs, optimizer, pef=args.pef)


def test_two_models_in_one_process(compiled) -> None:
    _, first, inputs, _ = compiled(net, "-b", "4")
    second = Net()
    samba.from_torch_model_(second)
    optimizer = samba.optim.SGD(second.parameters(), lr=0.1)
    samba.utils.trace_graph(second, inputs, optimizer)
    x, y = batch()
    expected = [float(m(x, y)[0]) for m in (first, second)]
    found = [float(samba.session.run([x, y], m.output_tensors, section_types=["fwd"])[0]) for m in (first, second)]
    assert found == pytest.approx(expected, abs=1e-6)
    before = first.fc1.weight.detach().clone()
    samba.session.run([x, y], second.output_tensors)
    samba.session.to_cpu(first)
    assert torch.equal(first.fc1.weight, before) and torch.equal(first.fc1.weight.sn_data, before)
    assert not torch.equal(second.fc1.weight.sn_data, second.fc1.weight)
    with pytest.raises(tilework.UserError, match="not traced"):
        samba.session.to_cpu(Net())


def test_only_the_outputs_that_were_asked_for(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    x, y = batch()
    loss, out = model.output_tensors
    found = samba.session.run([x, y], [out], section_types=["fwd"])
    assert len(found) == 1 and found[0].shape == (4, 3)
    assert torch.allclose(samba.session.get_tensors([out])[0], model(x, y)[1])
    assert torch.allclose(out.cpu(), model(x, y)[1]) and samba.session.run([x, y], loss, section_types=["fwd"])[0].dim() == 0


def test_named_inputs_in_another_order(compiled) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, a, b):
            return (self.fc(a) - b).pow(2).mean()

    def make(args):
        torch.manual_seed(0)
        model = Two()
        samba.from_torch_model_(model)
        return model, tuple(samba.randn(2, 3, name=n, batch_dim=0) for n in "ab"), samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make)
    a, b = (samba.randn(2, 3, name=n) for n in "ab")
    found = samba.session.run([b, a], section_types=["fwd"])[0]
    assert torch.allclose(found, model(a, b), atol=1e-6)


@pytest.mark.parametrize("layer", ["attention", "encoder", "lstm", "gru"])
def test_every_dropout_follows_p(compiled, layer) -> None:
    """p=0.0 in hyperparam_dict is as in eval mode, also inside torch's own layers."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = {
                "attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
                "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
                "lstm": lambda: nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True, bidirectional=True),
                "gru": lambda: nn.GRU(8, 8, 3, dropout=0.5, batch_first=True),
            }[layer]()

        def forward(self, x):
            out = self.layer(x, x, x)[0] if layer == "attention" else self.layer(x)
            out = out[0] if isinstance(out, tuple) else out
            return out.pow(2).mean(), out

    def make(args):
        torch.manual_seed(0)
        model = Dropped()
        samba.from_torch_model_(model)
        return model, (samba.randn(2, 5, 8, name="x", batch_dim=0),), samba.optim.SGD(model.parameters(), lr=0.0)

    _, model, _, _ = compiled(make)
    x = torch.randn(2, 5, 8)
    expected = copy.deepcopy(model).eval()(x)[1]
    dropped = samba.session.run([x], hyperparam_dict={"p": 0.5}, section_types=["fwd"])[1]
    assert not torch.allclose(dropped, expected, atol=1e-3)
    found = samba.session.run([x], hyperparam_dict={"p": 0.0}, section_types=["fwd"])[1]
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("how", ["together", "apart", "host"])
def test_a_partial_batch_section_by_section(compiled, how) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    host = copy.deepcopy(model)
    optimizer = torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3)
    for n in (4, 3, 4):
        x, y = batch(n, seed=n)
        if how == "together":
            samba.session.run([x, y], model.output_tensors)
        else:
            out = samba.session.run([x, y], model.output_tensors, section_types=["fwd"])[1]
            grads = None
            if how == "host":
                leaf = samba.to_torch(out).detach().requires_grad_()
                F.cross_entropy(leaf, y).backward()
                grads = [torch.zeros(()), leaf.grad]
            samba.session.run([x, y], model.output_tensors, section_types=["bckwd", "opt"], grad_of_outputs=grads)
        eager_steps(host, optimizer, [(x, y)])
        assert torch.allclose(model.fc1.weight.sn_grad, host.fc1.weight.grad, atol=1e-5)
        same_weights(host, model)


def test_arguments_that_do_not_exist(compiled, tmp_path) -> None:
    _, model, inputs, optimizer = compiled(net, "-b", "4")
    x, y = batch()
    with pytest.raises(tilework.UserError, match="section_types"):
        samba.session.run([x, y], section_type=["fwd"])
    with pytest.raises(tilework.UserError, match="lr is not a number"):
        samba.session.run([x, y], hyperparam_dict={"lr": "fast"})
    with pytest.raises(tilework.UserError, match="loss_indices"):
        samba.utils.trace_graph(model, inputs, optimizer, pef=str(tmp_path / "m" / "m.pef"), loss_indices=[1])
    with pytest.raises(tilework.UserError, match="can be read"):
        parse_yaml_to_args(tmp_path / "none.yaml")


def test_one_value_returned_twice(compiled) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            out = self.fc(x)
            return out, out

    def make(args):
        model = Twice()
        samba.from_torch_model_(model)
        return model, (samba.randn(4, 6, name="x", batch_dim=0),), samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make)
    x, _ = batch()
    samba.session.run([x], section_types=["fwd"])
    samba.session.run([x], section_types=["bckwd"], grad_of_outputs=[None, torch.ones(4, 3)])
    model(x)[1].sum().backward()
    assert torch.allclose(model.fc.weight.sn_grad, model.fc.weight.grad, atol=1e-6)


@pytest.mark.parametrize("mode", ["bilinear", pytest.param("bicubic", marks=pytest.mark.full)])
def test_resizing(compiled, monkeypatch, mode) -> None:
    monkeypatch.setenv("TILEWORK_DEVICE", "cpu")

    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3, padding=1)

        def forward(self, x):
            out = F.interpolate(self.conv(x), scale_factor=2, mode=mode, align_corners=False)
            return out.pow(2).mean(), out

    def make(args):
        torch.manual_seed(0)
        model = Resized()
        samba.from_torch_model_(model)
        return model, (samba.randn(2, 1, 5, 7, name="x", batch_dim=0),), samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make)
    x = torch.randn(2, 1, 5, 7)
    loss, out = model(x)
    loss.backward()
    found, image = samba.session.run([x], model.output_tensors)
    assert torch.allclose(image, out, atol=1e-5) and torch.allclose(found, loss, atol=1e-5)
    assert torch.allclose(model.conv.weight.sn_grad, model.conv.weight.grad, atol=1e-5)


def test_an_app_that_defines_one_spelling_again() -> None:
    def common(parser):
        parser.add_argument("--batch-size", type=int, default=8)
        parser.add_argument("--world-size", type=int, default=1)
        parser.add_argument("--pef", default="mine.pef")

    args = parse_app_args(["run"], common_parser_fn=common)
    assert (args.batch_size, args.world_size, args.pef) == (8, 1, "mine.pef")
    assert parse_app_args(["run", "-b", "3", "-p", "x"], common_parser_fn=common).batch_size == 3


def test_errors_are_seen_under_data_parallel(tmp_path) -> None:
    """torch.distributed wraps the hook that shows them."""
    (tmp_path / "app.py").write_text("""
import torch
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
args = parse_app_args()
model = torch.nn.Linear(2, 2)
samba.from_torch_model_(model)
utils.trace_graph(model, (samba.randn(1, 2, name="x", batch_dim=0),), None, pef=args.pef)
""")
    for env, expected in (({}, "artifact-missing"), ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "2 ranks")):
        done = subprocess.run([sys.executable, "app.py", "run", "-p", "no.pef", "--data-parallel"], cwd=tmp_path, text=True,
                              capture_output=True, env={**os.environ, **env}, timeout=120)  # fmt: skip
        assert done.returncode == 2 and expected in done.stderr, done
