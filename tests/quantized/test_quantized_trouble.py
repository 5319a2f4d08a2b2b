"""What the ranks disagree about, arguments that are refused, calls after errors, asynchronous calls, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks import on_both, on_ranks
from quantized_cases import DTYPES, F32, check_all_reduce, normal

from alltoallv import Communicator, memory
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal

DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"bits": 8}, {"bits": 4}, "rank 0 has format int8, rank 1 has format int4"),
    ({"format": "mxfp8"}, {"format": "mxfp8_e5m2"}, "rank 0 has format mxfp8, rank 1 has format mxfp8_e5m2"),
    ({"group_size": 32}, {"group_size": 64}, "rank 0 has group_size 32, rank 1 has group_size 64"),
    ({"gather": "full"}, {"gather": "quantized"}, "rank 0 has gather full, rank 1 has quantized"),
    ({"op": "sum"}, {"op": "avg"}, "rank 0 reduces with sum, rank 1 reduces with avg"),
    ({"overflow": "raise"}, {"overflow": "infinity"}, "rank 0 has overflow raise, rank 1 has infinity"),
    ({}, {"out_dtype": "float16"}, "rank 0 has an output of float32, rank 1 has one of float16"),
    ({}, {"dtype": "bfloat16"}, "rank 0 has dtype float32, rank 1 has dtype bfloat16"),
    ({}, {"n": 1}, "rank 0 has elements: 0, rank 1 has elements: 1"),
    ({}, {"error_feedback": True}, "rank 0 has no error feedback, rank 1 has error feedback"),
    ({}, {"comm_quant_scale_1": 1.0, "comm_quant_scale_2": 1.0}, "dynamic scales, rank 1 has two shared scales"),
    ({"scale": 1.0}, {"scale": 1.5}, "rank 0 has scale 1, rank 1 has scale 1.5"),
    ({"scale": 1.0}, {"scale": 1.0, "offset": 2.0}, "rank 0 has offset 0, rank 1 has offset 2"),
    (
        {"scale": np.arange(1, 9, dtype=F32)},
        {"scale": np.array([1, 2, 3, 4, 5, 6, 8, 7], F32)},
        r"rank 0 has scale \[1, ...\] of 8 values \(digest .*\), rank 1 has scale \[1, ...\] of 8 values",
    ),
    (
        {"comm_quant_scale_1": 1.0, "comm_quant_scale_2": 1.0},
        {"comm_quant_scale_1": 1.0, "comm_quant_scale_2": 0.5},
        "rank 0 has scale_2 1, rank 1 has scale_2 0.5",
    ),
]


@pytest.mark.parametrize("n", [96, 80_000])
@on_both(2)
def test_differences(communicator: Communicator, n: int) -> None:
    """Named alike on every rank, before any output is written; the next call works."""
    inputs = normal(np.random.default_rng(0), communicator.size, n)
    for mine, theirs, message in DIFFERENCES:
        how = dict(mine if communicator.rank == 0 else theirs)
        length = how.pop("n", 0) + n
        if message.endswith("elements: 1"):
            message = f"rank 0 has elements: {n}, rank 1 has elements: {n + 1}"
        x = np.ones(length, "int8" if "scale" in how else DTYPES[how.pop("dtype", "float32")])
        state = av.ErrorFeedback() if how.pop("error_feedback", False) else None
        if "scale" in how:
            x = x.reshape(-1, 8)
        out = np.full(x.shape, 9, how.get("out_dtype") or ("float16" if "scale" in how else x.dtype))
        with pytest.raises(PeerMismatchError, match=message):
            av.quantized_all_reduce(x, out=out, error_feedback=state, group=communicator, **how)
        assert (out == 9).all()
        if state is not None:
            assert not np.any(state.state_dict()["error"])
        check_all_reduce(communicator, inputs)
    with pytest.raises(
        PeerMismatchError, match=r"rank 0 calls quantized_all_reduce, rank 1 calls all_reduce.*A2A-3009"
    ):
        (av.quantized_all_reduce if communicator.rank == 0 else av.all_reduce)(inputs[0], group=communicator)
    counts = [2, 1] if communicator.rank == 0 else [1, 2]
    with pytest.raises(PeerMismatchError, match=r"rank 1 sends 1 elements to rank 0, which expects 2.*A2A-3010"):
        av.quantized_reduce_scatter(np.ones(3, F32), counts, group=communicator)
    x, half = inputs[0].reshape((2, -1) if communicator.rank == 0 else (-1, 2)), n // 2
    for function in (av.quantized_all_reduce, av.quantized_reduce_scatter):
        with pytest.raises(
            PeerMismatchError, match=rf"0 has shape \(2, {half}\), rank 1 has shape \({half}, 2\).*A2A-3009"
        ):
            function(x, group=communicator)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bits": 7}, InvalidParamError, "bits is 7, expected 8, 6, 5, 4, 3 or 2"),
    ({"format": "fp8"}, InvalidParamError, "format is 'fp8', expected one of int8, int4, fp8_e4m3"),
    ({"format": "mxfp8", "group_size": 64}, InvalidParamError, "group_size is 64, expected 32 in format mxfp8"),
    (
        {"format": "int4_rotated", "group_size": 1025},
        InvalidParamError,
        "group_size is 1025, expected 1 to 1024 in format int4_rotated",
    ),
    ({"bits": 8.0}, InvalidParamError, "bits is 8.0, expected 8, 6, 5, 4, 3 or 2"),
    ({"group_size": True}, InvalidParamError, "group_size is True, expected an integer of at least 1"),
    ({"group_size": 2**63}, InvalidParamError, r"group_size is 9223372036854775808, expected .* below 2\*\*63"),
    ({"group_size": 0}, InvalidParamError, "group_size is 0, expected an integer of at least 1"),
    ({"gather": "none"}, InvalidParamError, "gather is 'none', expected full or quantized"),
    ({"op": "max"}, InvalidParamError, "op is 'max', expected sum or avg"),
    ({"overflow": "wrap"}, InvalidParamError, "overflow is 'wrap', expected saturate, raise or infinity"),
    ({"op": ["sum"]}, InvalidParamError, r"op is \['sum'\], expected sum or avg"),
    ({"offset": 1.0}, InvalidParamError, "offset is 1.0 but scale is None"),
    ({"dtype": "int8", "scale": 1.0, "offset": "a"}, InvalidParamError, "offset is 'a', expected a number"),
    ({"dtype": "int8", "scale": 1.0, "offset": np.ones(2)}, InvalidParamError, "offset is a ndarray, expected"),
    ({"dtype": "int8", "scale": 1.0, "offset": 1e39}, InvalidParamError, r"offset is 1e\+39, expected a number that"),
    (
        {"dtype": "int8", "scale": 1.0, "offset": 3e38},
        InvalidParamError,
        r"of 2 ranks' offset 3e\+38 is 6\S+e\+38, expec",
    ),
    ({"dtype": "int8", "scale": 1e39}, InvalidParamError, r"scale is 1e\+39, expected a number that float32 holds"),
    ({"dtype": "int8", "scale": 1e-50}, InvalidParamError, "scale is 1e-50, expected a number that float32 holds"),
    ({"comm_quant_scale_1": 1.0, "comm_quant_scale_2": 1e40}, InvalidParamError, r"comm_quant_scale_2 is 1e\+40"),
    ({"out": np.empty((2, 4), F32)}, InvalidTensorError, r"out has shape \(2, 4\), expected \(8,\)"),
    ({"dtype": "int8", "scale": 1.0, "out": np.empty(8, F32)}, InvalidTensorError, r"float32, expected float16 \[A2A"),
    ({"scale": 1.0}, InvalidTensorError, "input has dtype float32, expected int8 with a shared scale"),
    ({"dtype": "int8"}, InvalidTensorError, "input has dtype int8, expected .* or int8 with a scale"),
    ({"dtype": "float64"}, InvalidTensorError, "input has dtype float64"),
    ({"dtype": "int8", "scale": np.ones(3, F32)}, InvalidTensorError, "scale has 3 values, expected 1 or 8"),
    ({"dtype": "int8", "scale": np.ones(1)}, InvalidTensorError, "scale has dtype float64"),
    (
        {"dtype": "int8", "scale": 1.0, "bits": 4},
        InvalidParamError,
        "format is .int4., expected .int8. with a shared scale",
    ),
    ({"dtype": "int8", "scale": 1.0, "op": "avg"}, InvalidParamError, "op is 'avg', expected 'sum' with a shared"),
    ({"dtype": "int8", "scale": 1.0, "gather": "quantized"}, InvalidParamError, "gather is 'quantized'"),
    ({"comm_quant_scale_1": 1.0}, InvalidParamError, "comm_quant_scale_2 is None while the other scale is given"),
    ({"out_dtype": "int8"}, InvalidParamError, "out_dtype is int8"),
    ({"out": np.empty(8, np.float16)}, InvalidTensorError, "out has dtype float16, expected float32"),
    ({"error_feedback": "wrong size"}, InvalidParamError, "error has 3 elements, expected 8"),
    ({"error_feedback": 1}, InvalidParamError, "error_feedback is a int, expected alltoallv.numpy.ErrorFeedback"),
]


@on_both(2)
def test_refused_arguments(communicator: Communicator) -> None:
    """A rank's own error reaches all, whichever rank it is; the next call works."""
    for how, error, message in REFUSED:
        for culprits in ((0, 1), (1,)):
            arguments = dict(how) if communicator.rank in culprits else {}
            x = np.ones(8, arguments.pop("dtype", "float32"))
            if arguments.get("error_feedback") == "wrong size":
                arguments["error_feedback"] = av.ErrorFeedback()
                arguments["error_feedback"].load_state_dict({"error": np.zeros(3), "gather_error": None})
            with pytest.raises(error, match=message):
                av.quantized_all_reduce(x, group=communicator, **arguments)
    check_all_reduce(communicator, normal(np.random.default_rng(0), 2, 100))


