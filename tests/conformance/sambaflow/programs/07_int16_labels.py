"""int16 labels and uint8 tokens at compile time; whatever integers the data loader has at run time."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.criterion = nn.NLLLoss()

    def forward(self, tokens, labels):
        scores = torch.log_softmax(self.head(self.embed(tokens)), -1)
        return self.criterion(scores.reshape(-1, 3), labels.reshape(-1)), scores


def data(step, tokens=torch.uint8, labels=torch.int16):
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randint(0, 30, (2, 4), generator=generator).to(tokens),
        torch.randint(0, 3, (2, 4), generator=generator).to(labels),
    )


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(7)
    model = Tagger()
    samba.from_torch_model_(model)
    tokens, labels = data(0)
    inputs = {
        "tokens": samba.from_torch_tensor(tokens, name="tokens", batch_dim=0),
        "labels": samba.randint(0, 3, (2, 4), name="labels", batch_dim=0).short(),
    }
    optim = samba.optim.SGD(model.parameters(), lr=0.3)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="tagger")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    kinds = [(torch.uint8, torch.int16), (torch.int64, torch.int64), (torch.int32, torch.int32), (torch.int16, torch.uint8)]
    for step, (t, y) in enumerate(kinds):
        tokens, labels = data(step, t, y)
        loss, _ = samba.session.run({"tokens": tokens, "labels": labels}, model.output_tensors)
        print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
