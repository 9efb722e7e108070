"""What beginners do. Each ends in a message with the line of this file, and exit code 2."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


def add_args(parser):
    parser.add_argument("--mistake", default="")


class Net(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.fc, self.mistake = nn.Linear(4, 3), mistake

    def forward(self, x, y):
        if self.mistake == "shape":
            x = x.reshape(-1, 5)  # HERE shape
        if self.mistake == "value" and x.mean() > 0:  # HERE value
            x = -x
        out = self.fc(x)
        if self.mistake == "classes":
            out = out[:, :, None]
        return nn.functional.cross_entropy(out, y), out  # HERE classes


def main(argv=None):
    args = parse_app_args(argv, common_parser_fn=add_args)
    utils.set_seed(20)
    model = Net(args.mistake)
    samba.from_torch_model_(model)
    inputs = samba.randn(2, 4, name="x", batch_dim=0), samba.randint(3, (2,), name="y", batch_dim=0)
    optim = samba.optim.SGD(model.parameters(), lr=0.1)
    if args.mistake == "frozen":
        model.requires_grad_(False)
    if args.mistake == "optimizer":
        optim = samba.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    if args.mistake == "inputs":
        inputs = inputs[:1]
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="mistakes")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    x, y = torch.ones(2, 4), torch.tensor([0, 40000 if args.mistake == "width" else 1])
    if args.mistake == "graph":
        samba.session.compile_multigraph(name="none")
    loss, _ = samba.session.run([x, y.int()], model.output_tensors)
    print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
