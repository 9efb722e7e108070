"""Uno: how a tumor responds to two drugs. Trained on samples that the model zoo makes up, in which there is something to learn.

python uno.py compile -b 16 --pef-name="uno" --mapping spatial
python uno.py run -b 16 -p out/uno/uno.pef --mapping spatial --num-spatial-batches 2000 --spatial_train
python uno.py test -b 16 -p out/uno/uno.pef
python uno.py measure-performance -b 16 -p out/uno/uno.pef

With --spatial_train one session.run takes --num-spatial-batches mini-batches: 2000 of 16 samples are 32000 samples, as many
optimizer steps, and one loss each. Without it, each mini-batch is a run of its own. The losses are the same.
"""

import argparse
import time

import torch
from torch import nn

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta
from tilework.zoo import uno

NAMES = ("genes", "drug1", "drug2", "dose1", "dose2", "growth")


class Uno(nn.Module):
    """Beside the growth, the loss: so that it is part of the graph."""

    def __init__(self, config: uno.Config) -> None:
        super().__init__()
        self.model = uno.Uno(config)
        self.criterion = nn.MSELoss()

    def forward(self, genes, drug1, drug2, dose1, dose2, growth):
        found = self.model(genes, drug1, drug2, dose1, dose2)
        return self.criterion(found, growth), found


def add_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=sorted(uno.SIZES), default="tiny", help="of the model (default: tiny)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=256, help="of the weights and of the order of the samples (default: 256)")


def add_run_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-e", "--num-epochs", type=int, default=1, help="epochs to train (default: 1)")
    parser.add_argument("--spatial_train", "--spatial-train", action="store_true", help="many mini-batches in one run")
    parser.add_argument("--train-samples", type=int, default=64000, help="samples to train on (default: 64000)")
    parser.add_argument("--val-samples", type=int, default=32000, help="samples to validate on (default: 32000)")


def run(tensors, output_tensors, **how):
    """The loss of each mini-batch, and the growth of each sample."""
    inputs = [samba.from_torch_tensor(t, name=n, batch_dim=0) for n, t in zip(NAMES, tensors, strict=True)]
    loss, growth = samba.session.run(input_tensors=inputs, output_tensors=output_tensors, **how)
    return samba.to_torch(loss).reshape(-1), samba.to_torch(growth)


def train(args: argparse.Namespace, model: nn.Module, samples) -> None:
    steps = args.num_spatial_batches if args.spatial_train else 1
    total = len(samples[0]) // args.batch_size
    order = torch.Generator().manual_seed(args.seed)
    begin = time.perf_counter()
    for epoch in range(args.num_epochs):
        shuffled = torch.randperm(len(samples[0]), generator=order)
        losses = []
        for done in range(0, total, steps):
            pick = shuffled[done * args.batch_size : min(done + steps, total) * args.batch_size]
            losses += run([t[pick] for t in samples], model.output_tensors, hyperparam_dict={"lr": args.lr})[0].tolist()
            if len(losses) == total or len(losses) * 4 // total > (len(losses) - steps) * 4 // total:
                print(f"Epoch [{epoch + 1}/{args.num_epochs}], Step [{len(losses)}/{total}], Loss: {losses[-1]:.6f}", flush=True)
    took = time.perf_counter() - begin
    print(f"train time: {took:.3f} s, {args.num_epochs * total * args.batch_size / took:.1f} samples/s")


def validate(args: argparse.Namespace, model: nn.Module, samples) -> None:
    count = len(samples[0]) // args.batch_size * args.batch_size
    model.eval()
    growth = run([t[:count] for t in samples], model.output_tensors, section_types=["fwd"])[1]
    model.train()
    true = samples[-1][:count]
    error = (growth - true).square().mean()
    print(f"Validation samples: {count}, Loss: {error:.6f}, R2: {1 - error / true.var(unbiased=False):.4f}")


def main() -> None:
    args = parse_app_args(common_parser_fn=add_args, run_parser_fn=add_run_args)
    if args.command == "run" and args.spatial_train and (args.mapping != "spatial" or args.num_spatial_batches < 2):
        raise SystemExit("--spatial_train needs --mapping spatial and --num-spatial-batches 2 or more")
    utils.set_seed(args.seed)
    config = uno.SIZES[args.size]
    model = Uno(config)
    samba.from_torch_model_(model)
    inputs = tuple(samba.from_torch_tensor(t, name=n, batch_dim=0)
                   for n, t in zip(NAMES, uno.synthetic(config, args.batch_size), strict=True))  # fmt: skip
    optimizer = None if args.inference else samba.optim.AdamW(model.parameters(), lr=args.lr)
    if args.command == "compile":
        samba.session.compile(
            model, inputs, optimizer, name="uno", app_dir=utils.get_file_dir(__file__), config_dict=vars(args),
            pef_metadata=get_pefmeta(args, model), init_output_grads=not args.inference,
        )  # fmt: skip
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        loss, growth = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors)
        host_loss, host_growth = model(*[samba.to_torch(t) for t in inputs])
        utils.assert_close(loss, host_loss, "loss", threshold=1e-5, rtol=1e-4)
        utils.assert_close(growth, host_growth, "growth", threshold=1e-5, rtol=1e-4)
        print("test passed: host and device agree")
    elif args.command == "run":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        if not args.inference:
            train(args, model, uno.synthetic(config, args.train_samples, seed=1))
        validate(args, model, uno.synthetic(config, args.val_samples, seed=2))
    else:
        common_app_driver(args, model, inputs, optimizer, name="uno")


if __name__ == "__main__":
    main()
