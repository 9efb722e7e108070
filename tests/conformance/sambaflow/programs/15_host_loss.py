"""The loss is computed on the host: fwd, backward there, then bckwd and opt with what came of it. Images are bfloat16."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, image):
        return self.out(torch.relu(self.conv(image)))


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 1, 6, 6, generator=generator).bfloat16(), torch.randint(0, 3, (2, 6, 6), generator=generator).byte()


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(15)
    model = Segmenter()
    samba.from_torch_model_(model)
    inputs = (samba.randn(2, 1, 6, 6, name="image", batch_dim=0).bfloat16(),)
    optim = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="segmenter", init_output_grads=True)
        return
    utils.trace_graph(model, inputs, optim, init_output_grads=True, pef=args.pef)
    for step in range(4):
        image, label = data(step)
        (scores,) = samba.session.run([image], model.output_tensors, section_types=["fwd"])
        scores = scores.detach().requires_grad_()
        loss = nn.functional.cross_entropy(scores, label)  # uint8 labels, on a SambaTensor
        loss.backward()
        if step % 2:
            model.output_tensors[0].sn_grad = scores.grad
            samba.session.run([image], model.output_tensors, section_types=["bckwd", "opt"])
            model.output_tensors[0].sn_grad = None
        else:
            samba.session.run([image], model.output_tensors, grad_of_outputs=[scores.grad], section_types=["BCKWD", "OPT"])
        print(f"loss {loss.item():.8f}")


if __name__ == "__main__":
    main()
