"""Waiting for peers: warnings, timeouts, losses and aborts, which end a communicator for all of its ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from alltoallv.errors import CommTimeoutError, PeerLostError
from alltoallv.torch.engines.agreement import describe
from alltoallv.torch.engines.rendezvous import GroupStore, Ready, describe_rank

_STEP = 0.5  # seconds between looks at the store while a rank waits
_VERDICT_SECONDS = 4.0  # for the rank that finds out what is wrong
_IN_FLIGHT_SECONDS = 3.0  # for data that a rank has sent before it left, and the group's store with it
_Result = TypeVar("_Result")
_log = logging.getLogger("alltoallv")


class Watch:
    """One rank's waits.

    Args:
        store: The communicator's part of the group's store; None where a group has none: trouble then stays unnamed.
        who: What the ranks said of themselves.
        timeout: Seconds that an operator waits.
        warn_after: Seconds until a warning names the late ranks.
    """

    def __init__(
        self,
        store: GroupStore | None,
        rank: int,
        domain: str,
        who: Sequence[dict[str, Any]],
        timeout: float,
        warn_after: float,
    ) -> None:
        self._store, self._rank, self._domain, self._who = store, rank, domain, who
        self._timeout, self._warn_after = timeout, warn_after
        self._lock = threading.Lock()
        self._poison: tuple[str, str] | None = None
        self.on_poison: Callable[[], None] = lambda: None
        self.begin(0, "")

    def begin(self, seq: int, operator: str) -> None:
        """An operator starts."""
        self._seq, self._operator = seq, operator
        self._started = time.monotonic()
        self._next_warning = self._started + self._warn_after
        if self._poison is not None:
            self._raise_poison()

    @property
    def poisoned(self) -> bool:
        return self._poison is not None

    def wait(self, ready: Ready, missing: Callable[[], list[int]] | None = None) -> None:
        """Returns once ``ready(seconds)``, which waits that long at most; what it raises ends the communicator.

        Without ``missing``, which tells the ranks waited for, all ranks are asked whether they have come.

        Raises:
            PeerLostError, CommTimeoutError: also when another rank has met the trouble first.
        """
        end = self._started + self._timeout
        while True:
            broken = None
            try:
                if ready(max(0.0, min(_STEP, end - time.monotonic()))):
                    return
                if missing is None and self._is_silent() and ready(_IN_FLIGHT_SECONDS):
                    return
            except PeerLostError as error:  # the store
                self._set("lost", str(error))
            except RuntimeError as error:
                broken = str(error).splitlines()[0] if str(error) else repr(error)
            if broken is not None:  # outside, so that the engine's traceback does not hide the message
                self._broken(broken)
            self.look()
            now = time.monotonic()
            if missing is not None and self._store is not None:
                self._leave_out([j for j in missing() if self._has_left(j)], missing)
            if now >= end:
                self._time_out(missing or self._call_roll)
            self._answer_roll()
            if now >= self._next_warning:
                self._next_warning = now + (now - self._started)
                late = self._describe((missing or self._call_roll)()) or "its peers' data"
                _log.warning("rank %d has waited %.1f s in %s for %s", self._rank, now - self._started, self._op, late)

    def _is_silent(self) -> bool:
        """Whether the store has stopped answering: its keeper is gone, lost or after its last call."""
        if self._store is None or self._poison is not None:
            return False
        try:
            self._store.peek("poison")
        except PeerLostError:
            return True
        return False

    def work(self, work: Any) -> None:
        """Waits for a work of torch.distributed."""

        def ready(step: float) -> bool:
            try:
                work.wait(timedelta(seconds=max(step, 0.001)))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it may have ended just after the time was up; else this raises what went wrong
            return True

        self.wait(ready)

    def attempt(self, action: Callable[[], _Result]) -> _Result:
        """What a call of the engine returns that need not wait; what it raises ends the communicator."""
        results: list[_Result] = []

        def ready(step: float) -> bool:
            results.append(action())
            return True

        self.wait(ready)
        return results[0]

    def look(self) -> None:
        """Raises the trouble that a peer has posted."""
        if self._poison is None and self._store is not None:
            told = self._asking(lambda store: store.peek("poison"))
            if told:
                self._set(*json.loads(told))
        if self._poison is not None:
            self._raise_poison()

    def look_for_losses(self) -> None:
        """`look`; also ends the communicator where a rank of this host is gone, which no engine would notice."""
        self.look()
        for j in range(len(self._who)):
            about = describe_rank(j, self._who[j], False)
            if j != self._rank and about.endswith("gone)"):
                self.poison("lost", f"rank {j} was lost: {about}")
                self._raise_poison()

    def poison(self, kind: str, reason: str) -> None:
        """Ends the communicator for every rank. The first cause counts. From any thread."""
        with self._lock:
            if self._poison is not None:
                return
            if self._store is not None:
                with contextlib.suppress(PeerLostError):  # nobody left to tell
                    kind, reason = json.loads(self._store.set_once("poison", json.dumps([kind, reason])))
            self._poison = (kind, reason)
        self.on_poison()

    def _set(self, kind: str, reason: str) -> None:
        with self._lock:
            if self._poison is not None:
                return
            self._poison = (kind, reason)
        self.on_poison()

    @property
    def _op(self) -> str:
        return describe(self._seq, self._operator, self._domain) if self._operator else f"domain '{self._domain}'"

    def _raise_poison(self) -> NoReturn:
        assert self._poison is not None
        kind, reason = self._poison
        if kind == "timeout":
            raise CommTimeoutError(reason)
        raise PeerLostError(f"{self._op}: {reason}")

    def _time_out(self, missing: Callable[[], list[int]]) -> NoReturn:
        waited = time.monotonic() - self._started
        self._await_verdict()
        late = self._describe(missing()) or "its peers' data"
        self.poison("timeout", f"rank {self._rank} waited {min(waited, self._timeout):.1f} s in {self._op} for {late}")
        self._raise_poison()

    def _broken(self, text: str) -> NoReturn:
        """The engine failed: find out who is gone."""
        self.look()
        self._await_verdict()
        missing = self._call_roll()
        left = [j for j in missing if self._has_left(j)]
        gone = [j for j in missing if describe_rank(j, self._who[j], False).endswith("gone)")]
        if left:
            names = " and ".join(f"rank {j}" for j in left)
            reason = (
                f"{names} {'has' if len(left) == 1 else 'have'} left domain '{self._domain}': {self._describe(left)}"
            )
        elif missing:
            lost = gone or missing
            names = " and ".join(f"rank {j}" for j in lost)
            reason = f"{names} {'was' if len(lost) == 1 else 'were'} lost: {text}; {self._describe(lost)}"
        else:
            reason = f"the connection failed: {text}"
        self.poison("lost", reason)
        self._raise_poison()

    def _await_verdict(self) -> None:
        """One rank, the first, finds out what is wrong; the others get to know, unless that one is lost too."""
        if self._store is None:
            return
        first = int(self._asking(lambda store: store.set_once("trouble", str(self._rank))))
        end = time.monotonic() + _VERDICT_SECONDS
        while first != self._rank and time.monotonic() < end:
            self.look()
            self._answer_roll()
            time.sleep(0.05)

    def _answer_roll(self) -> None:
        if self._store is not None:
            self._asking(lambda store: store.answer_roll(self._seq, time.monotonic() - self._started))

    def _leave_out(self, left: Sequence[int], missing: Callable[[], list[int]]) -> None:
        """Ends the communicator if ranks that have left are still missing: what they told before they left counts."""
        left = [j for j in left if j in missing()]
        if left:
            names = " and ".join(f"rank {j}" for j in left) + (" has" if len(left) == 1 else " have")
            self.poison("lost", f"{names} left domain '{self._domain}': {self._describe(left)}")
            self._raise_poison()

    def _call_roll(self) -> list[int]:
        if self._store is None:
            return []
        missing: list[int] = self._asking(lambda store: store.absent(self._seq, time.monotonic() - self._started))
        return missing

    def _has_left(self, rank: int) -> bool:
        return self._asking(lambda store: store.peek(f"left/{rank}")) is not None

    def _describe(self, ranks: Sequence[int]) -> str:
        return ", ".join(describe_rank(j, self._who[j], self._has_left(j)) for j in ranks)

    def _asking(self, question: Callable[[GroupStore], Any]) -> Any:
        """A store that does not answer is a loss, too: whoever kept it is gone."""
        assert self._store is not None
        try:
            return question(self._store)
        except PeerLostError as error:
            self._set("lost", str(error))
            self._raise_poison()
