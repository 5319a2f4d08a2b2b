"""Cases of the NPU self-test besides exchanges that programs rely on: graphs, rank tables, fused operators.

Values are small whole numbers, exact in float16 however they are summed.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.npu_ops import limits
from alltoallv.testing.data_path import variable

HIDDEN, TOKENS, ROWS = 1024, 8, 1024


class LeftOut(Exception):
    """Raised where a case does not apply to this machine; the text explains why."""


def same(got: Tensor, expected: Tensor) -> None:
    """Raises AssertionError unless the bits are the same."""
    host = got.cpu()
    if host.shape != expected.shape or not torch.equal(host.view(torch.uint8), expected.view(torch.uint8)):
        raise AssertionError(
            f"the bits differ: {host.flatten()[:8].tolist()}, expected {expected.flatten()[:8].tolist()}"
        )


def is_emulated() -> bool:
    """Returns whether the devices belong to the emulator."""
    return hasattr(ctypes.CDLL("libascendcl.so"), "AlltoallvEmulatorSet")


def product(soc: str) -> limits.Product:
    """Returns the product whose limits hold, by the SoC; emulated devices' is ALLTOALLV_NPU_PRODUCT's."""
    return "A3" if "910_93" in soc else "A2"


def check_rank_table(comm: Communicator, device: torch.device) -> None:
    """Makes a communicator from a rank table of this host."""
    devices = [{"device_id": str(rank), "rank_id": str(rank)} for rank in range(comm.size)]
    server = {"server_id": "127.0.0.1", "device": devices}
    table = {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"}
    with tempfile.TemporaryDirectory() as folder, variable("RANK_TABLE_FILE", path := f"{folder}/table.json"):
        Path(path).write_text(json.dumps(table))
        with Communicator.from_env("doctor rank table", backend="hccl", timeout=120.0) as listed:
            x = torch.arange(comm.size, dtype=torch.int32).to(device) + 10 * comm.rank
            y = at.all_to_all_v(x, [1] * comm.size, [1] * comm.size, group=listed)
            same(y, torch.arange(comm.size, dtype=torch.int32) * 10 + comm.rank)


def check_aclgraph(comm: Communicator, device: torch.device) -> None:
    """Captures a collective in an NPUGraph and replays it on other values."""
    x = torch.zeros(4, device=device)
    dist.all_reduce(x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x + comm.rank
        dist.all_reduce(y)
    for number in (1.0, 2.0):
        x.fill_(number)
        graph.replay()
        torch.npu.synchronize()
        same(y, torch.full((4,), number * comm.size + sum(range(comm.size))))


def _name(device: torch.device) -> str:
    """Makes a group of all ranks for MC2's operators, which need one of their own; returns its name in HCCL."""
    group = dist.new_group()
    name: str = group._get_backend(device).get_hccl_comm_name(dist.get_rank())
    return name


def _demand(breaches: Iterable[str]) -> None:
    for breach in breaches:
        raise LeftOut(breach)


def _whole(rank: int, *shape: int) -> Tensor:
    """Returns random values -1, 0 and 1, the same on every rank with the same arguments."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1, 2, shape, generator=generator).half()


def check_dispatch_and_combine(comm: Communicator, device: torch.device) -> None:
    """Dispatches tokens to two identity experts per rank and back; every token must come to the right place."""
    size, rank = comm.size, comm.rank
    experts = 2 * size
    _demand(limits.MoE(size, experts, HIDDEN, TOKENS, 2).breaches(product(torch.npu.get_device_name())))
    tokens = [_whole(other, TOKENS, HIDDEN) for other in range(size)]
    chosen = [torch.tensor([[(t + r) % experts, (t + r + size) % experts] for t in range(TOKENS)]) for r in range(size)]
    position = _name(device), size, rank, experts
    x, ids = tokens[rank].to(device), chosen[rank].int().to(device)
    rows, _, assist, counts, ends, *_ = torch_npu.npu_moe_distribute_dispatch_v2(x, ids, *position)
    came = [tokens[r][(chosen[r] == e).any(1)] for e in (2 * rank, 2 * rank + 1) for r in range(size)]
    same(rows[: sum(map(len, came))], torch.cat(came))
    same(counts, torch.tensor([sum(map(len, came[:size])), sum(map(len, came[size:]))]))
    halves = torch.full((TOKENS, 2), 0.5, device=device)
    same(torch_npu.npu_moe_distribute_combine_v2(rows, ids, assist, ends, halves, *position), tokens[rank])


def check_alltoallv_gmm(comm: Communicator, device: torch.device) -> None:
    """Sends equal parts of every rank's rows to every expert, and back."""
    size, rank, experts = comm.size, comm.rank, 2
    use = limits.GroupedMatmul(size, experts, HIDDEN, 64, 2 * ROWS * HIDDEN)
    _demand(use.breaches(product(torch.npu.get_device_name())))
    part = ROWS // (size * experts)
    rows, counts = [_whole(other, part * size * experts, HIDDEN) for other in range(size)], [part] * (size * experts)
    weight = _whole(100 + rank, experts, HIDDEN, 64)
    position = _name(device), size, counts, counts
    y, _, _ = torch_npu.npu_alltoallv_gmm(rows[rank].to(device), weight.to(device), *position)
    own_rows = [
        torch.cat([rows_of_rank.split(part)[rank * experts + e] for rows_of_rank in rows]) for e in range(experts)
    ]
    same(y, torch.cat([(part.float() @ weight[e].float()).half() for e, part in enumerate(own_rows)]))


def check_matmuls(comm: Communicator, device: torch.device) -> None:
    """Checks the products of tensor parallelism: one after a gather, one before a reduce-scatter."""
    size, rank = comm.size, comm.rank
    for name in ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"):
        _demand(limits.Matmul(name, size, 256).breaches(product(torch.npu.get_device_name())))
    name = _name(device)
    parts, weights = (
        [_whole(start + r, *shape) for r in range(size)] for start, shape in ((0, (4, 256)), (50, (256, 8)))
    )
    y, gathered = torch_npu.npu_all_gather_base_mm(parts[rank].to(device), weights[rank].to(device), name, size)
    same(gathered, torch.cat(parts))
    same(y, (torch.cat(parts).float() @ weights[rank].float()).half())
    wide = [_whole(200 + r, 4 * size, 256) for r in range(size)]
    z = torch_npu.npu_mm_reduce_scatter_base(wide[rank].to(device), weights[rank].to(device), name, size)
    total = torch.stack([a.float() @ b.float() for a, b in zip(wide, weights, strict=True)]).sum(0)
    same(z, total.half().split(4)[rank])