@on_both(3)
def test_asynchronous_calls(communicator: Communicator) -> None:
    """Several under way, errors among them, handles dropped; feedback is that of calls in order."""
    rng = np.random.default_rng(5)
    sizes = [0, 100, 50_000, 3000]
    vectors = [normal(rng, communicator.size, n) for n in sizes]
    pending = [
        av.quantized_all_reduce(inputs[communicator.rank], group=communicator, async_op=True, gather="quantized")
        for inputs in vectors
    ]
    av.quantized_all_reduce(vectors[2][communicator.rank], group=communicator, async_op=True)  # dropped
    bits = 8 if communicator.rank else 4
    _, wrong = av.quantized_all_reduce(vectors[1][0], bits=bits, group=communicator, async_op=True)
    for (out, work), inputs in zip(pending, vectors, strict=True):
        assert work.result() is out
        assert_bits_equal(out, reference.quantized_all_reduce(inputs, gather="quantized")[0])
    with pytest.raises(PeerMismatchError, match=r"format.*A2A-3009"):
        wrong.wait()
    check_all_reduce(communicator, vectors[1], feedback=True)


def test_one_rank_does_what_was_asked() -> None:
    """Quantizes and dequantizes. Integers may be of any integer type."""
    [communicator] = Communicator.threads(1)
    with communicator:
        x = np.random.default_rng(0).normal(size=1000).astype(F32)
        result: Any = av.quantized_all_reduce(x, bits=4, group=communicator)
        assert_bits_equal(result, reference.dequantize(reference.quantize(x, bits=4)))
        assert np.abs(result - x).max() > 0.01
        same: Any = av.quantized_all_reduce(x, bits=np.int8(4), group_size=np.int64(128), group=communicator)
        assert_bits_equal(same, result)


