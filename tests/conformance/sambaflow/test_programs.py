"""Programs against the interface of sambaflow, each with something that a port depends on."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tilework
from sambaflow import samba
from sambaflow.samba.sambaloader import SambaLoader
from sambaflow.samba.utils.argparser import parse_app_args


class Net(nn.Module):
    """(loss, out), the usual order."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(p)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, y):
        out = self.fc2(self.drop(torch.tanh(self.fc1(x))))
        return self.criterion(out, y), out


def net(args, model=None, **optimizer):
    torch.manual_seed(0)
    model = model or Net()
    samba.from_torch_model_(model)
    b = args.batch_size
    inputs = (samba.randn(b, 6, name="x", batch_dim=0).bfloat16().float(), samba.randint(3, (b,), name="y", batch_dim=0))
    return model, inputs, samba.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, **optimizer})


def batch(n=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


def eager_steps(model, optimizer, batches):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss, _ = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def same_weights(host, model):
    for (k, a), b in zip(host.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b.sn_data, atol=1e-6), k


def test_a_training_loop(compiled) -> None:
    _, model, inputs, _ = compiled(net, "-b", "4")
    assert [t.sn_name for t in inputs] == ["x", "y"] and inputs[0].batch_dim == 0
    host = copy.deepcopy(model)
    expected = eager_steps(
        host, torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3), [batch(seed=s) for s in range(5)]
    )
    before = [p.detach().clone() for p in model.parameters()]
    for s in range(5):
        x, y = batch(seed=s)
        loss, out = samba.session.run(input_tensors=[samba.from_torch_tensor(x, name="x"), samba.from_torch_tensor(y, name="y")],
                                      output_tensors=model.output_tensors)  # fmt: skip
        assert abs(samba.to_torch(loss).item() - expected[s]) < 1e-5 and out.shape == (4, 3)
        assert isinstance(loss, samba.SambaTensor) and type(samba.to_torch(loss)) is torch.Tensor
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "run must not touch the host"
    same_weights(host, model)
    samba.session.to_cpu(model)
    for a, b in zip(host.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_gradients_are_the_losses_alone(compiled) -> None:
    """(loss, logits): the logits contribute nothing. The host's graph may be made before the run and used after it."""
    _, model, _, _ = compiled(net, "-b", "4")
    x, y = batch()
    host_loss, host_out = model(x, y)
    loss, out = samba.session.run([x, y], model.output_tensors)
    host_loss.backward()
    samba.utils.assert_close(loss, host_loss, "loss", 1e-5)
    samba.utils.assert_close(host_out, out, "out", threshold=1e-5)
    for k, p in model.named_parameters():
        assert torch.allclose(p.sn_grad, p.grad, atol=1e-6), k


def test_sections_by_name_in_any_case(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    x, y = batch()
    loss, _ = samba.session.run([x, y], model.output_tensors, section_types=["FWD"])
    assert torch.equal(model.fc1.weight.sn_data, model.fc1.weight)
    samba.session.run([x, y], model.output_tensors, section_types=["bckwd", "GRADNORM", "opt"])
    assert not torch.equal(model.fc1.weight.sn_data, model.fc1.weight)
    again, _ = samba.session.run([x, y], model.output_tensors, section_types=["fwd"])
    assert float(again) < float(loss)
    with pytest.raises(tilework.UserError, match="bckwd"):
        samba.session.run([x, y], section_types=["fwd", "bckward"])
    first = samba.session.run([x, y], section_ids=[0])
    assert torch.equal(first[0], again)


def test_hyperparameters_drive_an_optimizer_of_nothing(compiled) -> None:
    """lr=0, momentum not given at all: both come with hyperparam_dict, and hold until it says something else."""
    _, model, _, _ = compiled(lambda a: net(a, lr=0.0, momentum=0.0, weight_decay=0.0), "-b", "4")
    host = copy.deepcopy(model)
    x, y = batch()
    samba.session.run([x, y], model.output_tensors)
    assert torch.equal(model.fc1.weight.sn_data, model.fc1.weight), "lr=0"
    for hyper in ({"lr": 0.05, "momentum": 0.8, "weight_decay": 0.01, "p": 0.0}, None):
        samba.session.run([x, y], model.output_tensors, hyperparam_dict=hyper)
    # momentum's buffer holds the gradient of the step with lr=0 as well
    opt = torch.optim.SGD(host.parameters(), lr=0.0, momentum=0.8)
    eager_steps(host, opt, [(x, y)])
    opt.param_groups[0].update(lr=0.05, weight_decay=0.01)
    eager_steps(host, opt, [(x, y), (x, y)])
    for (k, a), b in zip(host.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b.sn_data, atol=1e-6), k
    with pytest.raises(tilework.UserError, match="learning_rate"):
        samba.session.run([x, y], hyperparam_dict={"learning_rate": 1.0})


def test_a_scheduler_on_the_host_is_followed(compiled) -> None:
    _, model, _, optimizer = compiled(net, "-b", "4")
    host = copy.deepcopy(model)
    opt = torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3)
    ours, theirs = (torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, opt))
    x, y = batch()
    for _ in range(4):
        samba.session.run([x, y], model.output_tensors)
        ours.step()
        eager_steps(host, opt, [(x, y)])
        theirs.step()
    same_weights(host, model)


