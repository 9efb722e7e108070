"""A transform whose matrices are made in __init__ as SambaTensors: constants of the graph. One is a buffer, two are in a list."""

import math

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import SambaTensor, utils
from sambaflow.samba.utils.argparser import parse_app_args


def cosines(n):
    rows, columns = torch.arange(n)[:, None], torch.arange(n)[None]
    return torch.cos(math.pi / n * (columns + 0.5) * rows) / math.sqrt(n)


class Spectral(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.basis = wrap(cosines(6))
        self.scales = [wrap(torch.full((6,), 0.5)), wrap(torch.arange(6.0))]
        self.register_buffer("window", wrap(torch.linspace(0.1, 1, 6)))
        self.linear = nn.Linear(6, 3)

    def forward(self, x, y):
        spectrum = torch.matmul(x * self.window, self.basis) * self.scales[0] + self.scales[1]
        out = self.linear(spectrum)
        return nn.functional.cross_entropy(out, y), out


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(4)
    model = Spectral(lambda t: SambaTensor(t, name="constant"))
    samba.from_torch_model_(model)
    inputs = samba.randn(4, 6, name="x", batch_dim=0), samba.randint(3, (4,), name="y", batch_dim=0)
    optim = samba.optim.SGD(model.parameters(), lr=0.1)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="spectral")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    for step in range(3):
        loss, _ = samba.session.run(data(step), model.output_tensors)
        print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
