"""Writes a trace as Chrome's trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alltoallv_tools.trace.records import CUT_SHORT, FAILED, RUNNING, DomainTrace, RankTrace, rank_names


def events(domains: Sequence[DomainTrace]) -> dict[str, Any]:
    """Returns one process per rank, one thread per domain, a slice per operator, and inside it one for the waiting
    time.
    """
    names = rank_names(list(domains))
    slices: list[dict[str, Any]] = []
    for thread, domain in enumerate(domains):
        for rank, trace in domain.ranks.items():
            process = names.get((trace.host, trace.pid), rank)
            ids = {"pid": process, "tid": thread}
            text = f"rank {process} (pid {trace.pid} of {trace.host})"
            slices.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": text}})
            slices.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": f"domain {domain.name}"}})
            for record, sent in zip(trace.records, trace.sent_bytes(), strict=True):
                slices += _slices(trace, record, sent.tolist(), ids)
    return {"traceEvents": slices, "displayTimeUnit": "ns"}


def _slices(trace: RankTrace, record: Any, sent: list[int], ids: dict[str, int]) -> list[dict[str, Any]]:
    begin = (int(record["begin"]) + trace.clock_ns) / 1e3
    waited = int(record["waited"]) / 1e3
    slice_of_call = {
        "name": trace.operators[record["op"]],
        "cat": "failed" if record["state"] in (FAILED, CUT_SHORT) else "alltoallv",
        "ts": begin,
        **ids,
        "args": {"operator": trace.name(record), "dtype": trace.dtype(record), "waited_us": waited, "bytes_to": sent},
    }
    if record["state"] == RUNNING:
        return [{"ph": "B", **slice_of_call}]
    slices = [{"ph": "X", "dur": (int(record["end"]) - int(record["begin"])) / 1e3, **slice_of_call}]
    if waited:
        slices.append({"ph": "X", "name": "waiting", "cat": "waiting", "ts": begin, "dur": waited, **ids})
    return slices