def test_dropout_by_hyperparameter(compiled) -> None:
    _, model, _, _ = compiled(lambda a: net(a, Net(p=0.5)), "-b", "4")
    x, y = batch()
    clean = copy.deepcopy(model).eval()(x, y)[1]
    outs = [samba.session.run([x, y], section_types=["fwd"], hyperparam_dict={"p": p})[1].clone() for p in (0.5, 0.0)]
    assert not torch.allclose(outs[0], clean, atol=1e-4) and torch.allclose(outs[1], clean, atol=1e-5)
    model.eval()
    assert torch.allclose(samba.session.run([x, y], section_types=["fwd"], hyperparam_dict={"p": 0.5})[1], clean, atol=1e-5)


class OutFirst(Net):
    def forward(self, x, y):
        loss, out = super().forward(x, y)
        return out, loss


def test_out_before_loss(compiled) -> None:
    _, model, _, _ = compiled(lambda a: net(a, OutFirst()), "-b", "4")
    x, y = batch()
    out, loss = samba.session.run([x, y], model.output_tensors)
    assert out.shape == (4, 3) and loss.shape == ()
    model(x, y)[1].backward()
    assert torch.allclose(model.fc1.weight.sn_grad, model.fc1.weight.grad, atol=1e-6)


class OneInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x):
        return self.fc(x)


def test_a_bare_tensor_and_the_loss_on_the_host(compiled) -> None:
    """fwd, loss and its backward on the host, then bckwd and opt with grad_of_outputs, and again through sn_grad."""

    def make(args):
        torch.manual_seed(0)
        model = OneInput()
        samba.from_torch_(model)
        return model, samba.randn(3, 5, name="input", batch_dim=0), samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make)
    host = copy.deepcopy(model)
    opt = torch.optim.SGD(host.parameters(), 0.1)
    x, target = torch.randn(3, 5), torch.randn(3, 2)
    for how in ("grad_of_outputs", "sn_grad of the traced", "sn_grad of the returned"):
        outs = samba.session.run(input_tensors=(x,), output_tensors=model.output_tensors, section_types=["fwd"])
        out = samba.to_torch(outs[0]).detach().requires_grad_()
        F.mse_loss(out, target).backward()
        grads = None
        if how == "grad_of_outputs":
            grads = [samba.from_torch(out.grad)]
        elif how == "sn_grad of the traced":
            model.output_tensors[0].sn_grad = out.grad
        else:
            outs[0].sn_grad = samba.from_torch_tensor(out.grad)
        samba.session.run(
            input_tensors=(x,), output_tensors=model.output_tensors, section_types=["bckwd", "opt"], grad_of_outputs=grads
        )
        opt.zero_grad()
        F.mse_loss(host(x), target).backward()
        opt.step()
        same_weights(host, model)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, input_ids, attention_mask=None, labels=None, scale=None):
        h = self.emb(input_ids)
        if attention_mask is not None:
            h = h * attention_mask.unsqueeze(-1)
        logits = self.fc(h)
        return F.cross_entropy(logits.reshape(-1, 11), labels.reshape(-1)), logits


