"""vipu: leases as partitions. popc --version: the check whether the SDK is there."""

from __future__ import annotations

import argparse
import sys

from .. import __version__
from .devices import devices, guarded


def vipu(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="vipu", description="Leases of this machine's tiles, as partitions.")
    p.add_argument("--version", action="version", version=f"v-ipu {__version__}")
    p.add_argument("action", choices=("list", "create", "remove"), help="list; leases are made by who uses them")
    p.add_argument("what", choices=("partition", "partitions", "allocation", "allocations", "ipu-attrs"))
    p.add_argument("rest", nargs=argparse.REMAINDER)
    args = p.parse_args(argv)
    if args.action != "list":
        print("vipu: partitions are leases here, which a job or a process takes and gives back by itself\n"
              "  fix: srun --ipus=4 python train.py, or TILEWORK_TILES=chips:4 python train.py", file=sys.stderr)  # fmt: skip
        return 2

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
