"""A data loader without drop_last. The PEF is compiled for both sizes: compile -b 8 --batch-sizes 8,3."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.Linear(10, 4)

    def forward(self, x, y):
        out = self.b(torch.relu(self.norm(self.a(x))))
        return nn.functional.cross_entropy(out, y), out


def loader():
    generator = torch.Generator().manual_seed(11)
    x, y = torch.randn(19, 6, generator=generator), torch.randint(0, 4, (19,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(11)
    model = Net()
    samba.from_torch_model_(model)
    b = args.batch_size
    inputs = samba.randn(b, 6, name="x", batch_dim=0), samba.randint(4, (b,), name="y", batch_dim=0)
    optim = samba.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="partial")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    for _ in range(2):
        for x, y in loader():
            loss, out = samba.session.run([x, y], model.output_tensors)
            assert out.shape[0] == len(x)
            print(f"loss {loss.item():.8f}")
    samba.session.to_cpu(model)
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
