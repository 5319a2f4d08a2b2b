"""What a language model may say next."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

Array = np.ndarray[Any, Any]


def chosen(logits: Array, p: Array | None = None, k: Array | None = None) -> Array:
    """Drops the smallest of each row until k are left, then the least likely while the others sum up to p."""
    result = logits.copy()
    for number, row in enumerate(result):
        order = np.argsort(row, kind="stable")
        if k is not None:
            row[order[: len(row) - k[number]]] = -np.inf
        likely = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        for place, one in enumerate(order[:-1] if p is not None else []):
            if likely[order[: place + 1]].sum() <= 1 - p[number]:  # type: ignore[index]
                row[one] = -np.inf
    return result


def to_choose(p: bool, k: bool) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        spread = np.stack([r.permutation(np.linspace(-4, 4, 20)) for _ in range(4)])  # no two are equal
        given = {"p": np.array([0.0, 0.3, 0.8, 1.0])} if p else {}
        return {"logits": spread, **given, **({"k": np.array([1, 20, 12, 5], np.int32)} if k else {})}

    return inputs


CASES = [
    Case("npu_top_k_top_p", to_choose(*which), chosen, exact=True, note=note)
    for note, which in (("both", (True, True)), ("k", (False, True)), ("p", (True, False)))
]
