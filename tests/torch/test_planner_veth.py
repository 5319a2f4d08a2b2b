"""The planner against a cable of known rate: two network namespaces, `tc tbf`, two ranks in each, over gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from alltoallv.testing.hosts import Host, HostRanks, gloo_environment
from alltoallv_tools.planner import model
from alltoallv_tools.planner.topology import Level, Topology

PROGRAM = """
import json, sys, time
import torch
import torch.distributed as dist
import alltoallv.torch as at
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
host, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])

def uniform(x, group):
    parts = dist.get_world_size(group)
    counts = [x.numel() // parts] * parts
    return at.all_to_all_v(x, counts, counts, group=group)

def flat(nbytes, group=None):
    x = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: uniform(x, group)

def hierarchical(nbytes):
    x = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: uniform(uniform(x, host), across)  # data of zeros need no reordering in between

def pair(nbytes):  # ranks 0 and 2; the others only meet them at the barrier
    return flat(nbytes, across) if rank in (0, 2) else lambda: None

def gathered_in_pair(nbytes):
    x, out = torch.zeros(nbytes // 2, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return (lambda: at.all_gather_into_tensor(out, x, group=across)) if rank in (0, 2) else lambda: None

def reduced(nbytes):
    x = torch.randn(nbytes // 4)
    return lambda: at.quantized_all_reduce(x, gather="quantized")

def reduced_in_pair(nbytes):
    x = torch.randn(nbytes // 4)
    return (lambda: at.quantized_all_reduce(x, gather="quantized", group=across)) if rank in (0, 2) else lambda: None

def reduced_in_levels(nbytes):
    x, out = torch.randn(nbytes // 4), torch.empty(nbytes // 4)
    def run():
        part = at.quantized_reduce_scatter(x, group=host).contiguous()
        part = at.quantized_all_reduce(part, gather="quantized", group=across)
        at.all_gather_into_tensor(out, part, group=host)
    return run

def best(call, repeats):
    times = torch.empty(repeats, dtype=torch.float64)
    for i in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        times[i] = (time.perf_counter() - start) * 1e6
    dist.all_reduce(times, dist.ReduceOp.MAX)  # a call ends when its last rank does
    return times.min().item()  # a busy machine only adds

out = {"latency": best(flat(4), 50)}
for name, nbytes in json.loads(sys.argv[1]):
    call = globals()[name](nbytes)
    call()  # a new connection begins slowly
    out[f"{name} {nbytes}"] = best(call, int(sys.argv[2]))
if rank == 0:
    print(json.dumps(out))
dist.destroy_process_group()
"""
FRAME = 1448 / 1514  # of the bytes that the filter counts are payload: Ethernet, IP and TCP headers with timestamps
BUCKET_US = 30_000  # what the filter lets through at once after a pause, in time: softirqs of a busy machine are late
MIB = 1 << 20
REPEATS = 8
WORK = [  # half a second each at 40 Mbit/s; as long where the wire is quicker
    ("pair", 4 * MIB),
    ("gathered_in_pair", 4 * MIB),
    ("flat", 2 * MIB),
    ("hierarchical", 2 * MIB),
    ("reduced_in_pair", 8 * MIB),
    ("reduced", 4 * MIB),
    ("reduced_in_levels", 8 * MIB),
]


def predict(name: str, nbytes: int, wire_gbps: float, latency: float) -> float:
    """Microseconds. The ranks of a host share its wire; within a host a MiB takes less than a thousandth of that."""
    pair = Topology("pair", (Level("wire", 0, latency, wire_gbps),))
    hosts = Topology("hosts", (Level("host", 2, 0.0, 2.0), Level("wire", 0, latency, wire_gbps / 2)))
    return {
        "pair": lambda: model.all_to_all_v(pair, 2, nbytes),
        "gathered_in_pair": lambda: model.all_to_all_v(pair, 2, nbytes),  # the same bytes on the same wire
        "flat": lambda: model.all_to_all_v(hosts, 4, nbytes),
        "hierarchical": lambda: model.all_to_all_v(hosts, 4, nbytes, algorithm="hierarchical"),
        "reduced_in_pair": lambda: model.all_reduce(pair, 2, nbytes, bits=8),
        "reduced": lambda: model.all_reduce(hosts, 4, nbytes, bits=8),
        "reduced_in_levels": lambda: model.all_reduce(hosts, 4, nbytes, "two-level", bits=8),
    }[name]()


@pytest.mark.slow
@pytest.mark.parametrize("megabits", [100, 40])
def test_predictions_on_a_rate_limited_wire(
    two_hosts: Callable[..., AbstractContextManager[list[Host]]], megabits: int, tmp_path: Path
) -> None:
    """Only the latency is measured, with a payload of four bytes; the rate is that of the filter.

    The fastest of a few calls is within 25 % of the prediction: at these rates the wire is slower than processors that
    have much else to do.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    work = [(name, nbytes * megabits // 40) for name, nbytes in WORK]
    limit = (f"{megabits}mbit", f"{megabits * BUCKET_US // 8}b", "4s")  # drops nothing
    with two_hosts(limit) as hosts:
        measured = run(hosts, script, work)
    wire = megabits / 8e3 * FRAME
    errors = {}
    for name, nbytes in work:
        time = measured[f"{name} {nbytes}"]
        predicted = predict(name, nbytes, wire, measured["latency"]) - BUCKET_US
        error = errors[name, nbytes] = predicted / time - 1
        print(f"{name:>17} {nbytes / MIB:4.1f} MiB: {time:9.0f} us, predicted {predicted:9.0f}, {error:+.1%}")
    assert max(abs(error) for error in errors.values()) <= 0.25, errors


def run(hosts: list[Host], script: Path, work: list[tuple[str, int]]) -> dict[str, float]:
    """What rank 0 of two ranks on each host prints."""
    ranks = HostRanks(
        script,
        [host for host in hosts for _ in range(2)],
        json.dumps(work),
        str(REPEATS),
        environment=lambda rank: gloo_environment(hosts, rank, 4, 29512),
    )
    texts = ranks.outputs(240)
    assert ranks.codes() == [0] * 4, texts
    measured: dict[str, float] = json.loads(next(line for line in texts[0].splitlines() if line.startswith("{")))
    return measured
