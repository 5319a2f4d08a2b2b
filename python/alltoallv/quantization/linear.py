"""A row-parallel linear layer whose partial products travel quantized, in chunks computed during the exchange."""

from __future__ import annotations

import math
from typing import Any

from alltoallv import _core
from alltoallv._calls.counts import integer
from alltoallv.errors import InvalidParamError

CHUNKS = 4  # the default, if a chunk has at least this number of elements:
SMALLEST = 1 << 17


def chunk_rows(rows: int, columns: int, chunks: int | None, format: Any, group_size: int | None) -> int:
    """Returns the rows of a chunk: it has whole groups, so that chunks have the scales of the undivided product.

    NVFP4's scale of all elements, and groups of all elements, cannot be divided: there is one chunk, unless asked for.
    """
    wanted = integer(chunks)
    if chunks is not None and (wanted is None or wanted < 1):
        raise InvalidParamError(f"chunks is {chunks!r}, expected an integer of at least 1, or None", id=1183)
    row = _core.code_formats.get(format) if isinstance(format, str) else None
    group = group_size if isinstance(group_size, int) and group_size > 0 else (row.group_size if row else 0) or 128
    unit = group // math.gcd(max(columns, 1), group)
    if wanted is None:
        wanted = 1 if row is not None and row.scale == "e4m3" else min(max(rows * columns // SMALLEST, 1), CHUNKS)
    units = -(-rows // unit)
    return max(-(-units // wanted) * unit, 1)
