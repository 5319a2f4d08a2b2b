"""Programs written for mpi4py give the bits of their definitions once one import is changed."""

from __future__ import annotations

import subprocess
import sys
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


def heat() -> tuple[np.ndarray, float]:
    plate = np.zeros((14, 14))
    plate[0] = 1
    for _ in range(25):
        inner = (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]) / 4
        change = np.abs(inner - plate[1:-1, 1:-1]).max()
        plate[1:-1, 1:-1] = inner
    return plate[1:-1, 1:-1], change


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_programs_of_mpi4py(size: int, tmp_path: Path) -> None:
    command = ("-m", "alltoallv", "run", "-n", str(size), HERE / "run_programs.py", tmp_path)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made = {file.stem: np.load(file) for file in tmp_path.iterdir()}
    assert len(made) == len(list((HERE / "programs").glob("*.py")))

    middles = 2 / 64 * (np.arange(64) + 0.5)
    parts = [np.sum(middles[r::size] ** 3) * (2 / 64) for r in range(size)]
    assert made["integral"].tolist() == [reduce(np.add, parts), max(parts)]

    product = np.arange(66.0).reshape(11, 6) @ (np.arange(6) - 2.0)
    assert made["matrix_vector"].tolist() == [*product, *(product.max() + np.arange(size))]

    plate, change = heat()
    assert np.array_equal(made["heat"]["plate"], plate)
    assert made["heat"]["change"] == change

    assert made["tasks"].tolist() == [n * n + 0.5 for n in range(20)]

    numbers = np.sort(np.concatenate([(np.arange(50 + 10 * r) * 7919 + 31 * r) % 1000 for r in range(size)]))
    assert made["bucket_sort"]["everything"].tolist() == numbers.tolist()
    bounds = [0, *(1000 * (j + 1) // size for j in range(size - 1))]
    assert made["bucket_sort"]["firsts"].tolist() == np.searchsorted(numbers, bounds).tolist()

    factors = [np.array([[1.0, r], [1.0, 1.0]]) for r in range(size)]
    means = [np.mean([[2.0 * s, 1] for s in (r, (r - 1) % size, (r + 1) % size)], axis=0) for r in range(size)]
    assert np.array_equal(made["ring"]["whole"], reduce(np.matmul, factors))
    rows = [[*reduce(np.matmul, factors[: r + 1]).ravel(), *means[r]] for r in range(size)]
    assert made["ring"]["everything"].tolist() == rows
    highest = max(means, key=lambda mean: mean[0])[0]
    assert made["ring"]["where"].tolist() == [highest, [mean[0] for mean in means].index(highest)]
