"""Agreement: every rank compares the same rows and so comes to the same verdict, in the words of the core.

A rank's row is small and of one size: what it calls, as a hash, and digests of its counts, whose sums over all ranks
are equal exactly when all pairs agree. Only where rows differ do the ranks fetch what the error message needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core, errors
from alltoallv.errors import AllToAllVError, PeerMismatchError

ROW = 5  # entries: SEQ, FLAGS, SIGNATURE, SENT, EXPECTED
SEQ, FLAGS, SIGNATURE, SENT, EXPECTED = range(ROW)
FAILED, LEARNS = 1, 2

NOTE_BYTES = 1280  # of a note, which says in words what a row only hashes
_TEXT_BYTES = 495  # of an error in it, as in the core

REDUCTIONS = ("all_reduce", "reduce_scatter", "quantized_all_reduce", "quantized_reduce_scatter")

Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class Descriptor:
    """What one rank is about to do.

    Attributes:
        send_counts: Elements for every rank.
        recv_counts: Elements expected from every rank; None: learnt from the peers.
        count: Elements per row of an exchange, or all elements of a reduction; equal on all ranks.
        root: Of a broadcast, or the terms of quantized rows; else 0.
        failure: Class and code of the error that this rank announces instead, and its text.
        terms: More that must be equal: what stands before the first rank's value, before another's, and the value.
    """

    operator: str
    dtype: str
    send_counts: Sequence[int]
    recv_counts: Sequence[int] | None
    reduce_op: str = "sum"
    root: int = 0
    count: int = 1
    failure: tuple[int, int, str] | None = None
    terms: tuple[tuple[str, str, str], ...] = ()

    @property
    def reduces(self) -> bool:
        return self.operator in REDUCTIONS


def announcement(operator: str, size: int, error: BaseException) -> Descriptor:
    """The row of a rank that failed its own checks."""
    names = _core.error_classes
    name = type(error).__name__
    kind = names.index(name) if name in names else names.index("InvalidParamError")
    code = error.code if isinstance(error, AllToAllVError) else 1
    text = str(error) if name in names else f"{name}: {error}"
    return Descriptor(operator, "uint8", [0] * size, [0] * size, failure=(kind, code, text))


def describe(seq: int, operator: str, domain: str) -> str:
    return f"operator #{seq} {operator} of domain '{domain}'"


class Agreement:
    """Makes this rank's rows and judges those of all ranks."""

    def __init__(self, rank: int, size: int, domain: str) -> None:
        self.rank, self.size, self.domain = rank, size, domain

    def row(self, seq: int, descriptor: Descriptor) -> Rows:
        """Shape ``[ROW]``."""
        row = np.zeros(ROW, np.int64)
        row[SEQ] = seq
        row[FLAGS] = (FAILED if descriptor.failure else 0) | (LEARNS if descriptor.recv_counts is None else 0)
        row[SIGNATURE] = _signature(
            descriptor.operator,
            descriptor.dtype,
            descriptor.reduce_op,
            descriptor.root,
            descriptor.count,
            descriptor.terms,
        )
        row[SENT], row[EXPECTED] = _core.pair_digests(self.rank, descriptor.send_counts, descriptor.recv_counts or [])
        return row

    def judge(
        self,
        seq: int,
        descriptor: Descriptor,
        rows: Rows,
        gather: Callable[[str, bytes], list[bytes]],
        *,
        mixed_learning: bool = True,
    ) -> None:
        """Raises on every rank alike what the ranks disagree about, or what one of them announces.

        Args:
            seq, descriptor: This rank's own.
            rows: All ranks' rows, shape ``[W, ROW]``.
            gather: Collective: all ranks' bytes of a given length; called on all ranks or on none.
            mixed_learning: Whether ranks that learn their counts get on with ranks that give them.
        """
        flags = rows[:, FLAGS]
        if (flags & FAILED).any():
            notes = gather("note", note(descriptor))
            first = int(np.flatnonzero(flags & FAILED)[0])
            told = json.loads(notes[first].rstrip(b"\0"))
            kind = getattr(errors, _core.error_classes[told["kind"]])
            what = describe(seq, told["operator"], self.domain)
            raise kind(f"{what} failed on rank {first}: {told['text']}", told["code"])
        if (rows[:, SIGNATURE] != rows[0, SIGNATURE]).any():
            told = [json.loads(text.rstrip(b"\0")) for text in gather("note", note(descriptor))]
            for j in range(1, self.size):
                if difference := _difference(told[0], told[j], j):
                    raise PeerMismatchError(f"operator #{seq} of domain '{self.domain}': {difference}")
        learns = (flags & LEARNS) != 0
        if learns.all():
            return
        if not mixed_learning and learns.any():
            a, b = (int(np.flatnonzero(learns == value)[0]) for value in (True, False))
            raise PeerMismatchError(
                f"{describe(seq, descriptor.operator, self.domain)}: rank {a} learns its receive counts, rank {b} "
                "gives them, expected all or none where not every call is checked"
            )
        digests = rows[:, (SENT, EXPECTED)].view(np.uint64).sum(axis=0, dtype=np.uint64)
        if not learns.any() and digests[0] == digests[1]:
            return
        # With some ranks learning their counts the digests cannot balance, so the others are compared pair by pair.
        if difference := self._count_difference(descriptor, learns.tolist(), gather):
            raise PeerMismatchError(f"{describe(seq, descriptor.operator, self.domain)}: {difference}")

    def _count_difference(
        self, descriptor: Descriptor, learns: list[bool], gather: Callable[[str, bytes], list[bytes]]
    ) -> str:
        mine = np.zeros((2, self.size), np.int64)
        mine[0] = descriptor.send_counts
        if descriptor.recv_counts is not None:
            mine[1] = descriptor.recv_counts
        counts = [np.frombuffer(part, np.int64).reshape(2, -1) for part in gather("counts", mine.tobytes())]
        unit = 1 if descriptor.reduces else max(descriptor.count, 1)
        what = " rows" if unit > 1 else " elements"
        for to in range(self.size):
            if learns[to]:
                continue
            for sender in range(self.size):
                sent, expected = int(counts[sender][0, to]), int(counts[to][1, sender])
                if sent != expected:
                    return f"rank {sender} sends {sent // unit}{what} to rank {to}, which expects {expected // unit}"
        return ""