def test_loading_feedback() -> None:
    """Of any float dtype; what is none is refused, and says so."""
    state = av.ErrorFeedback()
    for dtype in (np.float64, np.float16, DTYPES["bfloat16"]):
        state.load_state_dict({"error": np.array([[0.5, -2.0], [0.0, 8.0]], dtype), "gather_error": [1.0]})
        saved = state.state_dict()
        assert_bits_equal(saved["error"], np.array([0.5, -2, 0, 8], F32))
        assert_bits_equal(saved["gather_error"], np.ones(1, F32))
    for wrong, message in (
        (None, "the state is a NoneType, expected a dict of error, gather_error"),
        ({"error": None}, r"the state has the keys \['error'\], expected"),
        ({"error": "abc", "gather_error": None}, "the state's error is 'abc', expected an array of numbers or None"),
        ({"error": None, "gather_error": [[1], [2, 3]]}, "the state's gather_error is a list, expected an array"),
    ):
        with pytest.raises(InvalidParamError, match=message):
            state.load_state_dict(wrong)  # type: ignore[arg-type]
    assert_bits_equal(state.state_dict()["error"], np.array([0.5, -2, 0, 8], F32))


@on_both(2)
def test_in_place_and_overlapping(communicator: Communicator) -> None:
    for n in (500, 200_000):
        inputs = normal(np.random.default_rng(n), communicator.size, n)
        x = inputs[communicator.rank].copy()
        assert av.quantized_all_reduce(x, out=x, group=communicator) is x
        assert_bits_equal(x, reference.quantized_all_reduce(inputs)[0])
        with pytest.raises(InvalidParamError, match=r"overlap.*A2A-1085"):
            av.quantized_all_reduce(x[1:], out=x[:-1], group=communicator)
        with pytest.raises(InvalidParamError, match=r"overlap.*A2A-1085"):
            av.quantized_all_reduce(x, out=x.view("float16")[:n], out_dtype="float16", group=communicator)


