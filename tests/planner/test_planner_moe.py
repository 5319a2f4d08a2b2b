"""What devices demand of a mixture of experts: the documented formulas, and what the command says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_planner_model import command

from alltoallv.npu_ops.limits import GroupedMatmul, Matmul, MoE, Product

MB = 1 << 20


@pytest.mark.parametrize(
    ("use", "product", "needed"),
    [
        (MoE(16, 256, 7168, 256, 8), "A2", 2 * (256 * 16 * 8 * 7168 * 2 + 2 * MB)),
        (MoE(16, 16, 7168, 256, 8), "A2", 2 * (256 * 16 * 1 * 7168 * 2 + 2 * MB)),
        (MoE(16, 256, 7168, 256, 9, "hierarchy"), "A2", 256 * 256 * (7168 * 2 + 4 * 16 * 4) + 104 * MB),
        (MoE(16, 32, 7168, 8, 8), "A3", 2 * (2 * 8 * 16 * 14848 + (8 + 1) * 8 * 14336)),
        (MoE(16, 32, 7168, 8, 8, shared=2, shared_ranks=8), "A3", 2 * (4 * 8 * 16 * 14848 + (8 + 2) * 8 * 14336)),
        (MoE(64, 256, 7168, 512, 8, "fullmesh_v2"), "A3", 2 * (4 * 512 * 64 * 15360 + (8 + 1) * 512 * 14336)),
    ],
)
def test_the_buffer_is_the_documented_one(use: MoE, product: Product, needed: int) -> None:
    assert use.buffer_mb(product) == -(-needed // MB)


@pytest.mark.parametrize(
    ("use", "product", "words"),
    [
        (MoE(12, 24, 7168, 8, 8), "A2", "ep_world_size is 12, expected one of 2, 3, 4, 5, 6, 7, 8, 16, 32, 64,"),
        (MoE(128, 256, 7168, 8, 8, "hierarchy"), "A2", "ep_world_size is 128, expected one of 16, 32, 64 on A2"),
        (MoE(16, 32, 7136 + 16, 8, 8), "A2", "the hidden size is 7152, expected a multiple of 32 on A2"),
        (MoE(16, 512, 1024, 1, 8), "A2", "moe_expert_num is 512, 32 for each rank, expected 24 at most on A2"),
        (MoE(16, 32, 512, 8, 8), "A3", "the hidden size is 512, expected 1024 to 8192 on A3"),
        (MoE(16, 32, 1024, 513, 8), "A3", "the number of tokens is 513, expected 1 to 512 on A3"),
        (MoE(16, 32, 1024, 8, 17), "A3", "the number of experts of a token is 17, expected 1 to 16 on A3"),
        (MoE(16, 32, 1024, 8, 9, version=1), "A3", "the number of experts of a token is 9, expected 1 to 8 on A3"),
        (MoE(16, 32, 1024, 8, 8, shared_ranks=8), "A2", "shared_expert_rank_num is 8, expected 0 to 0 on A2"),
        (MoE(16, 32, 1024, 8, 8, shared=5, shared_ranks=5), "A3", "shared_expert_num is 5, expected 0 to 4 on A3"),
        (MoE(16, 26, 7168, 8, 8, shared_ranks=3, version=1), "A3", "rank_num is 3, expected a divisor of 16 on A3"),
        (MoE(16, 32, 1024, 8, 8, "hierarchy"), "A3", "comm_alg is 'hierarchy', expected one of"),
        (GroupedMatmul(16, 32, 7168, 4096, 50 * MB), "A3", "the number of experts of all ranks is 512, expected 1 to"),
        (GroupedMatmul(16, 2, 7168, 4096, MB), "A3", "bytes that a rank sends is 1048576, expected 2097152 to"),
        (Matmul("npu_mm_all_reduce_base", 8, 4096), "A3", "not exist on A3, expected A2: set ALLTOALLV_NPU_PRODUCT=A2"),
        (Matmul("npu_all_gather_base_mm", 16, 4096), "A2", "world_size is 16, expected one of 2, 4, 8 on A2"),
        (Matmul("npu_mm_reduce_scatter_base", 16, 128), "A3", "width is 128, expected 256 to 65534 on A3"),
        (Matmul("npu_all_to_all_matmul", 32, 128), "A3", "world_size is 32, expected one of 2, 4, 8, 16 on A3"),
    ],
)
def test_a_breach_says_what_is_allowed(use: MoE | GroupedMatmul | Matmul, product: Product, words: str) -> None:
    assert any(words in breach for breach in use.breaches(product)), list(use.breaches(product))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1000")
    path = tmp_path / "limits.json"
    assert command("--np", "16", "--moe", "tokens=256,hidden=7168,experts=256,k=8", "--json", str(path)) == 0
    assert "HCCL_BUFFSIZE is 1000 MB, expected 1919 at least on A3: set HCCL_BUFFSIZE=1919" in capsys.readouterr().out
    found = {row["product"]: row for row in json.loads(path.read_text())["rows"]}
    assert found["A2"]["npu_moe_distribute_dispatch_v2"] == []
    assert found["A3"]["npu_alltoallv_gmm"] == []
    assert command("--np", "12", "--moe", "tokens=256,hidden=64,experts=256,k=8") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--moe", "tokens=1,hidden=2,k=3"), "--moe is 'tokens=1,hidden=2,k=3', expected experts as well"),
        (("--moe", "tokens=x"), "--moe has 'tokens=x', expected NAME=NUMBER"),
        (("--moe", "tokens=1", "--pattern", "moe"), "--pattern is given with --moe"),
    ],
)
def test_arguments_that_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err
