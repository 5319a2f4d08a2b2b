"""Writes docs/mint-distributed.md, names of mint.distributed and their checks: python tests/mindspore/mint_page.py."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "mint-distributed.md"
HEAD = """# mint.distributed on CPU

Written by `python tests/mindspore/mint_page.py` from tests/mindspore/mint_calls.py, which calls every public name of
`mindspore.mint.distributed` 2.10 on CPU in a job of msrun with 2 ranks, and compares what it gives with NumPy: as
`alltoallv.mindspore.distributed`, and as `mindspore.mint.distributed` itself under `alltoallv.mindspore.install()`. A
check says that these are all of its names, with its parameters and defaults. The last column counts the calls that must
raise MindSpore's error class.

| name | CPU | errors checked |
|---|---|---|
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
    lines = [f"| `{name.removeprefix('call_')}` | yes | {errors} |\n" for name, errors in sorted(rows.items())]
    return HEAD + "".join(lines) + f"\n{len(rows)} names.\n"


if __name__ == "__main__":
    PAGE.write_text(page())
