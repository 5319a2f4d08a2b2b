"""Writes docs/npu-operators.md from the cases of the tests. ``python tests/npu/operator_page.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import fused_cases
from operator_case import TOLERANCE
from operators import families

from alltoallv.npu_ops import limits, names
from alltoallv.npu_ops.registry import formulas

CALLED = Path(__file__).with_name("called_operators.txt")
HUGE = 10**6 + 1  # outside all limits
PAGE = Path(__file__).parents[2] / "docs" / "npu-operators.md"
HEAD = """# torch_npu's operators on the emulator

Written by `python tests/npu/operator_page.py` from the cases of tests/operators. Each case compares an operator of
the real torch_npu on an emulated NPU with a reference in NumPy's float64, written from the operator's documented
formula. *exact*: the same bits; else the error is at most {} of the largest
value. Results of integers are always exact. *gradient*: of these inputs, compared with differences of the reference.
*limits checked*: what is compared with the devices' documentation before a call (below).

Of the {} operators in tests/npu/called_operators.txt, which vllm-ascend, MindSpeed or sgl-kernel-npu calls, {} run.
These do not: {}.

Any other operator `npu::` raises NotImplementedError in the caller, and the program can go on; so does an argument's
value that the emulator does not cover, by a sentence that names the argument. Nothing here tells how fast an NPU is,
and kernels of CANN may round differently within these bounds.

The families Moe distribute, Moe alltoallv and Parallel matmuls communicate over the group that `hcom` or `group_ep`
names. Each case runs on 2 and on 4 ranks against a reference of one process that has all ranks' arguments. torch_npu
has no gradients for them; on CPU tensors (`alltoallv.npu_ops`) their formulas have. What ranks disagree about, or one
of them refuses, is raised on all of them. Limits that the devices' documentation states (world sizes, hidden sizes,
tokens, experts, HCCL_BUFFSIZE) are kept: `ALLTOALLV_NPU_PRODUCT` is `A3` (the default) or `A2`, and
`ALLTOALLV_NPU_LIMITS=relax` lifts them. Of a shared expert's copies, on the first `shared_expert_rank_num` ranks, rank
r's tokens go to copy r modulo their number. Refused by name: `tp_world_size` 2 (with 0 or 1 `group_tp` changes
nothing), `elastic_info`, scales of blocks (mx).

"""


def called() -> list[str]:
    """Operators that programs for NPUs call, by name."""
    return [line for line in CALLED.read_text().splitlines() if not line.startswith("#")]


def checked(operator: str) -> list[str]:
    """What an operator compares with the devices' limits: the subjects of all that they would refuse."""
    function = formulas()[operator].function
    kinds = _limits_of(function, set())
    algorithm = "?" if "comm_alg" in function.__code__.co_varnames else ""
    calls = {
        "MoE": limits.MoE(1, HUGE, HUGE, HUGE, HUGE, algorithm, HUGE, HUGE),
        "GroupedMatmul": limits.GroupedMatmul(HUGE, HUGE, HUGE, HUGE, HUGE * HUGE),
        "Matmul": limits.Matmul(operator, HUGE, HUGE),
    }
    products: tuple[limits.Product, ...] = ("A3", "A2")
    breaches = [one for kind in sorted(kinds) for product in products for one in calls[kind].breaches(product)]
    subjects = ("product" if " exist on " in one else one.partition(" is ")[0].removeprefix("the ") for one in breaches)
    return list(dict.fromkeys(subjects))


def _limits_of(function: Callable[..., Any], seen: set[Callable[..., Any]]) -> set[str]:
    """The classes of `limits` that a formula or a function of ours that it calls makes."""
    seen.add(function)
    assert isinstance(function, FunctionType)
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    found = set(function.__code__.co_names) & {"MoE", "GroupedMatmul", "Matmul"} if limits in used else set()
    ours = [one for one in used if isinstance(one, FunctionType) and one.__module__.startswith(limits.__package__)]
    return found.union(*(_limits_of(one, seen) for one in ours if one not in seen))


def page() -> str:
    """The text of the page."""
    bounds = ", ".join(f"{bound:g} ({dtype})" for dtype, bound in TOLERANCE.items())
    lines = []
    for family, cases in (families() | fused_cases.FAMILIES).items():
        lines += [f"## {family.replace('_', ' ').capitalize()}", ""]
        lines += ["| operator | dtypes | gradient | compared | cases | limits checked |", "| --- " * 6 + "|"]
        for name in dict.fromkeys(case.operator for case in cases):
            of = [case for case in cases if case.operator == name]
            dtypes = dict.fromkeys(dtype for case in of for dtype in case.dtypes)
            gradient = dict.fromkeys(one for case in of for one in getattr(case, "gradient", ()))
            compared = "exact" if all(case.exact for case in of) else "tolerance"
            cells = [f"`{name}`", ", ".join(dtypes), ", ".join(gradient) or "-", compared, str(len(of))]
            cells.append(", ".join(checked(name)) or "-")
            lines.append(f"| {' | '.join(cells)} |")
        backward = dict.fromkeys(f"`{name}`" for case in cases for name in getattr(case, "runs", ()))
        lines += ["", *([f"Run by these cases too: {', '.join(backward)}.", ""] if backward else [])]
    missing = [name for name in called() if name not in names()]
    counts = len(called()), len(called()) - len(missing)
    return HEAD.format(bounds, *counts, ", ".join(f"`{name}`" for name in missing)) + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
