"""One case of an operator of torch_npu's: inputs, a reference in NumPy's float64, and how near the results must be.

Run on emulated NPUs against the real torch_npu, and on the CPU against `alltoallv.npu_ops`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "float16", "bfloat16")
HALVES = FLOATS[1:]
#: Allowed error, relative to the largest value of the result: one or two units in the last place.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclasses.dataclass(frozen=True)
class Bits:
    """A tensor of a dtype that NumPy lacks, of one byte, by its bytes."""

    codes: np.ndarray[Any, Any]
    dtype: str

    def __getitem__(self, place: int) -> Bits:
        return Bits(self.codes[place], self.dtype)

    def swapaxes(self, a: int, b: int) -> Bits:
        return Bits(self.codes.swapaxes(a, b), self.dtype)

    @property
    def T(self) -> Bits:
        return Bits(self.codes.T, self.dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is called, with what, and what must come out.

    ``inputs`` gives arguments by name from a random generator. Arrays of float64 are handed over in each of ``dtypes``;
    other arrays keep their dtype; what is no array goes as it is. ``reference`` gets the same arguments, floating
    point as float64 with the values that the operator got, and gives the results (None: not compared). A result that
    is not floating point is compared bit for bit, with ``exact`` every one is.
    """

    operator: str
    inputs: Callable[[np.random.Generator], dict[str, Any]]
    reference: Callable[..., Any]
    dtypes: Sequence[str] = FLOATS
    #: Inputs whose gradients are compared with differences of the reference, in float32.
    gradient: Sequence[str] = ()
    #: How many of the results gradients go through: torch_npu takes none through what it keeps for the backward pass.
    differentiable: int | None = None
    exact: bool = False
    #: Inputs that the operator writes; their new values come after its results.
    writes: Sequence[str] = ()
    note: str = ""
    #: Operators that this case runs as well: the gradient's.
    runs: Sequence[str] = ()

    def call(self, device: torch.device, dtype: str) -> None:
        """Fails unless operator and reference agree."""
        arguments = self.inputs(np.random.default_rng(5))
        given = {name: to_torch(value, dtype, device) for name, value in arguments.items()}
        known = {name: to_numpy(value) for name, value in given.items()}
        results = [*listed(called(self.operator, device)(**given)), *(given[name] for name in self.writes)]
        compare_all(f"{self.operator}, {dtype}", results, self.reference(**known), self.exact)

    def differentiate(self, device: torch.device) -> None:
        """Fails unless the gradients are the reference's."""
        import torch

        arguments = self.inputs(np.random.default_rng(6))
        given = {name: to_torch(value, "float32", device) for name, value in arguments.items()}
        known = {name: to_numpy(value) for name, value in given.items()}
        for name in self.gradient:
            given[name].requires_grad_()
        results = [
            r for r in listed(called(self.operator, device)(**given)) if isinstance(r, torch.Tensor) and r.requires_grad
        ]
        results = results[: self.differentiable]
        weights = [np.random.default_rng(7).normal(size=r.shape).astype(np.float32) for r in results]
        torch.autograd.backward(results, [torch.from_numpy(w).to(device) for w in weights])

        def loss() -> float:
            expected = [np.asarray(value) for value in listed(self.reference(**known)) if value is not None]
            floating = [value for value in expected if value.dtype.kind == "f"]
            return float(sum((w * v).sum() for w, v in zip(weights, floating, strict=False)))

        for name in self.gradient:
            _compare(f"gradient of {name} in {self.operator}", given[name].grad, _differences(loss, known[name]), False)


def called(operator: str, device: torch.device) -> Callable[..., Any]:
    """The operator that is under test on the device."""
    import torch

    base, _, overload = operator.partition(".")
    if device.type == "cpu":
        from alltoallv import npu_ops

        return getattr(npu_ops, base)
    packet = getattr(torch.ops.npu, base, None) or getattr(torch.ops.atb, base)
    return getattr(packet, overload) if overload else packet


def compare_all(what: str, results: Sequence[Any], expected: Any, exact: bool) -> None:
    """Fails unless there are as many results as expected, each near enough; None is not compared."""
    expected = listed(expected)
    assert len(results) == len(expected)
    for number, (result, value) in enumerate(zip(results, expected, strict=True)):
        if value is not None:
            _compare(f"result {number} of {what}", result, value, exact)


def _differences(loss: Callable[[], float], value: np.ndarray[Any, Any], step: float = 1e-5) -> np.ndarray[Any, Any]:
    """The loss's derivatives by each element of the value, which the loss reads."""
    derivative = np.zeros_like(value)
    for index in np.ndindex(value.shape):
        middle = value[index]
        value[index] = middle + step
        above = loss()
        value[index] = middle - step
        derivative[index] = (above - loss()) / (2 * step)
        value[index] = middle
    return derivative


def listed(results: Any) -> list[Any]:
    if results is None:
        return []
    return list(results) if isinstance(results, (tuple, list)) else [results]


def to_torch(value: Any, dtype: str, device: torch.device) -> Any:
    import torch

    if isinstance(value, list) and value and isinstance(value[0], (np.ndarray, Bits)):
        return [to_torch(one, dtype, device) for one in value]
    if isinstance(value, Bits):
        return torch.from_numpy(value.codes.copy(order="K")).view(getattr(torch, value.dtype)).to(device)
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value.copy(order="K"))
    return (tensor.to(getattr(torch, dtype)) if value.dtype == np.float64 else tensor).to(device)


def to_numpy(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [to_numpy(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return (value.double() if value.is_floating_point() else value).cpu().numpy().copy()


def _compare(what: str, result: Any, value: Any, exact: bool) -> None:
    import torch

    if not isinstance(result, torch.Tensor):
        assert result == value, what
        return
    expected = torch.from_numpy(np.asarray(value))
    assert result.shape == expected.shape, f"{what}: shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    back = result.cpu()
    if back.is_floating_point() and back.itemsize == 1:  # whose numbers are exact
        back, exact = back.double(), True
    if exact or not back.is_floating_point():
        assert torch.equal(back, expected.to(back.dtype)), f"{what}: {back} is not {expected}"
        return
    if not back.numel():
        return
    finite = expected.isfinite()
    assert torch.equal(back.double()[~finite], expected[~finite]), f"{what}: {back} is not {expected}"
    if not finite.any():
        return
    error = (back.double() - expected)[finite].abs().max().item()
    allowed = TOLERANCE[str(back.dtype).removeprefix("torch.")] * max(1.0, expected[finite].abs().max().item())
    assert error <= allowed, f"{what}: off by {error}, allowed {allowed}"
