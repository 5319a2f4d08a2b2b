"""The kernels in Ascend C behind alltoallv.torch on emulated NPUs: when they serve, and counts on the device."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from npu_ranks import bits, caught, communicator, emulated, group, use_device
from npu_starts import start_as_msrun
from on_ranks import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import alltoallv.torch as at
from alltoallv import AllToAllVParam, Communicator, _core
from alltoallv.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    InvalidParamError,
    InvalidTensorError,
    PeerMismatchError,
)
from alltoallv.testing.golden import assert_bits_equal
from alltoallv_tools.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


def normal(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def codes(rank: int, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(rank), dtype=torch.int8)


def calls_of(comm: Any) -> int:
    """How often the kernels have served."""
    number: int = comm.stats()["kernel_calls"]
    return number


SERVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": (lambda r: normal(r, 5003), {}),
    "float16, mean of groups of 32": (lambda r: normal(r, 5003).half(), {"op": "avg", "group_size": 32}),
    "bfloat16 to float32": (lambda r: normal(r, 777).bfloat16(), {"out_dtype": torch.float32}),
    "values that do not fit": (lambda r: 6e4 * normal(r, 999), {"out_dtype": torch.float16}),
    "to infinity": (lambda r: 6e4 * normal(r, 999), {"out_dtype": torch.float16, "overflow": "infinity"}),
    "a group that is longer than the vector": (lambda r: normal(r, 100), {"group_size": 1 << 40}),
    "4 bits, groups of odd size": (lambda r: normal(r, 501), {"bits": 4, "group_size": 33}),
    "one scale for all": (lambda r: codes(r, 5003), {"scale": 0.0125}),
    "a scale of each channel": (
        lambda r: codes(r, 30, 48), {"scale": torch.linspace(-1, 1, 48), "offset": 2.5, "out_dtype": torch.bfloat16},
    ),
    "nothing": (lambda r: normal(r, 0), {}),
}  # fmt: skip
NOT_SERVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "quantized twice": (lambda r: normal(r, 500), {"gather": "quantized"}),
    "two scales": (lambda r: normal(r, 500), {"comm_quant_scale_1": 0.03, "comm_quant_scale_2": 0.05}),
    "an error for what does not fit": (lambda r: normal(r, 500), {"overflow": "raise"}),
}


@on_ranks(3, communicator=False)
def test_sums_that_the_kernel_serves(rank: int, size: int) -> None:
    """With the bits of shared memory; what it does not serve goes through HCCL."""
    with communicator(rank) as (npus, device), Communicator.from_env("host", backend="shm", timeout=30) as host:
        for cases, kernel in ((SERVED, 1), (NOT_SERVED, 0)):
            for name, (make, options) in cases.items():
                x, before = make(rank), calls_of(npus)
                y = at.quantized_all_reduce(x.to(device), group=npus, **options)
                wanted = at.quantized_all_reduce(x, group=host, **options)
                assert calls_of(npus) - before == kernel, name
                assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
                assert_bits_equal(bits(y), bits(wanted), name)
        x = normal(rank, 300).to(device)
        wanted = at.quantized_all_reduce(x.cpu(), group=host)
        assert at.quantized_all_reduce(x, out=x, group=npus) is x
        assert_bits_equal(bits(x), bits(wanted), "in place")
        at.quantized_all_reduce(x, error_feedback=at.ErrorFeedback(), group=npus)
        assert calls_of(npus) == len(SERVED) + 1


def matrix(size: int, seed: int, most: int = 6) -> list[list[int]]:
    """Counts of all ranks."""
    return torch.randint(0, most, (size, size), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(rank: int, seed: int, count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(100 * seed + rank))


@on_ranks(3, communicator=False)
def test_counts_on_the_device(rank: int, size: int, file: str) -> None:
    """As the host's operator; counts of int32, of a list, with displacements; gradients; also over a group."""
    with Communicator.from_env("host", backend="shm", timeout=30) as host, group(rank, size, file) as (world, device):
        for seed, dtype in enumerate((torch.int64, torch.int32, None)):
            counts, sends = matrix(size, seed), matrix(size, seed)[rank]
            x = rows_of(rank, seed, sum(sends))
            given = sends if dtype is None else torch.tensor(sends, dtype=dtype, device=device)
            recvs = [row[rank] for row in counts]
            wanted = at.all_to_all_v(x, sends, recvs, group=host)
            for expected in (None, torch.tensor(recvs, device=device)):
                moved = x.to(device).requires_grad_()
                received = at.all_to_all_v(moved, given, expected, capacity=20).check()
                assert received.output.shape == (20, 3)
                assert received.recv_counts.device == device
                assert received.recv_counts.tolist() == recvs
                assert_bits_equal(bits(received.output[: len(wanted)]), bits(wanted))
                assert not received.output[len(wanted) :].any()
                (received.output * (rank + 1)).sum().backward()
                assert moved.grad is not None
                assert moved.grad[:, 0].tolist() == [j + 1 for j in range(size) for _ in range(sends[j])]
        flat, places = torch.arange(10.0) + 100 * rank, [7, 2, 3]
        received = at.all_to_all_v(flat.to(device), [2] * size, sdispls=torch.tensor(places, device=device), capacity=9)
        begin = places[rank]
        assert received.check().output.tolist() == [
            *(100.0 * j + begin + k for j in range(size) for k in range(2)), 0, 0, 0,
        ]  # fmt: skip
        member = at.from_group(world, device="npu")
        assert calls_of(member) == 13  # six exchanges with their gradients, and one


