"""Examples from samba.randn stand for targets between 0 and 1. The driver compiles; run is the app's own."""

import argparse

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver


def add_args(parser: argparse.ArgumentParser):
    parser.add_argument("-bs", "--batch-size", type=int, default=4)
    parser.add_argument("-lr", type=float, default=0.2)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1), nn.Sigmoid())

    def forward(self, x, y):
        p = self.net(x)
        return nn.functional.binary_cross_entropy(p, y), torch.log(y).sum() * 0 + p


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=generator), torch.rand(4, 1, generator=generator)


def main(argv=None):
    args = parse_app_args(argv, common_parser_fn=add_args)
    utils.set_seed(5)
    model = Detector()
    optim = samba.optim.SGD(model.parameters(), lr=0.0)
    samba.from_torch_model_(model)  # after the optimizer, as some do
    b = args.batch_size
    inputs = (samba.randn(b, 5, name="x", batch_dim=0), samba.randn(b, 1, name="y", batch_dim=0))
    common_app_driver(args, model, inputs, optim, name="detector", app_dir=utils.get_file_dir(__file__), init_output_grads=True)
    if args.command == "run":
        utils.trace_graph(model, inputs, optim, pef=args.pef)
        for step in range(3):
            loss, _ = samba.session.run(data(step), model.output_tensors, hyperparam_dict={"lr": args.lr})
            print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
