"""gc-info and gc-inventory: which devices there are."""

from __future__ import annotations

import argparse
import sys

from tilework.errors import UserError
from tilework.tiles.machine import processor

from .devices import Device, devices, groups, guarded, host

ARCHITECTURE = "cpu"


def line(device: Device) -> str:
    return f"Id:  [{device.number}], target: [Fabric], IPU-M host:  [{host()}], IPU#: [{device.number}]"


def listed(found: list[Device]) -> str:
    lines = [f"-+- {line(d)}" for d in found]
    for number, members in enumerate(groups(len(found)), len(found)):
        lines.append(f"-+- Id:  [{number}], target: [Multi IPU]")
        lines += [f" |--- {line(found[m])}, DNC Id: [{i}]" for i, m in enumerate(members)]
    return "\n".join(lines)


def members_of(found: list[Device], number: int) -> list[Device]:
    """One device, or those of a group."""
    several = groups(len(found))
    if 0 <= number < len(found):
        return [found[number]]
    if 0 <= number - len(found) < len(several):
        return [found[m] for m in several[number - len(found)]]
    raise UserError("poptorch-tools", f"there is no device {number}", expected=f"0 to {len(found) + len(several) - 1}",
                    fix="gc-info -l lists them")  # fmt: skip


def attributes(device: Device) -> dict[str, str]:
    holder = device.holders[0] if device.holders else None
    return {
        "IPU#": str(device.number),
        "ipu architecture": ARCHITECTURE,
        "ipu utilisation": f"{device.busy:.2f}%",
        "model": processor(),
        "number of tiles": str(len(device.tiles)),
        "cpus": ",".join(str(c) for t in device.tiles for c in t.cpus),
        "state": device.state,
        "user process id": str(holder.pid) if holder else "0",
        "user name": holder.user if holder else "",
        "user executable": holder.command if holder else "",
        "clock": "N/A",
        "board temp": "N/A",
        "power": "N/A",
    }


def info(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="gc-info", description="Which devices there are.")
    p.add_argument("-l", "--list-devices", action="store_true", help="every device, and groups of 2, 4, 8 ...")
    p.add_argument("-d", "--device-id", type=int, help="one of them")
    p.add_argument("-i", "--device-info", action="store_true", help="its attributes")
    p.add_argument("--ipu-count", action="store_true")
    p.add_argument("--ipu-arch", action="store_true")
    p.add_argument("--all-partitions", action="store_true", help="accepted; it has no effect here")
    args = p.parse_args(argv)
    if not (args.list_devices or args.device_id is not None or args.ipu_count or args.ipu_arch):
        p.print_help()
        return 1

    def show() -> None:
        found = devices()
        if args.list_devices:
            print(listed(found))
        chosen = found if args.device_id is None else members_of(found, args.device_id)
        if args.ipu_count:
            print(len(chosen))
        if args.ipu_arch:
            print(ARCHITECTURE)
        if args.device_id is not None and not (args.ipu_count or args.ipu_arch):
            for device in chosen:
                print("\n".join(f"{k}: {v}" for k, v in attributes(device).items()))

    return guarded("gc-info", show)


def inventory(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="gc-inventory", description="Every device with its attributes.")
    p.add_argument("--all-partitions", action="store_true", help="accepted; it has no effect here")
    p.parse_args(argv)

    def show() -> None:
        found = devices()
        print(f"{'Host':<20}{host()}\n{'Devices':<20}{len(found)}")
        for device in found:
            print(f"\nIPU {device.number}")
            print("\n".join(f"  {k:<18}{v}" for k, v in attributes(device).items()))

    return guarded("gc-inventory", show)


def run_info() -> None:
    sys.exit(info())


def run_inventory() -> None:
    sys.exit(inventory())
