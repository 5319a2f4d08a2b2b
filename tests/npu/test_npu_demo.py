"""The demo on two emulated NPUs: the bits of the CPU, and proof that the comparison can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from started import run

PROGRAM = """
import sys
from alltoallv_tools.demo import on_npus, program
real = program.send_by_operation
def send_by_operation(comm, tokens, routing):
    arrived = real(comm, tokens, routing)
    if comm.backend == "hccl" and comm.rank == 1:
        arrived[17, 5] += int(sys.argv[1])
    return arrived
program.send_by_operation = send_by_operation
sys.exit(on_npus.main())
"""


@pytest.mark.parametrize("wrong", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_operator_and_the_pipeline_have_the_bits_of_the_cpu(tmp_path: Path, wrong: int) -> None:
    options = ["-n", "2", "--emulate-npu", "--preload", "torch_npu"]
    result = run(tmp_path, PROGRAM, *options, arguments=[str(wrong)], text=True, limit=240)
    assert result.returncode == wrong, result.stderr
    assert f"AllToAllVOperation delivers {wrong or 'no'} tokens with other bits" in result.stdout
    assert "the int8 pipeline, as 1 kernel in Ascend C, gives the bits of the CPU" in result.stdout
