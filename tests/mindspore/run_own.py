"""MindSpore's own tests of mint.distributed under `install`, from a folder: what passed, failed and was skipped.

``python tests/mindspore/run_own.py FOLDER``, which has test_distributed.py and test_comm_cpu.py of MindSpore's sources
(tests/st/mint). Every rank runs every test, in jobs of 4.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from msrun_jobs import HERE, msrun

NAMES = ("test_distributed.py", "test_comm_cpu.py")
RANKS = 4


def main() -> int:
    folder, failed = Path(sys.argv[1]).resolve(), False
    for name in NAMES:
        if not (folder / name).is_file():
            print(f"{name}: not in {folder}")
            failed = True
            continue
        with tempfile.TemporaryDirectory() as scratch:
            job = msrun(Path(scratch), RANKS, HERE / "run_own_rank.py", str(folder / name), timeout=600)
        failed |= job.code != 0
        for rank in range(RANKS):
            log = job.logs[f"worker_{rank}.log"]
            print(f"{name} on rank {rank}: {(re.findall('^[0-9]+ .* in .*s', log, re.MULTILINE) or ['no end'])[-1]}")
            print(*re.findall("^(?:FAILED|ERROR|SKIPPED) .*", log, re.MULTILINE), sep="\n", end="")
            if "no end" in log or job.code:
                print(log[-3000:])
    return int(failed)


sys.exit(main())
