"""What the tests of quantized collectives share: data, and a call on every rank compared with the NumPy reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from alltoallv import Communicator, memory
from alltoallv import numpy as av
from alltoallv.quantization.spec import Quantization, coding
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal

Array = npt.NDArray[Any]
Launch = Callable[..., list[Any]]
F32 = np.float32
DTYPES: dict[str, np.dtype[Any]] = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in ("float32", "float16", "bfloat16")}


def normal(rng: np.random.Generator, size: int, n: int, dtype: str = "float32") -> list[Array]:
    """N(0, 1) times a log-normal scale per rank."""
    with np.errstate(over="ignore"):
        return [(rng.normal(size=n) * np.exp(rng.normal())).astype(DTYPES[dtype]) for _ in range(size)]


def put(array: Array, shared: bool) -> Array:
    """A copy, in the shared arena or in private memory."""
    copy = memory.empty(array.shape, array.dtype) if shared else np.empty_like(array)
    copy[...] = array
    return copy


def digest(array: Array) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


class Expected(NamedTuple):
    """What one quantized_all_reduce gives by the reference, or two with feedback, and what they lose."""

    outputs: list[Array]
    errors: list[Array] | None
    gather_error: Array | None


def expected_all_reduce(inputs: list[Array], feedback: bool = False, **arguments: Any) -> Expected:
    """For the arguments of `check_all_reduce`; once for all ranks, where it takes long."""
    names = ("bits", "format", "group_size", "gather", "op", "overflow")
    known = {name: arguments[name] for name in names if name in arguments}
    dtype = DTYPES[arguments.get("out_dtype") or inputs[0].dtype.name]
    errors = [np.zeros(x.shape, F32) for x in inputs] if feedback else None
    gather_error = None
    if feedback and arguments.get("gather") == "quantized":
        gather_error = np.zeros(inputs[0].shape, F32)
    outputs = []
    for _ in range(2 if feedback else 1):
        [wanted, *_] = reference.quantized_all_reduce(
            inputs, dtype=dtype, errors=errors, gather_error=gather_error, **known
        )
        outputs.append(wanted)
    return Expected(outputs, errors, gather_error)


def check_all_reduce(
    communicator: Communicator,
    inputs: list[Array],
    feedback: bool = False,
    shared: bool = False,
    expected: Expected | None = None,
    **arguments: Any,
) -> str:
    """One quantized_all_reduce into a prefilled output, against the reference; the digest of the result.

    With feedback two calls, of which the second begins with what the first lost.
    """
    outputs, errors, gather_error = expected or expected_all_reduce(inputs, feedback, **arguments)
    r, size = communicator.rank, communicator.size
    x = put(inputs[r], shared)
    out = put(np.full(x.shape, 77, outputs[0].dtype), shared)
    state = av.ErrorFeedback() if feedback else None
    for wanted in outputs:
        result = av.quantized_all_reduce(x, out=out, error_feedback=state, group=communicator, **arguments)
        assert result is out
        assert_bits_equal(out, wanted, f"rank {r} of {size}: {arguments}")
        assert_bits_equal(x, inputs[r], "the input")
    if state is not None and errors is not None:
        saved = state.state_dict()
        assert saved["error"] is not None
        assert_bits_equal(saved["error"], errors[r].reshape(-1), "the error feedback")
        if gather_error is not None and saved["gather_error"] is not None:
            coded = coding(arguments.get("bits", 8), arguments.get("format"))
            begin, count = Quantization.checked(coded, arguments.get("group_size")).part(x.size, size, r)
            assert_bits_equal(saved["gather_error"], gather_error.reshape(-1)[begin : begin + count], "of the gather")
    return digest(out)