@on_ranks(3, communicator=False)
def test_a_later_group_has_the_name_of_an_earlier_one(rank: int, size: int, file: str) -> None:
    """torch_npu names it so: the old windows serve nobody, and nobody who frees them late frees the new ones."""

    def exchange(group: Any, world: int, device: torch.device) -> None:
        x = torch.arange(10 * world, 11 * world, device=device) + 100 * rank
        received = at.all_to_all_v(x, [1] * world, capacity=world, group=group).check()
        assert received.output.tolist() == [10 * world + rank + 100 * j for j in range(world)]

    earlier = []
    if rank < 2:
        with group(rank, 2, file + "2") as (world, device):
            earlier.append(at.from_group(world, device="npu"))
            exchange(earlier[0], 2, device)
    with group(rank, size, file) as (world, device):
        member = at.from_group(world, device="npu")
        exchange(member, size, device)
        if rank == 0:
            earlier.clear()
            gc.collect()
        exchange(member, size, device)
        assert calls_of(member) == 2


@on_ranks(2, communicator=False)
def test_what_all_ranks_refuse_alike(rank: int, size: int) -> None:
    """The device finds it, `check` raises it on every rank, and the communicator stays usable."""
    with communicator(rank) as (comm, device):
        x, ones = torch.ones(4, 2, device=device), torch.ones(size, dtype=torch.int64, device=device)

        def call(x: Tensor = x, counts: Tensor = ones, recvs: Tensor | None = None, capacity: int = 4) -> at.Received:
            return at.all_to_all_v(x, counts, recvs, capacity=capacity, group=comm)

        if rank:
            wrong = [{"capacity": 1}, {"counts": 5 * ones}, {"counts": -ones}, {"x": x.view(2, 4)}, {"recvs": 2 * ones}]
        else:
            wrong = [{}] * 5
        invalid = "more than its capacity", "a region outside of its input", "a negative count"
        errors = [*((InvalidParamError, text) for text in invalid)]
        errors += [
            (PeerMismatchError, "rows of another size"),
            (PeerMismatchError, "other counts than its recv_counts"),
        ]
        # After the first 8 calls, which the ranks compare: there the rows would be found before.
        for _ in range(8):
            call().check()
        for options, (kind, text) in zip(wrong, errors, strict=True):
            received = call(**options)
            with pytest.raises(kind, match=f"rank 1 .*{text}"):
                received.check()
            assert not received.output.any()
            assert call().check().recv_counts.tolist() == [1] * size
        assert comm.usable


