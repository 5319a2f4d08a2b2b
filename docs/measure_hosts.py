"""Collectives between two hosts beside gloo's and MPI's: two network namespaces, two ranks in each, a veth pair.

    sudo python docs/measure_hosts.py --kib 1 64 1024 16384

Needs what alltoallv.testing.hosts needs, torch, mpi4py, and MPICH or Open MPI from PyPI (--mpi), whose launcher starts
the ranks. All libraries take turns within one run; the table gives medians, in microseconds. MPI waits by polling, and
the ranks share this machine's processors. The namespaces go when the script ends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import performance_page as pages

from alltoallv.testing.hosts import joined_hosts, mpi_command, no_launcher

NAMES = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")


def run_rank(address: str, sizes: list[float], seconds: float) -> None:
    """Prints a JSON line: by size, collective and library the seconds of every turn."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import alltoallv.torch

    world = MPI.COMM_WORLD
    size = world.Get_size()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}:29511", rank=world.Get_rank(), world_size=size)
    groups = {"gloo": None, "alltoallv": dist.new_group(backend="alltoallv")}

    def calls(elements: int) -> dict[str, dict[str, Callable[[], Any]]]:
        x, y = torch.ones(elements // size * size), torch.empty(elements // size * size)
        part = x[: len(x) // size]
        sent, got, one = x.numpy(), y.numpy(), part.numpy()

        def of(group: Any) -> dict[str, Callable[[], Any]]:
            return {
                "all_to_all_single": lambda: dist.all_to_all_single(y, x, group=group),
                "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(y, part, group=group),
                "all_reduce": lambda: dist.all_reduce(y.fill_(1), group=group),
            }

        mpi = {
            "all_to_all_single": lambda: world.Alltoall(sent, got),
            "all_gather_into_tensor": lambda: world.Allgather(one, got),
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, y.fill_(1).numpy()),
        }
        return {library: of(group) for library, group in groups.items()} | {"mpi": mpi}

    told: dict[float, dict[str, dict[str, list[float]]]] = {}
    for kib in sizes:
        libraries = calls(int(kib * 256))
        told[kib] = {name: {library: [] for library in libraries} for name in NAMES}
        for name in NAMES:
            end, more = time.monotonic() + seconds, torch.ones(1)
            while more.item():
                for library, by_name in libraries.items():
                    by_name[name]()
                    dist.barrier()
                    begin = time.perf_counter()
                    by_name[name]()
                    told[kib][name][library].append(time.perf_counter() - begin)
                more = torch.tensor([float(time.monotonic() < end)])
                dist.broadcast(more, 0)
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    assert alltoallv.torch
    os._exit(0)  # gloo's threads would be waited for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", nargs="+", type=float, default=[1, 64, 1024, 16384], help="of a rank's larger tensor")
    parser.add_argument("--seconds", type=float, default=3, help="per size and collective")
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich")
    parser.add_argument("--keep", action="store_true", help="add the figures to docs/measured.json; needs MPICH")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(arguments.rank_of, arguments.kib, arguments.seconds)
    with joined_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        command = [*mpi_command(arguments.mpi, hosts, 2, Path(folder)), sys.executable, __file__]
        command += ["--rank-of", hosts[0].address, "--seconds", str(arguments.seconds)]
        command += ["--kib", *map(str, arguments.kib)]
        limit = 120 + 5 * arguments.seconds * len(arguments.kib) * len(NAMES)
        env = no_launcher() | {"GLOO_SOCKET_IFNAME": hosts[0].interface, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(ended.stdout + ended.stderr)
    figures = []
    print(f"{'KiB':>6} {'collective':>24} {'alltoallv':>10} {'gloo':>10} {'MPI':>10}")
    for kib, by_name in json.loads(lines[-1]).items():
        for name, times in by_name.items():
            ours, gloo, mpi = (statistics.median(times[library]) * 1e6 for library in ("alltoallv", "gloo", "mpi"))
            print(f"{float(kib):>6g} {name:>24} {ours:>10.0f} {gloo:>10.0f} {mpi:>10.0f}")
            figures.append([4, name, int(float(kib) * 1024), *(round(us, 1) for us in (ours, gloo, mpi))])
    if arguments.keep:
        command = f"sudo python docs/measure_hosts.py --kib {' '.join(map('{:g}'.format, arguments.kib))}"
        pages.add("hosts", command, ["np", "collective", "nbytes", "us", "gloo", "mpich"], figures)


if __name__ == "__main__":
    main()
