"""Checks what a mixture of experts demands of devices, by the limits that the emulator keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv.npu_ops.limits import GroupedMatmul, MoE, Product
from alltoallv_tools.tables import Table

_NEEDED, _OPTIONAL = ("tokens", "hidden", "experts", "k"), {"algorithm": "", "inner": 0}


def parse(text: str) -> dict[str, Any]:
    """Parses ``tokens=128,hidden=7168,experts=256,k=8``; optional are ``algorithm`` (comm_alg) and ``inner`` (columns).

    Raises:
        InvalidParamError: A name is missing or unknown, or a value is not a positive number.
    """
    options: dict[str, Any] = dict(_OPTIONAL)
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in (*_NEEDED, *_OPTIONAL) or not (value.isdecimal() or name == "algorithm"):
            names = ", ".join((*_NEEDED, *_OPTIONAL))
            raise InvalidParamError(f"--moe has {part!r}, expected NAME=NUMBER with a name among {names}", id=1467)
        options[name] = value if name == "algorithm" else int(value)
    missing = [name for name in _NEEDED if not options.get(name)]
    if missing:
        raise InvalidParamError(f"--moe is {text!r}, expected {', '.join(missing)} as well, above zero", id=1468)
    return options


def rows(model: dict[str, Any], sizes: Sequence[int], products: Sequence[Product]) -> list[dict[str, Any]]:
    """Returns, for each product and number of ranks, the buffer's size and the operators that would be refused."""
    return [row(model, size, product) for product in products for size in sizes]


def row(model: dict[str, Any], size: int, product: Product) -> dict[str, Any]:
    """Returns one of `rows`."""
    tokens, hidden, experts, k = (model[name] for name in _NEEDED)
    use = MoE(size, experts, hidden, tokens, k, model["algorithm"])
    uneven = [f"moe_expert_num is {experts}, expected a multiple of {size} ranks"] if experts % size else []
    sent = tokens * k * hidden * 2  # bytes
    products = GroupedMatmul(size, max(1, experts // size), hidden, model["inner"] or hidden, sent)
    return {
        "np": size,
        "product": product,
        "bytes": sent,
        "hccl_buffsize": use.buffer_mb(product),
        "npu_moe_distribute_dispatch_v2": [*uneven, *use.breaches(product)],
        "npu_alltoallv_gmm": [*uneven, *products.breaches(product)],
    }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Formats rows as lines of a table."""
    table = Table("np >6", "product >8", "sent(B) >11", "HCCL_BUFFSIZE >14", "operators <")
    yield table.head()
    for row in rows:
        first: tuple[Any, ...] = (row["np"], row["product"], row["bytes"], f"{row['hccl_buffsize']} MB")
        for name in ("npu_moe_distribute_dispatch_v2", "npu_alltoallv_gmm"):
            for text in row[name] or ["ok"]:
                yield table.row(*first, f"{name}: {text}")
                first = ("",) * 4
