"""Runs test bodies of Paddle's test/collective as they are, on two ranks, under `alltoallv.paddle.install`.

``python tests/paddle/run_own.py FOLDER``: it takes the folder's ``communication_stream_*_api_dygraph.py``, each with
every dtype, backend's name and way of waiting of Paddle's own tests, and its files of unittest. Prints what passed and
what failed, with the last line of the error. A rank that fails leaves the other one to go on.
"""

from __future__ import annotations

import collections
import io
import itertools
import os
import runpy
import subprocess
import sys
import types
import unittest
from pathlib import Path
from typing import Any

DTYPES = "float16 float32 float64 int32 int64 int8 uint8 bool complex64 complex128"
WAYS = [{"sync_op": a, "use_calc_stream": b} for a, b in (("True", "True"), ("True", "False"), ("False", "False"))]


def data(shape: Any, dtype: str, seed: int) -> Any:
    """Stands in for the function of Paddle's test_collective_api_base, which needs the rest of Paddle's tests."""
    import numpy as np

    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.random(shape) < 0.5
    if dtype.startswith("complex"):
        return (random.random(shape) + 1j * random.random(shape)).astype(dtype)
    return (random.random(shape) if dtype.startswith("float") else random.integers(0, 12, shape)).astype(dtype)


def on_rank(folder: Path) -> None:
    import alltoallv.paddle

    alltoallv.paddle.install()
    for name in ("test_collective_api_base", "legacy_test", "legacy_test.test_collective_api_base"):
        module: Any = types.ModuleType(name)
        module.create_test_data, module.__path__ = data, []
        sys.modules[name] = module
    sys.modules["legacy_test"].test_collective_api_base = module  # type: ignore[attr-defined]
    passed, failed = collections.Counter[str](), collections.Counter[tuple[str, str]]()
    for file in sorted(folder.glob("communication_stream_*_api_dygraph.py")):
        for way, dtype, backend in itertools.product(WAYS, DTYPES.split(), ("gloo", "nccl")):
            if dtype == "bool" and "reduce" in file.name:
                continue  # Paddle's tests have none
            os.environ |= {**way, "backend": backend, "shape": "(100, 200)", "dtype": dtype, "seeds": "[42, 84]"}
            try:
                runpy.run_path(str(file), run_name="__main__")
                passed[file.name] += 1
            except Exception as error:
                failed[file.name, f"{dtype}: {type(error).__name__}: {str(error).strip().splitlines()[-1][:150]}"] += 1
    for file in sorted(folder.glob("collective_*.py")):
        cases = [each for each in runpy.run_path(str(file)).values() if isinstance(each, type)]
        for case in (each for each in cases if issubclass(each, unittest.TestCase)):
            result = unittest.TextTestRunner(io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(case))
            passed[file.name] += result.testsRun - len(result.failures) - len(result.errors)
            for _, text in [*result.failures, *result.errors]:
                failed[file.name, text.strip().splitlines()[-1]] += 1
    for name, number in passed.items():
        print(f"{name}: {number} passed")
    for (name, reason), number in failed.items():
        print(f"{name}: {number} failed: {reason}")
    print(f"{sum(passed.values())} passed, {sum(failed.values())} failed")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        on_rank(Path(sys.argv[1]))
    else:
        command = [sys.executable, "-m", "alltoallv", "run", "-n", "2", __file__, sys.argv[1], "rank"]
        raise SystemExit(subprocess.run(command, check=False).returncode)
