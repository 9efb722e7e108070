"""The update in parts, each of some of the parameters, so that replicas can share it out: each runs its parts and keeps only
their optimizer state. A last part writes what belongs to no parameter: counts of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..artifact.graph import Graph
from ..artifact.names import Buffer, Kind, is_kind

REST = "opt_rest"


def parts(opt: Graph, count: int) -> dict[str, Graph]:
    """Role -> graph. Parameters keep their order; parts are as even in bytes as that allows."""
    params = [Buffer(b).name for b, _ in opt.writes if is_kind(b, Kind.PARAM)]
    sizes = [opt.types[Kind.PARAM.of(p)].num_bytes for p in params]
    total, done, part_of = max(1, sum(sizes)), 0, dict[str, int]()
    for name, size in zip(params, sizes, strict=True):
        part_of[name] = min(count - 1, (done + size // 2) * count // total)
        done += size
    found: dict[str, Graph] = {}
    for i in sorted(set(part_of.values())):
        writes = tuple(w for w in opt.writes if part_of.get(_owner(w[0], part_of)) == i)
        found[f"opt_{len(found)}"] = replace(opt, writes=writes).prune()
    rest = tuple(w for w in opt.writes if not _owner(w[0], part_of))
    if rest:
        found[REST] = replace(opt, writes=rest).prune()
    return found


def _owner(buffer: str, part_of: Mapping[str, int]) -> str:
    """The parameter that a buffer belongs to: param/<name>, state/<name>/<key>. Empty for what belongs to none."""
    name = Buffer(buffer).name
    if is_kind(buffer, Kind.PARAM):
        return name
    owner = name.rpartition("/")[0]
    return owner if is_kind(buffer, Kind.STATE) and owner in part_of else ""
