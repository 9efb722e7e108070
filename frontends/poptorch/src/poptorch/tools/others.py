"""vipu: leases as partitions. popc --version: the check whether the SDK is there."""

from __future__ import annotations

import argparse
import sys

from tilework.errors import UserError
from tilework.tiles.keep import keep, let_go

from .. import __version__
from .devices import devices, guarded


def vipu(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="vipu", description="Leases of this machine's tiles, as partitions.")
    p.add_argument("--version", action="version", version=f"v-ipu {__version__}")
    p.add_argument("action", choices=("list", "create", "remove"))
    p.add_argument("what", choices=("partition", "partitions", "allocation", "allocations", "ipu-attrs"))
    p.add_argument("name", nargs="?", default="")
    p.add_argument("--size", type=int, default=1, help="how many IPUs: a power of two")
    p.add_argument("--reconfigurable", action="store_true", help="has no effect here")
    args, rest = p.parse_known_args(argv)
    if args.action != "list":
        problem = (
            f"{args.action} {args.what} is not here: only partitions are created and removed" if args.what != "partition" else
            f"unknown: {' '.join(rest)}" if rest else
            f"vipu {args.action} partition NAME needs a name" if not args.name else
            f"the size is a power of two, not {args.size}" if args.size < 1 or args.size & (args.size - 1) else ""
        )  # fmt: skip
        if problem:
            print(f"vipu: {problem}", file=sys.stderr)
            return 2

        def change() -> None:
            if args.action == "create":
                if args.size > (have := len(devices())):
                    raise UserError("poptorch-devices", "a partition of this size does not exist here", found=str(args.size),
                                    expected=f"at most {have}")  # fmt: skip
                keep(args.name, f"chips:{args.size}")
            else:
                let_go(args.name)
            print(f"{args.action} partition ({args.name}): success.")

        return guarded("vipu", change)

    def show() -> None:
        found = devices()
        if args.what == "ipu-attrs":
            print("\n".join(f"{d.number}: {len(d.tiles)} tiles, {d.state}" for d in found))
            return
        print(f" {'Name':<24}| {'User':<12}| {'Tiles':<6}| Process")
        print("-" * 64)
        for lease in {h.id: h for d in found for h in d.holders}.values():
            print(
                f" {lease.label or lease.job or lease.id:<24}| {lease.user:<12}| {len(lease.tiles):<6}| {lease.pid} "
                f"{lease.command[:40]}"
            )

    return guarded("vipu", show)


def popc(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="popc", description="Only --version: codelets of a chip cannot be compiled here.")
    p.add_argument("--version", action="store_true")
    args, rest = p.parse_known_args(argv)
    if not args.version or rest:
        print("popc: codelets are code of the chip, and cannot be compiled here\n"
              "  fix: write the operator with torch, and poptorch.register_custom_op", file=sys.stderr)  # fmt: skip
        return 2
    print(f"POPLAR version {__version__.split('+')[0]} (tilework)\nno clang: nothing is compiled for a chip here")
    return 0


def run_vipu() -> None:
    sys.exit(vipu())


def run_popc() -> None:
    sys.exit(popc())
