"""sinfo over the local queue: one partition, one node, its tiles."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from ...tiles import client
from ...tiles.machine import ranges
from ...tiles.topology import HOST
from ..supervisor import PARTITION
from .flags import Failure, Parser, guarded, resources
from .tables import by_letters, by_names

_DEFAULT, _NODES = "%9P %.5a %.10l %.6D %.6t %N", "%N %.6D %.9P %.11T"


@dataclass(frozen=True)
class Node:
    name: str
    state: str
    gres: str
    used: str
    cpus: int


_FIELDS = {
    "P": ("PARTITION", lambda n: f"{PARTITION}*"), "R": ("PARTITION", lambda n: PARTITION), "a": ("AVAIL", lambda n: "up"),
    "l": ("TIMELIMIT", lambda n: "infinite"), "D": ("NODES", lambda n: "1"), "t": ("STATE", lambda n: n.state[:5]),
    "T": ("STATE", lambda n: n.state), "N": ("NODELIST", lambda n: n.name), "n": ("HOSTNAMES", lambda n: n.name),
    "G": ("GRES", lambda n: n.gres), "c": ("CPUS", lambda n: str(n.cpus)), "g": ("GRES_USED", lambda n: n.used),
    "S": ("ALLOCNODES", lambda n: "all"), "o": ("NODE_ADDR", lambda n: "127.0.0.1"), "E": ("REASON", lambda n: "none"),
}  # fmt: skip
_NAMES = {
    "partition": "P", "partitionname": "R", "available": "a", "time": "l", "nodes": "D", "statecompact": "t", "state": "T",
    "statelong": "T", "nodelist": "N", "nodehost": "n", "gres": "G", "cpus": "c", "gresused": "g", "allocnodes": "S",
    "nodeaddr": "o", "reason": "E",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return guarded("sinfo", lambda: _show(sys.argv[1:] if argv is None else argv))


def _show(argv: list[str]) -> int:
    known = Parser(prog="sinfo", allow_abbrev=False, add_help=False)
    known.add_argument("--help", action="help")
    known.add_argument("-p", "--partition", default="")
    known.add_argument("-n", "--nodes", default="")
    known.add_argument("-N", "--Node", action="store_true", dest="by_node")
    known.add_argument("-h", "--noheader", action="store_true")
    known.add_argument("-a", "--all", action="store_true")
    known.add_argument("-o", "--format", default="")
    known.add_argument("-O", "--Format", default="", dest="names")
    known.add_argument("more", nargs="*")  # -O A, B, C: people write spaces
    args = known.parse_args(argv)
    if args.more and not args.names.endswith(","):
        raise Failure(f"unrecognized argument '{args.more[0]}'")
    rows = [_node()]
    if (args.partition and PARTITION not in args.partition.split(",")) or (
        args.nodes and rows[0].name not in args.nodes.split(",")
    ):
        rows = []
    try:
        if args.names:
            names = args.names + " ".join(args.more)
            lines = by_names(names, rows, {name: _FIELDS[letter] for name, letter in _NAMES.items()}, not args.noheader)
        else:
            lines = by_letters(args.format or (_NODES if args.by_node else _DEFAULT), rows, _FIELDS, not args.noheader)
    except KeyError as e:
        raise Failure(f"Invalid field requested: {e.args[0]}") from None
    if lines:
        print("\n".join(lines))
    return 0


def _node() -> Node:
    seen = client.view()
    tiles = [t for t in seen.tiles if t.gpu is None]
    held = [i for i, t in enumerate(tiles) if t.lease is not None]
    drained = all(t.drained is not None for t in tiles)
    state = "drained" if drained else "idle" if not held else "allocated" if len(held) == len(tiles) else "mixed"
    chips = sorted({t.chip for t in tiles})
    busy = [n for n, chip in enumerate(chips) if any(t.chip == chip and t.lease is not None for t in tiles)]
    # A platform of a frontend's has chips that its users know by a name of their own.
    own = [name for name, kind in resources().items() if kind == "chips" and name != "chip"] if seen.platform != HOST else []
    name = own[0] if own else "tile"
    total, used = (len(chips), busy) if own else (len(tiles), held)
    return Node(socket.gethostname(), state, f"{name}:{total}", f"{name}:{len(used)}(IDX:{ranges(used) or 'N/A'})",
                os.cpu_count() or 1)  # fmt: skip
