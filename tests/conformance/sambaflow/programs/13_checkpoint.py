"""run, then run --resume: weights, frozen part and optimizer state come from a file that plain torch.load reads."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


def add_run_args(parser):
    parser.add_argument("--resume", action="store_true")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.register_buffer("mean", samba.from_torch_tensor(torch.full((5,), 0.1)))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.head(torch.tanh(self.base(x - self.mean))), y)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 2, generator=generator)


def main(argv=None):
    args = parse_app_args(argv, run_parser_fn=add_run_args)
    utils.set_seed(13)
    model = Net()
    model.base.bias.requires_grad_(False)
    samba.from_torch_model_(model)
    inputs = samba.randn(4, 5, name="x", batch_dim=0), samba.randn(4, 2, name="y", batch_dim=0)
    optim = samba.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="checkpoint")
        return
    first = 0
    if args.resume:
        saved = torch.load("checkpoint.pt")
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        first = saved["step"]
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    for step in range(first, first + 2):
        (loss,) = samba.session.run(data(step), model.output_tensors)
        print(f"loss {loss.item():.8f}")
    samba.session.to_cpu(model, optim)
    torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": first + 2}, "checkpoint.pt")


if __name__ == "__main__":
    main()
