"""Quantized collectives of a front end beside NumPy's on the same communicator: the same bits, the same errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, product
from typing import Any

import numpy as np

from alltoallv import Communicator
from alltoallv import numpy as an
from alltoallv._calls.adapters import Adapter, as_bytes
from alltoallv.quantization.spec import Bounded
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import dtype_of

F32 = np.float32
REDUCTIONS: list[tuple[str, dict[str, Any]]] = [  # dtype of the input and options; arrays are scales
    ("float32", {}),
    ("bfloat16", {"bits": 4, "gather": "quantized", "op": "avg", "group_size": 32, "timeout": 60}),
    ("float16", {"out_dtype": "float32", "group_size": 5}),
    ("float32", {"out_dtype": "float16", "overflow": "infinity"}),
    ("float32", {"out_dtype": "float16", "overflow": "raise"}),
    ("int8", {"scale": np.linspace(-1, 2, 33).astype(np.float16), "offset": 0.5}),
    ("int8", {"scale": 0.25, "out_dtype": "bfloat16"}),
    ("float16", {"comm_quant_scale_1": np.full(33, 0.1, F32), "comm_quant_scale_2": 0.25}),
    ("float32", {"bits": 7}),
    ("float32", {"scale": 1.0}),
    ("int8", {}),
    ("float32", {"out_dtype": "int8"}),
    ("float32", {"comm_quant_scale_2": 1.0}),
    ("float32", {"timeout": 0}),
]

COUNTS = [[1, 3], [2, 2]]  # rows between two ranks


def slopes_and_gradient(comm: Communicator, shape: tuple[int, ...], dtype: str, **how: Any) -> tuple[Any, Any]:
    """Of an exchange with ``COUNTS``: a gradient for the rows that this rank receives, and what its own rows get."""
    rng, back = np.random.default_rng(5), np.transpose(COUNTS).tolist()
    slopes = [(rng.normal(size=(sum(counts), *shape)) * 10.0**r).astype(F32) for r, counts in enumerate(back)]
    rounded = [x.astype(dtype_of(dtype)) for x in slopes]
    return slopes[comm.rank], reference.quantized_all_to_all(rounded, back, dtype="float32", **how)[comm.rank]


class Beside:
    """A front end's functions, called with the tensors that its adapter makes of arrays."""

    def __init__(self, front_end: Any, adapter: Adapter[Any], dtypes: Any, comm: Communicator) -> None:
        self._front_end, self._adapter, self._dtypes, self._comm = front_end, adapter, dtypes, comm

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        x = self._front_end.empty(array.shape, getattr(self._dtypes, array.dtype.name))
        as_bytes(self._adapter.region(x))[...] = np.frombuffer(array.tobytes(), np.uint8)
        return x

    def bits(self, x: Any) -> tuple[Any, ...]:
        """Dtype, shape and bytes of a tensor or of NumPy's array."""
        if isinstance(x, np.ndarray):
            return x.dtype.name, x.shape, x.tobytes()
        return self._adapter.dtype(x), tuple(x.shape), as_bytes(self._adapter.region(x)).tobytes()

    def both(self, name: str, x: np.ndarray[Any, Any], *counts: Any, **how: Any) -> bool:
        """Compares a call; whether it succeeded."""
        ours: dict[str, Any] = {
            key: getattr(self._dtypes, value) if key == "out_dtype" else self.tensor(value)
            if isinstance(value, np.ndarray) else value
            for key, value in how.items()
        }  # fmt: skip
        wanted = self._outcome(lambda: getattr(an, name)(x, *counts, group=self._comm, **how))
        call = partial(getattr(self._front_end, name), group=self._comm, **ours)
        for later in (False, True):
            found = self._outcome(partial(call, self.tensor(x), *counts, async_op=later))
            assert found == wanted, (name, x.dtype, x.shape, counts, how, later, found[:2], wanted[:2])
        return type(wanted[0]) is str

    def _outcome(self, call: Callable[[], Any]) -> tuple[Any, ...]:
        try:
            made = call()
            made = made[1].result() if type(made) is tuple else made
            if isinstance(made, Bounded):
                return *self.bits(made.output), *self.bits(made.bound), made.format
            return self.bits(made)
        except Exception as error:
            return type(error), re.sub("operator #[0-9]+", "operator", str(error))


