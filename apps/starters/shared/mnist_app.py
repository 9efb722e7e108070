"""What the MNIST starters share: arguments, training, testing, and the dispatch on the command.

A starter gives a model whose forward takes (image, label) and returns (loss, logits), and its own arguments. The rest is here,
written against the same interface that any program uses: compile, trace_graph, session.run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.benchmark_acc import AccuracyReport
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.dataset.mnist import load_dataset
from sambaflow.samba.utils.pef_utils import get_pefmeta

STEPS_IN_A_RUN = 1000  # mini-batches that one session.run takes; the numbers are those of single ones
PRINTS_IN_AN_EPOCH = 6


def add_common_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-classes", type=int, default=10, help="number of classes (default: 10)")
    parser.add_argument("--data-path", default="./data", help="where the data is (default: ./data)")
    parser.add_argument("--data-folder", default="mnist_data", help="folder with MNIST below it (default: mnist_data)")
    parser.add_argument("--seed", type=int, default=256, help="of the weights and of the order of the data (default: 256)")


def add_optimizer_args(parser: argparse.ArgumentParser, lr: float, weight_decay: float) -> None:
    parser.add_argument("--lr", type=float, default=lr, help=f"learning rate (default: {lr})")
    parser.add_argument("--momentum", type=float, default=0.0, help="momentum (default: 0)")
    parser.add_argument("--weight-decay", type=float, default=weight_decay, help=f"weight decay (default: {weight_decay})")


def add_run_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-e", "--num-epochs", type=int, default=1, help="epochs to train (default: 1)")
    parser.add_argument("--num-workers", type=int, default=0, help="accepted; the data is in memory")
    parser.add_argument("--log-path", default=None, help="folder for TensorBoard logs and checkpoints")
    parser.add_argument("--measure-train-performance", action="store_true", help="print samples a second of the training")
    parser.add_argument("--limit", type=int, default=None, help="train and test on this many samples only")
    parser.add_argument("--lr-schedule", choices=("constant", "linear"), default="constant", help="linear: down to 0 at the end")


class Log:
    """TensorBoard, where --log-path is given and the package is there."""

    def __init__(self, folder: str | None) -> None:
        self.writer = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(folder)
            except ImportError:
                print("no TensorBoard logs: pip install tensorboard", file=sys.stderr)

    def scalar(self, name: str, value: float, step: int) -> None:
        if self.writer is not None:
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _progress(done: int, total: int, loss: float) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        print(f"\r\033[K{bar:<30} {done}/{total}  loss {loss:.4f}", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def train(args: argparse.Namespace, model: nn.Module, images: Tensor, labels: Tensor, log: Log) -> None:
    """One session.run for many mini-batches: as many optimizer steps, and one loss each."""
    batch, total = args.batch_size, len(labels) // args.batch_size
    chunk = max(1, min(STEPS_IN_A_RUN, total // PRINTS_IN_AN_EPOCH))
    hyperparam_dict = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    all_steps = args.num_epochs * total
    order = torch.Generator().manual_seed(args.seed)
    begin = time.perf_counter()
    for epoch in range(args.num_epochs):
        shuffled = torch.randperm(len(labels), generator=order)
        sum_of_losses, done, printed = 0.0, 0, 0
        while done < total:
            steps = min(chunk, total - done)
            pick = shuffled[done * batch : (done + steps) * batch]
            if args.lr_schedule == "linear":
                hyperparam_dict["lr"] = args.lr * (1 - (epoch * total + done) / all_steps)
            loss, _ = samba.session.run(
                input_tensors=[samba.from_torch_tensor(images[pick], name="image", batch_dim=0),
                               samba.from_torch_tensor(labels[pick], name="label", batch_dim=0)],
                output_tensors=model.output_tensors,
                hyperparam_dict=hyperparam_dict,
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )  # fmt: skip
            losses = samba.to_torch(loss).reshape(-1)
            sum_of_losses, done = sum_of_losses + float(losses.sum()), done + steps
            mean = sum_of_losses / done
            log.scalar("train/loss", float(losses.mean()), epoch * total + done)
            _progress(done, total, mean)
            if done * PRINTS_IN_AN_EPOCH // total > printed or done == total:
                printed = done * PRINTS_IN_AN_EPOCH // total
                _clear_progress()
                print(f"Epoch [{epoch + 1}/{args.num_epochs}], Step [{done}/{total}], Loss: {mean:.4f}", flush=True)
    if args.measure_train_performance:
        took = time.perf_counter() - begin
        print(f"train time: {took:.3f} s, {args.num_epochs * total * batch / took:.1f} samples/s")


def evaluate(args: argparse.Namespace, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """(accuracy in percent, mean loss): forward only, on the device."""
    batch, right, loss_sum = args.batch_size, 0, 0.0
    model.eval()
    count = len(labels) // batch
    for start in range(0, count, STEPS_IN_A_RUN):
        steps = min(STEPS_IN_A_RUN, count - start)
        part = slice(start * batch, (start + steps) * batch)
        loss, logits = samba.session.run(
            input_tensors=[images[part], labels[part]], output_tensors=model.output_tensors, section_types=["fwd"]
        )
        right += int((samba.to_torch(logits).argmax(1) == labels[part]).sum())
        loss_sum += float(samba.to_torch(loss).sum())
    model.train()
    return 100 * right / (count * batch), loss_sum / count


def compare(args: argparse.Namespace, model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> None:
    """test: one step on the device and on the host; outputs, gradients and updated weights must agree."""
    loss, logits = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors)
    host_loss, host_logits = model(*[samba.to_torch(t) for t in inputs])
    utils.assert_close(loss, host_loss, "loss", threshold=1e-5, rtol=1e-4)
    utils.assert_close(logits, host_logits, "logits", threshold=1e-5, rtol=1e-4)
    optimizer.zero_grad()
    host_loss.mean().backward()
    for name, parameter in model.named_parameters():
        utils.assert_close(parameter.sn_grad, parameter.grad, f"gradient of {name}", threshold=1e-6, rtol=1e-4)
    optimizer.step()
    for name, parameter in model.named_parameters():
        utils.assert_close(parameter.sn_data, parameter, f"updated {name}", threshold=1e-6, rtol=1e-4)
    print("test passed: host and device agree")


def main(
    name: str,
    make_model: Callable[[argparse.Namespace], nn.Module],
    image_shape: Callable[[argparse.Namespace], tuple[int, ...]],
    add_args: Callable[[argparse.ArgumentParser], None],
    lr_schedule: str = "constant",
) -> None:
    def running(parser: argparse.ArgumentParser) -> None:
        add_run_args(parser)
        parser.set_defaults(lr_schedule=lr_schedule)

    def common(parser: argparse.ArgumentParser) -> None:
        add_common_args(parser)
        add_args(parser)

    args = parse_app_args(common_parser_fn=common, run_parser_fn=running, test_parser_fn=running)
    utils.set_seed(args.seed)
    shape = image_shape(args)
    inputs = (
        samba.randn(args.batch_size, *shape, name="image", batch_dim=0),
        samba.randint(args.num_classes, (args.batch_size,), name="label", batch_dim=0),
    )
    model = make_model(args)
    samba.from_torch_model_(model)
    optimizer = None
    if not args.inference:
        optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)

    if args.command == "compile":
        samba.session.compile(
            model, inputs, optimizer, name=name, app_dir=utils.get_file_dir(__file__), config_dict=vars(args),
            pef_metadata=get_pefmeta(args, model), init_output_grads=not args.inference,
        )  # fmt: skip
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        compare(args, model, inputs, optimizer)
    elif args.command == "run":
        args.num_spatial_batches = max(args.num_spatial_batches, STEPS_IN_A_RUN)
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping="spatial")
        train_set, test_set = load_dataset(args)
        log = Log(args.log_path)
        if not args.inference:
            train(args, model, *_flat(train_set, shape, args.limit), log)
        accuracy, loss = evaluate(args, model, *_flat(test_set, shape, args.limit))
        print(f"Test Accuracy: {accuracy:.2f} Loss: {loss:.4f}")
        log.scalar("test/accuracy", accuracy, args.num_epochs)
        log.close()
        if args.log_path and not args.inference:
            samba.session.to_cpu(model)
            torch.save(model.state_dict(), Path(args.log_path) / f"{name}.pt")
        if args.acc_report_json:
            AccuracyReport(val_metrics={"acc": accuracy, "loss": loss}, batch_size=args.batch_size).save(args.acc_report_json)
    else:
        common_app_driver(args, model, inputs, optimizer, name=name)


def _flat(dataset: Any, shape: tuple[int, ...], limit: int | None) -> tuple[Tensor, Tensor]:
    images = dataset.images[:limit].reshape(-1, *dataset.images.shape[1:])
    if len(shape) == 1:
        images = images.reshape(len(images), -1)
        images = nn.functional.pad(images, (0, shape[0] - images.shape[1]))
    return images.contiguous(), dataset.labels[:limit]
