"""Makes the operators functions. A call chooses the overload whose schema fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from alltoallv.npu_ops.registry import Operator, formulas


def function(name: str, schemas: Sequence[str]) -> Callable[..., Any]:
    """Returns the operator with its overloads as one function, called like torch_npu's."""
    known, operators = formulas(), []
    for text in schemas:
        schema = torch._C.parse_schema(text)
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        operators.append(Operator(full, schema, known[full]))

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = next((one for one in operators if one.fits(args, kwargs)), operators[-1])
        return chosen(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "\n\n".join([*schemas, operators[0].doc])
    return call
