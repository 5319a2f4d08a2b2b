"""Writes a trace as one HTML file that needs nothing else: matrix, timeline and load, drawn by `page.html`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv_tools.trace.records import RUNNING, DomainTrace
from alltoallv_tools.trace.summary import lateness, tell

_EXPERTS = (  # the operators that carry rows to the ranks of their experts
    "all_to_all_v",
    "all_to_all_single",
    "all_to_all",
    "global_scatter",
    "global_gather",
    "quantized_all_to_all",
)
_MOST_EVENTS = 100_000  # most events of a domain that are drawn one by one
_MOST_CELLS = 300_000  # most cells of a domain's matrices over time


def html(domains: Sequence[DomainTrace], title: str) -> str:
    """Returns the page; ``title`` names the trace."""
    data = {
        "title": title,
        "summary": tell(domains),
        "domains": [_domain(domain) for domain in sorted(domains, key=lambda each: -each.bytes)],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # else a name could end the script
    template = resources.files("alltoallv_tools.trace").joinpath("page.html").read_text("utf-8")
    return template.replace("{{DATA}}", text)


def _domain(domain: DomainTrace) -> dict[str, Any]:
    traces = domain.ranks.values()
    used = [trace for trace in traces if len(trace.records)]
    begin = min((int(trace.records["begin"].min()) + trace.clock_ns for trace in used), default=0)
    last = [np.maximum(trace.records["begin"], trace.records["end"]).max() + trace.clock_ns for trace in used]
    end = max(map(int, last), default=begin)
    span = max(end - begin, 1)
    count = max(1, min(60, _MOST_CELLS // domain.size**2))
    bins = np.zeros((count, domain.size, domain.size), np.int64)
    expert_bins = np.zeros_like(bins)
    for trace in used:
        bin_of = ((trace.records["begin"].astype(np.int64) + trace.clock_ns - begin) * count // span).clip(0, count - 1)
        sent = trace.sent_bytes()
        np.add.at(bins[:, trace.rank], bin_of, sent)
        experts = trace.of(_EXPERTS)
        np.add.at(expert_bins[:, trace.rank], bin_of[experts], sent[experts])
    late = lateness(domain)
    events, left_out = _events(domain, begin, end)
    return {
        "name": domain.name,
        "size": domain.size,
        "hosts": [domain.ranks[rank].host if rank in domain.ranks else "?" for rank in range(domain.size)],
        "span_us": span / 1e3,
        "operators": used[0].operators if used else [],
        "matrix": bins.tolist(),
        "load": expert_bins.sum(1).tolist(),  # received elements, by time and rank
        "late": np.stack([late.came_last, late.waited_ns, late.caused_ns], 1).tolist(),
        "compared": late.operators,
        "events": events,
        "left_out": left_out,
    }


def _events(domain: DomainTrace, begin: int, end: int) -> tuple[list[list[list[float]]], int]:
    """Returns by rank [begin, duration, waited (us), operator, number, bytes sent, state, peer], and the number of
    events that are left out, the shortest ones.
    """
    durations = {rank: _durations(trace.records, end - trace.clock_ns) for rank, trace in domain.ranks.items()}
    everything = np.concatenate([*durations.values(), np.zeros(0, np.int64)])
    left_out = max(0, len(everything) - _MOST_EVENTS)
    shortest = int(np.partition(everything, left_out)[left_out]) if left_out else 0
    events: list[list[list[float]]] = [[] for _ in range(domain.size)]
    for rank, trace in domain.ranks.items():
        shown = durations[rank] >= shortest
        records = trace.records[shown]
        start = (records["begin"].astype(np.int64) + trace.clock_ns - begin) / 1e3
        columns: list[npt.NDArray[Any]] = [
            start.round(2),
            (durations[rank][shown] / 1e3).round(2),
            (records["waited"] / 1e3).round(2),
            *(records[name] for name in ("op", "seq")),
            trace.sent_bytes()[shown].sum(1),
            *(records[name] for name in ("state", "peer")),
        ]
        events[rank] = [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return events, left_out


def _durations(records: npt.NDArray[Any], end: int) -> npt.NDArray[np.int64]:
    """Returns durations; operators that had not ended last until the end of the trace."""
    ends = np.where(records["state"] == RUNNING, np.uint64(max(end, 0)), records["end"]).astype(np.int64)
    durations: npt.NDArray[np.int64] = np.maximum(ends - records["begin"].astype(np.int64), 0)
    return durations
