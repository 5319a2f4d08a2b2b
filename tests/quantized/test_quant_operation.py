"""The ATB-shaped quantized AllReduce: ATB's codes for what it refuses, on every rank; ATB's accuracy data."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from on_ranks import on_both
from quantized_cases import DTYPES, F32, Launch, expected_all_reduce, normal

from alltoallv import Communicator, QuantAllReduceOperation, QuantAllReduceParam, QuantType
from alltoallv import numpy as av
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerMismatchError, ValueOverflowError
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal

SHAPES = [(135, 16), (125, 32), (15, 64), (16,), (2, 3, 48), (300, 4096)]
F16 = np.float16


def param(communicator: Communicator, **fields: Any) -> QuantAllReduceParam:
    return QuantAllReduceParam(rank=communicator.rank, rank_size=communicator.size, **fields)


@pytest.mark.parametrize("quant_type", [QuantType.PER_TENSOR, QuantType.PER_CHANNEL])
def test_accuracy_data(launch: Launch, quant_type: QuantType) -> None:
    for size in (2, 4, 8):
        rng, cases = np.random.default_rng(1), []
        for shape in SHAPES:
            inputs = [rng.integers(-100, 101, shape).astype(np.int8) for _ in range(size)]
            scale = rng.uniform(-1, 1, 1 if quant_type == QuantType.PER_TENSOR else shape[-1]).astype(F16)
            offset = rng.uniform(-1, 1, 1).astype(F16)
            wanted = reference.shared_scale_all_reduce(inputs, scale, float(offset[0]))[0]
            cases.append((inputs, scale, offset, wanted))

        def reduce(communicator: Communicator, cases: list[Any] = cases) -> None:
            operation = QuantAllReduceOperation(param(communicator, quant_type=quant_type), communicator)
            for inputs, scale, offset, wanted in cases:
                x = inputs[communicator.rank]
                assert_bits_equal(operation(x, scale, offset), wanted)
                shaped = scale.reshape(1, -1) if quant_type == QuantType.PER_CHANNEL else scale
                out = np.full(x.shape, 3, F16)
                assert operation(x, shaped, offset, out=out) is out
                assert_bits_equal(out, wanted)

        launch(size, reduce)


DYNAMIC: dict[str, Any] = {"quant_type": QuantType.DYNAMIC}
CREATE: list[tuple[dict[str, Any], str]] = [
    ({"backend": "hccl"}, 'backend is "hccl", expected "lccl"'),
    ({"all_reduce_type": "max"}, 'all_reduce_type is "max", expected "sum"'),
    ({"quant_type": QuantType.UNQUANT}, "quant_type is 0, expected 1.* or 16"),
    ({"quant_type": QuantType.MAX}, "quant_type is 3, expected 1"),
    ({"out_data_type": 27}, r"out_data_type is 27, expected 1 \(float16\)"),
    ({"bits": 4}, "bits, group_size, gather and overflow are set, expected them only with quant_type 16"),
    ({"overflow": "raise"}, "expected them only with quant_type 16"),
    (DYNAMIC | {"all_reduce_type": "max"}, 'all_reduce_type is "max", expected "sum" or "avg"'),
    (DYNAMIC | {"out_data_type": 2}, r"out_data_type is 2, expected -1 .* 27 \(bfloat16\)"),
    (DYNAMIC | {"bits": 7}, "bits is 7, expected 8, 6, 5, 4, 3 or 2"),
    (DYNAMIC | {"group_size": 0}, "group_size is 0, expected an integer of at least 1"),
    (DYNAMIC | {"gather": "half"}, "gather is 'half', expected full or quantized"),
    (DYNAMIC | {"overflow": "wrap"}, "overflow is 'wrap', expected saturate, raise or infinity"),
    (DYNAMIC | {"backend": "hccl"}, 'backend is "hccl", expected "lccl"'),
    ({"rank": 2}, "rank is 2, expected 0 to 1 for rank_size 2"),
    ({"rank_size": 0}, "rank_size is 0, expected at least 1"),
    ({"comm_mode": 7}, "comm_mode is 7"),
    ({"comm_domain": "x:3"}, "comm_domain is"),
    ({"rsv": b"\1"}, r"rsv\[0\] is 1, expected 0"),
]


@pytest.mark.parametrize(("fields", "message"), CREATE)
def test_refused_params(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamError, match=message) as caught:
        QuantAllReduceOperation(QuantAllReduceParam(**{"rank": 0, "rank_size": 2} | fields))
    assert caught.value.code == 1


def tensors(shape: Any = (4, 16), dtype: Any = np.int8, scale: Any = (1,), scale_dtype: Any = F16, offset: Any = (1,)):
    return np.ones(shape, dtype), np.ones(scale, scale_dtype), np.ones(offset, F16)


REFUSED: list[tuple[int, dict[str, Any], int, str]] = [
    (1, {"shape": (4, 17)}, 8, "the last axis of the input has 17 entries, expected a multiple of 16"),
    (1, {"shape": ()}, 8, "0 dimensions, expected 1 to 8"),
    (1, {"shape": (0, 16)}, 9, "expected positive dimensions"),
    (1, {"dtype": np.int16}, 13, "the dtype of the input is int16, expected int8"),
    (1, {"scale_dtype": np.float32}, 13, "the dtype of the scale is float32, expected float16"),
    (1, {"scale": (1, 1, 1)}, 16, "the scale has 3 dimensions, expected at most 2"),
    (1, {"scale": (16,)}, 8, r"the scale has shape \[16\], expected \[1\]"),
    (2, {"scale": (1,)}, 8, r"the scale has shape \[1\], expected \[16\]"),
    (2, {"scale": (16, 1)}, 8, r"the scale has shape \[16, 1\], expected \[16\]"),
    (1, {"offset": (2,)}, 8, r"the offset has shape \[2\], expected \[1\]"),
]

ACL = {"float32": 0, "float16": 1, "bfloat16": 27}


@pytest.mark.parametrize(("bits", "gather"), [(8, "full"), (8, "quantized"), (4, "full"), (4, "quantized")])
def test_dynamic(launch: Launch, bits: int, gather: str) -> None:
    """The reference's bits for every dtype and size, allocated, into an output, in place, and with error feedback."""
    kinds = (
        ("float32", None, 128, "sum"),
        ("bfloat16", "float32", 33, "avg"),
        ("float16", "bfloat16", 1 << 40, "sum"),
    )
    for size in (1, 3):
        rng, cases = np.random.default_rng(bits), []
        for name, out_name, group_size, op in kinds:
            how = {"bits": bits, "gather": gather, "group_size": group_size, "op": op, "out_dtype": out_name or name}
            for shape in ((0, 3), (1,), (5, 7), (40_007,), (5, 7)):
                inputs = [x.reshape(shape) for x in normal(rng, size, int(np.prod(shape)), name)]
                cases.append((inputs, *(expected_all_reduce(inputs, feedback, **how) for feedback in (False, True))))

        def reduce(communicator: Communicator, cases: list[Any] = cases) -> None:
            r, places = communicator.rank, iter(cases)
            for name, out_name, group_size, op in kinds:
                fields = DYNAMIC | {"bits": bits, "gather": gather, "group_size": group_size, "all_reduce_type": op}
                number = -1 if out_name is None else ACL[out_name]
                operation = QuantAllReduceOperation(param(communicator, out_data_type=number, **fields), communicator)
                for inputs, once, twice in itertools.islice(places, 5):
                    x, [wanted] = inputs[r].copy(), once.outputs
                    result = operation(x)
                    assert result.dtype == DTYPES[out_name or name]
                    assert_bits_equal(result, wanted)
                    out = np.full(x.shape, 3, result.dtype)
                    assert operation(x, out=out) is out
                    assert_bits_equal(out, wanted)
                    state = av.ErrorFeedback()
                    for expected in twice.outputs:
                        assert_bits_equal(operation(x, error_feedback=state), expected)
                    assert_bits_equal(state.state_dict()["error"], twice.errors[r].reshape(-1))
                    if out_name is None:
                        assert operation(x, out=x) is x
                        assert_bits_equal(x, wanted)
            assert next(places, None) is None

        launch(size, reduce)


