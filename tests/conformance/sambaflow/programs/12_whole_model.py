"""The whole model is saved after half of the steps and comes back with the program's own torch.load."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = samba.from_torch_tensor(torch.tensor([2.0, 0.5, 1.0, 3.0]), name="scale")
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(torch.relu(self.fc(x * self.scale)))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y), x


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(12)
    model = Stacked()
    samba.from_torch_model_(model)
    inputs = samba.randn(3, 4, name="x", batch_dim=0), samba.randn(3, 4, name="y", batch_dim=0)
    if args.command == "compile":
        samba.session.compile(model, inputs, samba.optim.SGD(model.parameters(), lr=0.05), name="stacked")
        return
    for half in range(2):
        optim = samba.optim.SGD(model.parameters(), lr=0.05)
        utils.trace_graph(model, inputs, optim, pef=args.pef)
        for step in range(2):
            loss, _ = samba.session.run(data(2 * half + step), model.output_tensors)
            print(f"loss {loss.item():.8f}")
        samba.session.to_cpu(model)
        torch.save(model, "model.pt")
        model = torch.load("model.pt")
        assert isinstance(model, Stacked) and model.blocks[0].fc.weight.sn_name == "stacked__blocks__0__fc__weight"


if __name__ == "__main__":
    main()
