"""A communicator over HCCL grows: newcomers have devices of their own, and the first communicator goes on."""

from __future__ import annotations

from pathlib import Path

from npu_starts import run_program

PROGRAM = """
import os, subprocess, sys
import pytest, torch, torch_npu
import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, PeerMismatchError

torch.npu.set_device(int(os.environ["RANK"]))
comm = Communicator.from_env("experts", backend="hccl", timeout=60)
first = comm
if first.size == 2:
    for n, error, text in ((0, InvalidParamError, "n is 0"), (1 + comm.rank, PeerMismatchError, "rank 0")):
        with pytest.raises(error, match=text):
            first.grow(n)
    if comm.rank == 0:
        child = subprocess.Popen([sys.executable, __file__], env=os.environ | comm.newcomers(1)[0])
    comm = first.grow(1)
for group in [comm] if first is comm else [comm, first]:
    x = torch.full((group.size,), 10.0 + group.rank).npu()
    told = at.all_to_all_v(x, [1] * group.size, [1] * group.size, group=group)
    assert told.tolist() == [10.0 + j for j in range(group.size)]
os.write(1, f"rank {comm.rank} of {comm.size} on {x.device}\\n".encode())
if first.size == 2 and comm.rank == 0:
    assert child.wait() == 0
"""


def test_grows(tmp_path: Path) -> None:
    program = tmp_path / "grows.py"
    program.write_text(PROGRAM)
    result = run_program("--no-prefix", "--preload", "torch_npu", str(program))
    assert result.returncode == 0, result.stderr
    told = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert told == [f"rank {rank} of 3 on npu:{rank}" for rank in range(3)], result.stderr
