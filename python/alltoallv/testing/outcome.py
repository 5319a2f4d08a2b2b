"""Reports how a function ended on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OUTPUT_LIMIT = 64 << 10  # characters of a rank's output that a report shows


class RankExit(Exception):
    """A rank's process ended without returning a result, or with a bad exit status.

    ``exit_code`` is negative for a signal, as in ``subprocess.Popen.returncode``.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankTimeout(Exception):
    """A rank did not finish in time and was killed; its stacks are in the output."""


class RemoteError(Exception):
    """Stands for an exception that cannot be sent between processes; its text is the original's."""


@dataclass
class Outcome:
    """Describes how a function ended on one rank.

    Attributes:
        rank: the rank.
        result: what the function returned.
        error: the exception that it raised, or RankExit or RankTimeout; None if all went well.
        traceback: the exception's traceback, as text.
        output: the text that the rank printed.
        exit_code: the process's, negative for a signal; None while the process lives on, and for threads.
    """

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    output: str = ""
    exit_code: int | None = None

    def report(self) -> str:
        """Returns all that is known, for a person."""
        text = self.traceback or f"{type(self.error).__name__}: {self.error}"
        lines = [f"--- rank {self.rank}: {type(self.error).__name__} ---", text.rstrip()]
        if self.output:
            cut = "...\n" if len(self.output) > OUTPUT_LIMIT else ""
            lines += [f"--- output of rank {self.rank} ---", (cut + self.output[-OUTPUT_LIMIT:]).rstrip()]
        return "\n".join(lines)


class RankFailures(AssertionError):
    """At least one rank failed; the message holds every failing rank's traceback and output.

    Attributes:
        outcomes: the outcomes of all ranks.
        errors: the exception of every rank that failed, by rank.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.errors = {o.rank: o.error for o in outcomes if o.error is not None}
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        summary = "; ".join(f"rank {o.rank}: {type(o.error).__name__}: {_first_line(o.error)}" for o in failed)
        head = f"{len(failed)} of {len(self.outcomes)} ranks failed ({summary})"
        super().__init__("\n".join([head, *(outcome.report() for outcome in failed)]))


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]
