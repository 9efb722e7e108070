"""Compiled for two ranks, as sites do it for any number of them. Here it runs with one, and says so where more are asked for."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x).pow(2).mean()


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(19)
    model = Net()
    samba.from_torch_model_(model)
    inputs = (samba.randn(3, 4, name="x", batch_dim=0),)
    optim = samba.optim.SGD(model.parameters(), lr=0.1)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="replicas")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    for _ in range(2):
        (loss,) = samba.session.run([torch.ones(3, 4)], model.output_tensors, data_parallel=args.data_parallel,
                                    reduce_on_rdu=args.reduce_on_rdu)  # fmt: skip
        print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