@on_both(2)
def test_dynamic_refused(communicator: Communicator) -> None:
    """One rank's mistake on every rank, and what the ranks disagree about; then the same operation works."""
    r = communicator.rank
    operation = QuantAllReduceOperation(param(communicator, **DYNAMIC), communicator)
    x, one, memory = np.ones(64, F32), np.ones(1, F16), np.ones(96, F32)
    state, other = av.ErrorFeedback(), av.ErrorFeedback()
    operation(np.ones(7, F32), error_feedback=other)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], int, str]] = [
        ((x.astype(np.int8),), {}, 13, "the dtype of the input is int8, expected float32, float16 or bfloat16"),
        ((x, one, one), {}, 5, "the number of inputs is 3, expected 1"),
        ((x,), {"out": np.ones(64, F16)}, 13, "the dtype of the output is float16, expected float32"),
        ((x,), {"out": np.ones(32, F32)}, 8, r"the output has shape \[32\], expected \[64\]"),
        ((np.array(1, F32),), {}, 8, "0 dimensions, expected 1 to 8"),
        ((memory[:64],), {"out": memory[32:]}, 1, "the input and the output overlap in memory"),
        ((x,), {"error_feedback": {}}, 1, "error_feedback is a dict"),
        ((x,), {"error_feedback": other}, 1, "the error feedback's error has 7 elements, expected 64"),
    ]
    for arguments, more, code, message in wrong:
        with pytest.raises(AllToAllVError, match=message) as caught:
            operation(*(arguments if r == 0 else (x,)), **(more if r == 0 else {}))
        assert caught.value.code == code, message
        assert operation(x, error_feedback=state).tolist() == [2.0] * 64
    with pytest.raises(PeerMismatchError, match=r"rank 0 has error feedback, rank 1 has no error feedback.*A2A-3009"):
        operation(x, error_feedback=None if r else state)
    for fields in ({"bits": 4}, {"group_size": 64}, {"gather": "quantized"}, {"all_reduce_type": "avg"}):
        differing = QuantAllReduceOperation(param(communicator, **DYNAMIC, **(fields if r else {})), communicator)
        with pytest.raises(PeerMismatchError, match=r"rank 0 .*rank 1.*A2A-3009"):
            differing(x)
    shared = QuantAllReduceOperation(param(communicator), communicator)
    codes = np.ones(64, np.int8)
    with pytest.raises(PeerMismatchError, match=r"rank 0 .*, rank 1 .*A2A-3009"):
        _ = operation(x) if r else shared(codes, one, one)
    with pytest.raises(InvalidParamError, match=r"error_feedback is given with a shared scale.*A2A-1221"):
        shared(codes, one, one, error_feedback=state)
    raising = QuantAllReduceOperation(
        param(communicator, **DYNAMIC, out_data_type=ACL["float16"], overflow="raise"), communicator
    )
    with pytest.raises(ValueOverflowError):
        raising(x * F32(1e6 if r else 1))
    assert raising(x).tolist() == [2.0] * 64


