"""A call whose like has been made before looks at its tensors only; everything else stays as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks


@pytest.mark.parametrize("unit", ["element", "row"])
def test_repeated_exchanges_move_the_data_of_each(ranks: Ranks, unit: Any) -> None:
    def program(comm: Communicator) -> None:
        counts = [[(i + j) % 3 for j in range(comm.size)] for i in range(comm.size)]
        recvs = [counts[j][comm.rank] for j in range(comm.size)]
        for step in range(4):
            inputs = [torch.arange(3 * sum(row)).view(-1, 3) + 100 * i + 1000 * step for i, row in enumerate(counts)]
            flat = [x if unit == "row" else x[:, 0].contiguous() for x in inputs]
            expected = torch.cat([x.split(row)[comm.rank] for x, row in zip(flat, counts, strict=True)])
            x, out = flat[comm.rank], torch.full_like(expected, -1)
            made = at.all_to_all_v(x, counts[comm.rank], recvs, unit=unit, group=comm)
            assert at.all_to_all_v(x, counts[comm.rank], recvs, unit=unit, out=out, group=comm) is out
            single = torch.full_like(expected, -1)
            assert at.all_to_all_single(single, x, recvs, counts[comm.rank], group=comm) is None
            for got in (made, out, single):
                assert torch.equal(got, expected)

    ranks(3)(program)


def test_repeated_gathers_and_equal_parts(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        for step in range(4):
            inputs = [torch.arange(6.0).view(2, 3) + 10 * i + 100 * step for i in range(comm.size)]
            whole = torch.full((2 * comm.size, 3), -1.0)
            at.all_gather_into_tensor(whole, inputs[comm.rank], group=comm)
            assert torch.equal(whole, torch.cat(inputs))
            parts = torch.full((2, 3), -1.0)
            at.all_to_all_single(parts, inputs[comm.rank], group=comm)
            assert torch.equal(parts, torch.stack([x[comm.rank] for x in inputs]))

    ranks(2)(program)


QUANTIZED: list[dict[str, Any]] = [
    {},
    {"bits": 4, "group_size": 32, "gather": "quantized", "op": "avg"},
    {"out_dtype": torch.float16},
]


@pytest.mark.parametrize("how", QUANTIZED, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 200), (0,)])
def test_repeated_quantized_reductions_give_what_first_ones_do(
    ranks: Ranks, shape: tuple[int, ...], how: dict[str, Any]
) -> None:
    def program(comm: Communicator) -> None:
        for step in range(4):
            torch.manual_seed(100 * step + comm.rank)
            x = torch.randn(shape)
            first, work = at.quantized_all_reduce(x, async_op=True, group=comm, **how)  # which is not repeated
            work.wait()
            made = at.quantized_all_reduce(x, group=comm, **how)
            out = torch.full_like(first, 9)
            assert at.quantized_all_reduce(x, out=out, group=comm, **how) is out
            half = at.quantized_all_reduce(x.half(), group=comm, **how)
            assert half.dtype == torch.float16
            results = [made, out]
            if first.dtype == x.dtype:
                assert at.quantized_all_reduce(x, out=x, group=comm, **how) is x
                results.append(x)
            for got in results:
                assert got.dtype == first.dtype
                assert got.shape == shape
                assert torch.equal(got, first)

    ranks(3)(program)


def test_quantized_reductions_refuse_again_what_they_refused() -> None:
    (comm,) = Communicator.threads(1)
    both = torch.arange(8.0)
    x, over = both[:6], both[2:]
    for _ in range(3):
        assert at.quantized_all_reduce(x, group=comm).shape == (6,)
        assert at.quantized_all_reduce(both[::2], group=comm).shape == (4,)  # copied first
        half = at.quantized_all_reduce(x, out_dtype=torch.float16, group=comm)
        with pytest.raises(InvalidParamError, match="overlap"):
            at.quantized_all_reduce(x, out=over, group=comm)
        with pytest.raises(InvalidParamError, match="overlap"):  # its elements are not as long
            at.quantized_all_reduce(x, out_dtype=torch.float16, out=x.view(torch.float16)[:6], group=comm)
        with pytest.raises(InvalidTensorError, match="dtype"):
            at.quantized_all_reduce(x, out=half, group=comm)
        with pytest.raises(InvalidTensorError, match="expected"):
            at.quantized_all_reduce(x, out=torch.zeros(5), group=comm)
        with pytest.raises(InvalidParamError, match="op"):
            at.quantized_all_reduce(x, op=["sum"], group=comm)  # type: ignore[arg-type]
        weighed = torch.ones(6, requires_grad=True)
        at.quantized_all_reduce(weighed, group=comm).sum().backward()
        assert weighed.grad is not None
        assert weighed.grad.tolist() == [1] * 6
    comm.destroy()
    with pytest.raises(AllToAllVError):
        at.quantized_all_reduce(x, group=comm)


def test_a_disagreement_after_repeated_reductions_is_found(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        for _ in range(2):
            at.quantized_all_reduce(torch.ones(6), group=comm)
        with pytest.raises(PeerMismatchError, match="rank 0 has bits 8, rank 1 has bits 4"):
            at.quantized_all_reduce(torch.ones(6), bits=8 - 4 * comm.rank, group=comm)
        assert at.quantized_all_reduce(torch.ones(6), group=comm).tolist() == [comm.size] * 6
        assert len(comm.repeats)

    ranks(2)(program)


def test_tensors_of_another_kind_take_the_way_that_suits_them() -> None:
    (comm,) = Communicator.threads(1)
    x, out = torch.arange(4.0), torch.zeros(4)
    for _ in range(3):
        assert at.all_to_all_v(x, [4], [4], out=out, group=comm) is out
        assert at.all_to_all_v(torch.arange(8.0)[::2], [4], [4], group=comm).tolist() == [0, 2, 4, 6]
        assert at.all_to_all_v(torch.arange(4.0).neg().to(torch.complex64).conj(), [4], [4], group=comm).tolist() == [
            0,
            -1,
            -2,
            -3,
        ]
        weighed = torch.ones(4, requires_grad=True)
        at.all_to_all_v(weighed, [4], [4], group=comm).mul(2).sum().backward()
        assert weighed.grad is not None
        assert weighed.grad.tolist() == [2, 2, 2, 2]
        with torch.no_grad():
            assert not at.all_to_all_v(weighed, [4], [4], group=comm).requires_grad
        parameter = torch.nn.Parameter(torch.ones(4))
        assert at.all_to_all_v(parameter, [4], [4], group=comm).requires_grad
        with pytest.raises(InvalidParamError, match="overlap"):
            at.all_to_all_v(x, [4], [4], out=x, group=comm)
        with pytest.raises(InvalidTensorError, match="dtype"):
            at.all_to_all_v(x, [4], [4], out=torch.zeros(4, dtype=torch.float64), group=comm)
        with pytest.raises(InvalidTensorError, match="not contiguous"):
            at.all_to_all_v(x, [4], [4], out=torch.zeros(8)[::2], group=comm)
        with pytest.raises(InvalidTensorError, match="layout"):
            at.all_to_all_v(x.to_sparse(), [4], [4], group=comm)
        with pytest.raises(InvalidParamError, match="unit"):
            at.all_to_all_v(x, [4], [4], unit="byte", group=comm)  # type: ignore[call-overload]
        with pytest.raises(RuntimeError):  # of a tensor that has no memory, and told to the peers
            torch.func.vmap(lambda row: at.all_to_all_v(row, [4], [4], out=torch.zeros(4), group=comm))(x.view(1, 4))
        with torch.profiler.profile() as profile:
            at.all_to_all_v(x, [4], [4], out=out, group=comm)
        assert any(event.name == "alltoallv.all_to_all_v" for event in profile.events() or ())
    comm.destroy()
    with pytest.raises(AllToAllVError):
        at.all_to_all_v(x, [4], [4], out=out, group=comm)


def test_a_disagreement_after_repeats_is_found(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        recvs = [1, 1] if comm.rank == 0 else [2, 2]
        for sends in ([1, 2], [1, 2]):
            at.all_to_all_v(torch.arange(3), sends, recvs, group=comm)
        with pytest.raises(PeerMismatchError, match="rank"):
            at.all_to_all_v(torch.arange(3), [2, 1] if comm.rank else [1, 2], recvs, group=comm)
        assert at.all_to_all_v(torch.arange(3), [1, 2], recvs, group=comm).numel() == sum(recvs)

    ranks(2)(program)


def test_only_plain_tensors_take_the_short_way() -> None:
    (comm,) = Communicator.threads(1)
    plan = at.Plan([4], [4], group=comm)
    x = torch.arange(4.0)
    assert plan(x).tolist() == at.all_to_all_v(x, [4], [4], group=comm).tolist() == [0, 1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these young
        nested, compressed = torch.nested.nested_tensor([x]), torch.eye(2).to_sparse_csr()
    with pytest.raises(InvalidTensorError, match="is a nested tensor"):
        at.all_to_all_v(nested, [4], [4], group=comm)
    others: list[tuple[torch.Tensor, str]] = [
        (torch.eye(2).to_sparse(), "layout"),
        (compressed, "layout"),
        (nested, "is a nested tensor"),
        (x.view(2, 2).to_mkldnn(), "layout"),
        (torch._efficientzerotensor(4), "is a zero tensor"),
        (torch._neg_view(x.clone()), "not contiguous"),
        (torch.arange(8.0)[::2], "not contiguous"),
        (x.double(), "dtype"),
        (x.to("meta"), "meta"),
    ]
    for tensor, message in others:
        with pytest.raises(InvalidTensorError, match=message):
            plan(tensor)
        with pytest.raises(InvalidTensorError, match=message):
            plan(x, tensor)
    pair = at.Plan([4], [4], torch.complex64, group=comm)
    turned = torch.tensor([1j, 2j, 3j, 4j])
    assert pair(turned).tolist() == turned.tolist()
    with pytest.raises(InvalidTensorError, match="not contiguous"):
        pair(turned.conj())
