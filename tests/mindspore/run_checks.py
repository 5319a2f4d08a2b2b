"""Run by msrun: every check of checks_*.py, each on a communicator of its own; writes a JSON file per rank."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "matrix"))

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.mindspore.tensors import executor

MODULES = (
    "checks_values",
    "checks_dispatcher",
    "checks_gradients",
    "checks_graph",
    "checks_layouts",
    "checks_cells",
    "checks_quantized",
    "checks_mint",
    "checks_options",
    "checks_primitives",
    "checks_arguments",
)


def main() -> None:
    """Checks run in the order of their names on all ranks."""
    world = am.init(timeout=30)
    results = {}
    for module in map(importlib.import_module, MODULES):
        checks = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
        for name in sorted(name for name in checks if name.startswith("check_")):
            text, begin = "", time.monotonic()
            with Communicator.from_env(domain=name, timeout=20) as comm:
                try:
                    getattr(module, name)(comm)
                except Exception:
                    text = traceback.format_exc()
                executor.clear_res()  # an error that a gradient function raised has left MindSpore recording
            results[name] = text
            print(f"{time.monotonic() - begin:6.2f} s  {name}  {text[-300:]}", flush=True)
    Path(sys.argv[1], f"rank-{world.rank}.json").write_text(json.dumps(results))


main()
