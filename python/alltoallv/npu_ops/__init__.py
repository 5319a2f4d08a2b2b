"""Provides torch_npu's own operators without torch_npu: the same names, arguments and results, on CPU tensors.

For unit tests of a program for Ascend NPUs where neither a device nor the wheel is wanted:

    import alltoallv.npu_ops as torch_npu

    y, rstd = torch_npu.npu_rms_norm(x, gamma)

Every operator of docs/npu-operators.md is here, written from its documented formula in ordinary torch, which gives it
gradients wherever the formula has any. Operators that communicate take in place of HCCL's name the ProcessGroup, its
``group_name``, or "" for the default group, and keep the documented limits of the device (`limits`). On emulated NPUs
(``python -m alltoallv run --emulate-npu``) the same formulas run behind the real torch_npu.

An operator that is not here raises AttributeError. A value that a formula does not cover raises NotImplementedError,
and one that the device would refuse raises InvalidParamError; both name the argument. An argument that the operator's
schema does not have, or has but once or by name only, raises TypeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.resources import files
from typing import Any

__all__ = ["names", "schemas"]


@functools.cache
def schemas() -> dict[str, list[str]]:
    """Returns the schemas of an operator and its overloads, as torch prints them, by name."""
    by_name: dict[str, list[str]] = {}
    for line in files(__name__).joinpath("schemas.txt").read_text().splitlines():
        name = line.partition("(")[0].partition("::")[2].partition(".")[0]
        by_name.setdefault(name, []).append(line)
    return by_name


def names() -> list[str]:
    """Returns the names of the operators in alphabetical order."""
    return sorted(schemas())


def __dir__() -> list[str]:
    return [*globals(), *names()]


@functools.cache
def __getattr__(name: str) -> Callable[..., Any]:
    if name not in schemas():
        raise AttributeError(f"npu::{name} is not among the operators of alltoallv.npu_ops")
    from alltoallv.npu_ops.registry import function

    return function(name, schemas()[name])
