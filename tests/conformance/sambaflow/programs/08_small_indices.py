"""gather, index_select, subscripts and one_hot with int16 and int32."""

import torch
import torch.nn.functional as F
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))
        self.mix = nn.Linear(4, 5)

    def forward(self, rows, column, label):
        picked = torch.index_select(self.table, 0, rows) + self.table[rows]
        scores = self.mix(picked)
        chosen = scores.gather(1, column[:, None]).squeeze(1)
        spread = torch.zeros(9, 5).index_add(0, rows, scores)
        return ((scores - F.one_hot(label, 5)) ** 2).mean() + chosen.mean() + (spread**2).mean(), scores


def data(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, n, (3,), generator=generator) for n in (9, 5, 5)]


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(8)
    model = Picker()
    samba.from_torch_model_(model)
    inputs = [
        samba.randint(9, (3,), name="rows").short(),
        samba.randint(5, (3,), name="column").short(),
        samba.randint(5, (3,), name="label").int(),
    ]
    optim = samba.optim.SGD(model.parameters(), lr=0.2)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="picker")
    else:
        utils.trace_graph(model, inputs, optim, pef=args.pef)
        for step in range(3):
            rows, column, label = data(step)
            loss, _ = samba.session.run([rows.short(), column.short(), label.int()], model.output_tensors)
            print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
