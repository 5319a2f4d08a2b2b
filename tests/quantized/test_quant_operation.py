"""The ATB-shaped quantized AllReduce: ATB's codes for what it refuses, on every rank; ATB's accuracy data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from quantized_cases import Launch

from alltoallv import Communicator, QuantAllReduceOperation, QuantAllReduceParam, QuantType
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerMismatchError
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal

SHAPES = [(135, 16), (125, 32), (15, 64), (16,), (2, 3, 48), (300, 4096)]
F16 = np.float16


def param(communicator: Communicator, **fields: Any) -> QuantAllReduceParam:
    return QuantAllReduceParam(rank=communicator.rank, rank_size=communicator.size, **fields)


@pytest.mark.parametrize("quant_type", [QuantType.PER_TENSOR, QuantType.PER_CHANNEL])
def test_accuracy_data(launch: Launch, quant_type: QuantType) -> None:
    def reduce(communicator: Communicator) -> None:
        operation = QuantAllReduceOperation(param(communicator, quant_type=quant_type), communicator)
        rng = np.random.default_rng(1)
        for shape in SHAPES:
            inputs = [rng.integers(-100, 101, shape).astype(np.int8) for _ in range(communicator.size)]
            scale = rng.uniform(-1, 1, 1 if quant_type == QuantType.PER_TENSOR else shape[-1]).astype(F16)
            offset = rng.uniform(-1, 1, 1).astype(F16)
            wanted = reference.shared_scale_all_reduce(inputs, scale, float(offset[0]))[0]
            x = inputs[communicator.rank]
            assert_bits_equal(operation(x, scale, offset), wanted)
            if quant_type == QuantType.PER_CHANNEL:
                scale = scale.reshape(1, -1)
            out = np.full(shape, 3, F16)
            assert operation(x, scale, offset, out=out) is out
            assert_bits_equal(out, wanted)

    for size in (2, 4, 8):
        launch(size, reduce)


CREATE: list[tuple[dict[str, Any], str]] = [
    ({"backend": "hccl"}, 'backend is "hccl", expected "lccl"'),
    ({"all_reduce_type": "max"}, 'all_reduce_type is "max", expected "sum"'),
    ({"quant_type": QuantType.UNQUANT}, "quant_type is 0, expected 1"),
    ({"quant_type": QuantType.MAX}, "quant_type is 3, expected 1"),
    ({"out_data_type": 27}, r"out_data_type is 27, expected 1 \(float16\)"),
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


def test_refused_tensors(launch: Launch) -> None:
    """One rank's mistake, with ATB's code, on every rank; then the same operation works."""

    def reduce(communicator: Communicator) -> None:
        for quant_type, how, code, message in REFUSED:
            operation = QuantAllReduceOperation(param(communicator, quant_type=quant_type), communicator)
            good = tensors(scale=(1,) if quant_type == 1 else (16,))
            with pytest.raises(AllToAllVError, match=message) as caught:
                operation(*(tensors(**how) if communicator.rank == 0 else good))
            assert caught.value.code == code
            assert operation(*good).tolist() == [[communicator.size * 2.0] * 16] * 4
        operation = QuantAllReduceOperation(param(communicator), communicator)
        x, scale, offset = tensors()
        with pytest.raises(PeerMismatchError, match=r"rank 0 has scale 1, rank 1 has scale 0\.5"):
            operation(x, scale if communicator.rank == 0 else scale / 2, offset)
        with pytest.raises(AllToAllVError, match="out is not contiguous"):
            operation(x, scale, offset, out=np.empty((4, 32), F16)[:, ::2])

    launch(2, reduce)


def test_json() -> None:
    text = '{"rank": 1, "rankSize": 4, "allReduceType": "sum", "backend": "lccl", "quantType": 2, "outDataType": 1}'
    made = QuantAllReduceParam.from_json(text)
    assert (made.rank, made.rank_size, made.quant_type, made.backend) == (1, 4, 2, "lccl")
    assert QuantAllReduceParam.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["quantType"] == 2
    with pytest.raises(InvalidParamError, match="rankSize is missing"):
        QuantAllReduceParam.from_json({"rank": 0})
    with pytest.raises(InvalidParamError, match="quantType is 'int8', expected an integer"):
        QuantAllReduceParam.from_json({"rank": 0, "rankSize": 1, "quantType": "int8"})
