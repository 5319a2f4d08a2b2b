"""torch_npu's own meta kernels, which torch.compile and graphs trust: results have their shapes, dtypes and order."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fused_cases
import numpy as np
import operator_page
import torch
from fused_case import place
from npu_ranks import group
from on_ranks import on_ranks
from operator_case import Case, called, listed, to_torch
from operators import families
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from alltoallv.npu_ops.registry import formulas


def described(results: Any) -> list[Any]:
    """Of tensors shape and dtype, of lists their length, and None."""
    return [
        (tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else len(one) if isinstance(one, list) else one
        for one in listed(results)
    ]


class Comparing(TorchDispatchMode):
    """Calls the meta kernel of each operator of torch_npu that is called, also in a backward pass, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()
        self.fail: set[str] = set()
        self.differ: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name().partition("::")[2]
        if func.namespace not in ("npu", "atb"):
            return func(*args, **kwargs)
        on_npu = [tensor for tensor in _tensors((args, kwargs)) if not tensor.is_cpu]
        twins = {id(tensor): tensor.to("meta") for tensor in on_npu}
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, lambda t: twins.get(id(t), t), (args, kwargs))
        results = func(*args, **kwargs)
        if not has_kernel(name):
            return results
        given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        if (name == "npu_fusion_attention_grad" and given.get("pse") is not None) or (
            name == "npu_fusion_attention_v2" and given["input_layout"] == "TND"
        ):
            self.fail.add(name)
            return results
        try:
            expected = described(func(*meta_args, **meta_kwargs))
        except Exception:
            self.fail.add(name)
            return results
        self.compared.add(name)
        if described(results) != expected:
            self.differ.append(f"{name} gives {described(results)}, the meta kernel {expected}")
        return results


@functools.cache
def kernels() -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key("Meta"))


def has_kernel(name: str) -> bool:
    """Whether torch_npu has a meta kernel."""
    return not kernels().isdisjoint((f"npu::{name}", f"atb::{name}"))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


@contextmanager
def comparing() -> Iterator[Comparing]:
    with Comparing() as mode:
        yield mode
    assert mode.differ == []


def run(case: Case, device: torch.device) -> None:
    """Calls a case in each of its dtypes without torch_npu's autograd, and in one with its backward operators."""
    for dtype in case.dtypes:
        with torch._C._AutoDispatchBelowAutograd():
            inputs = case.inputs(np.random.default_rng(5))
            called(case.operator, device)(**{name: to_torch(x, dtype, device) for name, x in inputs.items()})
    inputs = case.inputs(np.random.default_rng(5))
    given = {name: to_torch(x, case.dtypes[-1], device) for name, x in inputs.items()}
    for name in case.gradient:
        given[name].requires_grad_()
    results = [x for x in listed(called(case.operator, device)(**given)) if isinstance(x, torch.Tensor)]
    results = [x for x in results if x.requires_grad][: case.differentiable]
    if results:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])


def run_others(device: torch.device) -> None:
    """Calls what torch_npu's autograd has put other operators in the place of."""
    x, choices = torch.randn(5, 4, device=device).half(), torch.tensor([[0, 1], [1, 0]] * 2 + [[1, 2]], device=device)
    rows, places = called("npu_moe_token_permute", device)(x, choices)
    probs = torch.rand(5, 2, device=device).half()
    for name, *arguments in (
        ("npu_moe_token_permute_grad", x, rows, choices, places),
        ("npu_moe_token_unpermute_grad", rows, x, places, probs),
        ("npu_moe_token_unpermute_grad", rows[:5], x, choices.view(-1)[:5].int()),
        ("_npu_dtype_cast_backward", x, torch.float32),
        ("_npu_format_cast", x, 2),
    ):
        called(name, device)(*arguments)


@on_ranks(2, communicator=False)
def test_results_are_what_torch_npus_meta_kernels_say(rank: int, size: int, file: str) -> None:
    os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
    with group(rank, size, file) as (made, device), comparing() as mode:
        name = made._get_backend(device).get_hccl_comm_name(rank)
        for cases in fused_cases.FAMILIES.values():
            for fused in cases:
                arguments = fused.inputs(np.random.default_rng(5), size)[rank]
                given = {key: to_torch(value, fused.dtypes[-1], device) for key, value in arguments.items()}
                called(fused.operator, device)(**given | place(fused.operator, name, rank, size))
        for case in (case for cases in families().values() for case in cases):
            if rank == 0:
                run(case, device)
        if rank == 0:
            run_others(device)
    if rank == 0:
        assert {name for name in formulas() if not has_kernel(name)} == set(operator_page.WITHOUT_META)
        assert mode.fail == operator_page.META_FAULTS.keys()
        assert sorted(set(formulas()) - mode.compared - mode.fail - set(operator_page.WITHOUT_META)) == []