@pytest.mark.parametrize("form", ["none", "dict"])
def test_inputs_with_none_and_as_a_dict(compiled, form) -> None:
    def make(args):
        torch.manual_seed(0)
        model = Optional()
        samba.from_torch_model_(model)
        ids = samba.randint(0, 11, (2, 7), name="ids", batch_dim=0)
        labels = samba.randint(11, (2, 7), name="labels", batch_dim=0)
        mask = samba.from_torch_tensor(torch.ones(2, 7), name="mask", batch_dim=0)
        inputs = (ids, None, labels, None) if form == "none" else {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return model, inputs, samba.optim.AdamW(model.parameters(), lr=0.01)

    _, model, _, _ = compiled(make)
    ids, labels = torch.randint(0, 11, (2, 7)), torch.randint(0, 11, (2, 7))
    given = [ids, labels] if form == "none" else {"labels": labels, "input_ids": ids.int(), "attention_mask": torch.ones(2, 7)}
    expected = model(ids, labels=labels)[0]
    loss, _ = samba.session.run(given, model.output_tensors)
    assert abs(float(loss) - float(expected)) < 1e-5
    assert float(samba.session.run(given, model.output_tensors)[0]) < float(loss)


def test_optimizer_made_before_the_conversion(compiled) -> None:
    def make(args):
        torch.manual_seed(0)
        model = Net()
        optimizer = samba.optim.AdamW(model.parameters(), lr=0.01)
        samba.from_torch_model_(model)
        inputs = (samba.randn(4, 6, name="x", batch_dim=0), samba.randint(3, (4,), name="y", batch_dim=0))
        return model, inputs, optimizer

    _, model, _, optimizer = compiled(make)
    assert optimizer.param_groups[0]["params"][0] is model.fc1.weight and isinstance(model.fc1.weight, samba.SambaParameter)
    assert model.fc1.weight.sn_name == "net__fc1__weight" and model.fc1.name == "net__fc1"
    host = copy.deepcopy(model)
    opt = torch.optim.AdamW(host.parameters(), lr=0.01)
    batches = [batch(seed=s) for s in range(3)]
    eager_steps(host, opt, batches)
    for x, y in batches:
        samba.session.run([x, y], model.output_tensors)
    same_weights(host, model)
    samba.session.to_cpu(model, optimizer)
    assert torch.allclose(optimizer.state[model.fc1.weight]["exp_avg"], opt.state[host.fc1.weight]["exp_avg"], atol=1e-7)


def test_three_optimizers_and_clipping(compiled) -> None:
    def make(args):
        torch.manual_seed(0)
        model = Net()
        samba.from_torch_model_(model)
        ps = list(model.parameters())
        opts = [samba.optim.AdamW(g, lr=0.01, weight_decay=wd, betas=(0.9, 0.98), max_grad_norm=0.1)
                for g, wd in ((ps[:1], 0.1), (ps[1:2], 0.0), (ps[2:], 0.05))]  # fmt: skip
        return model, (samba.randn(4, 6, name="x", batch_dim=0), samba.randint(3, (4,), name="y", batch_dim=0)), opts

    _, model, _, _ = compiled(make)
    host = copy.deepcopy(model)
    ps = list(host.parameters())
    opts = [
        torch.optim.AdamW(g, lr=0.01, weight_decay=wd, betas=(0.9, 0.98))
        for g, wd in ((ps[:1], 0.1), (ps[1:2], 0.0), (ps[2:], 0.05))
    ]
    for s in range(3):
        x, y = batch(seed=s)
        samba.session.run([x, y], model.output_tensors, section_types=["fwd", "bckwd", "gradnorm", "opt"])
        host.zero_grad()
        host(x, y)[0].backward()
        nn.utils.clip_grad_norm_(ps, 0.1)
        for o in opts:
            o.step()
    same_weights(host, model)


def test_partial_last_batch(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    host = copy.deepcopy(model)
    x, y = batch(10)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    opt = torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3)
    expected = eager_steps(host, opt, list(loader))
    found = [float(samba.session.run([a, b], model.output_tensors)[0]) for a, b in loader]
    assert np.allclose(found, expected, atol=1e-5)
    same_weights(host, model)
    assert samba.session.run([x[8:], y[8:]], section_types=["fwd"])[1].shape == (2, 3)


@pytest.mark.parametrize("own", [True, False])
def test_partial_last_batch_without_an_optimizer(compiled, own) -> None:
    """An evaluation loop, from an inference PEF and from a training PEF."""
    args, model, inputs, _ = compiled(net, "-b", "4", *(["--inference"] if own else []))
    samba.utils.trace_graph(model, inputs, pef=args.pef)
    x, y = batch(6)
    outs = [samba.session.run([a, b], section_types=["fwd"])[1] for a, b in zip(x.split(4), y.split(4), strict=True)]
    assert torch.allclose(torch.cat([samba.to_torch(o) for o in outs]), model(x, y)[1], atol=1e-5)


def test_spatial_batches(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4", "--mapping", "spatial", "--num-spatial-batches", "3")
    host = copy.deepcopy(model)
    x, y = batch(12)
    batches = list(zip(x.chunk(3), y.chunk(3), strict=True))
    expected = eager_steps(host, torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3), batches)
    loss, out = samba.session.run([x, y], model.output_tensors)
    assert loss.shape == (3,) and out.shape == (12, 3) and np.allclose(loss.numpy(), expected, atol=1e-5)
    same_weights(host, model)
    loss, out = samba.session.run([x, y], model.output_tensors, section_types=["fwd"])
    assert loss.numel() == 3 and out.shape == (12, 3)


def test_micro_batches(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "8", "-mb", "2")
    host = copy.deepcopy(model)
    x, y = batch(8)
    expected = eager_steps(host, torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3), [(x, y)])
    loss, out = samba.session.run([x, y], model.output_tensors)
    assert loss.shape == () and abs(float(loss) - expected[0]) < 1e-5 and out.shape == (8, 3)
    same_weights(host, model)


