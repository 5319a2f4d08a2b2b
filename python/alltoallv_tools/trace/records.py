"""Reads the files of a trace: one per rank and domain, a page of JSON followed by records of one size."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 4096
T = TypeVar("T")
RUNNING, DONE, FAILED, CUT_SHORT = range(4)  # the last: by the loss or the abort of a rank
MESSAGES = ("send", "recv")

Records = npt.NDArray[Any]  # has the dtype of `layout`


def layout(size: int) -> np.dtype[Any]:
    """Returns a record's dtype, as in op_host/runtime/control/trace.h.

    Times are in ns, counts in units of ``element`` bytes.
    """
    fields = "begin=u8 end=u8 waited=u8 seq=u8 bytes=u8 dtype=u4 element=u4 op=u2 state=u1 unused=u1 peer=i4"
    return np.dtype([*(tuple(field.split("=")) for field in fields.split()), ("counts", "i8", (size,))])


@dataclass
class RankTrace:
    """The operators of one rank in one domain: ``records`` in the order in which they began."""

    domain: str
    rank: int
    size: int
    pid: int
    host: str
    started_ns: int  # on the clock of the records
    clock_ns: int  # offset that puts this rank's times on the common clock of all hosts
    operators: list[str]
    dtypes: list[str]
    records: Records
    lost: int = 0  # number of records that another program has cut off

    def name(self, record: Any) -> str:
        """Returns ``"all_reduce #41"``, or ``"recv from rank 3"`` for a message, which has no sequence number."""
        operator = self.operators[record["op"]]
        if operator not in MESSAGES:
            return f"{operator} #{record['seq']}"
        peer = f"rank {record['peer']}" if record["peer"] >= 0 else "any rank"
        return f"{operator} {'to' if operator == 'send' else 'from'} {peer}"

    def dtype(self, record: Any) -> str:
        """Returns the name of a record's element type."""
        number = int(record["dtype"])
        return self.dtypes[number] if number < len(self.dtypes) else f"{record['element']} bytes"

    def sent_bytes(self) -> npt.NDArray[np.int64]:
        """Returns the bytes sent to each rank, one row per record."""
        sent: npt.NDArray[np.int64] = self.records["counts"] * self.records["element"][:, None].astype(np.int64)
        return sent

    def collectives(self) -> Records:
        """Returns the records without the records of messages."""
        return self.records[~self.of(MESSAGES)]

    def of(self, operators: Collection[str]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the records of these operators."""
        return np.isin(self.records["op"], [i for i, name in enumerate(self.operators) if name in operators])


@dataclass
class DomainTrace:
    """One communicator: its traced ranks, by rank."""

    name: str  # of the domain; with a number if the domain was made again
    size: int
    ranks: dict[int, RankTrace]

    @property
    def bytes(self) -> int:
        """Returns the bytes that its ranks have sent."""
        return sum(int(trace.sent_bytes().sum()) for trace in self.ranks.values())


def read(folder: Path) -> list[DomainTrace]:
    """Reads all communicators of a folder, in the order in which they were made.

    A file that is not a trace is left out with a warning of the logger ``alltoallv``.

    Raises:
        ValueError: the folder is missing or holds no trace.
    """
    traces = [trace for trace in readable(read_file, sorted(folder.glob("*.trace"))) if trace is not None]
    if not traces:
        wrong = f"folder {str(folder)!r} holds no *.trace files" if folder.is_dir() else f"{str(folder)!r} is no folder"
        raise ValueError(f"{wrong}, expected the one that ALLTOALLV_TRACE or alltoallv.trace() named")
    steady = {trace.host: trace.clock_ns for trace in traces}  # one offset per host: its ranks share a clock
    for trace in traces:
        trace.clock_ns = steady[trace.host]
    by_name: dict[tuple[str, int, int], dict[int, RankTrace]] = defaultdict(dict)
    times: dict[tuple[str, int, int], int] = defaultdict(int)
    for trace in sorted(traces, key=lambda each: each.started_ns + each.clock_ns):
        which = times[trace.domain, trace.size, trace.rank] = times[trace.domain, trace.size, trace.rank] + 1
        by_name[trace.domain, trace.size, which][trace.rank] = trace
    return named(DomainTrace(name, size, dict(sorted(ranks.items()))) for (name, size, _), ranks in by_name.items())


def readable(read_one: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """Reads files; leaves out, with a warning, those for which ``read_one`` raises ValueError or OSError.

    Raises:
        ValueError, OSError: none can be read.
    """
    results: list[T] = []
    errors: list[Exception] = []
    for path in paths:
        try:
            results.append(read_one(path))
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors and not results:
        raise errors[0]
    for reason in errors:
        logging.getLogger("alltoallv").warning("%s; left out", reason)
    return results


def named(domains: Iterable[DomainTrace]) -> list[DomainTrace]:
    """Returns the domains; one whose name has come before gets a number."""
    again: dict[str, int] = defaultdict(int)
    listed = list(domains)
    for domain in listed:
        again[domain.name] += 1
        if (number := again[domain.name]) > 1:
            domain.name += f" ({number})"
    return listed


def read_file(path: Path) -> RankTrace | None:
    """Reads one file, which its rank may still be writing; None before it has written the first page, or cannot.

    Raises:
        ValueError: the file is not a trace.
    """
    with path.open("rb") as file:
        head, data = file.read(HEADER_BYTES).rstrip(b"\0"), file.read()
    if not head:
        return None
    try:
        header = json.loads(head)
        form = layout(header["size"])
        if header["stride"] != form.itemsize:
            raise ValueError("another version wrote it")
        records = np.frombuffer(data, form, count=len(data) // form.itemsize)
        empty = np.flatnonzero(records["begin"] == 0)  # files grow in steps
        trace = RankTrace(
            domain=header["domain"],
            rank=header["rank"],
            size=header["size"],
            pid=header["pid"],
            host=header["host"],
            started_ns=header["steady_ns"],
            clock_ns=header["unix_ns"] - header["steady_ns"],
            operators=header["operators"],
            dtypes=header["dtypes"],
            records=records[: empty[0]] if empty.size else records,
            lost=header.get("lost", 0),
        )
        strange = (trace.records["op"] >= len(trace.operators)) | (trace.records["state"] > CUT_SHORT)
        if trace.rank not in range(trace.size) or strange.any():
            raise ValueError("it holds something else")
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{str(path)!r} is not a trace: it does not begin with a header") from None
    except KeyError as error:
        raise ValueError(f"{str(path)!r} is not a trace: its header lacks {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a trace: {error}") from None
    return trace


def rank_names(domains: list[DomainTrace]) -> dict[tuple[str, int], int]:
    """Returns the ranks of the largest domain by host and process, to name them where they have other numbers.

    The result is empty if ranks are threads of one process.
    """
    world = max(domains, key=lambda domain: len(domain.ranks))
    names = {(trace.host, trace.pid): rank for rank, trace in world.ranks.items()}
    return names if len(names) == len(world.ranks) else {}