@on_ranks(2, communicator=False)
def test_wrong_arguments_are_errors_on_every_rank(rank: int, size: int) -> None:
    with communicator(rank, check="always") as (comm, device), Communicator.from_env("host", backend="shm") as host:
        x, ones = torch.ones(4, 2, device=device), torch.ones(size, dtype=torch.int64, device=device)
        for options, kind, text in (
            ({"capacity": -1}, InvalidParamError, "capacity is -1"),
            ({"send_counts": ones.float()}, InvalidParamError, "send_counts has dtype torch.float32"),
            ({"send_counts": ones[:1]}, InvalidParamError, r"send_counts has shape \(1,\), expected \(2,\)"),
            ({"out": x.clone()}, InvalidParamError, "expected a call without out"),
            ({"async_op": True}, InvalidParamError, "expected a call without async_op"),
            ({"unit": "page"}, InvalidParamError, "unit is 'page'"),
        ):
            right = {"send_counts": ones, "capacity": 4, "group": comm}
            with pytest.raises(kind, match=text):
                at.all_to_all_v(x, **right | (options if rank else {}))
        with pytest.raises(PeerMismatchError, match="moves"):  # counts on the host, and on the device
            at.all_to_all_v(x, [0] * size, [0] * size, sdispls=[0] * size, group=comm) if rank else at.all_to_all_v(
                x, ones, capacity=4, group=comm
            )
        with pytest.raises(PeerMismatchError, match="dtype"):
            at.all_to_all_v(x.half() if rank else x, ones, capacity=4, group=comm)
        with pytest.raises(InvalidTensorError, match="expected an npu with a capacity"):
            at.all_to_all_v(torch.ones(4), [1] * size, capacity=4, group=host)
        assert at.all_to_all_v(x, ones, capacity=4, group=comm).check().recv_counts.tolist() == [1] * size


@on_ranks(2, communicator=False)
def test_a_captured_exchange_is_replayed_with_new_counts(rank: int, size: int) -> None:
    """A thousand times, each with new counts and data, and compared with the host's operator."""
    with communicator(rank) as (npus, device), Communicator.from_env("host", backend="shm", timeout=30) as host:
        capacity = 12
        x, counts = torch.zeros(capacity, 4, device=device), torch.zeros(size, dtype=torch.int64, device=device)
        at.all_to_all_v(x, counts, capacity=capacity, group=npus).check()  # makes the windows
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            received = at.all_to_all_v(x * 2, counts, capacity=capacity, group=npus)
            doubled = received.output + 1
        generator = torch.Generator().manual_seed(7)
        for replay in range(1000):
            sends = torch.randint(0, 4, (size, size), generator=generator)
            mine = torch.randint(0, 1000, (size, capacity, 4), generator=generator).float()[rank]
            own, recvs = sends[rank].tolist(), sends[:, rank].tolist()
            x.copy_(mine)
            counts.copy_(sends[rank])
            graph.replay()
            wanted = torch.ones(capacity, 4)
            wanted[: sum(recvs)] += 2 * at.all_to_all_v(mine, own, recvs, sdispls=[0, own[0]], group=host)
            assert received.recv_counts.tolist() == recvs, replay
            assert torch.equal(doubled.cpu(), wanted), replay
        received.check()
        counts.copy_(torch.tensor([7, 0]))
        graph.replay()
        assert "rank 0 receives more than its capacity" in str(caught(received.check))


@on_ranks(2, communicator=False)
def test_the_operation_of_atb_with_a_capacity(rank: int, size: int) -> None:
    """ATB's arrays are empty, and its checks of the tensors stay; with a communicator, and with the param's own."""
    with communicator(rank) as (comm, device):
        for communicators in ((comm,), ()):
            operation = at.AllToAllVOperation(AllToAllVParam(rank=rank, rank_size=size), *communicators, capacity=6)
            x = torch.arange(6.0, device=device) + 10 * rank
            assert operation.infer_shape(x) == (1, 6)
            for sends in ([2, 1], [0, 3]):
                received = operation(x, send_counts=torch.tensor(sends, device=device)).check()
                begin, count = sum(sends[:rank]), sends[rank]
                wanted = [10.0 * j + begin + k for j in range(size) for k in range(count)]
                assert received.output.tolist() == [wanted + [0] * (6 - len(wanted))]
                assert received.recv_counts.tolist() == [count] * size
            with pytest.raises(InvalidTensorError, match="dtype"):
                operation(x.bool(), send_counts=[1, 1])
            with pytest.raises(InvalidParamError, match="send_counts and capacity belong together"):
                operation(x)
        with pytest.raises(InvalidParamError, match=r"send_counts is .* expected none with a capacity"):
            at.AllToAllVOperation(AllToAllVParam(rank=rank, rank_size=size, send_counts=[1, 1]), comm, capacity=6)


