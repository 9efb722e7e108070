"""GPT-2 pre-training, with the flags that its scripts have.

python transformers_hook.py compile --module_name gpt2_pretrain --task_name clm --max_seq_length 1024 -b 16 \
    --config_name configs/gpt2_config_xl_50260.json --pef-name=gpt15 --output-folder=out
python transformers_hook.py run --module_name gpt2_pretrain --task_name clm --max_seq_length 1024 -b 16 \
    --config_name configs/gpt2_config_xl_50260.json --pef=out/gpt15/gpt15.pef --data_dir DIR --steps_this_run 100

--size tiny or --size small is a model for a laptop, in place of --config_name. Without --data_dir there are synthetic sequences.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta
from tilework.data import Arrays, Feed, Position, Source
from tilework.data.formats import Hdf5, tokens
from tilework.parallel import launched
from tilework.zoo import gpt

HERE = Path(__file__).resolve().parent
STEPS_IN_A_RUN = 16  # mini-batches that one session.run takes at most; the numbers are those of single ones
SWITCHES = ("--overwrite_output_dir", "--do_train", "--non_split_head", "--skip_broadcast_patch", "--no_index_select_patch")
CLIP = 1.0
NO_LABEL = -100  # torch's cross entropy leaves it out


def add_common_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--module_name", choices=("gpt2_pretrain",), default="gpt2_pretrain", help="what to train")
    parser.add_argument("--task_name", choices=("clm",), default="clm", help="clm: the next token")
    parser.add_argument("--max_seq_length", type=int, default=None, help="tokens of a sequence (default: the model's)")
    parser.add_argument("--config_name", default=None, help="JSON with vocab_size, n_positions, n_embd, n_layer, n_head")
    parser.add_argument("--size", choices=("tiny", "small", "full"), default="full", help="without --config_name (default: full)")
    parser.add_argument("--per_device_train_batch_size", type=int, default=None, help="the same as -b")
    parser.add_argument("--max_grad_norm_clip", type=float, default=CLIP, help="norm of clipped gradients (default: 1)")
    parser.add_argument("--learning_rate", type=float, default=2.5e-4, help="of AdamW (default: 0.00025)")
    parser.add_argument("--output_dir", default="hf_output", help="folder for the weights at the end")
    parser.add_argument("--seed", type=int, default=42, help="of the weights and of the order of the data (default: 42)")
    for flag in ("--cache", "--tokenizer_name", "--model_name"):
        parser.add_argument(flag, default=None, help="accepted, no effect: data are tokens already")
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true", help="accepted, no effect")


def add_run_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data_dir", default=None, help="folder with *.h5 (input_ids) or *.bin (tokens of 16 bits)")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read the data (default: 0)")
    parser.add_argument("--logging_steps", type=int, default=1, help="steps between two lines (default: 1)")
    parser.add_argument("--max_steps", type=int, default=100, help="steps of the whole training (default: 100)")
    parser.add_argument("--steps_this_run", type=int, default=None, help="steps of this run (default: all)")
    parser.add_argument("--skip_checkpoint", action="store_true", help="save no weights at the end")
    parser.add_argument("--min_throughput", type=float, default=None, help="fail below this many sequences a second")
    parser.add_argument("--max_throughput", type=float, default=None, help="fail above this many sequences a second")


def config_of(args: argparse.Namespace) -> gpt.Config:
    config = gpt.SIZES[args.size]
    if args.config_name is not None:
        path = Path(args.config_name)
        path = path if path.exists() else HERE / "configs" / path.name
        if not path.exists():
            sys.exit(f"--config_name {args.config_name}: there is no such file, nor one of this name in {HERE / 'configs'}")
        found = json.loads(path.read_text())
        config = gpt.Config(vocabulary=found["vocab_size"], length=found["n_positions"], width=found["n_embd"],
                            num_layers=found["n_layer"], num_heads=found["n_head"],
                            dropout=found.get("resid_pdrop", 0.0))  # fmt: skip
    length = args.max_seq_length or config.length
    if length > config.length:
        sys.exit(f"--max_seq_length {length}: this model has {config.length} positions")
    return replace(config, length=length, batch_size=args.batch_size)


class Shifted:
    """Sequences of a data set, and the same ones a token later. What follows the last token of a row is not known: no label."""

    def __init__(self, source: Source, length: int) -> None:
        self.source, self.length, self.place = source, length, source.place
        found = source.rows(np.array([0]))[0].shape[1]
        if found < length:
            sys.exit(f"{source.place(0)} has {found} tokens, expected at least --max_seq_length {length}")

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self.source.rows(numbers)[0].to(torch.int64)
        labels = torch.nn.functional.pad(whole, (0, 1), value=NO_LABEL)[:, 1 : self.length + 1]
        return whole[:, : self.length].contiguous(), labels.contiguous()


def source_of(args: argparse.Namespace, config: gpt.Config) -> Source:
    if args.data_dir is None:
        print("no --data_dir: synthetic sequences")
        return Arrays(gpt.synthetic(config, 64 * args.batch_size, seed=1))
    for file in sorted(Path(args.data_dir).iterdir()):
        if file.suffix in (".h5", ".hdf5"):
            return Shifted(Hdf5(str(file), ["input_ids"]), config.length)
        if file.suffix == ".bin":
            return tokens(str(file), config.length)
    sys.exit(f"--data_dir {args.data_dir}: there is no *.h5, *.hdf5 or *.bin in it")


def say(facts: dict[str, object]) -> None:
    """In one piece: other instances write to the same place."""
    print(f"{facts}\n", end="", flush=True)


def train(args: argparse.Namespace, model: torch.nn.Module, feed: Feed, ranks: int) -> float:
    """Sequences per second of all ranks together. Reading the data counts."""
    steps = min(args.max_steps, args.steps_this_run or args.max_steps)
    begin, step, epoch, last = time.perf_counter(), 0, 0, float("nan")
    while step < steps:
        for chunk in feed.chunks(Position(epoch), iter(lambda: min(STEPS_IN_A_RUN, args.logging_steps), None)):
            count = min(chunk.num_steps, steps - step)
            parts = [t[: count * args.batch_size] for t in chunk.inputs]
            loss, _ = samba.session.run(
                input_tensors=[samba.from_torch_tensor(t, name=n, batch_dim=0)
                               for t, n in zip(parts, ("input_ids", "labels"), strict=True)],
                output_tensors=model.output_tensors,
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
                hyperparam_dict={"lr": args.learning_rate},
            )  # fmt: skip
            losses = samba.to_torch(loss).reshape(-1).tolist()
            for i, last in enumerate(losses, start=step + 1):
                if i % args.logging_steps == 0:
                    say({"loss": last, "step": i, "epoch": epoch})
            step += count
            if step >= steps:
                break
        epoch += 1
    took = time.perf_counter() - begin
    rate = step * args.batch_size * ranks / took
    say({"e2e_train_time": took, "training_sequences_per_second": rate, "final_loss": last})
    return rate


def main() -> None:
    args = parse_app_args(common_parser_fn=add_common_args, run_parser_fn=add_run_args)
    args.batch_size = args.per_device_train_batch_size or args.batch_size
    utils.set_seed(args.seed)
    config = config_of(args)
    if args.command == "run" and args.max_grad_norm_clip != CLIP:
        print(f"--max_grad_norm_clip {args.max_grad_norm_clip}: the norm is compiled into the PEF; it has to be the same there")
    shape = (args.batch_size, config.length)
    inputs = tuple(samba.randint(config.vocabulary, shape, name=name, batch_dim=0) for name in ("input_ids", "labels"))
    model = gpt.GPT(config)
    samba.from_torch_model_(model)
    optimizer = samba.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=args.max_grad_norm_clip
    )
    if args.command == "compile":
        samba.session.compile(
            model, inputs, optimizer, name="gpt2_pretrain", app_dir=utils.get_file_dir(__file__), config_dict=vars(args),
            pef_metadata=get_pefmeta(args, model), init_output_grads=True,
        )  # fmt: skip
    elif args.command == "run":
        args.num_spatial_batches = max(args.num_spatial_batches, STEPS_IN_A_RUN)
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping="spatial")
        rank, ranks = (launched().rank, launched().size) if args.data_parallel else (0, 1)
        feed = Feed(source_of(args, config), args.batch_size, seed=args.seed, rank=rank, ranks=ranks,
                    num_workers=args.num_workers, report=print)  # fmt: skip
        rate = train(args, model, feed, ranks)
        if not args.skip_checkpoint and rank == 0:
            samba.session.to_cpu(model)
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), Path(args.output_dir) / "pytorch_model.bin")
        if args.min_throughput is not None and rate < args.min_throughput:
            sys.exit(f"{rate:.1f} sequences a second, expected at least {args.min_throughput} (--min_throughput)")
        if args.max_throughput is not None and rate > args.max_throughput:
            sys.exit(f"{rate:.1f} sequences a second, expected at most {args.max_throughput} (--max_throughput)")
    else:
        common_app_driver(args, model, inputs, optimizer, name="gpt2_pretrain")


if __name__ == "__main__":
    main()
