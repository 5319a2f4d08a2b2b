"""Calls an operator with each argument of its schema that a case does not give: done, refused by name, or ignored."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import fused_cases
import numpy as np
import torch
from fused_case import place
from operator_case import listed, to_torch
from operators import families

from alltoallv import npu_ops
from alltoallv.npu_ops.registry import Operator, formulas


def sample(argument: Any) -> Any:
    """Returns a value that is not the argument's default."""
    kind, default = str(argument.type).replace("Optional[", "").rstrip("]"), argument.default_value
    if "Tensor" in kind:
        tensor = torch.full((1,), 0.5)
        return [tensor] if "List" in kind else tensor
    if "List" in kind:
        return [3]
    if kind == "bool":
        return not default
    if kind == "str":
        return "other"
    if kind == "float":
        return 0.25 if default is None else 0.5 * default + 0.125
    return 3 if default is None else default + 1


#: Arguments that the operators take and that change nothing in the first case of an operator, and why.
NO_EFFECT = {
    "actual_seq_lengths": "all of the sequence is used",
    "actual_seq_qlen": "all of the sequence is used",
    "actual_seq_kvlen": "for the layout TND",
    "q_start_idx": "for a pse that is made",
    "kv_start_idx": "for a pse that is made",
    "pse_type": "without a pse",
    "seed": "for dropout",
    "offset": "for dropout",
    "pre_tokens": "for sparse modes with a band",
    "next_tokens": "for sparse modes with a band",
    "softmax_lse_flag": "the form with outputs writes them",
    "return_softmax_lse": "the form with outputs writes them",
    "eps": "for weights that are divided by their sum",
    "k": "for rows without scales",
    "group_index": "for scales of groups",
    "tp_world_size": "1 is also no tensor parallelism",
    **dict.fromkeys(("group_tp", "tp_rank_id"), "for tp_world_size 2"),
    "comm_alg": "one of those that limits allow",
    "shared_expert_num": "where ranks have shared experts",
    "zero_expert_num": "no token has chosen them",
    "expert_capacity": "for drop_pad_mode 1",
    **dict.fromkeys(("clamp_limit", "glu_alpha", "glu_bias"), "for swiglu_mode 1"),
    **dict.fromkeys(("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"), "for int8"),
    **dict.fromkeys(("key_quant_mode", "value_quant_mode"), "for int8"),
    "trans_mm_weight": "where there is a mm_weight",
    "mm_y_dtype": "where there is a mm_x",
} | dict.fromkeys(("ori_x", *(f"const_expert_{one}" for one in ("alpha_1", "alpha_2", "v"))), "for special experts")


def copies(results: Any) -> list[Any]:
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in listed(results)]


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(*(x.double().nan_to_num() for x in (a, b)))


def check(operator: Operator, make: Callable[[], dict[str, Any]], given: set[str]) -> None:
    """Fails unless a call with each argument that no case gives shows what the operator says of it.

    ``make`` gives the arguments of a case.
    """
    before = copies(operator(**make()))
    for argument in operator._schema.arguments:
        name = argument.name
        if name in given:
            continue
        label = f"{operator._schema.name}: {name}"
        after, refusal = None, ""
        try:
            after = copies(operator(**make(), **{name: sample(argument)}))
        except Exception as error:  # of an argument that is taken: the sample is no good value
            refusal = str(error)
        if after is None:
            refuses = name in operator._not_covered and f" {name} is " in refusal
            assert refuses or name in operator._takes, (label, refusal)
            continue
        same = len(before) == len(after) and all(map(equal, before, after))
        if name in operator._takes:
            assert not same or name in NO_EFFECT, f"{label} changes nothing"
        else:
            assert same, f"{label} is ignored, and changes something"
            assert name not in operator._not_covered, f"{label} is neither done nor refused"


def check_all(group: str) -> None:
    """Checks all operators that have a case, on a group of this rank alone."""
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for one in itertools.chain(*families().values()):
        cases.append((one.operator, lambda one=one: of(one.inputs(np.random.default_rng(5)), one.dtypes[0])))
    for fused in itertools.chain(*fused_cases.FAMILIES.values()):
        make = lambda fused=fused: (  # noqa: E731
            of(fused.inputs(np.random.default_rng(5), 1)[0], fused.dtypes[0]) | place(fused.operator, group, 0, 1)
        )
        with contextlib.suppress(ZeroDivisionError):  # a case for more ranks
            make()
            cases.append((fused.operator, make))
    given: dict[str, set[str]] = {}
    for name, make in cases:
        given.setdefault(name, set()).update(make())
    first = dict(reversed(cases))
    known = formulas()
    for name, texts in npu_ops.schemas().items():
        for schema in map(torch._C.parse_schema, texts):
            full = f"{name}.{schema.overload_name}" if schema.overload_name else name
            if full in first:
                check(Operator(full, schema, known[full]), first[full], given[full])


def of(arguments: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {name: to_torch(value, dtype, torch.device("cpu")) for name, value in arguments.items()}
