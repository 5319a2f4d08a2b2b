"""Reads flight records (``ALLTOALLV_FLIGHT_DIR``) as a trace of each rank's last operators, without counts or waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from alltoallv_tools.trace.records import DomainTrace, RankTrace, layout, named

_STATES = ("running", "done", "failed")


def read(folder: Path) -> list[DomainTrace]:
    """Reads what the ranks of a failed job have written to ``folder``, by domain; empty if there are no such files.

    A rank that was killed before it could write is shown as its peers have seen it. Communicators of one name but other
    sizes, such as those of a job before, are domains of their own.

    Raises:
        ValueError: a file is not a flight record.
    """
    found: dict[tuple[str, int], DomainTrace] = {}
    for path in sorted(folder.glob("flight-*.json")):
        try:
            record = json.loads(path.read_text())
            name, size = record["domain"], int(record["size"])
            domain = found.setdefault((name, size), DomainTrace(name, size, {}))
            for one in record["ranks"]:
                if not 0 <= one["rank"] < size:
                    raise ValueError(f"it has rank {one['rank']} of {size}")
                if one["rank"] == record["rank"] or one["rank"] not in domain.ranks:
                    domain.ranks[one["rank"]] = _rank(name, size, one)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no flight record: {error}") from None
    for domain in found.values():
        domain.ranks = dict(sorted(domain.ranks.items()))
    return named(found.values())


def _rank(domain: str, size: int, one: dict[str, Any]) -> RankTrace:
    operators = sorted({entry["operator"] for entry in one["operators"]})
    dtypes = sorted({entry["dtype"] for entry in one["operators"]})
    records = np.zeros(len(one["operators"]), layout(size))
    for record, entry in zip(records, one["operators"], strict=True):
        record["begin"], record["end"], record["seq"] = entry["start_ns"], entry["end_ns"], entry["seq"]
        record["bytes"], record["state"] = entry.get("bytes", 0), _STATES.index(entry["state"])
        record["op"], record["dtype"] = operators.index(entry["operator"]), dtypes.index(entry["dtype"])
    return RankTrace(domain, one["rank"], size, one["pid"], "this host", 0, 0, operators, dtypes, records)
