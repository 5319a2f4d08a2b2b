"""Prepares what ``top`` shows of a running job: where every rank is, how much it moves, how long it waits."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

import numpy as np

from alltoallv_tools.tables import table_lines
from alltoallv_tools.trace.records import RUNNING, DomainTrace, RankTrace
from alltoallv_tools.trace.summary import where

_COLUMNS = ("domain", "rank", "pid", "where", "since", "ops/s", "MB/s sent", "waits")


def table(domains: Sequence[DomainTrace], seconds: float, now_ns: int | None = None) -> list[str]:
    """Returns lines of text, one per rank of each domain, about the last ``seconds``.

    Args:
        domains: The trace as it has just been read.
        seconds: The period over which rates are computed.
        now_ns: The time on the records' clock; default: the time of each rank's host.
    """
    rows = [
        _row(domain, trace, _now(trace) if now_ns is None else now_ns, seconds)
        for domain in domains
        for trace in domain.ranks.values()
    ]
    return list(table_lines(_COLUMNS, rows, "<"))


def _row(domain: DomainTrace, trace: RankTrace, now: int, seconds: float) -> tuple[str, ...]:
    records = trace.records
    identity = (domain.name, str(trace.rank), str(trace.pid))
    if len(records) == 0:
        return (*identity, "no operator yet" if _lives(trace) else "its process has ended", "", "", "", "")
    last = records[-1]
    since = now - int(last["begin"] if last["state"] == RUNNING else last["end"])
    begun = now - int(seconds * 1e9)
    recent = np.where(records["state"] == RUNNING, np.uint64(now), records["end"]) >= begun
    waited = int(np.minimum(records["waited"][recent], np.uint64(seconds * 1e9)).sum())
    if last["state"] == RUNNING:
        waited += now - max(int(last["begin"]), begun)
    sent = int(trace.sent_bytes()[recent].sum())
    gone = "" if _lives(trace) else "; its process has ended"
    return (
        *identity,
        where(trace, last) + gone,
        f"{since / 1e9:.1f} s",
        f"{recent.sum() / seconds:,.0f}",
        f"{sent / seconds / 1e6:,.1f}",
        f"{min(1.0, waited / seconds / 1e9):.0%}",
    )


def _now(trace: RankTrace) -> int:
    """Returns the time on the clock of the records."""
    return time.monotonic_ns() if _is_here(trace) else time.time_ns() - trace.clock_ns


def _lives(trace: RankTrace) -> bool:
    """True if the process exists, as far as this host can tell."""
    return not _is_here(trace) or os.path.exists(f"/proc/{trace.pid}")


def _is_here(trace: RankTrace) -> bool:
    return trace.host == socket.gethostname()
