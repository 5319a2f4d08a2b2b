"""Quantized all-reduce between two hosts against gloo: two network namespaces, one rank in each, a veth pair with tbf.

    sudo python docs/measure_network.py --rate 1gbit 10gbit --mib 1 16 64

Needs what alltoallv.testing.hosts needs, and torch. All competitors take turns within one run; the table
gives medians and how many times as fast as gloo's float32 all_reduce each is. The namespaces go when the script ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from alltoallv.testing.hosts import gloo_environment, joined_hosts

RANK = "_ALLTOALLV_NETWORK_RANK"


def competitors() -> dict[str, Callable[[object], object]]:
    """Each takes a float32 vector and reduces it."""
    import torch
    import torch.distributed as dist

    import alltoallv.torch as at
    from alltoallv_tools.bench.peers import bfloat16_sum, composed_sum

    comm = at.from_group(dist.group.WORLD)

    def ours(bits: int, gather: str = "quantized") -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: at.quantized_all_reduce(x, bits=bits, gather=gather, group=comm)

    return {
        "gloo float32": lambda x: dist.all_reduce(x.clone()),
        "gloo bfloat16": bfloat16_sum,
        "int8 of torch operators": composed_sum,
        "alltoallv int8": ours(8),
        "alltoallv int8, full": ours(8, "full"),
        "alltoallv int4": ours(4),
    }


def run_rank(sizes: list[float], seconds: float) -> None:
    """Prints a JSON line: by size and competitor the seconds of every turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    calls = competitors()
    told: dict[float, dict[str, list[float]]] = {}
    for mib in sizes:
        x = torch.randn(int(mib * (1 << 18)))
        told[mib] = {name: [] for name in calls}
        for call in calls.values():
            call(x)
        end, more = time.monotonic() + seconds, torch.ones(1)
        while more.item():
            for name, call in calls.items():
                dist.barrier()
                begin = time.perf_counter()
                call(x)
                told[mib][name].append(time.perf_counter() - begin)
            more = torch.tensor([float(time.monotonic() < end)])
            dist.broadcast(more, 0)
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads would be waited for


def measure(rate: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    with joined_hosts((rate, "256kb", "100ms")) as hosts, contextlib.ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            env = gloo_environment(hosts, rank, len(hosts), 29511) | {RANK: str(rank)}
            command = host.command(sys.executable, *sys.argv)
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE if rank == 0 else None, text=True)
            stack.callback(process.kill)
            processes.append(process)
        limit = 120 + 3 * arguments.seconds * len(arguments.mib)
        output, _ = processes[0].communicate(timeout=limit)
        return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", nargs="+", default=["1gbit", "10gbit"], help="of tc")
    parser.add_argument("--mib", nargs="+", type=float, default=[1, 16, 64], help="float32 payload")
    parser.add_argument("--seconds", type=float, default=10, help="per size, at least one turn of each")
    arguments = parser.parse_args()
    if RANK in os.environ:
        return run_rank(arguments.mib, arguments.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for rate in arguments.rate:
        for mib, times in measure(rate, arguments).items():
            medians = {name: statistics.median(values) for name, values in times.items()}
            base, turns = medians["gloo float32"], len(times["gloo float32"])
            print(f"\n{rate}, {float(mib):g} MiB, {turns} turns\n\n| | ms | × gloo float32 |\n|---|---|---|")
            for name, median in medians.items():
                print(f"| {name} | {median * 1e3:.1f} | {base / median:.2f} |", flush=True)


if __name__ == "__main__":
    main()
