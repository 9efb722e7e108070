"""Two graphs of one model in one PEF: a whole prompt, and one token with the state so far."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.graph import FwdGraph
from sambaflow.samba.utils.argparser import parse_app_args


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(13, 6), nn.Linear(12, 6), nn.Linear(6, 13)

    def forward(self, tokens, state=None):
        state = torch.zeros(tokens.shape[0], 6) if state is None else state
        for t in range(tokens.shape[1]):
            state = torch.tanh(self.cell(torch.cat([self.embed(tokens[:, t]), state], 1)))
        return self.head(state), state


def generate(prompt, steps, first, then):
    """The chosen tokens and the largest score of each step."""
    logits, state = first(prompt)
    chosen, scores = [], []
    for _ in range(steps):
        chosen.append(logits.argmax(-1, keepdim=True))
        scores.append(float(logits.max()))
        logits, state = then(chosen[-1], state)
    return torch.cat(chosen, 1), scores


def prompt():
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(10))


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(10)
    model = Language().eval()
    samba.from_torch_model_(model)
    prompt_inputs = (samba.randint(32000, (2, 5), name="tokens", batch_dim=0),)
    token_inputs = (samba.randint(32000, (2, 1), name="token", batch_dim=0), samba.randn(2, 6, name="state", batch_dim=0))
    prompt_outputs = utils.trace_multigraph(model, prompt_inputs, trace_prefix="prompt")
    token_outputs = utils.trace_multigraph(model, token_inputs, trace_prefix="token")
    samba.session.add_graph(FwdGraph(prompt_inputs, prompt_outputs, name="prompt"))
    samba.session.add_graph(FwdGraph(token_inputs, token_outputs, name="token"))
    if args.command == "compile":
        print(samba.session.compile_multigraph(name="language", config_dict=vars(args), enable_hypersection=True, inference=True))
        return
    samba.session.init_multigraph_runtime(args.pef)
    tokens, scores = generate(
        prompt(),
        4,
        lambda p: samba.session.run(input_tensors=[p], output_tensors=prompt_outputs, graph_name="prompt"),
        lambda t, s: samba.session.run([t, s], token_outputs, graph_name="token"),
    )
    print("tokens", tokens.tolist())
    for score in scores:
        print(f"loss {score:.8f}")


if __name__ == "__main__":
    main()
