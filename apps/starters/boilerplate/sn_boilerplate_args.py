"""The command line: what SambaFlow has anyway, and what this app adds."""

import argparse


def add_common_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-classes", type=int, default=10, help="number of classes")
    parser.add_argument("--num-features", type=int, default=784, help="pixels of an image")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the hidden layer")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.0, help="momentum")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="weight decay")


def add_run_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-e", "--num-epochs", type=int, default=1, help="epochs to train")
    parser.add_argument("--data-path", default="./data", help="where the data is")
    parser.add_argument("--data-folder", default="mnist_data", help="folder with MNIST below it")
    parser.add_argument("--log-path", default="checkpoints", help="where the trained weights go")
    parser.add_argument("--limit", type=int, default=None, help="train and test on this many samples only")
