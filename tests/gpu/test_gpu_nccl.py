"""Calls of one rank through NCCL: bytes, streams, memory, waiting, graphs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, on_group
from engine_groups import DTYPES, random_cases, run_case
from one_gpu import compared, on_gpu, through_nccl
from torch import Tensor

import alltoallv.torch as at
from alltoallv import communicator
from alltoallv.errors import AllToAllVError

LONG = 1 << 22  # elements
CYCLES = 200_000_000  # of a kernel that is late: a tenth of a second


def alone(test: Callable[..., None]) -> Callable[..., None]:
    return on_group(1, through_nccl, seconds=150)(test)


@alone
def test_every_dtype_and_layout(rank: int, size: int, comm: Any) -> None:
    for number, case in enumerate(random_cases(1, 2 * len(DTYPES))):
        run_case(comm, case, number, "cuda")


@alone
def test_a_call_waits_for_its_stream_alone(rank: int, size: int, comm: Any) -> None:
    compared(comm)
    stream = torch.cuda.Stream()
    for later in (False, True):
        x, out = torch.zeros(LONG, device="cuda"), torch.zeros(LONG, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            x.fill_(7)
            made: Any = at.all_to_all_v(x, [LONG], [LONG], out=out, async_op=later)
            if later:
                made[1].wait()
            x.fill_(8)
            y = out + 1
        stream.synchronize()
        assert (out == 7).all()
        assert (y == 8).all()


@alone
def test_memory_of_asynchronous_calls_is_not_handed_out(rank: int, size: int, comm: Any) -> None:
    compared(comm)
    for value in range(30):
        x = torch.full((LONG,), float(value), device="cuda")
        torch.cuda._sleep(CYCLES // 10)
        out, work = at.all_to_all_v(x, [LONG], [LONG], async_op=True)
        del x
        others = [torch.full((LONG,), -1.0, device="cuda") for _ in range(3)]
        work.wait()
        assert (out == value).all()
        del others
    for _ in range(300):  # never waited for
        at.all_to_all_v(torch.ones(1 << 16, device="cuda"), [1 << 16], [1 << 16], async_op=True)
    torch.cuda.synchronize()
    at.all_to_all_v(torch.ones(4, device="cuda"), [4], [4], async_op=True)[1].wait()
    assert len(communicator.pending) < 100


@alone
def test_where_the_host_waits(rank: int, size: int, comm: Any) -> None:
    """The table of docs/gpu.md."""
    compared(comm)
    x, counts = torch.ones(8, 4, device="cuda"), torch.tensor([8], device="cuda")
    out, plan, dispatcher = torch.empty_like(x), at.Plan([32], [32], device="cuda"), at.nn.MoEDispatcher(4)
    ids = torch.randint(0, 4, (8, 2), device="cuda")

    def gradient() -> None:
        at.all_to_all_v(x.clone().requires_grad_(), [8], [8]).sum().backward()

    def moe() -> None:
        rows, _, state = dispatcher.dispatch(x, ids, torch.ones(8, 2, device="cuda"))
        dispatcher.combine(rows, state)

    static = at.nn.StaticMoEDispatcher(4, 8)

    def static_moe() -> None:
        rows, _, state = static.dispatch(x.clone().requires_grad_(), ids, torch.ones(8, 2, device="cuda"))
        static.combine(rows, state).sum().backward()

    def waits(call: Callable[[], object]) -> bool:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call()
            torch.cuda.set_sync_debug_mode("default")
        return any("synchroniz" in str(warning.message) for warning in seen)

    enqueued: dict[str, Callable[[], object]] = {
        "lists": lambda: at.all_to_all_v(x, [8], [8]),
        "out": lambda: at.all_to_all_v(x, [8], [8], out=out),
        "single": lambda: at.all_to_all_single(out, x),
        "plan": lambda: plan(x.view(-1)),
        "learnt": lambda: at.all_to_all_v(x, [8]),
        "gradient": gradient,
        "all_reduce": lambda: at.all_reduce(out),
        "quantized": lambda: at.quantized_all_reduce(x.view(-1)),
        "static moe": static_moe,
    }
    assert [name for name, call in enqueued.items() if waits(call)] == []
    assert waits(lambda: at.all_to_all_v(x, counts, counts))
    assert waits(moe)


@alone
def test_a_captured_call_is_replayed_with_other_data(rank: int, size: int, comm: Any) -> None:
    compared(comm)
    x, a, b = (torch.zeros(4096, device="cuda") for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        at.all_to_all_v(x, [4096], [4096], out=a)
        y = a * 2
        works = [at.all_to_all_v(y, [4096], [4096], out=out, async_op=True)[1] for out in (a, b)]
        for work in works:  # two are in flight
            work.wait()
        z = a + b
    for value in range(50):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (z == 4 * value).all()


def test_the_first_call_of_a_group_within_a_capture(grouped: Grouped) -> None:
    """It is captured, or refused: never wrong."""

    def run(rank: int, size: int, comm: Any) -> None:
        x, out, graph = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                at.all_to_all_v(x, [64], [64], out=out)
        except (RuntimeError, AllToAllVError) as error:
            print("refused:", error)
            return
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 1).all()

    grouped(1, through_nccl, fresh=True, seconds=90)(run)


@alone
def test_compiled_functions(rank: int, size: int, comm: Any) -> None:
    compared(comm)
    x = torch.ones(8, 4, device="cuda")

    def step(x: Tensor) -> Tensor:
        return at.all_to_all_v(x * 2, [8], [8]) + 1

    for mode in (None, "reduce-overhead"):
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for value in range(4):
            assert (compiled(x * value) == 2 * value + 1).all(), mode


def test_messages_of_a_batch_are_one_launch(grouped: Grouped) -> None:
    """A message to oneself ends only if NCCL gets both halves at once."""

    def run(rank: int, size: int, comm: Any) -> None:
        dist.distributed_c10d._check_not_self_rank = lambda *_: None
        x, out = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, out, 0)]):
            work.wait()
        assert torch.equal(out, x)

    grouped(1, on_gpu, backend="cpu:alltoallv,cuda:nccl", fresh=True, seconds=60)(run)


def test_backend_alltoallv_with_nccl(grouped: Grouped) -> None:
    """Collectives, DDP, groups, and a second start in one process."""

    def run(rank: int, size: int, comm: Any) -> None:
        x, out = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
        dist.all_reduce(x)
        dist.all_to_all_single(out, x)
        dist.all_gather_into_tensor(out, x)
        dist.broadcast(x, 0)
        dist.barrier()
        dist.barrier(device_ids=[0])
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_object([None], 1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
        model(x[None]).sum().backward()
        for group in (dist.new_group([0]), dist.split_group(split_ranks=[[0]])):
            dist.all_reduce(x, group=group)
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
        dist.all_reduce(x, group=mesh.get_group())
        assert x.tolist() == out.tolist() == [1.0] * 8

    for _ in range(2):
        grouped(1, on_gpu, backend="cpu:alltoallv,cuda:nccl", seconds=120)(run)


def test_two_ranks_on_one_gpu_are_refused_by_nccl_on_both(grouped: Grouped) -> None:
    def run(rank: int, size: int, comm: Any) -> None:
        try:
            at.all_to_all_v(torch.ones(2, device="cuda"), [1, 1], [1, 1])
            torch.cuda.synchronize()
        except (RuntimeError, AllToAllVError) as error:
            print("refused:", error)
        sys.stdout.flush()
        os._exit(0)  # NCCL has no end after such an error

    call = grouped(2, on_gpu, backend="cpu:gloo,cuda:nccl", timeout=20.0, fresh=True, outcomes=True, seconds=90)
    assert ["refused:" in outcome.output for outcome in call(run)] == [True, True]


def test_a_message_is_refused(grouped: Grouped) -> None:
    def run(rank: int, size: int, comm: Any) -> None:
        with pytest.raises(AllToAllVError, match="has no messages here"):
            at.isend(torch.ones(4, device="cuda"), 0)

    grouped(1, through_nccl)(run)