def input_of(comm: Communicator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Values that differ by rank, some of which float16 cannot hold."""
    random = np.random.default_rng([comm.rank, *shape])
    if dtype == "int8":
        return random.integers(-127, 128, shape).astype(np.int8)
    x = random.normal(size=shape)
    if x.size and dtype == "float32":
        x.reshape(-1)[0] = 70_000
    return x.astype(dtype_of(dtype))


def check_quantized(front_end: Any, adapter: Adapter[Any], dtypes: Any, comm: Communicator) -> None:
    """All three functions; ``dtypes``: where the framework has its dtypes, by name."""
    beside, r, size = Beside(front_end, adapter, dtypes, comm), comm.rank, comm.size
    succeeded = 0
    for dtype, how in REDUCTIONS:
        for shape in ((7 * size, 33), (0, 33)):
            x = input_of(comm, shape, dtype)
            succeeded += beside.both("quantized_all_reduce", x, **how)
            if not {"gather", "scale", "comm_quant_scale_1", "comm_quant_scale_2"} & how.keys():
                beside.both("quantized_reduce_scatter", x, **how)
                counts = [7 * size, *[0] * (size - 1)] if len(x) else [0] * size
                beside.both("quantized_reduce_scatter", x, counts, **how)
                beside.both("quantized_reduce_scatter", x, [1] * size, **how)  # the sum is another
    assert succeeded == 15  # 8 with elements, of which one does not fit, and 8 without
    rows = [[(3 * i + 2 * j + 1) % 5 for j in range(size)] for i in range(size)]
    sends, recvs = rows[r], [row[r] for row in rows]
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        for tail in ((33,), (3, 5), (0,)):
            x = input_of(comm, (sum(sends), *tail), dtype)
            for how in ({}, {"bits": 4, "group_size": 7}, {"out_dtype": "float16", "overflow": "infinity"}):
                fits = beside.both("quantized_all_to_all", x, sends, **how)
                assert beside.both("quantized_all_to_all", x, sends, recvs, timeout=60, **how) == fits
                assert fits == (dtype != "int8")
    x = input_of(comm, (sum(sends), 33), "float32")
    for wrong in ({"overflow": "raise", "out_dtype": "float16"}, {"bits": 7}, {"group_size": 0}):
        assert not beside.both("quantized_all_to_all", x, sends, **wrong)
    assert not beside.both("quantized_all_to_all", x, [*sends[:-1], sends[-1] + 1])
    _check_bounds(beside, comm)
    _check_given(beside, front_end, comm)


def _check_bounds(beside: Beside, comm: Communicator) -> None:
    """With their bounds, and in the format that keeps one."""
    x = input_of(comm, (6 * comm.size, 33), "float16")
    for how in ({"bound": True}, {"max_error": 2.0}, {"max_error": 0.2, "group_size": 5}, {"bound": True, "bits": 4}):
        assert beside.both("quantized_all_reduce", x, **how)
        assert beside.both("quantized_reduce_scatter", x, **how)
        assert beside.both("quantized_all_to_all", x, [6] * comm.size, **how)
    for wrong in ({"max_error": 1e-9}, {"max_error": 0.1, "bits": 4}, {"max_error": "1"}):
        assert not beside.both("quantized_all_reduce", x, **wrong)
    assert not beside.both("quantized_all_reduce", x, bound=True, comm_quant_scale_1=0.5, comm_quant_scale_2=0.5)


def _check_given(beside: Beside, front_end: Any, comm: Communicator) -> None:
    """Into a given output, in place, with error feedback from call to call."""
    x = input_of(comm, (6 * comm.size, 33), "float16")
    ours, theirs = front_end.ErrorFeedback(), an.ErrorFeedback()
    for name, rows in (("quantized_all_reduce", 6 * comm.size), ("quantized_reduce_scatter", 6)):
        for _ in range(3):
            wanted: Any = getattr(an, name)(x, bits=4, error_feedback=theirs, group=comm)
            out = beside.tensor(np.ones((rows, 33), np.float16))
            made = getattr(front_end, name)(beside.tensor(x), bits=4, error_feedback=ours, out=out, group=comm)
            assert made is out
            assert beside.bits(out) == beside.bits(wanted)
        np.testing.assert_array_equal(ours.state_dict()["error"], theirs.state_dict()["error"])
    same = beside.tensor(x)
    assert front_end.quantized_all_reduce(same, out=same, group=comm) is same
    whole: Any = an.quantized_all_reduce(x, group=comm)
    assert beside.bits(same) == beside.bits(whole)
    for out in (np.ones(x.shape, F32), np.ones((3, 33), np.float16)):
        beside.both("quantized_all_reduce", x, out=out)
    # Whole numbers: every framework's product is exact.
    random = np.random.default_rng(comm.rank)
    rows, weight = (random.integers(-9, 10, shape).astype(F32) for shape in ((5, 3, 12), (64, 12)))
    wanted = an.quantized_linear_all_reduce(rows, weight, format="mxfp8", chunks=2, group=comm)
    linear = front_end.quantized_linear_all_reduce
    made = linear(beside.tensor(rows), beside.tensor(weight), format="mxfp8", chunks=2, group=comm)
    assert tuple(made.shape) == (5, 3, 64)
    assert beside.bits(made) == beside.bits(wanted)


def check_linear_gradients(
    linear: Callable[..., Any],
    tensor: Callable[[np.ndarray[Any, Any]], Any],
    gradients: Callable[[Callable[..., Any], Sequence[Any], Sequence[bool]], Sequence[Any]],
    comm: Communicator,
) -> None:
    """The gradients of the plain layer and sum, in one chunk and in two, whichever of input, weight and bias want one.

    ``gradients(loss, tensors, wanted)`` gives gradients of ``loss(*tensors)`` by the tensors that want one, as arrays.
    """
    ranks = [np.random.default_rng(rank) for rank in range(comm.size)]
    drawn = [
        [rng.integers(-9, 10, shape).astype(F32) for shape in ((5, 3, 12), (64, 12), (64,), (5, 3, 64))]
        for rng in ranks
    ]
    x, weight, bias, slopes = drawn[comm.rank]
    back = sum(each[3] for each in drawn)  # the sum is of all ranks' products, the bias is each rank's own
    expected = back @ weight, np.einsum("abo,abi->oi", back, x), slopes.sum((0, 1))
    for chunks, *wanted in product((1, 2), *[(False, True)] * 3):

        def loss(*given: Any, chunks: int = chunks) -> Any:
            return (linear(*given, format="mxfp8", chunks=chunks, group=comm) * tensor(slopes)).sum()

        if not any(wanted):
            continue
        found = gradients(loss, [tensor(each) for each in (x, weight, bias)], wanted)
        for gradient, right in zip(found, compress(expected, wanted), strict=True):
            np.testing.assert_array_equal(gradient, right, f"{chunks} chunks, {wanted}")
