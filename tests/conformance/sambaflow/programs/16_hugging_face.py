"""A Hugging Face model in forward's own order, with None where nothing is given; int32 tokens."""

import torch
from transformers import BertConfig, BertForSequenceClassification

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


def config():
    return BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                      max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
                      problem_type="single_label_classification")  # fmt: skip


def data(step):
    generator = torch.Generator().manual_seed(step)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, 4:] = 0
    return torch.randint(0, 40, (2, 6), generator=generator), mask, torch.randint(0, 3, (2,), generator=generator)


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(16)
    model = BertForSequenceClassification(config())
    samba.from_torch_model_(model)
    ids = samba.randint(0, 30522, (2, 6), name="input_ids", batch_dim=0).int()
    mask = samba.from_torch_tensor(torch.ones(2, 6, dtype=torch.int64), name="attention_mask", batch_dim=0)
    labels = samba.randint(0, 3, (2,), name="labels", batch_dim=0)
    inputs = (ids, mask, None, None, None, labels)  # ids, mask, types, positions, embeddings, labels
    optim = samba.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="bert")
        return
    utils.trace_graph(model, inputs, optim, pef=args.pef)
    for step in range(2):
        tokens, mask, labels = data(step)
        loss, _ = samba.session.run([tokens.int(), mask, labels], model.output_tensors)
        print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
