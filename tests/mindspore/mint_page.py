"""Writes docs/mint-distributed.md, names of mint.distributed and their checks: python tests/mindspore/mint_page.py."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "mint-distributed.md"
# Where a name runs with device target Ascend: in MindSpore's queue, or not; the others on the host.
QUEUED = "all_gather all_gather_into_tensor all_gather_into_tensor_uneven all_reduce all_to_all all_to_all_single"
QUEUED += " broadcast destroy_process_group gather new_group reduce reduce_scatter reduce_scatter_tensor scatter"
QUEUED += " reduce_scatter_tensor_uneven"
ON_ASCEND = dict.fromkeys(QUEUED.split(), "queue")
HEAD = """# mint.distributed on CPU and on Ascend

This page lists every public name of `mindspore.mint.distributed` 2.10 and how it is tested. It is written by `python
tests/mindspore/mint_page.py` from tests/mindspore/mint_calls.py.

**CPU.** The test calls each name in a job of msrun with 2 ranks and compares the results with NumPy. It does so twice:
for `alltoallv.mindspore.distributed`, and for `mindspore.mint.distributed` itself after
`alltoallv.mindspore.install()`. It also checks that no name is missing, and that parameters and defaults are
MindSpore's. The last column counts the calls that must raise MindSpore's error class.

**Ascend.** The test makes the same calls through the operator for Ascend, built for CPU
(tests/mindspore/run_device_op.py); on an NPU only the addresses and the stream differ. The column shows where a call
runs, and a test checks that it does:

- *queue*: the call is an operator in MindSpore's queue and runs on its stream over HCCL. The core's part of it
  (all-to-all, all-reduce, all-gather, reduce-scatter, a group of some ranks) is tested on emulated NPUs
  (tests/mindspore/run_device_stream.py). HCCL reduces by sum, min, max and prod, on all ranks, and scatters equal
  parts.
- *host*: the call runs on the host. Objects and messages travel in host memory, between ranks that share a host.

| name | CPU | Ascend | errors checked |
|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    rows, same = {}, {}
    for node in ast.parse((HERE / "mint_calls.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("call_"):
            rows[node.name] = ast.unparse(node).count("pytest.raises")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            same[ast.unparse(node.targets[0])] = node.value.id
    rows |= {name: rows[like] for name, like in same.items() if like in rows}
    names = {name.removeprefix("call_"): errors for name, errors in sorted(rows.items())}
    lines = [f"| `{name}` | yes | {ON_ASCEND.get(name, 'host')} | {errors} |\n" for name, errors in names.items()]
    return HEAD + "".join(lines) + f"\n{len(rows)} names.\n"


if __name__ == "__main__":
    PAGE.write_text(page())
