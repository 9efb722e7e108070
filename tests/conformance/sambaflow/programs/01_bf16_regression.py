"""bfloat16 features and targets meet float32 weights, in a linear layer and in the loss."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 2)
        self.criterion = nn.MSELoss()

    def forward(self, x, y):
        out = self.out(torch.tanh(self.hidden(x)))
        return self.criterion(out, y), out


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        yield torch.randn(4, 6, generator=generator).bfloat16(), torch.randn(4, 2, generator=generator).bfloat16()


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(256)
    model = Regression()
    samba.from_torch_model_(model)
    inputs = (
        samba.randn(4, 6, name="x", batch_dim=0).bfloat16(),
        samba.randn(4, 2, name="y", batch_dim=0).bfloat16(),
    )
    optim = samba.optim.SGD(model.parameters(), lr=0.1)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="regression")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef, mapping=args.mapping)
    for x, y in batches():
        loss, _ = samba.session.run([x, y], model.output_tensors)
        print(f"loss {loss.item():.8f}")
    samba.session.to_cpu(model)
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