@on_both(2)
def test_feedback_belongs_to_its_owner(communicator: Communicator) -> None:
    """Saved and loaded it continues as if never interrupted; the error of a repeated sum does not grow."""
    inputs = normal(np.random.default_rng(8), communicator.size, 6000)
    x, how = inputs[communicator.rank], {"bits": 4, "gather": "quantized", "group": communicator}
    state = av.ErrorFeedback()
    total = np.zeros(6000, np.float64)
    for step in range(40):
        if step == 20:
            saved = {name: np.array(value) for name, value in state.state_dict().items()}
            state = av.ErrorFeedback()
            state.load_state_dict(saved)
        result: Any = av.quantized_all_reduce(x, error_feedback=state, **how)
        total += result
    exact = 40 * np.sum([v.astype(np.float64) for v in inputs], axis=0)
    with_feedback = np.linalg.norm(total - exact)
    without: Any = av.quantized_all_reduce(x, **how)
    assert with_feedback < np.linalg.norm(40 * without.astype(np.float64) - exact) / 10
    state.reset()
    assert state.state_dict() == {"error": None, "gather_error": None}


def resident(what: str) -> int:
    """Bytes of memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gather": "quantized"},
        {"bits": 4, "gather": "quantized", "group_size": 8192},
        {"group_size": 1 << 22},
        {"scale": 1.0, "out_dtype": "float32"},
        {"comm_quant_scale_1": 1.0, "comm_quant_scale_2": 1.0},
    ],
    ids=lambda how: "-".join(map(str, how.values())) or "default",
)
@on_ranks(2, fresh=True)
def test_scratch_is_small(communicator: Communicator, how: dict[str, Any]) -> None:
    """At most 2 MiB per rank beside scales, however long the vector: a rank also sees its peers' scratch."""
    n = 8 << 20
    x = np.ones(n, np.int8 if "scale" in how else F32)
    # Results in the arena are read where they lie, which maps them: no scratch, but resident.
    out = memory.empty(n, F32) if how.get("gather") == "quantized" else np.empty(n, F32)
    out[:] = 0
    how["group"] = communicator
    communicator.stats()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    av.quantized_all_reduce(x, out=out, **how)
    grown = resident("VmHWM") - before
    assert np.allclose(out, communicator.size)
    assert grown <= communicator.size * (2 << 20), f"{grown >> 10} KiB"
