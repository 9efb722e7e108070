"""`test`: the converted model on plain tensors gives SambaTensors, which are compared with the device's, values and gradients."""

import torch
from torch import nn

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x, y):
        out = self.b(torch.relu(self.a(x)))
        return nn.functional.cross_entropy(out, y), {"logits": out, "best": out.argmax(1)}


def main(argv=None):
    args = parse_app_args(argv)
    utils.set_seed(9)
    model = Net()
    samba.from_torch_model_(model)
    inputs = samba.randn(5, 4, name="x", batch_dim=0), samba.randint(3, (5,), name="y", batch_dim=0)
    optim = samba.optim.SGD(model.parameters(), lr=0.1)
    if args.command == "compile":
        samba.session.compile(model, inputs, optim, name="net")
    elif args.command == "test":
        utils.trace_graph(model, inputs, optim, pef=args.pef)
        x, y = torch.randn(5, 4).bfloat16(), torch.randint(0, 3, (5,)).short()
        golden, more = model(x, y)
        loss, logits, best = samba.session.run([x, y], model.output_tensors, section_types=["FWD", "BCKWD"])
        utils.assert_close(golden.torch(), loss, "loss", 1e-5)
        utils.assert_close(more["logits"].torch(), logits, "logits", threshold=1e-5)
        assert isinstance(golden, samba.SambaTensor) and torch.equal(more["best"].torch(), samba.to_torch(best))
        golden.backward()
        for name, p in model.named_parameters():
            utils.assert_close(p.grad, p.sn_grad, name, 1e-5)
            assert float(p.grad.abs().sum()) > 0
        print(f"loss {loss.item():.8f} golden {float(golden.torch()):.8f}")


if __name__ == "__main__":
    main()
