"""--inference at several batch sizes: requests come as they are."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 2))

    def forward(self, x):
        return torch.softmax(self.net(x), -1)


def requests():
    generator = torch.Generator().manual_seed(18)
    return [torch.randn(n, 5, generator=generator).bfloat16() for n in (4, 1, 6, 4)]


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(18)
    model = Scorer()
    samba.from_torch_model_(model)
    inputs = samba.randn(args.batch_size, 5, name="x", batch_dim=0).bfloat16()
    if args.command == "compile":
        samba.session.compile(model, inputs, name="scorer", inference=True)
        return
    utils.trace_graph(model, inputs, pef=args.pef)
    for request in requests():
        (scores,) = samba.session.run([request])
        for score in scores[:, 0]:
            print(f"loss {score.item():.8f}")


if __name__ == "__main__":
    main()
