"""all_to_all_v and its kin on tensors of emulated NPUs, over HCCL, bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from npu_ranks import ATB_DTYPES, DTYPES, bits, communicator, moved, on
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv.testing import Ranks, golden, reference
from alltoallv.testing.golden import assert_bits_equal, random_case
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False)
def test_regions_with_zeros_and_gaps_in_any_order(rank: int, size: int) -> None:
    rng = np.random.default_rng(size)
    with communicator(rank) as (comm, device):
        for dtype in DTYPES * 2:
            case = random_case(rng, size, dtype, max_count=300, overlapping_sends=bool(rng.integers(2)))
            assert_bits_equal(moved(case, rank, device, group=comm), case.expected[rank], dtype)
        assert comm.stats()["operators"] == 2 * len(DTYPES)
        assert comm.stats()["agreed_operators"] == 8  # check="first"


@on_ranks(4, communicator=False)
def test_outputs_that_the_operator_allocates(rank: int, size: int) -> None:
    rng = np.random.default_rng(5)
    with communicator(rank) as (comm, device):
        for learns in (False, True):
            case = random_case(rng, size, "float32", gaps=False, permuted=False)
            recvs = None if learns else case.recv_counts[rank]
            y = at.all_to_all_v(on(device, case.inputs[rank]), case.send_counts[rank], recvs, group=comm)
            assert y.device == device
            assert_bits_equal(bits(y), case.expected[rank])
        case = random_case(rng, size, "float32")
        y = at.all_to_all_v(
            on(device, case.inputs[rank]),
            case.send_counts[rank],
            case.recv_counts[rank],
            sdispls=case.sdispls[rank],
            rdispls=case.rdispls[rank],
            group=comm,
        )
        zeros = [np.zeros_like(x) for x in case.outputs]
        expected = reference.all_to_all_v(
            case.inputs, case.send_counts, case.sdispls, case.recv_counts, case.rdispls, zeros
        )[rank]
        assert_bits_equal(bits(y), expected[: y.numel()])


@on_ranks(4, communicator=False)
def test_rows_and_the_functions_of_torch(rank: int, size: int) -> None:
    with communicator(rank) as (comm, device):
        arrays = [np.arange(6 * size, dtype=np.int32).reshape(2 * size, 3) + 1000 * j for j in range(size)]
        x = on(device, arrays[rank])
        expected = reference.all_to_all_single(arrays)[rank]
        y = at.all_to_all_v(x, [2] * size, [2] * size, unit="row", group=comm)
        assert_bits_equal(bits(y), expected)
        out = torch.empty_like(x)
        at.all_to_all_single(out, x, group=comm)
        assert_bits_equal(bits(out), expected)
        outs = [torch.empty(2, 3, dtype=torch.int32, device=device) for _ in range(size)]
        at.all_to_all(outs, list(x.split(2)), comm)
        assert_bits_equal(np.concatenate([bits(part) for part in outs]), expected)
        out = torch.empty(2 * size * size, 3, dtype=torch.int32, device=device)
        at.all_gather_into_tensor(out, x, comm)
        assert_bits_equal(bits(out), reference.all_gather_into_tensor(arrays)[rank])
        assert at.exchange_counts([10 * rank + j for j in range(size)], comm).tolist() == [
            10 * j + rank for j in range(size)
        ]


@on_ranks(2, communicator=False)
def test_async(rank: int, size: int) -> None:
    rng = np.random.default_rng(7)
    with communicator(rank) as (comm, device):
        works: list[tuple[Any, Any, Any]] = []
        for n in range(12):
            case = random_case(rng, size, "bfloat16", gaps=False, permuted=False, max_count=2000)
            recvs = None if n % 3 == 0 else case.recv_counts[rank]
            x = on(device, case.inputs[rank])
            y, work = at.all_to_all_v(x, case.send_counts[rank], recvs, group=comm, async_op=True)
            works.append((y, work, case.expected[rank]))
            del x
        for y, work, expected in reversed(works):
            assert work.wait()
            assert_bits_equal(bits(work.result() if y is None else y), expected)
            assert work.is_completed()
            assert work.is_success()


@on_ranks(4, communicator=False)
def test_gradients(rank: int, size: int) -> None:
    rng = np.random.default_rng(11)
    with communicator(rank) as (comm, device):
        for async_op in (False, True):
            case = random_case(rng, size, "int32", gaps=False)
            x = torch.arange(float(case.inputs[rank].size)).to(device).requires_grad_()
            layout = {"sdispls": case.sdispls[rank], "rdispls": case.rdispls[rank], "group": comm}
            y: Any = at.all_to_all_v(x, case.send_counts[rank], case.recv_counts[rank], async_op=async_op, **layout)
            if async_op:
                y, work = y
                work.wait()
            grads = [np.arange(float(n.size), dtype=np.float32) + 100 * j for j, n in enumerate(case.outputs)]
            y.backward(on(device, grads[rank][: y.numel()]))
            expected = reference.all_to_all_v(
                grads, case.recv_counts, case.rdispls, case.send_counts, case.sdispls,
                [np.zeros(n.size, np.float32) for n in case.inputs],
            )[rank]  # fmt: skip
            assert x.grad is not None
            assert_bits_equal(bits(x.grad), expected)


REDUCED = ("int8", "int16", "int32", "int64", "uint8", "bool", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(communicator=False)
def test_reductions(rank: int, size: int) -> None:
    """HCCL's own and, for what it lacks, ours. Small whole numbers: exact in any order."""
    rng, own = np.random.default_rng(3), np.random.default_rng(rank)
    numel = 6 * size
    even, uneven = [6] * size, ([0, 11, 7] if size == 3 else [1, 11])
    with communicator(rank) as (comm, device):
        member = groups.resolve(comm)
        for dtype, op in product(REDUCED, ("sum", "min", "max", "prod", "avg")):
            if op == "avg" and "float" not in dtype:
                continue
            least = 0 if dtype in ("bool", "uint8") else -4
            arrays = [(rng.integers(least, 5, numel) * (1 if op != "avg" else size)) for _ in range(size)]
            arrays = [array.astype(golden.dtype_of(dtype)) for array in arrays]
            x = on(device, arrays[rank])
            out = on(device, golden.fill(own, numel, dtype))
            calls.reduce(member, "all_reduce", out, x, op, even, x.shape).run()
            assert_bits_equal(bits(out), reference.all_reduce(arrays, op)[rank], f"{dtype} {op}")
            for counts in (even, uneven):
                part = on(device, golden.fill(own, counts[rank], dtype))
                calls.reduce(member, "reduce_scatter", part, x, op, counts, x.shape).run()
                expected = reference.reduce_scatter(arrays, op, counts)[rank]
                assert_bits_equal(bits(part), expected, f"{dtype} {op} {counts}")


