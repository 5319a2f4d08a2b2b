"""Operators of vllm-ascend's extension module by subject, each with its schema, formula and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By schema: the formula, which gets CPU tensors, and what gives the shapes of its results (None: vllm-ascend does).
Table = dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]]


def nothing(*arguments: object, **more: object) -> None:
    """Gives operators that only write into their arguments no results."""