def test_micro_batches_without_training(compiled) -> None:
    """--inference beside -mb: from a PEF of its own, and in eval mode from a training PEF; the loss is that of the batch."""
    x, y = batch(8)
    for flags, section in ((["-b", "8", "-mb", "2", "--inference"], None), (["-b", "8", "-mb", "2"], ["fwd"])):
        _, model, _, _ = compiled(net, *flags)
        expected, out = model(x, y)
        found = samba.session.run([x, y], model.output_tensors, section_types=section)
        assert found[0].shape == () and abs(float(found[0]) - float(expected)) < 1e-5
        assert torch.allclose(found[1], out, atol=1e-5)
        samba.session.reset()


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.criterion = nn.CrossEntropyLoss(reduction="none")

    def forward(self, x, y):
        logits = self.fc(x)
        return self.criterion(logits.reshape(-1, 5), y.reshape(-1)), logits


def test_losses_of_every_element_with_weights(compiled) -> None:
    def make(args):
        torch.manual_seed(0)
        model = PerToken()
        samba.from_torch_model_(model)
        inputs = (samba.randn(2, 3, 4, name="x", batch_dim=0), samba.randint(5, (2, 3), name="y", batch_dim=0))
        return model, inputs, samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make)
    x, y, weights = torch.randn(2, 3, 4), torch.randint(0, 5, (2, 3)), torch.rand(6)
    model.output_tensors[0].sn_grad = samba.from_torch_tensor(weights)
    samba.session.run([x, y], model.output_tensors)
    (model(x, y)[0] * weights).sum().backward()
    assert torch.allclose(model.fc.weight.sn_grad, model.fc.weight.grad, atol=1e-6)
    model.zero_grad()
    samba.session.to_cpu(model)
    model.output_tensors[0].sn_grad = None  # ones at the losses again, nothing from the logits
    samba.session.run([x, y], model.output_tensors)
    model(x, y)[0].sum().backward()
    assert torch.allclose(model.fc.weight.sn_grad, model.fc.weight.grad, atol=1e-5)


