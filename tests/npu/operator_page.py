"""Writes docs/npu-operators.md from the cases of the tests. ``python tests/npu/operator_page.py``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import fused_cases
from operator_case import TOLERANCE
from operators import families

from alltoallv.npu_ops import limits, names
from alltoallv.npu_ops.registry import formulas

CALLED = Path(__file__).with_name("called_operators.txt")
HUGE = 10**6 + 1  # outside all limits
#: Operators of which torch_npu has no meta kernel.
WITHOUT_META = (
    "_amp_foreach_non_finite_check", "_npu_flash_attention", "_npu_flash_attention_qlens", "_npu_flash_attention_unpad",
    "_npu_flash_attention_unpad_v2", "_npu_flash_attention_v3", "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output", "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_infer_output", "_npu_group_topk", "_npu_matmul_add_fp32",
    "_npu_paged_attention", "_npu_paged_attention_get_workspace", "_npu_paged_attention_mla",
    "_npu_paged_attention_quant", "_npu_paged_attention_splitfuse", "_npu_paged_attention_splitfuse_v2",
    "_npu_paged_attention_v2.out", "_npu_paged_attention_v2_get_workspace", "_npu_quant_rms_norm",
    "_npu_quantize_per_tensor", "_npu_reshape_and_cache", "_npu_reshape_and_cache_siso", "_npu_rotary_embedding",
    "get_npu_format", "npu_bmm_v2_mat1_backward", "npu_bmm_v2_mat2_backward", "npu_broadcast",
    "npu_confusion_transpose", "npu_confusion_transpose_backward", "npu_convert_weight_to_int4pack", "npu_dtype_cast_",
    "npu_format_cast", "npu_format_cast.Tensor", "npu_format_cast_", "npu_format_cast_.acl_format",
    "npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out", "npu_gather_pa_kv_cache",
    "npu_mish", "npu_mish_backward", "npu_paged_cache_load", "npu_paged_cache_load.out", "npu_sign_bits_unpack",
    "npu_silu_", "npu_slice", "npu_view_copy", "one_",
)  # fmt: skip
#: Operators whose meta kernel fails for calls that the operator takes, or is wrong.
META_FAULTS = {
    "npu_fusion_attention_grad": "it returns no gradient of pse",
    "npu_fusion_attention_v2": "it knows no layout TND",
    "npu_fusion_attention_grad_v2": "it fails whenever it is called",
    "npu_geglu_grad": "it returns two tensors, and the schema has one",
    "npu_grouped_matmul_swiglu_quant_v2": "it takes one weight for all groups, and no list of them",
    "npu_top_k_top_p": "it needs both p and k, which the schema lets out",
}
PAGE = Path(__file__).parents[2] / "docs" / "npu-operators.md"
HEAD = """# torch_npu's operators on the emulator

This page lists the operators of torch_npu that run without an NPU, and how each is tested. It is written by
`python tests/npu/operator_page.py` from the cases in tests/support/operators. Each case runs an operator of the real
torch_npu on an emulated NPU and compares the result with a reference, which computes the operator's documented formula
with NumPy in float64. The columns of the tables say:

- *gradient*: for these inputs the gradient is compared with difference quotients of the reference.
- *compared*: with *exact*, the result has the same bits as the reference. With *tolerance*, its error is at most the
  following part of the largest value: {}. Integer results are always exact.
- *limits checked*: before a call, these values are compared with the limits in the devices' documentation.

The programs vllm-ascend, MindSpeed and sgl-kernel-npu call {} operators (tests/npu/called_operators.txt); {} of them
run. These do not: {}.

[What vllm-ascend calls](notes/npu-callers.md), by name, number of calls and arguments, is counted by a script.

The results have the shapes, dtypes and order of torch_npu's own meta kernels, which torch.compile and graphs trust: a
test compares every operator with its own. [Some have none, or a wrong one](#meta-kernels).

`npu_attention_to_ffn` and `npu_ffn_to_attention` run on emulated NPUs only, [through windows](emulator.md#windows).
Every other operator `npu::` raises NotImplementedError in the caller, and the program can go on. An argument's value
that the emulator does not cover also raises NotImplementedError; the error names the argument. The emulator says
nothing about the speed of an NPU, and CANN's kernels may round differently within these bounds.

The families Moe distribute, Moe alltoallv and Parallel matmuls communicate over the group that `hcom` or `group_ep`
names. Each case runs on 2 and on 4 ranks; the reference is one process that has the arguments of all ranks. torch_npu
has no gradients for these operators, but on CPU tensors (`alltoallv.npu_ops`) they have. If ranks disagree, or one rank
refuses its arguments, all ranks raise the error. The limits in the devices' documentation (dtypes, world sizes, hidden
sizes, tokens, experts, HCCL_BUFFSIZE) apply to the product that `ALLTOALLV_NPU_PRODUCT` names: `A3` (the default) or
`A2`; those of `950` are not known for them. `ALLTOALLV_NPU_LIMITS=relax` turns them off. The first
`shared_expert_rank_num` ranks hold the copies of the shared expert; the tokens of rank r go to copy r modulo the number
of copies. Dispatch has `quant_mode` 0 to 5; a limit keeps all but 0 and 2 from A2 and A3. With `tp_world_size` 2 a rank
has its own rows first, and then those of the other rank of `group_tp`. With `elastic_info` the ranks that are left
exchange without the others; an error reaches these too, unless it is about `elastic_info`. The matrix products refuse
scales of blocks (mx).

"""


def called() -> list[str]:
    """Operators that programs for NPUs call, by name."""
    return [line for line in CALLED.read_text().splitlines() if not line.startswith("#")]


def checked(operator: str) -> list[str]:
    """What an operator compares with the devices' limits: the subjects of all that they would refuse."""
    function = formulas()[operator].function
    kinds = _limits_of(inspect.unwrap(function), set())
    algorithm = "?" if "comm_alg" in inspect.signature(function).parameters else ""
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
        lines += ["", *([f"These cases also run {', '.join(backward)}.", ""] if backward else [])]
    lines += ["## Arguments that are ignored", ""]
    about = "They cannot change a result here. Every other one is computed with, or refused unless it has its default."
    lines += [about, ""]
    lines += ["| operator | ignored arguments |", "| --- | --- |"]
    for name, formula in formulas().items():
        ignored = sorted(formula.ignores - {"*"})
        if ignored and not name.startswith("_"):
            lines.append(f"| `{name}` | {', '.join(f'`{one}`' for one in ignored)} |")
    missing = [name for name in called() if name not in names()]
    counts = len(called()), len(called()) - len(missing)
    lines += ["", "## Meta kernels", "", "torch_npu's meta kernels of these operators are no guide.", ""]
    lines += ["| operator | its meta kernel |", "| --- | --- |"]
    kernels = dict.fromkeys(WITHOUT_META, "there is none") | META_FAULTS
    lines += [f"| `{name}` | {kernels[name]} |" for name in sorted(kernels)]
    return HEAD.format(bounds, *counts, ", ".join(f"`{name}`" for name in missing)) + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
