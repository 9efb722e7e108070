"""measure-performance through the driver, with a JSON report, then run with two mini-batches in one call (spatial)."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x, y):
        out = self.fc(x)
        return nn.functional.cross_entropy(out, y), out


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator).bfloat16(), torch.randint(0, 3, (8,), generator=generator).short()


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(17)
    model = Net()
    samba.from_torch_model_(model)
    b = args.batch_size
    inputs = (samba.randn(b, 6, name="x", batch_dim=0).bfloat16(), samba.randint(3, (b,), name="y", batch_dim=0).short())
    optim = samba.optim.SGD(model.parameters(), lr=0.1)
    if args.command != "run":
        common_app_driver(args, model, inputs, optim, name="measured", metadata=get_pefmeta(args, model))
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef, mapping=args.mapping)
    for step in range(2):
        losses, _ = samba.session.run(data(step), model.output_tensors)
        for loss in losses:
            print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
