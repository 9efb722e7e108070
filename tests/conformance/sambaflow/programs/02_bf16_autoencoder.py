"""Convolution and its transpose on bfloat16 images, with the oldest names of the API."""

import torch
import torch.nn.functional as F

import sambaflow.samba as samba
import sambaflow.samba.utils as sn_utils
from sambaflow.samba.utils.argparser import parse_app_args


class AutoEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.up = torch.nn.ConvTranspose2d(3, 1, 2, stride=2)

    def forward(self, image):
        made = self.up(F.relu(self.down(image)))
        return F.l1_loss(made, image), made


def images(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(2, 1, 8, 8, generator=generator).bfloat16()


def main(argv=None):
    args = parse_app_args(argv)
    sn_utils.set_seed(1)
    net = AutoEncoder()
    samba.from_torch_(net)
    inputs = samba.from_torch(torch.zeros(2, 1, 8, 8).bfloat16(), name="image", batch_dim=0)
    optimizer = samba.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    if args.command == "compile":
        sn_utils.compile(net, inputs, optimizer, name="autoencoder", app_dir=sn_utils.get_file_dir(__file__))
        return
    sn_utils.trace_graph(args, net, inputs, optimizer)
    for step in range(3):
        loss, made = samba.session.run(samba.from_torch(images(step), name="image"), net.output_tensors)
        assert samba.to_torch(made).dtype == torch.float32
        print(f"loss {samba.to_torch(loss).item():.8f}")


if __name__ == "__main__":
    main()
