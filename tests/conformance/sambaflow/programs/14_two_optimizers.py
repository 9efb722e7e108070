"""SGD for the embedding, AdamW for the rest, with one hyperparam_dict; examples are int16 and bfloat16."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.sambacollections import OrderedSet


class Ranking(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.dense, self.top = nn.Embedding(12, 4), nn.Linear(3, 4), nn.Linear(8, 1)

    def forward(self, item, features, click):
        both = torch.cat([self.items(item), torch.relu(self.dense(features))], 1)
        score = self.top(both).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(score, click), score


def data(step):
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randint(0, 12, (4,), generator=generator).short(),
        torch.randn(4, 3, generator=generator).bfloat16(),
        torch.rand(4, generator=generator).round(),
    )


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(14)
    model = Ranking()
    samba.from_torch_model_(model)
    item, features, click = data(0)
    inputs = (
        samba.from_torch_tensor(item, name="item", batch_dim=0),
        samba.from_torch_tensor(features, name="features", batch_dim=0),
        samba.from_torch_tensor(click, name="click", batch_dim=0),
    )
    rest = OrderedSet([*model.dense.parameters(), *model.top.parameters()])
    optims = [samba.optim.SGD(model.items.parameters(), lr=0.5), samba.optim.AdamW(rest, lr=0.01, weight_decay=0.01)]
    if args.command == "compile":
        samba.session.compile(model, inputs, optims, name="ranking")
        return
    utils.trace_graph(model, inputs, optims, pef=args.pef)
    for step in range(4):
        hyper = {"lr": 0.05} if step == 2 else None
        loss, _ = samba.session.run(data(step), model.output_tensors, hyperparam_dict=hyper)
        print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