@on_ranks(2, communicator=False)
def test_where_a_rank_has_no_windows_hccl_serves_all(rank: int, size: int) -> None:
    """The ranks agree on it, once, without waiting for HCCL; who needs the kernel is told why there is none."""
    for fault, call in (
        ("aclrtMalloc@1=fail:207001", "aclrtMalloc"),
        ("HcclKfcAllocOpArgs@1=fail:4", "HcclKfcAllocOpArgs returned 4"),
        ("HcclGetRemoteIpcHcclBuf@1=fail:4", "HcclGetRemoteIpcHcclBuf returned 4"),
        ("HcclCreateOpResCtx@1=fail:4", "HcclCreateOpResCtx returned 4"),  # here HCCL lets the others wait
    ):
        in_hccl = {"exec_timeout": 2, "connect_timeout": 2} if "CreateOp" in fault else {}
        with communicator(rank, domain=call.split()[0]) as (comm, _), emulated(faults=fault, **in_hccl):
            assert re.search(f"rank 1: .*{call}", _core.why_no_kernels(comm.core))
    with communicator(rank) as (comm, device):
        with emulated(faults="HcclGetHcclBuffer@1=fail:2"):
            assert "rank 1: " in _core.why_no_kernels(comm.core)
        x = normal(rank, 300)
        y = at.quantized_all_reduce(x.to(device), group=comm)
        assert y.cpu().sub(sum(normal(r, 300) for r in range(size))).abs().max() < 0.1
        assert calls_of(comm) == 0
        ones = torch.ones(size, dtype=torch.int64, device=device)
        with pytest.raises(BackendUnavailableError, match=r"rank 1: .*HcclGetHcclBuffer returned 2"):
            at.all_to_all_v(x.to(device), ones, capacity=4, group=comm)
        assert comm.usable


@on_ranks(2, communicator=False, env={"HCCL_EXEC_TIMEOUT": "1"})
def test_a_rank_that_does_not_come_is_named(rank: int, size: int) -> None:
    """In bounded time, by the kernel itself; from then on the group's kernels are of no more use, on any rank."""
    with (
        communicator(rank, check="off") as (comm, device),
        Communicator.from_env("host", backend="shm", timeout=30) as host,
    ):
        x, ones = torch.ones(size, device=device), torch.ones(size, dtype=torch.int64, device=device)
        assert _core.why_no_kernels(comm.core) == ""
        if rank == 0:
            with pytest.raises(CommTimeoutError, match="rank 1 did not come in time"):
                at.all_to_all_v(x, ones, capacity=2, group=comm).check()
        at.barrier(host)
        received = at.all_to_all_v(x, ones, capacity=2, group=comm)
        with pytest.raises(CommTimeoutError, match="rank 1 did not come in time"):
            received.check()
        assert not received.output.any()


@on_ranks(2, communicator=False)
def test_between_servers_hccl_serves(rank: int, size: int, port: int) -> None:
    start_as_msrun(rank, size, port - 1, ALLTOALLV_LOCAL_WORLD_SIZE=1)
    with communicator(rank) as (comm, device):
        y = at.quantized_all_reduce(torch.full((200,), 127.0, device=device), group=comm)
        assert y.tolist() == [127.0 * size] * 200
        assert _core.why_no_kernels(comm.core) == "its ranks are on more than one server"
        assert calls_of(comm) == 0


@on_ranks(1, communicator=False)
def test_graphs_and_fake_tensors_know_the_shapes(rank: int, size: int, file: str) -> None:
    use_device(rank)
    store = dist.FileStore(file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with FakeTensorMode():
        x, counts = torch.empty(5, 3, dtype=torch.half), torch.empty(1, dtype=torch.int64)
        received = at.all_to_all_v(x, counts, capacity=7)
        assert (received.output.shape, received.output.dtype) == ((7, 3), torch.half)
        assert (received.recv_counts.shape, received.recv_counts.dtype) == ((1,), torch.int64)
    graph = make_fx(lambda x, counts: at.all_to_all_v(x, counts, capacity=7), tracing_mode="fake")(
        torch.ones(5, 3), torch.ones(1, dtype=torch.int64)
    )
    assert "alltoallv.all_to_all_v_counted.default" in [str(node.target) for node in graph.graph.nodes]
    dist.destroy_process_group()
