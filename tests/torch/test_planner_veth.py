"""The planner against a cable of known rate: two network namespaces, `tc tbf`, one rank in each, over gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_two_hosts import joined_hosts

from alltoallv.planner import model
from alltoallv.planner.topology import Level, Topology

PROGRAM = """
import json, sys, time
import torch
import torch.distributed as dist
import alltoallv.torch as at
torch.set_num_threads(1)
dist.init_process_group("gloo")
out = {}
for nbytes in map(int, sys.argv[1:]):
    x = torch.zeros(nbytes, dtype=torch.uint8)
    half = [nbytes // 2, nbytes - nbytes // 2]
    recvs = [half[dist.get_rank()]] * 2
    y, times = torch.empty(sum(recvs), dtype=torch.uint8), []
    for _ in range(200 if nbytes <= 2 else 6):
        dist.barrier()
        start = time.perf_counter()
        at.all_to_all_v(x, half, recvs, out=y)
        times.append((time.perf_counter() - start) * 1e6)
    out[nbytes] = min(times)  # a busy machine only adds
if dist.get_rank() == 0:
    print(json.dumps(out))
dist.destroy_process_group()
"""
FRAME = 1448 / 1514  # of the bytes that the filter counts are payload: Ethernet, IP and TCP headers with timestamps
SIZES = [2, 1 << 20, 2 << 20, 3 << 20]


@pytest.mark.slow
@pytest.mark.parametrize("megabits", [40, 100])
def test_predictions_on_a_rate_limited_wire(megabits: int, tmp_path: Path) -> None:
    """Only the latency is measured, with a payload of two bytes; the rate is that of the filter.

    What is judged is the time per byte, since a busy machine only adds: no wire is 25 % faster than predicted, and none
    takes three times as long. The differences are printed.
    """
    if shutil.which("tc") is None:
        pytest.skip("needs tc (Debian, Ubuntu: apt-get install iproute2)")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with joined_hosts() as hosts:
        for host in hosts:
            limit = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "2s"]  # nothing is dropped
            command = ["tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root", "tbf", *limit]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"this machine has no tbf: {made.stderr.strip()}")
        processes = []
        for rank, host in enumerate(hosts):
            env = {
                **{name: value for name, value in os.environ.items() if not name.startswith("ALLTOALLV")},
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29512",
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
            }
            command = host.command(sys.executable, str(script), *map(str, SIZES))
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        try:
            texts = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    measured = {int(nbytes): us for nbytes, us in json.loads(texts[0].splitlines()[-1]).items()}
    wire = Level("wire", 0, 0.0, megabits / 8e3 * FRAME)
    topology = Topology("veth", (wire,), start_us=measured[SIZES[0]])
    errors = {n: model.all_to_all_v(topology, 2, n) / measured[n] - 1 for n in SIZES[1:]}
    print({n: f"{measured[n]:.0f} us, predicted {error:+.1%}" for n, error in errors.items()})
    first, last = SIZES[1], SIZES[-1]
    predicted = model.all_to_all_v(topology, 2, last) - model.all_to_all_v(topology, 2, first)
    ratio = (measured[last] - measured[first]) / predicted
    assert 0.75 < ratio < 3, (measured, errors)
