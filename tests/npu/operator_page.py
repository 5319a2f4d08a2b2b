"""Writes docs/npu-operators.md from the cases of the tests. ``python tests/npu/operator_page.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import fused_cases
from operator_case import TOLERANCE
from operators import families

PAGE = Path(__file__).parents[2] / "docs" / "npu-operators.md"
HEAD = """# torch_npu's operators on the emulator

Written by `python tests/npu/operator_page.py` from the cases of tests/npu/operators. Each case compares an operator of
the real torch_npu on an emulated NPU with a reference in NumPy's float64, written from the operator's documented
formula. *exact*: the same bits; else the error is at most {} of the largest
value. Results of integers are always exact. *gradient*: of these inputs, compared with differences of the reference.

Any other operator `npu::` raises NotImplementedError in the caller, and the program can go on; so does an argument's
value that the emulator does not cover, by a sentence that names the argument. Nothing here tells how fast an NPU is,
and kernels of CANN may round differently within these bounds.

The families Moe distribute, Moe alltoallv and Parallel matmuls communicate over the group that `hcom` or `group_ep`
names. Each case runs on 2 and on 4 ranks against a reference of one process that has all ranks' arguments. torch_npu
has no gradients for them; on CPU tensors (`alltoallv.npu_ops`) their formulas have. What ranks disagree about, or one
of them refuses, is raised on all of them. Limits that the devices' documentation states (world sizes, hidden sizes,
tokens, experts, HCCL_BUFFSIZE) are kept: `ALLTOALLV_NPU_PRODUCT` is `A3` (the default) or `A2`, and
`ALLTOALLV_NPU_LIMITS=relax` lifts them. Refused by name: `tp_world_size` 2 (with 0 or 1 `group_tp` changes nothing),
`shared_expert_rank_num` above 0, `elastic_info`, scales of blocks (mx).

"""


def page() -> str:
    """The text of the page."""
    bounds = ", ".join(f"{bound:g} ({dtype})" for dtype, bound in TOLERANCE.items())
    lines = []
    for family, cases in (families() | fused_cases.FAMILIES).items():
        lines += [f"## {family.replace('_', ' ').capitalize()}", ""]
        lines += ["| operator | dtypes | gradient | compared | cases |", "| --- | --- | --- | --- | --- |"]
        for name in dict.fromkeys(case.operator for case in cases):
            of = [case for case in cases if case.operator == name]
            dtypes = dict.fromkeys(dtype for case in of for dtype in case.dtypes)
            gradient = dict.fromkeys(one for case in of for one in getattr(case, "gradient", ()))
            compared = "exact" if all(case.exact for case in of) else "tolerance"
            cells = [f"`{name}`", ", ".join(dtypes), ", ".join(gradient) or "-", compared, str(len(of))]
            lines.append(f"| {' | '.join(cells)} |")
        backward = dict.fromkeys(f"`{name}`" for case in cases for name in getattr(case, "runs", ()))
        lines += ["", *([f"Run by these cases too: {', '.join(backward)}.", ""] if backward else [])]
    return HEAD.format(bounds) + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
