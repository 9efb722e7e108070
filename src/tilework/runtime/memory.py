"""How much memory this process may still take: what the machine has free, and what the limits of its job leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes, or None where the system does not tell. `root`: the folder in which proc and sys are looked for."""
    left = [_available(root), *(_left(folder, *names) for folder, names in _groups(root))]
    return min((max(0, n) for n in left if n is not None), default=None)


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:") and line.split()[1].isdigit():
            return int(line.split()[1]) * 1024
    return None


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of the control groups that this process is in, from its own up to the root: a limit of any of them counts.
    Inside a container the path may be the host's, which is not to be seen there; the root is the container's own group then."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), names


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """What a group's limit leaves. File pages that nobody uses count as free: the system takes them back first."""
    most, now = _text(folder / limit).strip(), _text(folder / used).strip()
    if not most.isdigit() or not now.isdigit():  # no limit ("max"), or no such file
        return None
    pages = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return int(most) - int(now) + int(pages.get(reclaimable, "0"))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
