"""Describes in words what the ranks of a job do, or did when it ended, and for which ranks they waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv_tools.trace.records import CUT_SHORT, DONE, FAILED, MESSAGES, RUNNING, DomainTrace, RankTrace

_VERBS = {RUNNING: "is in", DONE: "has ended"}


def tell(domains: Sequence[DomainTrace]) -> list[str]:
    """Returns one sentence or more per domain: what its ranks do, then for which ranks they waited."""
    return [
        sentence
        for domain in domains
        for sentence in (*_lost(domain), *_places(domain), *_messages(domain), *_waits(domain))
    ]


def where(trace: RankTrace, record: Any) -> str:
    """Returns ``"is in all_reduce #41"``, ``"has ended all_reduce #40"`` or ``"failed in all_reduce #41"``."""
    return f"{_VERBS.get(int(record['state']), 'failed in')} {trace.name(record)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ``"rank 2"``, ``"ranks 0, 1 and 3"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _lost(domain: DomainTrace) -> list[str]:
    return [
        f"{trace.lost:,} operators of rank {rank} of {domain.name!r} are lost: another program cut its file."
        for rank, trace in domain.ranks.items()
        if trace.lost
    ]


def _places(domain: DomainTrace) -> list[str]:
    last = {rank: trace.collectives()[-1] for rank, trace in domain.ranks.items() if len(trace.collectives())}
    sentences = []
    if silent := sorted(set(range(domain.size)) - set(domain.ranks)):
        sentences.append(f"Of {ranks_text(silent)} of {domain.name!r} there is no trace.")
    if idle := sorted(set(domain.ranks) - set(last)):
        sentences.append(f"No collective of {domain.name!r} was called by {ranks_text(idle)}.")
    if not last:
        return sentences
    # The ranks that are behind explain the others.
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, record in last.items():
        groups[int(record["seq"]), int(record["state"] == DONE), int(record["op"])].append(rank)
    if len(groups) == 1:
        ranks = next(iter(groups.values()))
        everybody = {1: ranks_text(ranks), 2: "both ranks"}.get(len(ranks), f"all {len(ranks)} ranks")
        return [*sentences, f"{_start(_phrase(domain, ranks, last, everybody))} of {domain.name!r}."]
    ordered = [ranks for _, ranks in sorted(groups.items())]
    phrases = [_phrase(domain, ranks, last, ranks_text(ranks)) for ranks in ordered[:-1]]
    end = ordered[-1]
    others = "all others" if len(end) > 1 else f"{ranks_text(end)}"
    first = f"{phrases[0]} of {domain.name!r}"
    text = ", ".join([first, *phrases[1:], _phrase(domain, end, last, others)])
    sentences.append(f"{_start(text)}.")
    return sentences


def _phrase(domain: DomainTrace, ranks: Sequence[int], last: dict[int, Any], who: str) -> str:
    """Describes what ranks did before the end: ranks that outlived one by a moment were in what its loss cut short."""
    rank = min(ranks, key=lambda rank_of: last[rank_of]["state"] == FAILED)
    text = where(domain.ranks[rank], last[rank])
    if last[rank]["state"] == CUT_SHORT:
        text = text.replace("failed in", _VERBS[RUNNING], 1)
    plural = {"is": "are", "has": "have"} if not who.startswith("rank ") else {}
    verb, _, rest = text.partition(" ")
    return f"{who} {plural.get(verb, verb)} {rest}"


def _start(text: str) -> str:
    return text[0].upper() + text[1:]


def _messages(domain: DomainTrace) -> list[str]:
    sentences = []
    for rank, trace in domain.ranks.items():
        left = trace.records[trace.of(MESSAGES) & np.isin(trace.records["state"], (RUNNING, CUT_SHORT))]
        if len(left):
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            sentences.append(f"Rank {rank} of {domain.name!r} has not ended its {trace.name(left[0])}{more}.")
    return sentences


@dataclass
class Lateness:
    """Lateness in the operators that every rank has begun; every array is by rank."""

    operators: int
    came_last: npt.NDArray[np.int64]  # number of operators in which the rank came last
    waited_ns: npt.NDArray[np.int64]  # time that the rank waited for others
    caused_ns: npt.NDArray[np.int64]  # time that others waited in operators in which this rank came last


def lateness(domain: DomainTrace) -> Lateness:
    """Computes which rank came last how often, and how long the others waited for it."""
    size = domain.size
    result = Lateness(0, *(np.zeros(size, np.int64) for _ in range(3)))
    per_rank = {rank: trace.collectives() for rank, trace in domain.ranks.items()}
    for rank, records in per_rank.items():
        result.waited_ns[rank] = records["waited"].sum()
    if len(per_rank) < 2 or len(per_rank) < size:
        return result
    shared = set.intersection(*(set(records["seq"].tolist()) for records in per_rank.values()))
    rows = [records[np.isin(records["seq"], list(shared))] for records in per_rank.values()]
    clocks = [trace.clock_ns for trace in domain.ranks.values()]
    begin = np.stack([row["begin"].astype(np.int64) + clock for row, clock in zip(rows, clocks, strict=True)])
    waited = np.stack([row["waited"].astype(np.int64) for row in rows])
    latest = begin.argmax(0)
    result.operators = begin.shape[1]
    result.came_last = np.bincount(latest, minlength=size)
    own = waited[latest, np.arange(begin.shape[1])]
    result.caused_ns = np.bincount(latest, waited.sum(0) - own, minlength=size).astype(np.int64)
    return result


def _waits(domain: DomainTrace) -> list[str]:
    late = lateness(domain)
    if late.operators == 0 or not late.caused_ns.any():
        return []
    span = max(int(trace.records["end"].max()) - int(trace.records["begin"].min()) for trace in domain.ranks.values())
    worst = int(late.caused_ns.argmax())
    return [
        f"In {_seconds(span)} of {domain.name!r} {_waited(late.waited_ns)} for others, "
        f"{late.caused_ns[worst] / late.caused_ns.sum():.0%} of it for rank {worst}, "
        f"which came last to {late.came_last[worst]:,} of {late.operators:,} operators."
    ]


def _waited(waited_ns: npt.NDArray[np.int64]) -> str:
    """Describes how long each rank waited; of many ranks, between which limits."""
    if len(waited_ns) > 4:
        least, most = int(waited_ns.argmin()), int(waited_ns.argmax())
        limits = f"{_seconds(waited_ns[least])} (rank {least}) to {_seconds(waited_ns[most])} (rank {most})"
        return f"each rank waited {limits}"
    each = [f"rank {rank} waited {_seconds(waited)}" for rank, waited in enumerate(waited_ns)]
    return f"{', '.join(each[:-1])} and {each[-1]}"


def _seconds(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} µs"
