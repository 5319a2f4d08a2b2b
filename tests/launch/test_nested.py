"""Launchers inside a rank of another one: the inner one decides."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from environments import MSRUN, OPENMPI, PADDLE, TORCHRUN, clean_environment
from started import RUN

PLACE = "from alltoallv.launch.detect import detect; found = detect(); print(found.launcher, found.rank, found.size)"
PLAIN = {"RANK": "1", "WORLD_SIZE": "2"}
LAUNCHERS = {
    "plain": (PLAIN, "RANK"),
    "torchrun": (TORCHRUN | PLAIN | {"LOCAL_WORLD_SIZE": "2"}, "RANK"),
    "msrun": (MSRUN, "RANK_ID"),
    "paddle": (PADDLE, "PADDLE_TRAINER_ID"),
    "openmpi": (OPENMPI, "OMPI_COMM_WORLD_RANK"),
}

# Starts, as a launcher does, a process for each rank with the variables given for one of them.
LAUNCH = """if True:
    import json, os, subprocess, sys
    variables, rank, program = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    # They begin when all are there, and end when all have printed: a rank alone could be one of the outer job.
    program = "import sys; sys.stdin.readline()\\n" + program + "\\nsys.stdout.flush(); sys.stdin.read()"
    ranks = [subprocess.Popen([sys.executable, "-c", program, *sys.argv[4:]],
                              env=os.environ | variables | {rank: str(j)}, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
             for j in range(2)]
    for process in ranks:
        process.stdin.write("\\n")
        process.stdin.flush()
    print(*(process.stdout.readline().strip() for process in ranks), sep=", ", flush=True)
    for process in ranks:
        process.stdin.close()
    sys.exit(any([process.wait() for process in ranks]))
"""


def launch(variables: dict[str, str], rank: str, *program: str) -> list[str]:
    return [sys.executable, "-c", LAUNCH, json.dumps(variables), rank, *program]


def output(command: list[str], env: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment() | (env or {}), timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("inner", LAUNCHERS)
def test_inside_run(tmp_path, inner):
    """One for each rank, also where a rank is the same as that of ``run``."""
    program = tmp_path / "outer.py"
    program.write_text(
        f"import subprocess; print(subprocess.check_output({launch(*LAUNCHERS[inner], PLACE)!r}, text=True), end='')"
    )
    name = inner.replace("plain", "torchrun")
    for size in (1, 2):
        assert output([*RUN, "-n", str(size), str(program)]).count(f"{name} 0 2, {name} 1 2") == size


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("torchrun", "msrun"), ("torchrun", "openmpi"), ("torchrun", "paddle"), ("msrun", "openmpi"), ("paddle", "plain"),
     ("openmpi", "torchrun"), ("msrun", "torchrun"), ("openmpi", "msrun")],
)  # fmt: skip
def test_inside_each_other(outer, inner):
    name = inner.replace("plain", "torchrun")
    variables, rank = LAUNCHERS[outer]
    found = output(launch(variables, rank, LAUNCH, *launch(*LAUNCHERS[inner], PLACE)[3:]))
    assert found.count(f"{name} 0 2, {name} 1 2") == 2


# Both ranks of a job stay until both have counted.
COUNT = """if True:
    import os, sys, time
    from alltoallv.launch.ancestry import ranks_here
    count, mine = ranks_here("RANK_ID", 2), f"{os.getppid()}."
    open(f"{sys.argv[1]}/{mine}{os.environ['RANK_ID']}", "w").close()
    while sum(name.startswith(mine) for name in os.listdir(sys.argv[1])) < 2:
        time.sleep(0.01)
    print(count)
"""


def test_ranks_are_counted_inside_one_of_the_same_number(tmp_path):
    inner = launch(*LAUNCHERS["msrun"], COUNT, str(tmp_path))[3:]
    assert output(launch(*LAUNCHERS["msrun"], LAUNCH, *inner)).split(", ") == ["2", "2", "2", "2\n"]


def test_children_that_set_their_own_variables(tmp_path):
    """As torch's spawn() lets them do, inside a rank whose numbers may be the same."""
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import multiprocessing, os
        from alltoallv.launch.detect import detect

        def place(j):
            os.environ.update(RANK=str(j), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
            found = detect()
            os.write(1, f"{found.launcher} {found.rank} {found.size}, ".encode())

        if __name__ == "__main__":
            children = [multiprocessing.get_context("spawn").Process(target=place, args=(j,)) for j in range(2)]
            for child in children:
                child.start()
                child.join()
            os.environ["MASTER_PORT"] = "29400"
            found = detect()
            os.write(1, f"{found.launcher} {found.rank}\\n".encode())  # changes no rank
    """)
    lines = sorted(output([*RUN, "-n", "2", "--no-prefix", str(program)]).splitlines())
    assert lines == [f"torchrun 0 2, torchrun 1 2, alltoallv {j}" for j in range(2)]
