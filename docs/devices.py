"""On which devices each name of the packages runs: the tables of docs/api, which tests hold to it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import alltoallv  # noqa: E402 - of the working tree

#: By page of docs/api: the columns of its table of devices, and the cells of names of the module; where none are named,
#: the cells of all others. A name may have an argument. "" leaves out what has no device. Tests hold torch's cells.
DEVICES: dict[str, tuple[str, dict[str, str]]] = {
    "numpy": (
        "CPU | several hosts | GPU | NPU",
        {"": "Bounded ErrorFeedback MessageWork Work", "yes | yes | no | no": ""},
    ),
    "paddle": (
        "CPU | several hosts | GPU | NPU",
        {"": "Bounded ErrorFeedback P2POp Task", "yes | not tested | no | no": ""},
    ),
    "mindspore": (
        "CPU | CPU, in graphs | Ascend | GPU",
        {
            "": "Bounded CommHandle ErrorFeedback Received install uninstall",
            "yes | yes | queue | no": "AllReduceLeaves AllToAllV AllToAllVCell DynamicAllToAllV QuantAllReduceCell "
            "QuantizedAllReduce QuantizedAllToAll QuantizedReduceScatter",
            "yes | no | host | no": "barrier exchange_counts global_gather global_scatter init irecv isend "
            "new_group recv send",
            "yes | no | no | no": "MoEDispatcher ReshardPlan empty reshard reshard_state",
            "yes | no | queue; learnt counts: host | no": "all_to_all_v",
            "yes | no | queue | no": "",
        },
    ),
    "torch": (
        "CPU | GPU | NPU",
        {
            "": "Bounded ErrorFeedback GroupOptions Received Work functional nn",
            "yes | no | no": "irecv isend recv send",
            "no | no | emulated": "all_to_all_v(capacity=)",
            "yes | not run | emulated": "",
        },
    ),
    "torch.functional": ("CPU | GPU | NPU", {"yes | not run | emulated": ""}),
    "torch.nn": ("CPU | GPU | NPU", {"": "DispatchState StaticState", "yes | not run | emulated": ""}),
    "jax": ("CPU | GPU | TPU | NPU", {"yes | no | no | no": ""}),
    "deep_ep": (
        "CPU | GPU | NPU",
        {"": "Config EPHandle EventHandle EventOverlap install topk_idx_t", "yes | not run | not tested": ""},
    ),
    "torch.symm_mem": ("CPU | GPU | NPU", {"yes | torch's own | emulated": ""}),
    "npu_ops": ("CPU | emulated NPU | NPU", {"yes | yes | torch_npu's own": ""}),
}


def table(module: str) -> str:
    """The table of a module's page, as Markdown."""
    rows = []
    for name, cell in cells(module).items():
        anchor = name.partition("(")[0] if module == "npu_ops" else f"alltoallv.{module}.{name.partition('(')[0]}"
        rows += [f"| [`{name}`](#{anchor}) | {cell} |"] if cell else []
    columns = DEVICES[module][0]
    return "\n".join([f"| name | {columns} |", "|---" * (columns.count("|") + 2) + "|", *rows]) + "\n"


def cells(module: str) -> dict[str, str]:
    """What a module's table says of each name that it offers."""
    names, found = offered(module), dict[str, str]()
    for cell, named in DEVICES[module][1].items():
        found |= {name: cell for name in named.split() or names if name not in found}
    if unknown := {name.partition("(")[0] for name in found} - set(names):
        raise ValueError(f"docs/devices.py names {sorted(unknown)}, which alltoallv.{module} has not")
    return dict(sorted(found.items()))


def offered(module: str) -> list[str]:
    """The names that a module offers."""
    if module == "npu_ops":
        return list(schemas())
    if names := alltoallv._offered(f"alltoallv.{module}"):
        return names
    path = (ROOT / "python/alltoallv" / module.replace(".", "/")).with_suffix(".py")
    functions = [one.name for one in ast.parse(path.read_text("utf-8")).body if isinstance(one, ast.FunctionDef)]
    return [name for name in functions if not name.startswith("_")]


def schemas() -> dict[str, str]:
    """The schemas of the operators of `alltoallv.npu_ops`, by name."""
    lines = (ROOT / "python/alltoallv/npu_ops/schemas.txt").read_text("utf-8").splitlines()
    return {line.partition("(")[0].partition("::")[2]: line for line in lines if line}