def test_methods_of_the_oldest_models(compiled, tmp_path) -> None:
    """model.run and model.write_host_params, and a model that has a `run` of its own keeps it."""
    _, model, _, _ = compiled(net, "-b", "4")
    host = copy.deepcopy(model)
    with torch.no_grad():
        for a, b in zip(host.parameters(), model.parameters(), strict=True):
            a.mul_(0.5)
            b.mul_(0.5)
    model.write_host_params()  # nothing has run: host to device
    same_weights(host, model)
    x, y = batch()
    eager_steps(host, torch.optim.SGD(host.parameters(), 0.1, 0.9, weight_decay=1e-3), [(x, y)])
    loss, out = model.run([x, y], section_types=["fwd"])
    assert loss.dim() == 0 and out.shape == (4, 3)
    model.run([x, y], section_types=["bckwd", "opt"])
    same_weights(host, model)
    model.write_host_params()  # something has run: device to host
    for a, b in zip(host.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    own = nn.Linear(2, 2)
    own.run = marker = object()
    assert samba.from_torch_(own).run is marker


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bfloat16_model(compiled, when) -> None:
    """model.bfloat16() before or after the conversion: the device computes as eager PyTorch does on the same model."""

    def make(args):
        torch.manual_seed(0)
        model = Net()
        if when == "before":
            model.bfloat16()
        samba.from_torch_model_(model)
        if when == "after":
            model.bfloat16()
        b = args.batch_size
        inputs = (samba.randn(b, 6, name="x", batch_dim=0).bfloat16(), samba.randint(3, (b,), name="y", batch_dim=0))
        return model, inputs, samba.optim.SGD(model.parameters(), lr=0.1)

    _, model, _, _ = compiled(make, "-b", "4")
    host = copy.deepcopy(model)
    assert model.fc1.weight.dtype == torch.bfloat16
    x, y = batch()
    x = x.bfloat16()
    expected = eager_steps(host, torch.optim.SGD(host.parameters(), 0.1), [(x, y)] * 3)
    losses = [samba.session.run([x, y], model.output_tensors)[0] for _ in range(3)]
    assert losses[0].dtype == torch.bfloat16 and [float(v) for v in losses] == pytest.approx(expected, rel=0.02)
    for a, b in zip(host.parameters(), model.parameters(), strict=True):
        assert b.sn_data.dtype == torch.bfloat16 and torch.allclose(a, b.sn_data, atol=0.01)


@pytest.mark.parametrize(("preset", "low"), [("mp0", False), ("mp1", True)])
def test_graphamp_presets(compiled, preset, low) -> None:
    _, model, _, _ = compiled(net, "-b", "4", "--graphamp-preset", preset)
    host = copy.deepcopy(model)
    x, y = batch()
    loss, _ = host(x, y)
    found = float(samba.session.run([x, y], model.output_tensors)[0])
    assert model.fc1.weight.sn_data.dtype == torch.float32
    assert found == pytest.approx(float(loss), rel=0.02)
    assert (abs(found - float(loss)) > 1e-5) == low


@pytest.mark.parametrize("more", [{}, {"run_graph_only": True}])
def test_measure_performance_times_the_steps_that_it_makes(compiled, monkeypatch, more) -> None:
    """By a clock that goes on by a millisecond a step of the engine: no more and no fewer of them are timed than are counted."""
    import time

    _, model, inputs, _ = compiled(net, "-b", "4")
    core = samba.session.runner.core
    monkeypatch.setattr(time, "perf_counter", lambda: core.num_steps * 1e-3)
    before = core.num_steps
    throughput, latency = samba.utils.measure_performance(model, inputs, 4, 1, False, n_iterations=50, **more)
    assert latency == pytest.approx(1e-3) and throughput == pytest.approx(4 / 1e-3)
    assert core.num_steps - before >= 60  # ten to warm up


def test_saving_and_loading_after_the_conversion(compiled, tmp_path) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    x, y = batch()
    samba.session.run([x, y], model.output_tensors)
    samba.session.to_cpu(model)
    model.output_tensors = None
    torch.save(model, tmp_path / "whole.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    other = Net()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for a, b, c in zip(model.parameters(), whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_single_dash_flags_and_redefined_ones(compiled) -> None:
    def common(parser):
        parser.add_argument("-bs", type=int, default=4, dest="bs")
        parser.add_argument("-lr", "--learning-rate", type=float, default=0.1)
        parser.add_argument("-b", "--batch-size", type=int, default=4, help="redefined")
        parser.add_argument("-e", "--num-epochs", type=int, default=1)

    args, model, _, _ = compiled(net, "-bs", "4", "-lr=0.5", "-mb", "4", "--mac-v2", "--resources-scaling-factors", "1", "0.9",
                                 common=common)  # fmt: skip
    assert (args.batch_size, args.bs, args.learning_rate, args.microbatch_size) == (4, 4, 0.5, 4)
    assert samba.session.run(list(batch()), model.output_tensors)[0].shape == ()


def test_unknown_flags_are_errors(capsys) -> None:
    with pytest.raises(SystemExit) as e:
        parse_app_args(["run", "--pef", "x", "--no-such-flag"])
    assert e.value.code == 2 and "--no-such-flag" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_app_args(["run"])  # no PEF


def test_samba_loader(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    x, y = batch(12)
    loader = SambaLoader(DataLoader(TensorDataset(torch.arange(12), x, y), batch_size=4), ["x", "y"],
                         function_hook=lambda b: (b[1], b[2]), return_original_batch=True)  # fmt: skip
    assert len(loader) == 3
    seen = []
    for (a, b), original in loader:
        assert (a.sn_name, b.sn_name) == ("x", "y")
        seen += original[0].tolist()
        samba.session.run([a, b], model.output_tensors)
    assert seen == list(range(12))
    iterator = iter(SambaLoader([(x[:4], y[:4])], ["x", "y"]))
    assert torch.equal(samba.to_torch(next(iterator)[0]), x[:4])

    def broken():
        yield x[:4], y[:4]
        raise RuntimeError("the third file is missing")

    with pytest.raises(RuntimeError, match="third file"):
        list(SambaLoader(broken(), ["x", "y"]))
    assert len(list(SambaLoader(broken(), ["x", "y"], ignore_dataloader_exception=True))) == 1


def test_inference_from_a_training_pef_and_from_its_own(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4", "--inference")
    x, y = batch()
    before = model.fc1.weight.sn_data
    _, out = samba.session.run([x, y], model.output_tensors)
    assert torch.allclose(out, model(x, y)[1], atol=1e-6) and torch.equal(before, model.fc1.weight.sn_data)
    with pytest.raises(tilework.UserError, match="no section"):
        samba.session.run([x, y], section_types=["fwd", "bckwd"])


def test_tensors_behave_like_tensors() -> None:
    t = samba.randn(3, 4, name="t", batch_dim=0)
    assert isinstance(t, torch.Tensor) and t.shape == (3, 4) and t.sn_name == t.name == "t"
    kept = t.bfloat16().float().to(torch.float64).clone().detach()
    assert kept.sn_name == "t" and kept.batch_dim == 0 and kept.dtype == torch.float64
    plain = torch.ones(3, 4)
    assert torch.equal(samba.to_torch(t + plain), samba.to_torch(plain + t)) and isinstance(t + plain, samba.SambaTensor)
    assert (t > 0).sum().item() == int((samba.to_torch(t) > 0).sum()) and t[t > 0].numel() == (t > 0).sum()
    assert torch.max(t) == t.max() and t.mean().item() == pytest.approx(float(samba.to_torch(t).mean()))
    assert t.reshape(-1, 2).view(6, 2).unsqueeze(0).expand(2, 6, 2).repeat(1, 1, 2).shape == (2, 6, 4)
    assert isinstance(t.numpy(), np.ndarray) and t.tolist() == samba.to_torch(t).tolist()
    assert samba.to_torch(t).data_ptr() == t.data_ptr() and t.torch().data_ptr() == t.data_ptr()
    w = samba.from_torch_tensor(torch.randn(3, requires_grad=True), name="w")
    (w * 2).sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))
    again = copy.deepcopy(t)
    assert again.sn_name == "t" and torch.equal(again, t)
    empty = samba.SambaTensor(shape=(2, 2), dtype=torch.float32, name="e")
    assert not empty.has_data and t.has_data
    assert samba.cat([t, t]).shape == (6, 4) and samba.sigmoid(t).shape == t.shape
    x, weight, bias = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(4)
    assert torch.allclose(samba.addmm(bias, x, weight, is_transposed=True), F.linear(x, weight, bias), atol=1e-6)


def test_lazy_parameters_are_filled_by_materialize() -> None:
    from sambaflow.samba.lazy_param import lazy_param
    from sambaflow.samba.materialize import materialize

    with lazy_param():
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)  # whatever was in memory
    assert model.fc1.weight.has_data is False
    with materialize(model) as filled:
        assert filled is model and float(model.fc1.weight.abs().max()) < 1 and model.fc1.weight.has_data
    assert float(nn.Linear(4, 4).weight.detach().abs().sum()) > 0


def test_sync_of_single_tensors_and_names(compiled) -> None:
    _, model, _, _ = compiled(net, "-b", "4")
    x, y = batch()
    samba.session.run([x, y], model.output_tensors)
    device = model.fc1.weight.sn_data
    assert not torch.equal(device, model.fc1.weight)
    model.fc1.weight.cpu()
    assert torch.equal(device, model.fc1.weight) and not torch.equal(model.fc2.weight.sn_data, model.fc2.weight)
    with torch.no_grad():
        model.fc1.weight.zero_()
    model.fc1.weight.rdu()
    assert float(model.fc1.weight.sn_data.abs().sum()) == 0
    named = samba.session.get_tensors_by_name(["net__fc1__weight", "x"])
    assert float(named[0].abs().sum()) == 0 and torch.allclose(named[1], x)
    with pytest.raises(tilework.UserError, match="did you mean"):
        samba.session.get_tensors_by_name(["net__fc1__wait"])
    samba.session.to_rdu(model)
    assert torch.equal(model.fc2.weight.sn_data, model.fc2.weight)


def test_what_does_not_fit_is_refused(compiled, tmp_path) -> None:
    args, model, inputs, optimizer = compiled(net, "-b", "4")
    with pytest.raises(tilework.UserError, match="no such file"):
        samba.utils.trace_graph(model, inputs, optimizer, pef="nowhere.pef")
    (tmp_path / "foreign.pef").write_text("not a PEF")
    with pytest.raises(tilework.UserError, match="not an artifact"):
        samba.utils.trace_graph(model, inputs, optimizer, pef=str(tmp_path / "foreign.pef"))
    wide = Net()
    wide.fc1, wide.fc2 = nn.Linear(6, 9), nn.Linear(9, 3)
    samba.from_torch_model_(wide)
    with pytest.raises(tilework.UserError, match=r"fc1.weight: found \[9, 6\], expected \[8, 6\]"):
        samba.utils.trace_graph(wide, inputs, samba.optim.SGD(wide.parameters(), lr=0.1), pef=args.pef)
    with pytest.raises(tilework.UserError, match="batch size 4"):
        samba.utils.trace_graph(model, (samba.randn(5, 6), samba.randint(3, (5,))), optimizer, pef=args.pef)
    other = OutFirst()
    samba.from_torch_model_(other)
    with pytest.raises(tilework.UserError, match="found OutFirst, expected Net"):
        samba.utils.trace_graph(other, inputs, samba.optim.SGD(other.parameters(), lr=0.1), pef=args.pef)
    samba.session.reset()
    with pytest.raises(tilework.UserError, match="trace_graph"):
        samba.session.run(list(batch()))
