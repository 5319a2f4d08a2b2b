"""Options that must be equal on all ranks: for each, two ranks that give different values, and what the error says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from alltoallv import (
    AllToAllVOperation,
    AllToAllVParam,
    Communicator,
    QuantAllReduceOperation,
    QuantAllReduceParam,
    QuantType,
)
from alltoallv.errors import PeerMismatchError

# A call of one value; the values of ranks 0 and 1; what the error says of rank 0, and of rank 1.
Case = tuple[Callable[[Any], object], Any, Any, str, str]
F32 = np.float32


def check(comm: Communicator, cases: Sequence[Case]) -> None:
    """Fails unless every case is a PeerMismatchError of both ranks that names both values; after it the next is met."""
    for number, (call, one, other, first, second) in enumerate(cases):
        with pytest.raises(PeerMismatchError) as caught:
            call(other if comm.rank else one)
        assert f"rank 0 {first}, rank 1 {second}" in str(caught.value), (number, first)


def quantized(front_end: Any, tensor: Callable[[Any], Any], dtypes: Any, comm: Communicator | None) -> list[Case]:
    """Returns a case for each option of the quantized collectives of a front end; ``dtypes`` has its dtypes by name."""
    x, rows, codes = (
        tensor(np.ones(shape, dtype)) for shape, dtype in (((4, 32), F32), ((2, 64), F32), ((2, 4), np.int8))
    )
    weight, many = tensor(np.ones((128, 16), F32)), tensor(np.ones((512, 16), F32))
    place = {} if comm is None else {"group": comm}
    calls: dict[str, Callable[[dict[str, Any]], object]] = {
        "all_reduce": lambda how: front_end.quantized_all_reduce(x, **how, **place),
        "reduce_scatter": lambda how: front_end.quantized_reduce_scatter(x, **how, **place),
        "linear": lambda how: front_end.quantized_linear_all_reduce(x, tensor(np.ones((32, 32), F32)), **how, **place),
        "all_to_all": lambda how: front_end.quantized_all_to_all(rows, [1, 1], **how, **place),
        "shared": lambda how: front_end.quantized_all_reduce(codes, **{"scale": 1.0} | how, **place),
        "two": lambda how: front_end.quantized_all_reduce(
            x, **{"comm_quant_scale_1": 1.0, "comm_quant_scale_2": 1.0} | how, **place
        ),
        "chunks": lambda how: front_end.quantized_linear_all_reduce(many, weight, **how, **place),
    }
    reductions, typed = ("all_reduce", "reduce_scatter", "linear"), ("all_reduce", "reduce_scatter", "all_to_all")
    every, of_rows, eight = (*reductions, "all_to_all"), ("all_to_all",), "has int8 codes in groups of 64"
    half, single = getattr(dtypes, "float16"), getattr(dtypes, "float32")  # noqa: B009
    table: list[tuple[Sequence[str], str, Any, Any, str, str]] = [
        (reductions, "format", "int8", "fp8_e4m3", "has format int8", "has format fp8_e4m3"),
        (reductions, "bits", 8, 4, "has format int8", "has format int4"),
        (reductions, "group_size", 16, 32, "has group_size 16", "has group_size 32"),
        (reductions, "op", "sum", "avg", "reduces with sum", "reduces with avg"),
        (("all_reduce", "linear"), "gather", "full", "quantized", "has gather full", "has quantized"),
        (typed, "out_dtype", single, half, "has an output of float32", "has one of float16"),
        ((*every, "shared", "two"), "overflow", "saturate", "infinity", "has overflow saturate", "has infinity"),
        (every, "overflow", "raise", "saturate", "has overflow raise", "has saturate"),
        (("all_reduce", "reduce_scatter"), "bound", False, True, "has no bound", "has a bound"),
        (typed, "max_error", 0.5, 0.25, "has max_error 0.5", "has max_error 0.25"),
        (of_rows, "format", "int8", "fp8_e4m3", eight, "has fp8_e4m3 codes in groups of 64"),
        (of_rows, "bits", 8, 4, eight, "has int4 codes in groups of 64"),
        (of_rows, "group_size", 16, 32, "has int8 codes in groups of 16", "has int8 codes in groups of 32"),
        (of_rows, "quantize_gradient", False, True, "has quantize_gradient False", "has True"),
        (("shared",), "scale", 1.0, 2.0, "has scale 1", "has scale 2"),
        (("shared",), "offset", 1.0, 2.0, "has offset 1", "has offset 2"),
        (("two",), "comm_quant_scale_1", 1.0, 2.0, "has scale 1", "has scale 2"),
        (("two",), "comm_quant_scale_2", 1.0, 2.0, "has scale_2 1", "has scale_2 2"),
        (("chunks",), "chunks", 2, 4, "begins a call in 2 chunks", "begins a call in 4 chunks"),
        (("chunks",), "chunks", 1, 2, "calls quantized_all_reduce", "begins a call in 2 chunks"),
    ]  # fmt: skip
    cases: list[Case] = [
        (lambda value, call=calls[name], option=option: call({option: value}), one, other, first, second)
        for names, option, one, other, first, second in table
        for name in names
    ]
    feedback = front_end.ErrorFeedback
    for name in ("all_reduce", "reduce_scatter"):
        fed = lambda kind, call=calls[name]: call({"error_feedback": kind and kind()})  # noqa: E731
        cases.append((fed, None, feedback, "has no error feedback", "has error feedback"))
    taken = lambda x: front_end.quantized_all_to_all(x, [1, 1], out_dtype=single, **place)  # noqa: E731
    cases.append((taken, rows, tensor(np.ones((2, 64), np.float16)), "has an input of float32", "has one of float16"))
    return cases


def dispatchers(front_end: Any, tensor: Callable[[Any], Any], comm: Communicator | None) -> list[Case]:
    """Returns a case for each option of MoEDispatcher and of its calls."""
    place = {} if comm is None else {"group": comm}
    tokens, ids = tensor(np.ones((4, 8), F32)), tensor(np.array([[0], [1], [0], [1]]))
    weights = tensor(np.ones((4, 1), F32))

    def dispatch(options: dict[str, Any]) -> object:
        return front_end.MoEDispatcher(**{"num_experts": 2} | options, **place).dispatch(tokens, ids)

    def layer(chunks: int) -> object:
        return front_end.MoEDispatcher(2, **place)(tokens, ids, None, [lambda rows: rows], chunks=chunks)

    def weigh(gate_weights: Any) -> object:
        return front_end.MoEDispatcher(2, **place).dispatch(tokens, ids, gate_weights)

    table: list[tuple[str, Any, Any]] = [
        ("num_experts", 2, 6), ("capacity", None, 2), ("capacity", 1.0, 1), ("drop", "last", "lightest"),
        ("alignment", 1, 2), ("payload", None, "int8"), ("combine_payload", None, "int8"),
        ("placement", ((0,), (1,)), ((1,), (0,))), ("codes", False, True),
    ]  # fmt: skip
    cases: list[Case] = []
    for name, one, other in table:
        base = {"payload": "int8"} if name == "codes" else {}
        call = lambda value, base=base, name=name: dispatch(base | {name: value})  # noqa: E731
        cases.append((call, one, other, f"has {name} {one!r}", f"has {name} {other!r}"))
    cases.append((layer, 1, 2, "calls all_to_all_v", "begins a call in 2 chunks"))
    cases.append((layer, 3, 2, "begins a call in 3 chunks", "begins a call in 2 chunks"))
    text = "has tokens of float32 (8,), gate_weights "
    cases.append((weigh, None, weights, f"{text}None", f"{text}float32"))
    return cases


def operations(tensor: Callable[[Any], Any], comm: Communicator) -> list[Case]:
    """Returns a case for each field of the params, and each argument of the operations, that ranks must agree in."""
    x, codes = tensor(np.ones((4, 32), F32)), tensor(np.ones((4, 32), np.int8))

    def half(value: float) -> Any:
        return tensor(np.full(1, value, np.float16))

    def dynamic(fields: dict[str, Any]) -> object:
        about = {"rank": comm.rank, "rank_size": comm.size, "quant_type": QuantType.DYNAMIC} | fields
        return QuantAllReduceOperation(QuantAllReduceParam(**about), comm)(x)

    def shared(values: dict[str, float]) -> object:
        operation = QuantAllReduceOperation(QuantAllReduceParam(rank=comm.rank, rank_size=comm.size), comm)
        scale, offset = (half(values.get(name, 1.0)) for name in ("scale", "offset"))
        return operation(codes, scale, offset)

    def exchanged(dtype: Any) -> object:
        counts = {"send_counts": [1, 1], "sdispls": [0, 1], "recv_counts": [1, 1], "rdispls": [0, 1]}
        param = AllToAllVParam(rank=comm.rank, rank_size=comm.size, **counts)
        return AllToAllVOperation(param, comm)(tensor(np.ones(2, dtype)))

    table: list[tuple[Callable[[dict[str, Any]], object], str, Any, Any, str, str]] = [
        (dynamic, "all_reduce_type", "sum", "avg", "reduces with sum", "reduces with avg"),
        (dynamic, "bits", 8, 4, "has format int8", "has format int4"),
        (dynamic, "group_size", 16, 32, "has group_size 16", "has group_size 32"),
        (dynamic, "gather", "full", "quantized", "has gather full", "has quantized"),
        (dynamic, "overflow", "saturate", "infinity", "has overflow saturate", "has infinity"),
        (dynamic, "out_data_type", 0, 1, "has an output of float32", "has one of float16"),
        (shared, "scale", 1.0, 2.0, "has scale 1", "has scale 2"),
        (shared, "offset", 1.0, 2.0, "has offset 1", "has offset 2"),
    ]
    cases: list[Case] = [
        (lambda value, call=call, name=name: call({name: value}), one, other, first, second)
        for call, name, one, other, first, second in table
    ]
    return [*cases, (exchanged, F32, np.int32, "has dtype float32", "has dtype int32")]