@pytest.mark.parametrize("communicator", ["name", 3, np])
def test_refused_communicators(communicator: Any) -> None:
    with pytest.raises(InvalidParamError, match=r"communicator is a \w+, expected Communicator.*A2A-1204"):
        QuantAllReduceOperation(QuantAllReduceParam(rank=0, rank_size=1), communicator)


@on_both(2)
def test_refused_tensors(communicator: Communicator) -> None:
    """One rank's mistake, with ATB's code, on every rank; then the same operation works."""
    for quant_type, how, code, message in REFUSED:
        operation = QuantAllReduceOperation(param(communicator, quant_type=quant_type), communicator)
        good = tensors(scale=(1,) if quant_type == 1 else (16,))
        with pytest.raises(AllToAllVError, match=message) as caught:
            operation(*(tensors(**how) if communicator.rank == 0 else good))
        assert caught.value.code == code
        assert operation(*good).tolist() == [[communicator.size * 2.0] * 16] * 4
    operation = QuantAllReduceOperation(param(communicator), communicator)
    x, scale, offset = tensors()
    with pytest.raises(PeerMismatchError, match=r"rank 0 has scale 1, rank 1 has scale 0\.5.*A2A-3009"):
        operation(x, scale if communicator.rank == 0 else scale / 2, offset)
    with pytest.raises(AllToAllVError, match=r"out is not contiguous.*A2A-1205"):
        operation(x, scale, offset, out=np.empty((4, 32), F16)[:, ::2])


def test_json() -> None:
    text = '{"rank": 1, "rankSize": 4, "allReduceType": "sum", "backend": "lccl", "quantType": 2, "outDataType": 1}'
    made = QuantAllReduceParam.from_json(text)
    assert (made.rank, made.rank_size, made.quant_type, made.backend) == (1, 4, 2, "lccl")
    assert QuantAllReduceParam.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["quantType"] == 2
    assert "bits" not in made.to_json()
    assert json.loads(QuantAllReduceParam(0, 1).to_json())["outDataType"] == 1
    ours = QuantAllReduceParam(0, 2, **DYNAMIC, bits=4, group_size=32, gather="quantized", overflow="raise")
    assert QuantAllReduceParam.from_json(ours.to_json()) == ours
    with pytest.raises(InvalidParamError, match=r"gather is 3, expected a string.*A2A-1218"):
        QuantAllReduceParam.from_json({"rank": 0, "rankSize": 1, "gather": 3})
    with pytest.raises(InvalidParamError, match=r"rankSize is missing.*A2A-1212"):
        QuantAllReduceParam.from_json({"rank": 0})
    with pytest.raises(InvalidParamError, match=r"quantType is 'int8', expected an integer.*A2A-1216"):
        QuantAllReduceParam.from_json({"rank": 0, "rankSize": 1, "quantType": "int8"})
