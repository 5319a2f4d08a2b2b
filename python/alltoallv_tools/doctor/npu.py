"""The self-test on NPUs: each rank uses its own device over HCCL and compares results with the definitions.

`npu_selftest` starts it, one process per device. Rank 0 prints its report, a line of JSON, whenever a case begins or
ends, so that the findings survive a crash. Needs torch and torch_npu.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

import alltoallv.torch as at
from alltoallv import AllToAllVParam, Communicator, QuantAllReduceParam, _core
from alltoallv.errors import PeerMismatchError
from alltoallv.launch import detect as launch
from alltoallv.testing.data_path import variable
from alltoallv.torch.engines.hccl import handle_of
from alltoallv_tools.doctor import npu_programs
from alltoallv_tools.doctor.npu_programs import LeftOut, is_emulated, same

TIMEOUT = 120.0
LOCAL_SIZE = "ALLTOALLV_LOCAL_WORLD_SIZE"
DTYPES = ("float16", "float32", "int8", "int32", "int16", "int64", "bfloat16", "bool", "uint8", "float64", "complex64")
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes to each peer
WARM_UP, REPETITIONS = 3, 20


class Exchanges:
    """Draws random exchanges, the same on all ranks; element k of rank i's input encodes i and k."""

    def __init__(self, comm: Any, device: torch.device) -> None:
        self.comm, self.device, self.size = comm, device, comm.size
        self.random = random.Random(0)

    def input(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        values = (torch.arange(numel, dtype=torch.int64) * 31 + rank * 7919) % 251
        return values.to(dtype) if dtype is not torch.bool else values % 3 == 0

    def check(self, dtype: torch.dtype, async_op: bool = False) -> None:
        """Exchanges with zero counts, gaps, and regions in any order."""
        w, r = self.size, self.comm.rank
        counts = [[self.random.choice((0, 1, 5, 300, 4096)) for _ in range(w)] for _ in range(w)]
        sdispls = [self._places(counts[i]) for i in range(w)]
        rdispls = [self._places([counts[j][i] for j in range(w)]) for i in range(w)]
        numel = max(max(d + n for d, n in zip(sdispls[i], counts[i], strict=True)) for i in range(w))
        x = self.input(r, numel, dtype).to(self.device)
        recvs = [counts[j][r] for j in range(w)]
        length = max(d + n for d, n in zip(rdispls[r], recvs, strict=True))
        expected = torch.ones(length, dtype=dtype)
        for j in range(w):
            begin = sdispls[j][r]
            part = self.input(j, numel, dtype)[begin : begin + recvs[j]]
            expected[rdispls[r][j] : rdispls[r][j] + recvs[j]] = part
        out = torch.ones(length, dtype=dtype).to(self.device)
        result: Any = at.all_to_all_v(  # type: ignore[call-overload, unused-ignore]
            x, counts[r], recvs, sdispls=sdispls[r], rdispls=rdispls[r], out=out, group=self.comm, async_op=async_op
        )
        if async_op:
            result[1].wait()
        same(out, expected)

    def _places(self, counts: list[int]) -> list[int]:
        order = list(range(self.size))
        self.random.shuffle(order)
        places, end = [0] * self.size, self.random.choice((0, 3))
        for j in order:
            places[j] = end
            end += counts[j] + self.random.choice((0, 0, 2))
        return places


def check_reductions(comm: Any, device: torch.device) -> None:
    x = torch.arange(8 * comm.size, dtype=torch.int32) + comm.rank
    total = sum(torch.arange(8 * comm.size, dtype=torch.int32) + j for j in range(comm.size))
    assert isinstance(total, Tensor)
    same(at.functional.all_reduce(x.to(device), comm), total)
    same(at.functional.reduce_scatter(x.to(device), comm), total.split(8)[comm.rank])
    same(
        at.functional.all_gather(x[:8].to(device), comm),
        torch.cat([torch.arange(8) + j for j in range(comm.size)]).int(),
    )


def check_lists(comm: Communicator, device: torch.device) -> None:
    w, r = comm.size, comm.rank
    inputs = [(torch.arange(j + 2 * r + 1) + 1000 * r).to(device) for j in range(w)]
    outs = [torch.zeros(r + 2 * j + 1, dtype=torch.int64).to(device) for j in range(w)]
    at.all_to_all(outs, inputs, comm)
    for j in range(w):
        same(outs[j], torch.arange(r + 2 * j + 1) + 1000 * j)


def check_group(comm: Communicator, device: torch.device) -> None:
    """Exchanges on the process group's own HcclComm between torch_npu's own calls, and calls ATB's operator with it."""
    world = dist.group.WORLD
    assert world is not None
    member = at.from_group(world, device="npu")
    exchanges = Exchanges(member, device)
    for dtype in (torch.float32, torch.int8):
        exchanges.check(dtype)
    exchanges.check(torch.float16, async_op=True)
    x = (torch.arange(4 * comm.size, dtype=torch.int32) + 100 * comm.rank).to(device)
    ours, theirs = torch.zeros_like(x), torch.zeros_like(x)
    at.all_to_all_single(ours, x, group=member)
    dist.all_to_all_single(theirs, x)
    same(ours, theirs.cpu())
    check_reductions(member, device)
    handle = handle_of(world, device)
    if handle:
        check_operator(comm, device, hccl_comm=handle, comm_domain="doctor borrowed")


def check_operator(comm: Communicator, device: torch.device, **own: Any) -> None:
    """Checks the ATB-shaped operator, and reports the device family and the number of devices."""
    w, r = comm.size, comm.rank
    counts, places = [3] * w, [3 * j for j in range(w)]
    arrays: dict[str, Any] = {"send_counts": counts, "sdispls": places, "recv_counts": counts, "rdispls": places}
    param = AllToAllVParam(rank=r, rank_size=w, **arrays, **own)
    x = torch.arange(3 * w, dtype=torch.float16) + 100 * r
    y = at.AllToAllVOperation(param, *([] if own else [comm]))(x.to(device))
    same(y, torch.cat([torch.arange(3 * r, 3 * r + 3) + 100 * j for j in range(w)]).half().view(1, -1))


def check_gradient(comm: Communicator, device: torch.device) -> None:
    x = torch.ones(comm.size).to(device).requires_grad_()
    y = at.all_to_all_v(x, [1] * comm.size, [1] * comm.size, group=comm)
    y.backward(torch.full((comm.size,), comm.rank + 1.0).to(device))
    assert x.grad is not None
    same(x.grad, torch.arange(1.0, comm.size + 1))


def check_quantized(comm: Communicator, device: torch.device) -> None:
    """Sums with a shared scale, by functions and by ATB's operator, and with scales computed on the device."""
    codes = [(torch.arange(160 * 16) * 37 % 251 - 125 + j).to(torch.int8).view(160, 16) for j in range(comm.size)]
    total = torch.stack(codes).sum(0, dtype=torch.int32).float()
    scale, offset = torch.full((1,), 0.25, dtype=torch.float16), torch.full((1,), 2.0, dtype=torch.float16)
    expected = ((total + comm.size * 2.0) * 0.25).half()
    x = codes[comm.rank].to(device)
    same(at.quantized_all_reduce(x, scale=0.25, offset=2.0, group=comm), expected)
    operation = at.QuantAllReduceOperation(QuantAllReduceParam(rank=comm.rank, rank_size=comm.size), comm)
    same(operation(x, scale.to(device), offset.to(device)), expected)
    ones = torch.full((1000,), 1.0 + comm.rank)  # their codes are exact
    same(at.quantized_all_reduce(ones.to(device), group=comm), torch.full((1000,), comm.size * (comm.size + 1) / 2))


def check_kernels(comm: Communicator, device: torch.device) -> None:
    """Exchanges rows by counts on the device, at once and in a graph that is replayed with other counts."""
    if reason := _core.why_no_kernels(comm.core):
        raise LeftOut(reason)
    w, r = comm.size, comm.rank
    x = (torch.arange(4 * w, dtype=torch.float32).view(2 * w, 2) + 100 * r).to(device)
    counts = torch.ones(w, dtype=torch.int64).to(device)

    def exchanged(received: at.Received, count: int) -> None:
        rows = [torch.arange(4 * w, dtype=torch.float32).view(2 * w, 2)[count * r : count * (r + 1)] for _ in range(w)]
        same(received.check().output[: w * count], torch.cat([part + 100 * j for j, part in enumerate(rows)]))

    exchanged(at.all_to_all_v(x, counts, capacity=2 * w, group=comm), 1)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        received = at.all_to_all_v(x, counts, capacity=2 * w, group=comm)
    for count in (1, 2):
        counts.fill_(count)
        graph.replay()
        exchanged(received, count)


def check_hosts(comm: Communicator, device: torch.device) -> None:
    """Runs the ranks as if each had its own host, so that they agree over TCP."""
    if comm.size < 2:
        return
    with (
        variable(LOCAL_SIZE, "1"),
        Communicator.from_env("doctor hosts", backend="hccl", timeout=TIMEOUT) as apart,
    ):
        control = apart.core.control
        assert control is not None
        assert control.backend == "tcp", control.backend
        Exchanges(apart, device).check(torch.float32)
        disagree(apart, device)


def check_mismatch(comm: Communicator, device: torch.device) -> None:
    """Checks that counts that disagree raise an error on every rank, and that the communicator stays usable."""
    if comm.size < 2:
        return
    with Communicator.from_env("doctor mismatch", backend="hccl", timeout=TIMEOUT) as fresh:
        disagree(fresh, device)


def disagree(comm: Communicator, device: torch.device) -> None:
    x = torch.zeros(2 * comm.size).to(device)
    recvs = [2] * comm.size if comm.rank else [1] * comm.size
    try:
        at.all_to_all_v(x, [2] * comm.size, recvs, group=comm)
    except PeerMismatchError:
        pass
    else:
        raise AssertionError("no PeerMismatchError for counts that disagree")
    at.all_to_all_v(x, [2] * comm.size, [2] * comm.size, group=comm)


def speeds(comm: Communicator, device: torch.device, exchange: Callable[[Tensor, Tensor], Any]) -> dict[str, float]:
    """Measures an equal exchange: median seconds for each number of bytes per peer."""
    medians = {}
    for size in SIZES:
        x = torch.zeros(size * comm.size, dtype=torch.uint8).to(device)
        out = torch.empty_like(x)
        seconds = []
        for _ in range(WARM_UP + REPETITIONS):
            torch.npu.synchronize()
            begin = time.perf_counter()
            exchange(out, x)
            torch.npu.synchronize()
            seconds.append(time.perf_counter() - begin)
        medians[str(size)] = statistics.median(seconds[WARM_UP:])
    return medians


def main() -> int:
    job = launch.detect()
    device = torch.device(f"npu:{job.local_rank}")
    torch.npu.set_device(device)
    report: dict[str, Any] = {"torch": torch.__version__, "torch_npu": torch_npu.__version__, "cases": {}}
    report["soc"], report["devices"] = _core.npu_devices()
    report["emulated"] = is_emulated()
    if report["emulated"]:
        from alltoallv_emulator import aten

        aten.install()  # the operators that quantization needs
    hosts, kind = job.size // (job.local_size or job.size), "emulated " if report["emulated"] else ""
    where = f"{job.size} {kind}{report['soc']}, {hosts} host"
    failed = False

    @contextlib.contextmanager
    def case(name: str) -> Iterator[None]:
        nonlocal failed
        begin = time.perf_counter()
        report["running"] = name
        tell()
        try:
            yield
            report["cases"][name] = {"ok": True, "seconds": time.perf_counter() - begin}
        except LeftOut as reason:
            report["cases"][name] = {"ok": True, "seconds": 0.0, "left_out": str(reason)}
        except Exception as error:
            failed = True
            report["cases"][name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            print(f"rank {job.rank}: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        report["cases"][name]["where"] = where
        del report["running"]
        tell()

    def tell() -> None:
        if job.rank == 0:
            print(json.dumps(report), flush=True)

    comm = None
    with case("communicator"):
        comm = Communicator.from_env("doctor", backend="hccl", timeout=TIMEOUT)
    if comm is not None:
        report["kernels"] = _core.why_no_kernels(comm.core) or "serve"
        report["falls_back"] = bool(comm.stats()["falls_back"])
        exchanges = Exchanges(comm, device)
        for name in DTYPES:
            with case(f"all_to_all_v {name}"):
                exchanges.check(getattr(torch, name))
        with case("all_to_all_v async"):
            exchanges.check(torch.float32, async_op=True)
        checks = [
            check_reductions,
            check_lists,
            check_quantized,
            check_kernels,
            check_operator,
            check_gradient,
            check_mismatch,
        ]
        if job.master_addr:
            dist.init_process_group("hccl")
            checks += [check_hosts, check_group, npu_programs.check_aclgraph, npu_programs.check_rank_table]
            checks += [npu_programs.check_dispatch_and_combine, npu_programs.check_alltoallv_gmm]
            checks += [npu_programs.check_matmuls]
        for function in checks:
            with case(function.__name__.removeprefix("check_")):
                function(comm, device)
        with case("speed of all_to_all_single"):
            report["seconds"] = speeds(comm, device, lambda out, x: at.all_to_all_single(out, x, group=comm) and None)
        if not failed and job.master_addr:
            with case("speed of torch_npu's all_to_all_single"):
                report["seconds_torch_npu"] = speeds(comm, device, lambda out, x: dist.all_to_all_single(out, x))
        if dist.is_initialized():
            dist.destroy_process_group()
        comm.destroy()
    tell()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
