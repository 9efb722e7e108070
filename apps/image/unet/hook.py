"""U-Net on pictures with masks.

python compile.py compile --in-channels=3 --in-width=256 --in-height=256 -b 256 --pef-name=unet --output-folder=out
python hook.py run --pef=out/unet/unet.pef --in-channels=3 --in-width=256 --in-height=256 -b 256 --epochs 10 --data-dir kaggle_3m
python hook.py test --pef=out/unet/unet.pef --in-channels=3 --in-width=256 --in-height=256 -b 256

Without --data-dir there are synthetic pictures, --num-samples of them. --init-features and --depth make the model small.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta
from tilework.data import Arrays, Feed, Position, Source
from tilework.data.formats import npy, pictures
from tilework.parallel import launched
from tilework.zoo import unet

STEPS_IN_A_RUN = 64  # mini-batches that one session.run takes at most; the numbers are those of single ones


class UNetWithLoss(nn.Module):
    """(loss, logits)"""

    def __init__(self, config: unet.Config) -> None:
        super().__init__()
        self.net = unet.UNet(config)

    def forward(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(image)
        return unet.dice_and_cross_entropy(logits, mask), logits


def add_common_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-channels", type=int, default=3, help="channels of a picture (default: 3)")
    parser.add_argument("--in-width", type=int, default=256, help="of a picture (default: 256)")
    parser.add_argument("--in-height", type=int, default=256, help="of a picture; pictures are square (default: 256)")
    parser.add_argument("--init-features", type=int, default=32, help="channels of the first level (default: 32)")
    parser.add_argument("--depth", type=int, default=4, help="levels below the first (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data (default: 0)")
    parser.add_argument("--enable-tiling", action="store_true", help="accepted, no effect")


def add_run_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--do-train", action="store_true", help="accepted: run trains")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default: 1)")
    parser.add_argument("--data-dir", default=None, help="folder of pictures NAME.tif with masks NAME_mask.tif")
    parser.add_argument("--num-samples", type=int, default=1024, help="synthetic pictures, without --data-dir (default: 1024)")
    parser.add_argument("--data-cache", default=None, help="folder for the decoded pictures, for the next run")
    parser.add_argument("--data-in-memory", action="store_true", help="decode all pictures before the training")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that decode pictures (default: 0)")
    parser.add_argument("--bad-records", choices=("stop", "skip"), default="stop", help="pictures that cannot be read")
    parser.add_argument("--log-dir", default=None, help="folder for TensorBoard")
    parser.add_argument("--min-throughput", type=float, default=None, help="fail below this many samples a second")
    parser.add_argument("--max-throughput", type=float, default=None, help="fail above this many samples a second")


def config_of(args: argparse.Namespace) -> unet.Config:
    if args.in_width != args.in_height or args.in_width % 2**args.depth:
        sys.exit(f"pictures of {args.in_width} x {args.in_height}: expected a square with sides divisible by {2**args.depth}")
    return unet.Config(in_channels=args.in_channels, init_features=args.init_features, depth=args.depth,
                       image_size=args.in_width, batch_size=args.batch_size)  # fmt: skip


def source_of(args: argparse.Namespace, config: unet.Config) -> Source:
    if args.data_dir is None:
        print(f"no --data-dir: {args.num_samples} synthetic pictures")
        return Arrays(unet.synthetic(config, args.num_samples, seed=1))
    source = pictures(args.data_dir, config.image_size)
    if args.data_cache is None:
        return Arrays(source.rows(np.arange(len(source)))) if args.data_in_memory else source
    key = hashlib.sha256(f"{Path(args.data_dir).resolve()} {config.image_size} {len(source)}".encode()).hexdigest()[:16]
    files = [Path(args.data_cache) / f"{key}-{what}.npy" for what in ("images", "masks")]
    if not all(file.exists() for file in files) and launched().rank == 0:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file, tensor in zip(files, source.rows(np.arange(len(source))), strict=True):
            part = file.with_suffix(".part.npy")
            np.save(part, tensor.numpy())
            part.rename(file)
        print(f"{len(source)} pictures decoded into {args.data_cache}")
    while not all(file.exists() for file in files):  # the first rank is at it
        time.sleep(0.1)
    found = npy([str(file) for file in files])
    return Arrays([torch.from_numpy(np.array(a)) for a in found.arrays]) if args.data_in_memory else found


def train(args: argparse.Namespace, model: nn.Module, feed: Feed, ranks: int) -> float:
    """Samples per second of all ranks together. Reading the data counts."""
    writer = None
    if args.log_dir and launched().rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.log_dir)
    begin, step = time.perf_counter(), 0
    for epoch in range(args.epochs):
        losses: list[float] = []
        for chunk in feed.chunks(Position(epoch), iter(lambda: STEPS_IN_A_RUN, None)):
            loss, _ = samba.session.run(
                input_tensors=[samba.from_torch_tensor(t, name=n, batch_dim=0)
                               for t, n in zip(chunk.inputs, ("image", "mask"), strict=True)],
                output_tensors=model.output_tensors,
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )  # fmt: skip
            losses += samba.to_torch(loss).reshape(-1).tolist()
            step += chunk.num_steps
            if writer is not None:
                writer.add_scalar("train/loss", losses[-1], step)
        print(f"Epoch [{epoch + 1}/{args.epochs}], Loss: {sum(losses) / len(losses):.4f}", flush=True)
    took = time.perf_counter() - begin
    rate = step * args.batch_size * ranks / took
    print(f"inner train loop time : {took} for {args.epochs} epochs, number of global steps: {step}, e2e samples_per_sec: {rate}")
    if writer is not None:
        writer.close()
    return rate


def compare(model: nn.Module, inputs: tuple, optimizer: torch.optim.Optimizer) -> None:
    """test: one step on the device and on the host; loss and gradients must agree."""
    loss, logits = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors)
    host_loss, host_logits = model(*[samba.to_torch(t) for t in inputs])
    utils.assert_close(loss, host_loss, "loss", threshold=1e-4, rtol=1e-3)
    utils.assert_close(logits, host_logits, "logits", threshold=1e-4, rtol=1e-3)
    optimizer.zero_grad()
    host_loss.mean().backward()
    for name, parameter in model.named_parameters():
        utils.assert_close(parameter.sn_grad, parameter.grad, f"gradient of {name}", threshold=1e-4, rtol=1e-2)
    print("test passed: host and device agree")


def main() -> None:
    args = parse_app_args(common_parser_fn=add_common_args, run_parser_fn=add_run_args)
    utils.set_seed(args.seed)
    config = config_of(args)
    shapes = {"image": (args.in_channels, args.in_height, args.in_width), "mask": (1, args.in_height, args.in_width)}
    inputs = tuple(samba.randn(args.batch_size, *shape, name=name, batch_dim=0) for name, shape in shapes.items())
    model = UNetWithLoss(config)
    samba.from_torch_model_(model)
    optimizer = samba.optim.Adam(model.parameters(), lr=args.lr)
    if args.command == "compile":
        samba.session.compile(
            model, inputs, optimizer, name="unet", app_dir=utils.get_file_dir(__file__), config_dict=vars(args),
            pef_metadata=get_pefmeta(args, model), init_output_grads=True,
        )  # fmt: skip
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        compare(model, inputs, optimizer)
    elif args.command == "run":
        args.num_spatial_batches = max(args.num_spatial_batches, STEPS_IN_A_RUN)
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping="spatial")
        rank, ranks = (launched().rank, launched().size) if args.data_parallel else (0, 1)
        feed = Feed(source_of(args, config), args.batch_size, seed=args.seed, rank=rank, ranks=ranks,
                    num_workers=args.num_workers, bad_records=args.bad_records, report=print)  # fmt: skip
        rate = train(args, model, feed, ranks)
        if args.min_throughput is not None and rate < args.min_throughput:
            sys.exit(f"{rate:.1f} samples a second, expected at least {args.min_throughput} (--min-throughput)")
        if args.max_throughput is not None and rate > args.max_throughput:
            sys.exit(f"{rate:.1f} samples a second, expected at most {args.max_throughput} (--max-throughput)")
    else:
        common_app_driver(args, model, inputs, optimizer, name="unet")


if __name__ == "__main__":
    main()
