"""Where the ranks meet: an address that all of them can work out before any of them has spoken to another.

MASTER_ADDR and MASTER_PORT where they are set (torchrun sets them). On one machine, a small file in which rank 0 says its port:
no port has to be guessed. In a Slurm step, the first node's name and a port made from the job's number."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import MachineError, UserError
from .environment import Launched

_FIRST_PORT, _PORTS = 20000, 20000


def job_key(here: Launched, env: Mapping[str, str] = os.environ) -> str:
    """What the ranks of one launch have in common, and no other launch has."""
    if here.launcher == "tilework":
        return env.get("TILEWORK_LAUNCH", "")
    if env.get("SLURM_JOB_ID") and here.launcher in ("slurm", "pmi"):
        return f"slurm-{env['SLURM_JOB_ID']}-{env.get('SLURM_STEP_ID', '')}"
    if here.launcher == "openmpi":
        return "openmpi-" + (env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or f"{_parent()}")
    return f"{here.launcher}-{_parent()}"


def _parent() -> str:
    """The process that started the ranks of this machine: its number is used again, its number and start are not."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "0"
    return f"{parent}-{started}"


def address(here: Launched, timeout: float, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """(host, port) at which rank 0 listens. Port 0 for rank 0 on one machine: it takes a free one, and says so (`publish`)."""
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if host and port:
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError("ranks-address", "MASTER_PORT is not a port", found=port, expected="a number from 1 to 65535")
        return host, int(port)
    if here.one_node:
        return "127.0.0.1", 0 if here.rank == 0 else _published(here, timeout, env)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if nodes:
        digest = int(hashlib.sha256(job_key(here, env).encode()).hexdigest()[:8], 16)
        return slurm_address(first_host(nodes)), int(port) if port.isdigit() else _FIRST_PORT + digest % _PORTS
    raise UserError(
        "ranks-address", f"{here.size} ranks on several machines, and nobody says where rank 0 is",
        found=f"launched by {here.launcher}", expected="MASTER_ADDR and MASTER_PORT",
        fix="set both in every rank's environment: mpirun -genv MASTER_ADDR=head -genv MASTER_PORT=29500 (MPICH), "
            "mpirun -x MASTER_ADDR=head -x MASTER_PORT=29500 (Open MPI)",
    )  # fmt: skip


def first_host(nodes: str) -> str:
    """Of Slurm's node[07-09,12],other the first: node07."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


def slurm_address(node: str) -> str:
    """A node's name where that is an address too; else what Slurm says its address is."""
    with contextlib.suppress(OSError):
        socket.gethostbyname(node)
        return node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, timeout=10).stdout
        if (match := re.search(r"NodeAddr=(\S+)", said)) is not None:
            return match[1]
    return node


# ---- one machine: a file ----


def _place(here: Launched, env: Mapping[str, str]) -> Path:
    """In this user's own folder: nobody else can say where rank 0 is."""
    base = env.get("XDG_RUNTIME_DIR") or ""
    folder = Path(base) / "tilework" if base and Path(base).is_dir() else Path(tempfile.gettempdir()) / f"tilework-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise MachineError("ranks-address", f"{folder} belongs to somebody else, or others can write to it",
                           fix="remove it, or set XDG_RUNTIME_DIR to a folder of your own")  # fmt: skip
    return folder / f"ranks-{hashlib.sha256(job_key(here, env).encode()).hexdigest()[:24]}"


def publish(here: Launched, port: int, env: Mapping[str, str] = os.environ) -> Path:
    """Rank 0 says its port to the ranks of this machine. The caller removes the file when all have come."""
    place = _place(here, env)
    part = place.with_suffix(f".{os.getpid()}")
    part.write_text(f"{port} {os.getpid()}\n")
    part.replace(place)
    return place


def _published(here: Launched, timeout: float, env: Mapping[str, str]) -> int:
    place, end = _place(here, env), time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            port, pid = place.read_text().split()
            os.kill(int(pid), 0)  # left over from a launch that was killed: wait for the new one
            return int(port)
        time.sleep(0.005)
    raise MachineError("ranks-missing", f"rank {here.rank} of {here.size} waited {timeout:.0f} s for rank 0, which did not come",
                       found=f"no {place}", fix="see what rank 0 printed; was it started on this machine?")  # fmt: skip


# ---- several machines: which of this machine's addresses ----


def own_interface(host: str, port: int) -> str:
    """The network interface that leads to `host`, by name; empty where the system does not say. gloo would take the address that
    this machine's own name stands for, which on Debian is 127.0.1.1: nobody else can reach it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((host, port))
            own = s.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, found in _addresses() if found == own), "")


def _addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this machine."""
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def require_reachable(host: str, port: int, here: Launched) -> None:
    """A head node whose name stands for loopback looks well to itself and is unreachable to the others."""
    try:
        found = socket.gethostbyname(host)
    except OSError as e:
        raise MachineError("ranks-address", f"rank 0's machine {host} has no address", found=str(e),
                           fix="set MASTER_ADDR to an address that every machine can reach") from None  # fmt: skip
    if here.rank == 0 or not found.startswith("127."):
        return
    end = time.monotonic() + 10  # there are clusters within one machine, where this is right
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((found, port), 1):
            return
        time.sleep(0.1)
    raise MachineError(
        "ranks-address", f"rank 0's machine {host} resolves to {found}, which every machine takes for itself",
        expected="an address that the other machines can reach",
        fix="set MASTER_ADDR to its address in the cluster's network, or mend /etc/hosts there (Debian writes 127.0.1.1)",
    )  # fmt: skip
