"""The tiles of other nodes, by their daemons' read-only listeners (endpoint.py): what a login node can show of a cluster."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import MachineError, UserError
from .site import Site, read_site
from .view import View

SECONDS = 5.0  # for one node's answer
AT_ONCE = 32
_views = msgspec.json.Decoder(View)  # before there are threads (artifact/manifest.py says why)


@dataclass(frozen=True)
class Seen:
    """One node: what its daemon says, or why it says nothing."""

    node: str
    view: View | None
    why: str = ""


def look(partition: str | None = None, site: Site | None = None) -> list[Seen]:
    """All nodes, asked at the same time."""
    site = site or read_site()
    try:
        token = Path(site.cluster.token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError("tiles-cluster", f"{site.cluster.token_file}: the token for the nodes' daemons cannot be read",
                        found=str(e), fix="ask the administrator (cluster.token_file of the site file)") from e  # fmt: skip
    nodes = _nodes(site, partition)
    with ThreadPoolExecutor(min(AT_ONCE, len(nodes))) as pool:
        return list(pool.map(lambda node: _ask(node, token, site.cluster.port), nodes))


def _nodes(site: Site, partition: str | None) -> list[str]:
    """name, or name=host:port. Those of a partition are Slurm's word."""
    known = {word.partition("=")[0]: word for word in site.cluster.nodes}
    if known and partition is None:
        return list(known.values())
    words = ["sinfo", "-h", "-N", "-o", "%N", *(["-p", partition] if partition else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise MachineError("tiles-cluster", "Slurm does not say which nodes there are", found=str(e),
                           fix="name them in the site file: [cluster] nodes = [...]") from e  # fmt: skip
    names = list(dict.fromkeys(done.stdout.split()))
    if done.returncode or not names:
        raise UserError("tiles-cluster", "there are no such nodes", found=(done.stderr.strip() or partition or "")[:200],
                        fix="see sinfo, or name them in the site file: [cluster] nodes = [...]")  # fmt: skip
    return [known.get(name, name) for name in names]


def _ask(node: str, token: str, port: int) -> Seen:
    name, _, address = node.partition("=")
    url = f"http://{address or f'{name}:{port}'}/tiles"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=SECONDS) as answer:
            return Seen(name, _views.decode(answer.read()))
    except urllib.error.HTTPError as e:
        return Seen(name, None, "the token is not the node's" if e.code == 401 else f"its daemon answers {e.code}")
    except (OSError, ValueError, msgspec.DecodeError) as e:
        return Seen(name, None, str(getattr(e, "reason", None) or e)[:120])
