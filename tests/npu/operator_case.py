"""One case of an operator of torch_npu's: inputs, a reference in NumPy's float64, and how near the results must be."""

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
        given = {name: _to_torch(value, dtype, device) for name, value in arguments.items()}
        known = {name: _to_numpy(value) for name, value in given.items()}
        results = [*_listed(self._operator()(**given)), *(given[name] for name in self.writes)]
        expected = _listed(self.reference(**known))
        assert len(results) == len(expected)
        for number, (result, value) in enumerate(zip(results, expected, strict=True)):
            if value is not None:
                _compare(f"result {number} of {self.operator}, {dtype}", result, value, self.exact)

    def differentiate(self, device: torch.device) -> None:
        """Fails unless the gradients are the reference's."""
        import torch

        arguments = self.inputs(np.random.default_rng(6))
        given = {name: _to_torch(value, "float32", device) for name, value in arguments.items()}
        known = {name: _to_numpy(value) for name, value in given.items()}
        for name in self.gradient:
            given[name].requires_grad_()
        results = [r for r in _listed(self._operator()(**given)) if isinstance(r, torch.Tensor) and r.requires_grad]
        results = results[: self.differentiable]
        weights = [np.random.default_rng(7).normal(size=r.shape).astype(np.float32) for r in results]
        torch.autograd.backward(results, [torch.from_numpy(w).to(device) for w in weights])

        def loss() -> float:
            expected = [np.asarray(value) for value in _listed(self.reference(**known)) if value is not None]
            floating = [value for value in expected if value.dtype.kind == "f"]
            return float(sum((w * v).sum() for w, v in zip(weights, floating, strict=False)))

        for name in self.gradient:
            _compare(f"gradient of {name} in {self.operator}", given[name].grad, _differences(loss, known[name]), False)

    def _operator(self) -> Callable[..., Any]:
        import torch

        base, _, overload = self.operator.partition(".")
        packet = getattr(torch.ops.npu, base)
        return getattr(packet, overload) if overload else packet


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


def _listed(results: Any) -> list[Any]:
    if results is None:
        return []
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _to_torch(value: Any, dtype: str, device: torch.device) -> Any:
    import torch

    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [_to_torch(one, dtype, device) for one in value]
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value.copy())
    return (tensor.to(getattr(torch, dtype)) if value.dtype == np.float64 else tensor).to(device)


def _to_numpy(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_to_numpy(one) for one in value]
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
    if exact or not back.is_floating_point():
        assert torch.equal(back, expected.to(back.dtype)), f"{what}: {back} is not {expected}"
        return
    if not back.numel():
        return
    error = (back.double() - expected).abs().max().item()
    allowed = TOLERANCE[str(back.dtype).removeprefix("torch.")] * max(1.0, expected.abs().max().item())
    assert error <= allowed, f"{what}: off by {error}, allowed {allowed}"
