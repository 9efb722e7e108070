"""Token ids of the examples are beyond the vocabulary, and class numbers are rounded normal numbers, some of them negative."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.sambaloader import SambaLoader
from sambaflow.samba.utils.argparser import parse_app_args

VOCABULARY, CLASSES = 17, 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, CLASSES)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens, label):
        out = self.head(self.embed(tokens).mean(1))
        return self.loss(out, label), out


def loader():
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCABULARY, (8, 5), generator=generator)
    return DataLoader(TensorDataset(tokens, torch.randint(0, CLASSES, (8,), generator=generator)), batch_size=4)


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(6)
    model = Classifier()
    samba.from_torch_model_(model)
    label = samba.from_torch_tensor((torch.randn(4) * 3 - 9).long(), name="label", batch_dim=0)
    inputs = (samba.randint(50000, (4, 5), name="tokens", batch_dim=0), label)
    optim = samba.optim.AdamW(model.parameters(), lr=0.05, betas=(0.9, 0.997), weight_decay=0.1, max_grad_norm=0.5)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="classifier", config_dict=vars(args))
    else:
        utils.trace_graph(model, inputs, optim, pef=args.pef)
        for _ in range(2):
            for batch in SambaLoader(loader(), ["tokens", "label"]):
                loss, _ = samba.session.run(batch, model.output_tensors)
                print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
