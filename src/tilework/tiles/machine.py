"""What the machine has: cores, memory nodes, GPUs, PCI links. Read from /sys, lscpu and NVML; nothing is guessed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

SYS = Path("/sys")


@dataclass(frozen=True)
class Core:
    """A physical core."""

    package: int
    memory_node: int
    cpus: tuple[int, ...]  # as the system counts them; several with SMT


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    serial: str
    multiprocessors: int
    memory_bytes: int
    memory_node: int
    address: str = ""  # on the PCI bus


@dataclass(frozen=True)
class Link:
    """A PCI device's link."""

    address: str
    speed: str  # "16.0 GT/s PCIe"
    width: int
    memory_node: int


@dataclass(frozen=True)
class Machine:
    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...] = ()
    memory: dict[int, int] = field(default_factory=dict)  # memory node -> bytes
    links: tuple[Link, ...] = ()


@cache
def machine() -> Machine:
    cores = _cores()
    nodes = sorted({c.memory_node for c in cores})
    return Machine(cores, _gpus(), {n: _memory(n, len(nodes) == 1) for n in nodes}, _links())


def numbers(text: str, most: int = 2**16) -> list[int]:
    """'0-3,8' -> [0, 1, 2, 3, 8], the way the kernel writes lists. ValueError also where they are more than `most`."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            begin, end = int(first), int(last or first)
            if end < begin or len(found) + end - begin >= most:
                raise ValueError(part)
            found += range(begin, end + 1)
    return found


def ranges(found: Iterable[int]) -> str:
    """The other way round: [0, 1, 2, 3, 8] -> '0-3,8'."""
    parts: list[list[int]] = []
    for number in sorted(set(found)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _read(path: Path, default: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return default


def _usable() -> list[int]:
    """The CPUs of this machine or container. A taskset on this process does not count: the daemon serves everybody."""
    group = next((line.split("::", 1)[1] for line in _read(Path("/proc/self/cgroup")).splitlines() if "::" in line), "")
    for place in (SYS / "fs/cgroup" / group.lstrip("/"), SYS / "fs/cgroup"):
        found = _read(place / "cpuset.cpus.effective")
        if found:
            return numbers(found)
    return numbers(_read(SYS / "devices/system/cpu/online")) or sorted(os.sched_getaffinity(0))


def _cores() -> tuple[Core, ...]:
    usable = _usable()
    nodes: dict[int, int] = {}
    for node in sorted(SYS.glob("devices/system/node/node[0-9]*")):
        for cpu in numbers(_read(node / "cpulist")):
            nodes[cpu] = int(node.name.removeprefix("node"))
    found: dict[tuple[int, int], list[int]] = {}  # (package, core) -> cpus
    for cpu in usable:
        place = SYS / f"devices/system/cpu/cpu{cpu}/topology"
        package = int(_read(place / "physical_package_id", "0") or 0)
        siblings = numbers(_read(place / "thread_siblings_list", str(cpu)))
        found.setdefault((max(0, package), siblings[0] if siblings else cpu), []).append(cpu)
    cores = [Core(package, nodes.get(cpus[0], 0), tuple(cpus)) for (package, _), cpus in found.items()]
    return tuple(sorted(cores, key=lambda c: (c.package, c.memory_node, c.cpus)))


def _memory(node: int, alone: bool) -> int:
    """Of a memory node; of the whole machine where there is only one, because memory may be plugged in beside any node."""
    for line in _read(SYS / f"devices/system/node/node{node}/meminfo").splitlines() if not alone else ():
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _links() -> tuple[Link, ...]:
    found = []
    for device in sorted(SYS.glob("bus/pci/devices/*")):
        speed, width = _read(device / "current_link_speed"), _read(device / "current_link_width", "0")
        if speed and width.isdigit() and int(width):
            found.append(Link(device.name, speed, int(width), max(0, int(_read(device / "numa_node", "0") or 0))))
    return tuple(found)


def _gpus() -> tuple[Gpu, ...]:
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return ()
    try:
        import pynvml
    except ImportError:
        return _gpus_by_tool()
    found = []
    try:
        pynvml.nvmlInit()
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            address = pynvml.nvmlDeviceGetPciInfo(handle).busId
            address = (address.decode() if isinstance(address, bytes) else address).lower()[-12:]
            name, serial = pynvml.nvmlDeviceGetName(handle), "N/A"
            with contextlib.suppress(pynvml.NVMLError):
                serial = pynvml.nvmlDeviceGetSerial(handle)
            found.append(Gpu(i, str(name), str(serial), _multiprocessors_by_cores(handle) or _multiprocessors(i),
                             int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                             max(0, int(_read(SYS / f"bus/pci/devices/{address}/numa_node", "0") or 0)), address))  # fmt: skip
    except pynvml.NVMLError:
        return _gpus_by_tool()
    return tuple(found)


# How many cores a multiprocessor has, by compute capability; NVML tells the cores only.
_CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128}


def _multiprocessors_by_cores(handle: Any) -> int:
    """0 where NVML or the table does not tell. Far quicker than to start CUDA for it: 180 ms on an H200."""
    import pynvml

    try:
        each = _CORES.get(tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)), 0)
        return int(pynvml.nvmlDeviceGetNumGpuCores(handle)) // each if each else 0
    except (pynvml.NVMLError, AttributeError):
        return 0


def _gpus_by_tool() -> tuple[Gpu, ...]:
    """The driver's own tool, where its library has no Python binding."""
    query = "--query-gpu=index,name,serial,memory.total,pci.bus_id"
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        index, name, serial, memory, address = (part.strip() for part in line.split(","))
        node = int(_read(SYS / f"bus/pci/devices/{address.lower()[-12:]}/numa_node", "0") or 0)
        size = int(memory) * 2**20 if memory.isdigit() else 0
        found.append(Gpu(int(index), name, serial.strip("[]"), _multiprocessors(int(index)), size, max(0, node),
                         address.lower()[-12:]))  # fmt: skip
    return tuple(found)


@cache
def _multiprocessors(index: int) -> int:
    """Asked of the driver's library. 0: unknown."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return 0
    return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, device) else count.value  # 16: number of multiprocessors


def processor() -> str:
    """The processor's name, by lscpu."""
    try:
        done = subprocess.run(["lscpu", "-J"], capture_output=True, text=True, timeout=10)
        rows = json.loads(done.stdout)["lscpu"]
        return str(next(r["data"] for r in rows if r["field"].startswith("Model name")))
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, StopIteration):
        return "N/A"
