"""Collectives between two hosts beside gloo's: two network namespaces, two ranks in each, a veth pair.

    sudo python docs/measure_hosts.py --kib 1 64 1024 16384

Needs what alltoallv.testing.hosts needs, and torch. Both take turns within one run; the table gives medians, in
microseconds, and how many times as fast as gloo each is. The namespaces go when the script ends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from alltoallv.testing.hosts import HostRanks, joined_hosts, torchrun_environment

INSIDE = "_ALLTOALLV_MEASURES_HOSTS"
NAMES = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")


def run_rank(sizes: list[float], seconds: float) -> None:
    """Prints a JSON line: by size and collective the seconds of every turn, of gloo and of ours."""
    import torch
    import torch.distributed as dist

    import alltoallv.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": None, "alltoallv": dist.new_group(backend="alltoallv")}
    size = dist.get_world_size()

    def calls(elements: int) -> dict[str, Callable[[object], object]]:
        x, y = torch.ones(elements // size * size), torch.empty(elements // size * size)
        return {
            "all_to_all_single": lambda group: dist.all_to_all_single(y, x, group=group),
            "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(y, x[: len(x) // size], group=group),
            "all_reduce": lambda group: dist.all_reduce(y.fill_(1), group=group),
        }

    told: dict[float, dict[str, dict[str, list[float]]]] = {}
    for kib in sizes:
        told[kib] = {name: {party: [] for party in groups} for name in NAMES}
        for name, call in calls(int(kib * 256)).items():
            end, more = time.monotonic() + seconds, torch.ones(1)
            while more.item():
                for party, group in groups.items():
                    call(group)
                    dist.barrier()
                    begin = time.perf_counter()
                    call(group)
                    told[kib][name][party].append(time.perf_counter() - begin)
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
    arguments = parser.parse_args()
    if INSIDE in os.environ:
        return run_rank(arguments.kib, arguments.seconds)
    options = ["--seconds", str(arguments.seconds), "--kib", *map(str, arguments.kib)]
    with joined_hosts() as hosts:

        def environment(rank: int) -> dict[str, str]:
            known = torchrun_environment(rank, 4, 2, hosts[0].address, 29_511)
            return known | {INSIDE: "1", "GLOO_SOCKET_IFNAME": hosts[rank // 2].interface}

        place = [host for host in hosts for _ in range(2)]
        ranks = HostRanks(Path(__file__), place, *options, environment=environment)
        texts = ranks.outputs(120 + 5 * arguments.seconds * len(arguments.kib) * len(NAMES))
    if any(ranks.codes()):
        raise SystemExit("\n".join(texts))
    print("| KiB | collective | gloo | alltoallv | × gloo |\n|---|---|---|---|---|")
    for kib, by_name in json.loads(texts[0].splitlines()[-1]).items():
        for name, times in by_name.items():
            gloo, ours = (statistics.median(times[party]) * 1e6 for party in ("gloo", "alltoallv"))
            print(f"| {float(kib):g} | {name} | {gloo:.0f} | {ours:.0f} | {gloo / ours:.1f} |")


if __name__ == "__main__":
    main()
