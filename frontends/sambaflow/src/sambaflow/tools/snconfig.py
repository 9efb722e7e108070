"""snconfig: what this node has (static), and the state of every tile now (dynamic)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

from tilework.errors import TileworkError
from tilework.tiles.client import view
from tilework.tiles.machine import Link, Machine, machine, processor
from tilework.tiles.topology import LEVELS as PLAIN
from tilework.tiles.topology import Node, node_of
from tilework.tiles.view import SessionView, TileView, View

from ..platforms import LEVELS, spelt

_LINE = "=" * 54


def _banner(word: str) -> list[str]:
    return [_LINE, f"{'=' * 7}{'NODE Info':^40}{'=' * 7}", _LINE, f"{'=' * 7}{word + ' Info':^40}{'=' * 7}",
            f"Timestamp: {time.strftime('%Y-%m-%d %H:%M:%S')}"]  # fmt: skip


def static(node: Node, here: Machine, banner: bool = True) -> str:
    """Memory and links are listed once, below the first chip that is near them; what the machine does not tell is N/A."""
    lines = _banner("Static") if banner else []
    lines += [f"Platform Name: {node.title}", "Node Name: NODE"]
    if node.note:
        lines.append(f"Note: {node.note}")
    board_name, chip_name, tile_name = LEVELS if node.levels == PLAIN else node.levels
    boards = sorted({t.board for t in node.tiles})
    lines.append(f"    Number of {board_name}S: {len(boards)}")
    listed: set[int] = set()  # memory nodes
    for board in boards:
        name = f"{board_name}_{board}"
        lines.append(f"    {board_name} Name: {name}")
        chips = [c for c in node.chips if c[0].board == board]
        lines.append(f"        Number of {chip_name}S: {len(chips)}")
        total = 0
        for place, chip in enumerate(chips):
            gpu = next((g for g in here.gpus if g.index == chip[0].gpu), None)
            near = {t.memory_node for t in chip} - listed if gpu is None else set()
            listed |= near
            lines.append(f"        {chip_name} name: {chip_name}_{place}")
            lines.append(f"            Model             : {gpu.name if gpu else processor()}")
            lines.append(f"            Serial Number     : {gpu.serial if gpu else 'N/A'}")
            lines.append(f"            Number of {tile_name}S: {len(chip)}")
            for i, tile in enumerate(chip):
                lines.append(f"            {tile_name} Name: {tile_name}_{i}")
                lines.append("                Serial Number     : N/A")
                share = f"{tile.multiprocessors or 'N/A'} multiprocessors" if gpu else ",".join(map(str, tile.cpus))
                lines.append(f"                {'Share' if gpu else 'CPUs '}             : {share}")
            gpus = {g.address for g in here.gpus}
            lines += _links([k for k in here.links if (k.address == gpu.address if gpu else
                                                       k.memory_node in near and k.address not in gpus)])  # fmt: skip
            memory = [(f"DIMM_{chr(65 + n % 26)}0", here.memory.get(n, 0)) for n in sorted(near)]
            if gpu is not None:
                memory = [("HBM", gpu.memory_bytes)]
            total += sum(size for _, size in memory)
            lines.append(f"            Number of DDRCHs: {len(memory)}")
            for i, (dimm, size) in enumerate(memory):
                lines += [f"            DDR CH Name: DDRCH_{i}", "                Number of DIMMS: 1",
                          f"                DIMM Name: {dimm}", f"                    Size              : {size / 2**30:.1f} GB",
                          "                    Serial Number     : N/A"]  # fmt: skip
        lines.append(f"        Total {name} memory size (GB): {total / 2**30:.1f}")
    return "\n".join(lines)


def _links(links: Sequence[Link]) -> Iterator[str]:
    yield f"            Number of PCIES: {len(links)}"
    for i, link in enumerate(links):
        rate = float(link.speed.split()[0])
        # A lane carries `rate` GT/s with 8b/10b coding up to 5 GT/s, 128b/130b above.
        bandwidth = rate * link.width / 8 * (0.8 if rate <= 5 else 128 / 130)
        yield f"            PCIE Name: PCIE_{i}"
        yield f"                Bandwidth         : {bandwidth:.0f} GB/s"
        yield f"                Speed             : {rate:g} GT/s"
        yield f"                Width             : {link.width}"
        yield "                Serial Number     : N/A"


def dynamic(seen: View) -> str:
    """One `perfect` line a chip, which counts the tiles that are neither hung nor drained; then every tile; then who has none."""
    lines = [*_banner("Dynamic"), f"Platform Name: {seen.title}", "Node Name: NODE"]
    if seen.note:
        lines.append(f"Note: {seen.note}")
    leases = {lease.id: lease for lease in seen.leases}
    chips: dict[int, list[TileView]] = {}
    for tile in seen.tiles:
        chips.setdefault(tile.chip, []).append(tile)
    for tiles in chips.values():
        bad = [text for t in tiles if (text := _trouble(t, leases))]
        where = spelt(tiles[0].path, seen.levels).rsplit("/", 1)[0]
        lines.append(f"{where} tiles perfect: {len(tiles) - len(bad)} of {len(tiles)}" + (f" ({'; '.join(bad)})" if bad else ""))
        for tile in tiles:
            who = f", {_who(leases[tile.lease])}" if tile.lease is not None else ""
            lines.append(f"    {spelt(tile.path, seen.levels).rsplit('/', 1)[1]:<8} : {tile.state}{who}")
    lines += [f"shared       : {x.state}, {_who(x)}" for x in seen.shared]
    return "\n".join(lines)


def _who(x: SessionView) -> str:
    return f"pid {x.pid}, user {x.user}"


def _trouble(tile: TileView, leases: dict[str, SessionView]) -> str:
    name = spelt(tile.path, PLAIN).rsplit("/", 1)[1] if tile.path.startswith(f"/{PLAIN[0]}_") else tile.path.rsplit("/", 1)[1]
    if tile.state == "hung" and tile.lease is not None:
        return f"{name} hung, {_who(leases[tile.lease])}"
    if tile.drained is not None:
        return f"{name} drained{': ' + tile.drained if tile.drained else ''}"
    return ""


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="snconfig", description="What this node has, and the state of its tiles.")
    p.add_argument("words", nargs="*", metavar="show Node static|dynamic", help="without them: the static configuration")
    p.add_argument("--platform", default=os.environ.get("TILEWORK_PLATFORM"), help="host, SN10-8, SN30-8, or the site's own")
    args = p.parse_args(argv)
    words = [w.lower() for w in args.words]
    if words and (words[:1] != ["show"] or words[1:2] not in ([], ["node"]) or words[2:] not in ([], ["static"], ["dynamic"])):
        p.error(f"cannot understand {' '.join(args.words)!r}: expected show Node static, or show Node dynamic")
    try:
        seen = view(2.0, args.platform)  # one look, so that both parts are about the same node
        if seen.platform_note:
            print(f"snconfig: {seen.platform_note}", file=sys.stderr)
        if words[2:] != ["dynamic"]:
            print(static(node_of(seen), machine(), banner=bool(words)))
        if words and words[2:] != ["static"]:
            print(dynamic(seen))
        sys.stdout.flush()
    except TileworkError as e:
        print(f"snconfig: {e}", file=sys.stderr)
        return e.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # snconfig | head
    except OSError as e:  # nowhere to print to
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"snconfig: {e}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
