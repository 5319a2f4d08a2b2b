"""Where a package is missing these tests are left out, which the summary says."""

from __future__ import annotations

import importlib.util

import pytest

PACKAGES = ("torch", "torch_npu", "transformers", "vllm", "vllm_ascend")
# A folder of tests may have the name of a package: such a spec has no origin.
specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]

if missing:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        left_out = f"tests/vllm left out: needs {', '.join(missing)} (nox -s vllm installs them)"
        terminalreporter.write_line(left_out, yellow=True)
