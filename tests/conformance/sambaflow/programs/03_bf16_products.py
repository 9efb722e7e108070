"""Every kind of matrix product, with one operand in half the width of the other; then float16 probabilities in a loss."""

import torch
import torch.nn.functional as F
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5) * 0.3)
        self.stack = nn.Parameter(torch.randn(2, 5, 5) * 0.3)
        self.bias = nn.Parameter(torch.zeros(5))
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x, target):
        h = x @ self.w
        h = h + torch.bmm(x, self.stack) + torch.einsum("bij,jk->bik", x, self.w)
        h = h + torch.addmm(self.bias, x.reshape(-1, 5), self.w).reshape(x.shape) + samba.matmul(x, self.w)
        h = h + torch.baddbmm(x, x, self.stack) + self.attention(x, x, x)[0]
        return F.binary_cross_entropy_with_logits(h.mean(-1), target)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 5, generator=generator).bfloat16(), torch.rand(2, 3, generator=generator).half()


def main(argv=None):
    args = parse_app_args(argv)
    torch.manual_seed(3)
    model = Products()
    samba.from_torch_model_(model)
    inputs = [samba.randn([2, 3, 5], name="x", batch_dim=0).bfloat16(), samba.randn([2, 3], name="target", batch_dim=0).half()]
    optim = samba.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim=optim, name="products", init_output_grads=not args.inference)
    elif args.command == "run":
        traced = utils.trace_graph(model, inputs, optim, pef=args.pef)
        for step in range(3):
            (loss,) = samba.session.run(input_tensors=data(step), output_tensors=traced)
            print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