@lru_cache(maxsize=4096)
def _signature(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def note(descriptor: Descriptor) -> bytes:
    """What a row hashes, in words; always NOTE_BYTES long."""
    if descriptor.failure is None:
        told = {
            "operator": descriptor.operator,
            "dtype": descriptor.dtype,
            "reduce_op": descriptor.reduce_op,
            "root": descriptor.root,
            "count": descriptor.count,
            "terms": descriptor.terms,
        }
    else:
        kind, code, text = descriptor.failure
        cut = text.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")
        cut = "".join(" " if c < " " and c not in "\n\t" else c for c in cut)  # JSON would write six letters for one
        told = {"operator": descriptor.operator, "kind": kind, "code": code, "text": cut}
    return json.dumps(told, ensure_ascii=False).encode().ljust(NOTE_BYTES, b"\0")


def _difference(a: dict[str, Any], b: dict[str, Any], rank: int) -> str:
    """In the core's order and words; ``a`` is rank 0's note."""
    reduces = a["operator"] in REDUCTIONS
    for key, text in (
        ("operator", "calls "),
        ("dtype", "has dtype "),
        ("reduce_op", "reduces with "),
        ("root", "has root "),
    ):
        if a[key] != b[key]:
            values = [told[key] for told in (a, b)]
            if (key, a["operator"]) == ("root", "quantized_all_to_all"):
                text, values = "has ", [_core.describe_row_terms(value) for value in values]
            return f"rank 0 {text}{values[0]}, rank {rank} {text}{values[1]}"
    for (text, other, value), (_, _, another) in zip(a["terms"], b["terms"], strict=False):
        if value != another:
            return f"rank 0 has {text}{value}, rank {rank} has {other}{another}"
    if a["count"] != b["count"]:
        text = "has elements: " if reduces else "has elements per row: "
        return f"rank 0 {text}{a['count']}, rank {rank} {text}{b['count']}"
    return ""