@on_ranks(1, communicator=False)
def test_a_world_of_one_honours_displacements(rank: int, size: int) -> None:
    with communicator(rank) as (comm, device):
        for dtype in ATB_DTYPES:
            x = on(device, golden.fill(np.random.default_rng(0), 10, dtype))
            out = torch.zeros(10, dtype=x.dtype).to(device)
            at.all_to_all_v(x, [4], [4], sdispls=[3], rdispls=[5], out=out, group=comm)
            expected = np.zeros_like(bits(x))
            expected[5:9] = bits(x)[3:7]
            assert_bits_equal(bits(out), expected)


def test_disagreement_is_an_error_everywhere_and_nothing_is_written(ranks: Ranks) -> None:
    from alltoallv.errors import InvalidParamError, PeerMismatchError

    def check(rank: int, size: int) -> None:
        with communicator(rank) as (comm, device):
            x = torch.arange(4.0).to(device)
            out = torch.full((4,), 7.0).to(device)
            with pytest.raises(PeerMismatchError, match="rank 1 sends 1 elements to rank 0, which expects 2"):
                at.all_to_all_v(x, [2 - rank, 2 + rank], [2, 2], out=out, group=comm)
            with pytest.raises(PeerMismatchError, match="dtype"):
                at.all_to_all_v(x if rank else torch.zeros(4).half().to(device), [2, 2], [2, 2], group=comm)
            with pytest.raises(InvalidParamError):  # on the rank that is wrong, and on its peer
                at.all_to_all_v(x, [9, 2] if rank else [2, 2], [2, 2], out=out, group=comm)
            assert out.cpu().tolist() == [7.0] * 4
            at.all_to_all_v(x, [2, 2], [2, 2], out=out, group=comm)
            assert out.cpu().tolist() == [2.0 * rank, 2.0 * rank + 1] * 2

    ranks(2, communicator=False)(check)


def test_tensors_in_the_wrong_place(ranks: Ranks) -> None:
    from alltoallv.errors import InvalidParamError, InvalidTensorError

    def check(rank: int, size: int) -> None:
        import alltoallv.numpy as an

        with communicator(rank) as (comm, device):
            with pytest.raises(InvalidTensorError, match="lie on cpu, expected a device of hccl"):
                at.all_to_all_v(torch.zeros(2), [1, 1], [1, 1], group=comm)
            with pytest.raises(InvalidTensorError, match="lie on npu"):
                at.all_to_all_v(torch.zeros(2).to(device), [1, 1], [1, 1], out=torch.zeros(2), group=comm)
            with pytest.raises(InvalidParamError, match="backend 'hccl'"):
                an.all_to_all_v(np.zeros(2), [1, 1], [1, 1], group=comm)

    ranks(2, communicator=False)(check)
