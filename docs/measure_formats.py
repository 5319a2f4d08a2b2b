"""What every format of the quantized collectives loses: the table of docs/quantization.md.

    python docs/measure_formats.py
    python -m alltoallv run -n 2 --no-prefix docs/measure_formats.py --speed    # of all-reduce, beside int8

Eight ranks, threads of this process; every rank has N(0, 1), of which one element in a hundred is an outlier, times
exp(2 |n|) for another normal n. The errors are the sum's, mean of the draws: relative L2, which the outliers
govern; and the median, over the standard deviation of a sum without outliers. The program fails unless all ranks have
the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.quantization.spec import Quantization
from alltoallv.testing import run_ranks
from alltoallv.testing.quantized_formats import FORMATS

RANKS = 8
COLUMNS = 1024  # elements of a token
Floats = npt.NDArray[np.float32]


def inputs(draw: int, count: int) -> list[Floats]:
    """Of every rank."""
    rng = np.random.default_rng(draw)
    made = []
    for _ in range(RANKS):
        outliers = np.where(rng.random(count) < 0.01, np.exp(2 * np.abs(rng.normal(size=count))), 1)
        made.append((rng.normal(size=count) * outliers).astype(np.float32).reshape(-1, COLUMNS))
    return made


def ways() -> list[tuple[str, str, Any]]:
    """Formats with the groups that they can have, and what to call those."""
    rows: list[tuple[str, str, Any]] = []
    for name, how in FORMATS.items():
        if how.shaped or (how.is_integer and how.bits not in (8, 4)):
            continue  # measure_low_bits.py has these
        if how.group_size:
            rows.append((name, str(how.group_size), how.group_size))
        else:
            rows += [(name, shown, size) for shown, size in (("128", 128), ("token", "token"), ("tensor", "tensor"))]
    return rows


def errors(communicator: Communicator, draws: int, count: int) -> dict[tuple[str, str, str], npt.NDArray[Any]]:
    """Both, by format, group and gather; every rank looks whether the ranks have the same bits."""
    found: dict[tuple[str, str, str], npt.NDArray[Any]] = {}
    for draw in range(draws):
        xs = inputs(draw, count)
        exact = np.sum(np.array(xs, np.float64), axis=0)
        for name, shown, size in ways():
            for gather in ("full", "quantized"):
                how: Any = {"format": name, "group_size": size, "gather": gather, "group": communicator}
                result = av.quantized_all_reduce(xs[communicator.rank], **how)
                others = av.all_gather(result.view(np.uint32), group=communicator)
                if not all((np.asarray(other).ravel() == result.view(np.uint32).ravel()).all() for other in others):
                    raise AssertionError(f"{name}, {shown}, {gather}: ranks differ")
                off = result - exact
                error = [np.linalg.norm(off) / np.linalg.norm(exact), np.median(np.abs(off)) / np.sqrt(RANKS)]
                found[name, shown, gather] = found.get((name, shown, gather), np.zeros(2)) + np.array(error) / draws
    return found


def speed(communicator: Communicator) -> None:
    """Prints what each format of 8 bits takes of int8's time; they take turns, the slowest rank counts."""
    for mib, turns in ((1, 60), (16, 16), (64, 6)):
        x = np.random.default_rng(communicator.rank).normal(size=mib << 18).astype(np.float32)
        told: dict[str, list[float]] = {}
        for turn in range(turns + 2):
            for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
                av.barrier(group=communicator)
                begin = time.perf_counter()
                av.quantized_all_reduce(x, format=name, group=communicator)
                took = av.all_reduce(np.array([time.perf_counter() - begin]), "max", group=communicator)
                if turn > 1:
                    told.setdefault(name, []).append(float(took[0]))
        medians = {name: statistics.median(times) for name, times in told.items()}
        if communicator.rank == 0:
            shown = ", ".join(f"{name} {median / medians['int8']:.2f}" for name, median in medians.items())
            print(f"{communicator.size} ranks, {mib} MiB: int8 {medians['int8'] * 1e3:.1f} ms; {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--count", type=int, default=1 << 16, help="elements, a multiple of 1024")
    parser.add_argument("--speed", action="store_true", help="of all-reduce on the ranks of a launcher")
    options = parser.parse_args()
    if options.speed:
        return speed(Communicator.from_env())
    found = run_ranks(RANKS, errors, options.draws, options.count)[0]
    print("| format | group | bytes | full: L2 | median | quantized: L2 | median |\n|---|---|---|---|---|---|---|")
    for name, shown, size in ways():
        group = {"token": COLUMNS, "tensor": options.count}.get(shown, size)
        how = Quantization(name, group)
        sent = (how.code_bytes(options.count) + how.scale_bytes(options.count)) / options.count
        both = [*found[name, shown, "full"], *found[name, shown, "quantized"]]
        print(f"| `{name}` | {shown} | {sent:.3f} | {' | '.join(f'{error:.1e}' for error in both)} |")


if __name__ == "__main__":
    main()
