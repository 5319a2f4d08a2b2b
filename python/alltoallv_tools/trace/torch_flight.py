"""Writes a trace as dumps of torch's flight recorder, one file per rank, which ``torchfrtrace`` reads and compares."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from alltoallv_tools.trace.records import DONE, DomainTrace, RankTrace, rank_names

_VERSION = "2.10"  # of the dump format
_ENGINE = "gloo"  # torchfrtrace accepts only engines that it knows
_EVEN = {"all_gather", "all_gather_into_tensor"}  # torchfrtrace expects equal sizes in these


def write(domains: Sequence[DomainTrace], folder: Path) -> list[Path]:
    """Writes ``rank_0``, ``rank_1``, ... into a folder, which is made if needed; returns their paths.

    Exchanges with individual counts become ``all_to_all``, the only operator whose sizes torch lets differ. Messages
    are left out: torchfrtrace reports ranks that take no part in a message as missing.
    """
    names = rank_names(list(domains))
    ranks: dict[int, dict[str, Any]] = {}
    for domain in domains:
        members = {rank: names.get((trace.host, trace.pid), rank) for rank, trace in domain.ranks.items()}
        shown = sorted({*members.values(), *(set(range(domain.size)) if len(members) < domain.size else ())})
        even = _even(domain)
        for rank, trace in domain.ranks.items():
            of_rank = ranks.setdefault(members[rank], _empty())
            group = {"name": domain.name, "desc": domain.name, "ranks": str(shown)}
            of_rank["pg_config"][domain.name] = group
            of_rank["pg_status"][domain.name] = _status(trace)
            of_rank["entries"] += _entries(domain, trace, even)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, dump in sorted(ranks.items()):
        dump["entries"].sort(key=lambda entry: entry["time_created_ns"])
        for record_id, entry in enumerate(dump["entries"]):
            entry["record_id"] = record_id
        paths.append(folder / f"rank_{number}")
        paths[-1].write_bytes(pickle.dumps(dump))
    return paths


def _empty() -> dict[str, Any]:
    return {
        "version": _VERSION,
        "comm_lib_version": "alltoallv",
        "nccl_version": "alltoallv",
        "pg_config": {},
        "pg_status": {},
        "entries": [],
    }


def _status(trace: RankTrace) -> dict[str, str]:
    records = trace.collectives()
    done = records[records["state"] == DONE]
    last = {"enqueued": records, "started": records, "completed": done}
    return {
        f"last_{word}_collective": str(records_of["seq"].max() if len(records_of) else -1)
        for word, records_of in last.items()
    }


def _even(domain: DomainTrace) -> set[int]:
    """Returns the sequence numbers of gathers in which every rank gives the same number of elements."""
    counts_of: dict[int, set[int]] = {}
    for trace in domain.ranks.values():
        for record in trace.records[trace.of(_EVEN)]:
            counts_of.setdefault(int(record["seq"]), set()).update(record["counts"].tolist())
    return {seq for seq, counts in counts_of.items() if len(counts) == 1}


def _entries(domain: DomainTrace, trace: RankTrace, even: set[int]) -> Iterable[dict[str, Any]]:
    for number, record in enumerate(trace.collectives()):
        kind, into, out = _described(trace, record, even)
        operator = trace.operators[record["op"]]
        yield {
            "pg_id": 0,
            "process_group": (domain.name, domain.name),
            "collective_seq_id": int(record["seq"]),
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": f"{_ENGINE}:{kind}",
            "time_created_ns": int(record["begin"]) + trace.clock_ns,
            "duration_ms": max(0, int(record["end"]) - int(record["begin"])) / 1e6,
            "input_sizes": [[into]],
            "input_dtypes": [trace.dtype(record)],
            "output_sizes": [[out]],
            "output_dtypes": [trace.dtype(record)],
            "state": "completed" if record["state"] == DONE else "started",
            "time_discovered_started_ns": int(record["begin"]) + trace.clock_ns,
            "time_discovered_completed_ns": int(record["end"]) + trace.clock_ns if record["end"] else None,
            "retired": record["state"] == DONE,
            "timeout_ms": 0,
            "is_p2p": False,
            "frames": [{"name": operator, "filename": "alltoallv", "line": 0}],
        }


def _described(trace: RankTrace, record: Any, even: set[int]) -> tuple[str, int, int]:
    """Returns torch's name of an operator, and the numbers of elements of its input and output."""
    operator = trace.operators[record["op"]]
    counts = record["counts"].tolist()
    sent, received = sum(counts), int(record["bytes"]) // max(1, int(record["element"]))
    if operator in ("all_reduce", "quantized_all_reduce"):
        return "all_reduce", sent, sent
    if operator in ("broadcast", "reduce"):
        return operator, max(max(counts), received), max(max(counts), received)
    if operator == "barrier":
        return operator, 0, 0
    if operator in _EVEN and int(record["seq"]) in even:
        return "all_gather", counts[0], counts[0] * len(counts)
    if operator in ("reduce_scatter", "quantized_reduce_scatter") and len(set(counts)) == 1:
        return "reduce_scatter", sent, counts[0]
    return "all_to_all", sent, received
