"""torch's own distributed_test.py, of its package, on backend alltoallv and on gloo: a page of what differs, and why.

``python tests/torch/run_own.py PAGE [NAME ...]``; 3 ranks. The exit code is 1 if gloo passes what alltoallv
does not. The tests' decorators are told that the backend is gloo, so that no more is left out than
of gloo's own run; what only MPI's run has there is run on both.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RANKS = 3
OF_COMPLETE = "Only MPI supports"  # why tests are left out that any backend with all collectives could pass
Outcomes = dict[str, tuple[str, str]]  # by test: passed, failed or skipped; why


class Recorder(unittest.TestResult):
    """Prints each outcome when it is known."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.outcomes: Outcomes = {}

    def _record(self, test: Any, outcome: str, why: str = "") -> None:
        self.outcomes[test._testMethodName] = outcome, why
        print(f"{self.backend}: {test._testMethodName} {outcome}", why, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._record(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._record(test, "failed", str(err[1]))

    addFailure = addError


def tests_of_torch(scratch: Path) -> Any:
    """Its tests, whose ranks are forks of this process."""
    for name in ("barrier", "test_dir"):
        (scratch / name).mkdir()
    own = {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(RANKS),
        "TEMP_DIR": str(scratch),
        "INIT_METHOD": f"file://{scratch}/init",
    }
    os.environ.update(own, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    import torch
    from torch.testing._internal.distributed import distributed_test as module

    import alltoallv.torch  # noqa: F401

    os.environ["BACKEND"] = "mpi"  # is asked once more, by tests that want more ranks of any other
    base = module.DistributedTest._DistTestBase
    for function in vars(base).values():
        if getattr(function, "__unittest_skip_why__", "").startswith(OF_COMPLETE):
            function.__unittest_skip__ = False

    class Own(module.TestDistBackend, base):  # type: ignore[misc]
        backend = "gloo"

        def setUp(self) -> None:
            super().setUp()
            module.BACKEND = self.backend if self._testMethodName == "test_get_backend" else "gloo"
            (scratch / "init").unlink(missing_ok=True)
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Own


def run(tests: Any, backend: str, names: Sequence[str]) -> Outcomes:
    import torch.distributed as dist

    recorder, begin, tests.backend = Recorder(backend), dist.init_process_group, backend
    dist.init_process_group = _instead_of_gloo(begin, backend)
    unittest.TestSuite(tests(name) for name in names).run(recorder)
    dist.init_process_group = begin
    return recorder.outcomes


def _instead_of_gloo(begin: Callable[..., None], backend: str) -> Callable[..., None]:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin(*args, **{**kwargs, "backend": backend})

    return init_process_group


def page(ours: Outcomes, gloo: Outcomes) -> str:
    """What differs, and what neither ran."""
    import torch

    def count(outcomes: Outcomes, kind: str) -> int:
        return sum(outcome == kind for outcome, _ in outcomes.values())

    of = {"alltoallv": ours, "gloo": gloo}
    kinds = "passed", "failed", "skipped"
    lines = [
        "# torch's own tests",
        "",
        "`nox -s torch_own` writes this page. It runs the tests in distributed_test.py of torch "
        f"{torch.__version__} with {RANKS} ranks on backend `alltoallv` and on `gloo`.",
        "Decorators choose tests by backend: here they take `alltoallv` for gloo, and tests for MPI alone run too.",
        "",
        "| | " + " | ".join(kinds) + " |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(str(count(each, kind)) for kind in kinds)} |" for name, each in of.items()),
    ]
    for better, worse in (("gloo", "alltoallv"), ("alltoallv", "gloo")):
        names = [name for name in ours if of[better][name][0] == "passed" != of[worse][name][0]]
        lines += ["", f"## Passed by {better}, not by {worse}", ""]
        lines += [f"- {name}" for name in names] or ["None."]
    lines += ["", "## Skipped", "", "| why | tests |", "|---|---|"]
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for name, (outcome, why) in ours.items():
        if outcome == "skipped":
            reasons[why].append(name.removeprefix("test_"))
    lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    target, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        tests = tests_of_torch(Path(scratch))
        names = names or list(unittest.defaultTestLoader.getTestCaseNames(tests))
        ours, gloo = (run(tests, backend, names) for backend in ("alltoallv", "gloo"))
    if not sys.argv[2:]:
        Path(target).write_text(page(ours, gloo))
    worse = [name for name in names if gloo[name][0] == "passed" and ours[name][0] == "failed"]
    print(f"gloo passes and alltoallv does not: {', '.join(worse) or 'none'}")
    return int(bool(worse))


sys.exit(main())
