"""Reads flight records (``ALLTOALLV_FLIGHT_DIR``) as a trace of each rank's last operators, without counts or waits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alltoallv_tools.trace.records import DomainTrace, RankTrace, layout, named, readable

_STATES = ("running", "done", "failed")


def read(folder: Path) -> list[DomainTrace]:
    """Reads what the ranks of a failed job have written to ``folder``, by domain; empty if there are no such files.

    A rank that was killed before it could write is shown as its peers have seen it. Communicators of one name, such as
    records of a job before, and records that failed one after the other, are domains of their own.

    A file that is not a flight record is left out with a warning of the logger ``alltoallv``.

    Raises:
        ValueError: none of the files is a flight record.
    """
    records: list[_Failed] = []
    operators: list[str] = []  # of all ranks, as in traces

    def read_one(path: Path) -> None:
        try:
            record = json.loads(path.read_text())
            name, size, writer = record["domain"], int(record["size"]), record["rank"]
            ranks = {entry["rank"]: _rank(name, size, entry, operators) for entry in record["ranks"]}
            if strange := ranks.keys() - range(size):
                raise ValueError(f"it has rank {min(strange)} of {size}")
            own = ranks[writer]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a flight record: {error}") from None
        domain = next((entry for entry in records if entry.wrote(name, size, writer, ranks)), None)
        if domain is None:
            records.append(domain := _Failed(name, size, {}))
        domain.writers.add(writer)
        domain.ranks = dict(sorted((ranks | domain.ranks | {writer: own}).items()))

    paths = folder.glob("flight-*.json")
    readable(
        read_one, sorted(paths, key=lambda path: (len(path.name), path.name))
    )  # a rank's second file after its first
    return named(records)


@dataclass
class _Failed(DomainTrace):
    """A communicator that has failed."""

    writers: set[int] = field(default_factory=set)  # the ranks whose files have been read

    def wrote(self, name: str, size: int, writer: int, ranks: dict[int, RankTrace]) -> bool:
        """True if a file can be of a rank of this communicator: its processes are the same."""
        pids = {(self.ranks[rank].pid, trace.pid) for rank, trace in ranks.items() if rank in self.ranks}
        same = all(own == other for own, other in pids if own and other)
        return (self.name, self.size) == (name, size) and writer not in self.writers and same


def _rank(domain: str, size: int, described: dict[str, Any], operators: list[str]) -> RankTrace:
    """Makes a rank's trace; adds the names of its operators to the other ranks' names."""
    operators += sorted({entry["operator"] for entry in described["operators"]} - set(operators))
    dtypes = sorted({entry["dtype"] for entry in described["operators"]})
    records = np.zeros(len(described["operators"]), layout(size))
    for record, entry in zip(records, described["operators"], strict=True):
        record["begin"], record["end"], record["seq"] = entry["start_ns"], entry["end_ns"], entry["seq"]
        record["bytes"], record["state"] = entry.get("bytes", 0), _STATES.index(entry["state"])
        record["op"], record["dtype"] = operators.index(entry["operator"]), dtypes.index(entry["dtype"])
    return RankTrace(domain, described["rank"], size, described["pid"], "this host", 0, 0, operators, dtypes, records)
