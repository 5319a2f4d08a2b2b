"""Quantized reductions over an engine: the oracle's bits on every rank, and what the ranks disagree about."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from atb_front_ends import check_quantized
from backend_groups import Grouped, on_group
from engine_groups import staged, to_numpy, to_torch, views

import alltoallv.torch as at
from alltoallv.errors import InvalidParamError, PeerMismatchError, ValueOverflowError
from alltoallv.quantization.spec import Quantization
from alltoallv.testing import quantized as q
from alltoallv.testing.golden import assert_bits_equal, dtype_of
from alltoallv.torch.engines import kernels
from alltoallv.torch.quantized import ops as quantized_rows

F32 = np.float32


def inputs_of(seed: int, ranks: int, count: int, name: str) -> list[Any]:
    rng = np.random.default_rng(seed)
    xs = [(rng.normal(size=count) * np.exp(rng.normal())).astype(dtype_of(name)) for _ in range(ranks)]
    if count > 40:
        xs[0][count // 2] = np.inf
        xs[-1][7] = np.nan
    return xs


def feedback(seed: int, ranks: int, count: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=count) * 0.01).astype(F32) for _ in range(ranks)]


def all_reduce_cases(comm: Any, place: str) -> None:
    """Every mode, with parts that are empty, short and longer than a chunk; torch operators are the kernels."""
    rank, size = comm.rank, comm.size
    for number, count in enumerate((0, 1, 33, 1024, 5003)):
        for form, group, gather, name, out_name, op, feeds in (
            ("int8", 128, "full", "float32", "float16", "sum", False),
            ("int8", 32, "quantized", "bfloat16", "bfloat16", "avg", True),
            ("int4", 33, "quantized", "float16", "float32", "sum", True),
            ("int4", 64, "full", "float32", "float32", "avg", True),
            ("int5", 2500, "quantized", "float32", "float32", "sum", True),
            ("int3_rotated_spikes", 96, "quantized", "float32", "float32", "sum", True),
            ("int2_rotated_spikes", 33, "full", "bfloat16", "bfloat16", "avg", True),
        ):
            xs, how = inputs_of(number, size, count, name), {"format": form, "group_size": group, "gather": gather}
            errors = feedback(number, size, count) if feeds else None
            gather_error = feedback(99, 1, count)[0] if feeds and gather == "quantized" else None
            begin, length = Quantization(form, group).part(count, size, rank)
            state = None
            if errors is not None:
                held = None if gather_error is None else to_torch(gather_error[begin : begin + length])
                (state := at.ErrorFeedback()).load_state_dict({"error": to_torch(errors[rank]), "gather_error": held})
            out = torch.full((count,), 3.0, dtype=getattr(torch, out_name), device=place)
            told: Any = {"out": out, "out_dtype": out.dtype, "error_feedback": state, "group": comm} | how
            at.quantized_all_reduce(to_torch(xs[rank]).to(place), op=op, **told)
            expected = q.quantized_all_reduce(
                xs, op=op, dtype=out_name, errors=errors, gather_error=gather_error, **how
            )[rank]  # fmt: skip
            assert_bits_equal(to_numpy(out.cpu()), expected, f"{count} {form} {group} {gather}")
            if state is not None:
                kept = state.state_dict()
                assert_bits_equal(to_numpy(kept["error"].cpu()), errors[rank], "error feedback")
                if gather_error is not None:
                    wanted = gather_error[begin : begin + length]
                    assert_bits_equal(to_numpy(kept["gather_error"].cpu()), wanted, "error feedback of the gather")


def shared_scale_cases(comm: Any, place: str) -> None:
    rank, size = comm.rank, comm.size
    for shape, channels in (((7, 5), 1), ((7, 5), 5), ((200, 16), 16), ((0, 4), 4), ((1, 3000), 3000), ((11,), 1)):
        rng = np.random.default_rng(channels)
        codes = [rng.integers(-128, 128, shape).astype(np.int8) for _ in range(size)]
        scale = rng.uniform(0.01, 1, channels).astype(F32)
        one, second = to_torch(scale), (scale * F32(1.7)).astype(F32)
        out = at.quantized_all_reduce(to_torch(codes[rank]).to(place), scale=one, offset=0.5, group=comm)
        assert_bits_equal(to_numpy(out.cpu()), q.shared_scale_all_reduce(codes, scale, 0.5)[rank])

        xs = [rng.normal(size=shape).astype(F32) for _ in range(size)]
        told: Any = {"comm_quant_scale_1": one, "comm_quant_scale_2": to_torch(second), "group": comm}
        out = at.quantized_all_reduce(to_torch(xs[rank]).to(place), **told)
        assert_bits_equal(to_numpy(out.cpu()), q.two_scale_all_reduce(xs, scale, second)[rank])


def operation_cases(comm: Any, place: str = "cpu") -> None:
    """The ATB-shaped operation."""

    def array(tensor: torch.Tensor) -> Any:
        assert tensor.device.type == place
        return to_numpy(tensor.cpu())

    check_quantized(comm, lambda x: to_torch(x).to(place), array, at.ErrorFeedback())


@pytest.mark.parametrize("size", [1, 2])
def test_the_operation_over_a_group(grouped: Grouped, size: int) -> None:
    grouped(size, views, check="always")(lambda rank, size, comm: operation_cases(comm))


def every_case(comm: Any, place: str = "cpu") -> None:
    """Reductions of tensors that lie in ``place``."""
    all_reduce_cases(comm, place)
    shared_scale_cases(comm, place)
    uneven = [700, *[0] * (comm.size - 2), 41][-comm.size :]
    for counts in ([0] * comm.size, [5] * comm.size, uneven):
        scattered(comm, counts, (), place, group_size=32)


@pytest.mark.parametrize(("size", "way"), [(1, views), (2, staged), (3, views)])
def test_over_an_engine(grouped: Grouped, size: int, way: Any) -> None:
    grouped(size, way)(lambda rank, size, comm: every_case(comm))


def scattered(comm: Any, counts: list[int], tail: tuple[int, ...], place: str = "cpu", **how: Any) -> None:
    """``quantized_reduce_scatter`` as a user calls it, twice with one error feedback."""
    rank, size = comm.rank, comm.size
    xs = [x.reshape(-1, *tail) for x in inputs_of(8, size, sum(counts) * int(np.prod(tail)), "float32")]
    errors = [np.zeros(x.shape, F32) for x in xs]
    state = at.ErrorFeedback()
    for _ in range(2):
        wanted = q.quantized_reduce_scatter(xs, counts, dtype="bfloat16", errors=errors, **how)[rank]
        out = torch.full(wanted.shape, 5.0, dtype=torch.bfloat16, device=place)
        told = {"out": out, "out_dtype": out.dtype, "error_feedback": state, "group": comm} | how
        assert at.quantized_reduce_scatter(to_torch(xs[rank]).to(place), counts, **told) is out
        assert_bits_equal(to_numpy(out.cpu()), wanted)
    assert_bits_equal(to_numpy(state.state_dict()["error"].cpu()), errors[rank].reshape(-1))


def dispatched(comm: Any, counts: list[list[int]], tail: tuple[int, ...], place: str, **how: Any) -> None:
    """``quantized_all_to_all`` as a user calls it, with counts told and learnt, at once and later."""
    rank = comm.rank
    rng = np.random.default_rng(6)
    xs = [rng.normal(size=(sum(row), *tail)).astype(dtype_of("bfloat16")) for row in counts]
    wanted = q.quantized_all_to_all(xs, counts, dtype="float32", **how)[rank]
    recvs = [row[rank] for row in counts]
    told = {"out_dtype": torch.float32, "group": comm} | how
    for known in (recvs, None):
        rows = at.quantized_all_to_all(to_torch(xs[rank]).to(place), counts[rank], known, **told)
        assert rows.shape == (sum(recvs), *tail)
        assert_bits_equal(to_numpy(rows.cpu()).reshape(-1), wanted.reshape(-1))
        _, work = at.quantized_all_to_all(to_torch(xs[rank]).to(place), counts[rank], known, async_op=True, **told)
        assert_bits_equal(to_numpy(work.result().cpu()).reshape(-1), wanted.reshape(-1))


ROWS = ([[1, 0, 8], [3, 3, 3], [9, 0, 0]], [[0, 0, 0], [0, 70, 1], [5, 0, 0]], [[0] * 3] * 3)  # sent, by rank


def rows_cases(comm: Any, place: str = "cpu") -> None:
    """Ranks that send or get nothing, rows that are empty, groups that do not divide a row."""
    for rows in ROWS:
        sends = [row[: comm.size] for row in rows[: comm.size]]
        for tail, bits, group in (((33,), 8, None), ((3, 5), 4, 7), ((), 8, 16), ((0,), 4, None)):
            dispatched(comm, sends, tail, place, bits=bits, group_size=group)


@pytest.mark.parametrize("size", [2, 3])
def test_parts_and_rows(grouped: Grouped, size: int) -> None:
    """Uneven counts, ranks that send or get nothing, rows that are empty."""
    parts = [[0] * size, [4, 0, 5][-size:], [901, 1, 300][:size]]

    def run(rank: int, size: int, comm: Any) -> None:
        for counts in parts:
            scattered(comm, counts, (33,), group_size=32)
            scattered(comm, counts, (3, 5), bits=4, op="avg", group_size=1 << 40)
        rows_cases(comm)

    grouped(size, views)(run)


def test_disagreement_about_rows(grouped: Grouped) -> None:
    """Ranks that differ in rows or parts hear of it, as of what does not fit; the communicator stays usable."""

    def run(rank: int, size: int, comm: Any) -> list[str]:
        x, to = torch.ones(2, 64), {"group": comm}
        told = []
        for call in (
            lambda: at.quantized_all_to_all(x, [1, 1], group_size=32 if rank else None, **to),
            lambda: at.quantized_all_to_all(x, [1, 1], [1, 1], group_size=40 - 8 * rank, **to),
            lambda: at.quantized_all_to_all(x, [1, 1] if rank else [0, 2], [rank, 1], **to),
            lambda: at.quantized_reduce_scatter(x, [1, 1] if rank else [2, 0], **to),
        ):
            with pytest.raises(PeerMismatchError) as caught:
                call()
            told.append(str(caught.value))
        y = x * (1e6 if rank else 1)
        for call in (
            lambda: at.quantized_all_to_all(y, [1, 1], overflow="raise", out_dtype=torch.float16, **to),
            lambda: at.quantized_reduce_scatter(y, overflow="raise", out_dtype=torch.float16, **to),
        ):
            with pytest.raises(ValueOverflowError):
                call()
        assert at.quantized_reduce_scatter(x, **to).eq(2).all()
        return told

    told = grouped(2, views)(run)
    assert told[0] == told[1]
    assert "rank 0 has int8 codes in groups of 64, rank 1 has int8 codes in groups of 32" in told[0][0]
    assert "rank 0 has int8 codes in groups of 40, rank 1 has int8 codes in groups of 32" in told[0][1]
    assert "rank 0 sends 2 rows to rank 1, which expects 1" in told[0][2]
    assert "quantized_reduce_scatter" in told[0][3]


@on_group(2, views)
def test_rows_as_on_an_accelerator(rank: int, size: int, comm: Any) -> None:
    """With torch operators as kernels, where shared memory has its own."""
    rows = mock.patch.object(
        quantized_rows, "HostRows", lambda *how: quantized_rows.DeviceRows(*how, torch.device("cpu"))
    )
    with np.errstate(all="ignore"), rows:
        rows_cases(comm)
        large = torch.full((2, 40), 7e4)
        with pytest.raises(ValueOverflowError):
            at.quantized_all_to_all(large, [1, 1], overflow="raise", out_dtype=torch.float16, group=comm)


@on_group(2, views)
def test_formats_that_an_engine_does_not_offer(rank: int, size: int, comm: Any) -> None:
    """Torch's operators have codes of integers alone; no engine finds one scale for a vector that comes in pieces."""
    text = "which this engine does not offer; shared memory and tcp do"
    for name in ("fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"):
        for call in (at.quantized_all_reduce, at.quantized_reduce_scatter):
            with pytest.raises(InvalidParamError, match=rf"format is {name}, {text}.*A2A-1439"):
                call(torch.ones(64 * size), format=name, group=comm)
    for name in ("int8", "int4"):
        assert at.quantized_all_reduce(torch.ones(64), format=name, group=comm).tolist() == [size] * 64
    nvfp4, mxfp4 = (
        Quantization(name, size, "full", "sum", "saturate") for name, size in (("nvfp4", 16), ("mxfp4", 32))
    )
    for name in ("int6", "int4_rotated", "int4_spikes"):
        with pytest.raises(InvalidParamError, match=rf"format is {name}, {text}.*A2A-1439"):
            kernels.check_format(Quantization(name), "Triton's")
    kernels.check_format(nvfp4, "Triton's")
    kernels.check_format(mxfp4, "Triton's", pieces=True)
    with pytest.raises(InvalidParamError, match=rf"format is nvfp4, {text}.*A2A-1439"):
        kernels.check_format(nvfp4, "Triton's", pieces=True)
