"""The command ``npu-smi`` of the emulator's environment: shows the emulated devices in the form that programs parse.

``npu-smi info`` prints a table, ``-l`` the NPUs, ``-m`` the numbers of their chips, and ``-t board``, ``-t health`` or
``-t usages`` with ``-i NPU [-c CHIP]`` the values of one. A product A3 has two chips in an NPU. Memory that other
processes use is not visible.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from alltoallv_emulator import library_folder

VERSION = "25.2.0"
_HBM = 1  # ACL_HBM_MEM


class Chip(NamedTuple):
    """An emulated device: its number, the NPU that has it, its number in there, and its memory in MB."""

    device: int
    npu: int
    number: int
    used: int
    total: int

    @property
    def bus(self) -> str:
        """An address on the PCIe bus."""
        return f"0000:{0x81 + self.device:02X}:00.0"


def soc() -> str:
    """Returns the name of the product, as ACL gives it."""
    library = ctypes.CDLL(str(library_folder() / "libascendcl.so"))
    library.aclrtGetSocName.restype = ctypes.c_char_p
    return str(library.aclrtGetSocName().decode())


def chips() -> Iterator[Chip]:
    """Yields all devices; raises RuntimeError if ACL fails."""
    library = ctypes.CDLL(str(library_folder() / "libascendcl.so"))
    count, free, total = ctypes.c_uint32(), ctypes.c_size_t(), ctypes.c_size_t()

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"ACL returned {code}")

    check(library.aclInit(None))
    check(library.aclrtGetDeviceCount(ctypes.byref(count)))
    each = _each()
    for device in range(count.value):
        check(library.aclrtSetDevice(device))
        check(library.aclrtGetMemInfo(_HBM, ctypes.byref(free), ctypes.byref(total)))
        used = total.value - free.value
        yield Chip(device, device // each, device % each, used >> 20, total.value >> 20)


def _each() -> int:
    """Returns how many chips an NPU has."""
    return 2 if _pair() else 1


def _pair() -> list[str]:
    """Returns the names of chip and NPU of a product A3; nothing for others, whose chips have the only name."""
    name = soc()
    return name.split("_") if "_" in name else []


def _table(all_chips: Sequence[Chip]) -> Iterator[str]:
    def row(*cells: str) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, (25, 13, 50), strict=True)) + " |"

    thin, thick = (f"+{line * 27}+{line * 15}+{line * 52}+" for line in "-=")
    pair = _pair()
    yield f"+{'-' * 96}+"
    yield f"| npu-smi {VERSION}".ljust(35) + f"Version: {VERSION}".ljust(62) + "|"
    yield thin
    yield row("NPU   Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)")
    yield row("Chip  Phy-ID" if pair else "Chip", "Bus-Id", "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)")
    yield thick
    for chip in all_chips:
        name = pair[0] if pair else soc().removeprefix("Ascend")
        yield row(f"{chip.npu:<6}{name}", "OK", "0.0         25                0    / 0")
        label = f"{chip.number:<6}{chip.device}" if pair else f"{chip.number}"
        yield row(label, chip.bus, f"0           0    / 0          {chip.used:<5}/ {chip.total}")
        yield thick
    wide = f"+{'-' * 27}+{'-' * 15}+{'-' * 26}+{'-' * 25}+"
    yield wide
    yield "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |"
    yield wide.replace("-", "=")
    for npu in sorted({chip.npu for chip in all_chips}):
        yield f"| No running processes found in NPU {npu}".ljust(97) + "|"
        yield wide.replace("-", "=")


def _mapping(all_chips: Sequence[Chip]) -> Iterator[str]:
    pair = _pair()
    names = ["NPU ID", "Chip ID", "Chip Logic ID", *(["Chip Phy-ID"] if pair else []), "Chip Name"]
    yield "\t" + "".join(name.ljust(31) for name in names)
    name = pair[0] if pair else soc().replace("Ascend", "Ascend ")
    for chip in all_chips:
        numbers = [chip.npu, chip.number, chip.device, *([chip.device] if pair else [])]
        yield "\t" + "".join(str(cell).ljust(31) for cell in (*numbers, name))


def _values(kind: str, chip: Chip, count: int) -> dict[str, object]:
    pair = _pair()
    if kind == "health":
        return {"Health Status": "OK", "Error Code": "NA", "Chip ID": chip.number}
    if kind == "usages":
        rate = 100 * chip.used // max(chip.total, 1)
        capacity = {"DDR Capacity(MB)": 0, "HBM Capacity(MB)": chip.total, "HBM Usage Rate(%)": rate}
        return {"NPU ID": chip.npu, "Chip Count": count, **capacity, "Aicore Usage Rate(%)": 0, "Chip ID": chip.number}
    names = {"Chip Name": pair[0], "NPU Name": pair[1]} if pair else {"Chip Name": soc().removeprefix("Ascend")}
    board = {"NPU ID": chip.npu, "Software Version": VERSION, "PCIe Bus Info": chip.bus, "Chip Count": count}
    return board | ({} if pair else {"Chip Type": "Ascend"}) | names


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser("npu-smi", description="Shows the emulated NPUs.")
    parser.add_argument("-v", "--version", action="version", version=f"npu-smi version: {VERSION}")
    info = parser.add_subparsers(dest="command", required=True).add_parser("info", help="show the devices")
    which = info.add_mutually_exclusive_group()
    which.add_argument("-l", action="store_true", dest="list", help="the NPUs")
    which.add_argument("-m", action="store_true", dest="mapping", help="the numbers of the chips")
    which.add_argument("-t", choices=("board", "health", "usages"), dest="type", help="values of an NPU")
    info.add_argument("-i", type=int, dest="npu", help="the NPU")
    info.add_argument("-c", type=int, dest="chip", default=0, help="the chip of the NPU (0)")
    options = parser.parse_args(arguments)
    all_chips = list(chips())
    if options.type:
        of_npu = [chip for chip in all_chips if chip.npu == options.npu]
        chip = next((chip for chip in of_npu if chip.number == options.chip), None)
        if chip is None:
            print(f"npu-smi: there is no chip {options.chip} of NPU {options.npu}: give -i and -c", file=sys.stderr)
            return 1
        lines = [f"\t{name.ljust(31)}: {value}" for name, value in _values(options.type, chip, len(of_npu)).items()]
    elif options.list:
        npus = sorted({chip.npu for chip in all_chips})
        lines = [f"\t{'Total Count'.ljust(31)}: {len(npus)}"]
        for npu in npus:
            of_npu = [chip for chip in all_chips if chip.npu == npu]
            lines += ["", f"\t{'NPU ID'.ljust(31)}: {npu}", f"\t{'Chip Count'.ljust(31)}: {len(of_npu)}"]
    else:
        lines = list(_mapping(all_chips) if options.mapping else _table(all_chips))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
