"""One rank of one library: obeys the coordinator, and sleeps in between without using a processor.

Run as ``python -m alltoallv_tools.bench.rank '{"library": …, "api": …, "socket": …, "bind": …}'``. Messages are lines
of JSON over a socket; `Server.answer` lists them.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from alltoallv.launch import detect as launch
from alltoallv_tools.bench.cases import Case
from alltoallv_tools.bench.competitors import Array, Prepared, spoil
from alltoallv_tools.bench.jobs import short
from alltoallv_tools.bench.libraries import Library, join

Reply = dict[str, Any]


class Server:
    """Answers the coordinator's requests on one rank. Every request is collective over the library's ranks."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._case: Case | None = None
        self._prepared: dict[str, Prepared] = {}
        self._expected: Array | None = None
        self._last: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Reply:
        """Handles the requests ``prepare``, ``run``, ``check`` and ``each``."""
        actions = self.prepare, self.run, self.check, self.each
        return {action.__name__: action for action in actions}[request.pop("do")](**request)

    def prepare(self, competitor: str, case: dict[str, Any]) -> Reply:
        """Prepares a competitor for a case, which stays until the next one; returns the seconds of one call."""
        if self._case != (wanted := Case(**case)):
            self._prepared.clear()
            self._last.clear()
            self._case = wanted
            self._expected = None
        prepared = self._library.competitors[competitor].prepare(wanted)
        spoil(prepared.output)
        self._prepared[competitor] = prepared
        self._library.barrier()
        self._last[competitor] = prepared.call()
        reply = self.check(competitor)
        self._library.barrier()
        start = time.perf_counter()
        self._last[competitor] = prepared.call()
        return {**reply, "once": time.perf_counter() - start}

    def check(self, competitor: str) -> Reply:
        """Compares the last result with the prediction."""
        prepared = self._prepared[competitor]
        assert self._case is not None
        if not prepared.exact:
            return {"wrong": 0}
        if self._expected is None:
            self._expected = self._case.expected(self._library.rank, self._library.size)
        got = prepared.result(self._last[competitor])
        return {"wrong": self._case.wrong(np.asarray(got), self._expected, self._library.size)}

    def run(self, competitor: str, calls: int, warm: int) -> Reply:
        """Times a block of calls: [start, end] on the host's monotonic clock, and [start, end] without the calls if the
        variant does work of its own between them.
        """
        prepared = self._prepared[competitor]
        assert self._case is not None
        if self._case.variant == "plain":
            return {"span": self._time(competitor, warm, calls, prepared.call)}
        before, after = _work(self._case.variant, prepared)

        def cycle() -> Any:
            before()
            value = prepared.call()
            after(value)
            return value

        span = self._time(competitor, warm, calls, cycle)
        value = self._last[competitor]

        def work() -> Any:  # keeps the last result for the check
            before()
            after(value)
            return value

        return {"span": span, "work": self._time(competitor, 0, calls, work)}

    def each(self, competitor: str, cases: list[dict[str, Any]], work: float) -> Reply:
        """Times one call of each case, which nothing warms: [start, end] on the host's monotonic clock. Before it the
        rank works for ``work`` seconds, which end at the same moment on all ranks.
        """
        wanted, library = [Case(**case) for case in cases], self._library
        prepared = {case: library.competitors[competitor].prepare(case) for case in dict.fromkeys(wanted)}
        expected = {case: case.expected(library.rank, library.size) for case in prepared}
        spans, wrong, parts = list[list[float]](), 0, cycle(np.zeros((32, 1 << 15), np.uint8))
        for case in wanted:
            library.barrier()
            until = (time.monotonic() // work + 2) * work if work else 0.0
            while time.monotonic() < until:
                np.add(part := next(parts), 1, out=part)
            start = time.monotonic()
            value = prepared[case].call()
            spans.append([start, time.monotonic()])
            wrong += case.wrong(prepared[case].result(value), expected[case], library.size)
        return {"spans": spans, "wrong": wrong}

    def _time(self, competitor: str, warm: int, calls: int, call: Callable[[], Any]) -> list[float]:
        self._last[competitor] = None  # so that the operator may use this memory again
        value = None
        for _ in range(warm):
            call()
        self._library.barrier()
        start = time.monotonic()
        for _ in range(calls):
            value = None
            value = call()
        end = time.monotonic()
        self._last[competitor] = value
        return [start, end]


def _work(variant: str, prepared: Prepared) -> tuple[Callable[[], None], Callable[[Any], None]]:
    """Returns what a program does before a call and after it."""
    fresh = prepared.input.copy()

    def rewrite() -> None:
        np.copyto(prepared.input, fresh)

    def read(value: Any) -> None:
        flat = prepared.result(value).reshape(-1).view(np.uint8)
        np.add.reduce(flat[: flat.size // 8 * 8].view(np.int64))

    before = rewrite if variant in ("rewritten", "cycle") else lambda: None
    after = read if variant in ("consumed", "cycle") else lambda _: None
    return before, after


def main(config: dict[str, Any]) -> None:
    """Serves requests until the coordinator closes the connection."""
    if config["library"] == "mindspore" and os.environ.get("MS_ROLE") == "MS_SCHED":
        from mindspore.communication import init

        init()  # does not return in msrun's scheduler
        return
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short(Path(config["socket"])) as address:
        link.connect(address)
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    lines = link.makefile("rw", encoding="utf-8", newline="\n")

    def say(reply: Reply) -> None:
        lines.write(json.dumps(reply) + "\n")
        lines.flush()

    job = launch.detect()
    if config["bind"] and job.size <= len(cpus := sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {cpus[job.rank]})
    try:
        library = join(config["library"], config["api"])
    except BaseException as error:
        say({"library": config["library"], "error": f"{type(error).__name__}: {error}"})
        raise
    say({"library": config["library"], "rank": library.rank, "size": library.size})
    server = Server(library)
    for line in lines:
        try:
            reply = server.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        say(reply)


def _end_with(link: socket.socket) -> None:
    """Ends this process when the coordinator is gone, even inside a collective that would never end."""
    poller = select.poll()
    poller.register(link, select.POLLRDHUP)
    poller.poll()
    time.sleep(1.0)  # leave time for an orderly end
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
