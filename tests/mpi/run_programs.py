"""On every rank: the programs of a folder, one after the other, with one import changed.

python -m alltoallv run -n 4 tests/mpi/run_programs.py FOLDER
"""

from __future__ import annotations

from pathlib import Path

for program in sorted((Path(__file__).parent / "programs").glob("*.py")):
    text = program.read_text()
    changed = text.replace("from mpi4py import MPI", "from alltoallv.mpi import MPI")
    assert changed.count("alltoallv") == 1
    exec(compile(changed, program, "exec"), {"__name__": "__main__"})
