"""Counts vllm-ascend's own tests that need a device, as they are, on emulated NPUs.

``python tests/vllm/run_own.py FOLDER [PATTERN...]``: FOLDER is vllm-ascend's source distribution, unpacked, and each
pattern chooses files below its folder `tests` (default: all of PATTERNS). One process runs all files of a folder of
`tests`, and another one goes on with those after a file in which it has died. A test may take SECONDS. Prints for each
file what passed, failed, was skipped, or where the process died, and with which errors.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SECONDS = os.environ.get("ALLTOALLV_TEST_SECONDS", "200")
OPS = "e2e/nightly/single_node/ops"
PATTERNS = ("ut/**/a[23]*/test_*.py", f"{OPS}/*/test_*.py", f"{OPS}/*/triton/test_*.py")
STARTED = re.compile(r"^(tests/\S+?\.py)::")
# With what a test prints between its name and the outcome.
OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b.*\[ *\d+%\]$")
REASON = re.compile(
    r"^(?:FAILED|ERROR) (tests/\S+?\.py)\S*(?: \S+)*? - (.*)|^SKIPPED \[(\d+)\] (tests/\S+?\.py)\S* (.*)"
)


def run(folder: Path, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Runs files in one process; yields for each file that it has ended what to print of it."""
    command = [sys.executable, "-m", "alltoallv", "run", "--emulate-npu", "--no-prefix", "-n", "1", "-m", "pytest"]
    command += ["-v", "-rsfE", "--tb=line", "--color=no", "--continue-on-collection-errors", f"--timeout={SECONDS}"]
    command += ["-p", "no:cacheprovider", *map(str, files)]
    counts = {str(file): collections.Counter[str]() for file in files}
    reasons = {str(file): collections.Counter[str]() for file in files}
    current = ""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = subprocess.run(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        output.seek(0)
        for line in output:
            if started := STARTED.match(line):
                current = started[1]
            if current in counts and (outcome := OUTCOME.search(line.rstrip())):
                counts[current][outcome[1].lower()] += 1
            elif found := REASON.match(line.rstrip()):
                file = found[1] or found[4]
                reasons.setdefault(file, collections.Counter())[(found[2] or found[5])[:160]] += int(found[3] or 1)
                if line.startswith("ERROR") and not counts.get(file, True):
                    counts[file]["not collected"] += 1
    died = code not in (0, 1, 2, 5)
    for file in counts:
        if died and file == current:
            counts[file][f"process died with {code} in"] += 1
        text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts[file].items())) or "no test"
        yield file, "\n".join([f"{file}: {text}", *(f"    {n} x {why}" for why, n in reasons[file].most_common(6))])
        if died and file == current:
            return


def main(source: Path, patterns: Sequence[str]) -> None:
    os.environ.setdefault("ALLTOALLV_EMULATOR_DEVICES", "16")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what asks for a real model fails at once
    os.environ.setdefault("COLUMNS", "300")  # else pytest leaves reasons out
    os.environ["PYTHONUNBUFFERED"] = "1"  # else a process that dies takes the names of its last tests with it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # without the sources of the package, which would hide the installed one
        shutil.copytree(source / "tests", folder / "tests")
        found = sorted({each.relative_to(folder) for pattern in patterns for each in (folder / "tests").glob(pattern)})
        for _, files in itertools.groupby(found, key=lambda file: file.parts[1]):
            left = list(files)
            while left:
                for _, text in run(folder, left.copy()):
                    left.pop(0)
                    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or PATTERNS)
