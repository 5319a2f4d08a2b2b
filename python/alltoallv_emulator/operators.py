"""torch_npu's own operators (``npu::``) on emulated NPUs, computed by the formulas of `alltoallv.npu_ops`.

Every operator is computed by a function of CPU tensors over the memory of the npu tensors. Where torch_npu has a
gradient for an operator, its own autograd calls the operator's backward operator, which has a formula as well. What has
none raises NotImplementedError in the caller, before it gets into torch_npu's queue of launches: an operator that fails
in there takes all later ones with it. docs/npu-operators.md lists the operators.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from alltoallv.npu_ops import schemas
from alltoallv.npu_ops.registry import Operator, exchanges, formulas
from alltoallv_emulator import exchange
from alltoallv_emulator.host_views import on_host

__all__ = ["install"]

# torch_npu's own kernels that stay: they only do bookkeeping or consist of aten operators.
_KEPT = {
    "get_storage_size", "copy_memory_", "npu_change_data_ptr", "set_op_timeout_ms", "npu_reshape", "npu_reshape.out",
    "super_kernel_scope_begin", "super_kernel_scope_end", "get_npu_format",
}  # fmt: skip


def install() -> list[Any]:
    """Registers the operators of the installed torch_npu; they live as long as the result."""
    exchanges["npu"] = exchange.all_to_all
    library = torch.library.Library("npu", "IMPL")
    for qualified in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")):
        namespace, _, name = qualified.partition("::")
        if namespace == "npu" and name not in _KEPT:
            library.impl(name, functools.partial(_call, "npu", name), "PrivateUse1")
    return [library, _define_atb()]


def _define_atb() -> Any:
    """Defines operators of ATB, which torch_npu's own library would define if it found ATB, and gives them to it."""
    library, torch_npu = torch.library.Library("atb", "FRAGMENT"), importlib.import_module("torch_npu")
    for name, (schema, *_) in schemas().items():
        namespace, _, text = schema.partition("::")
        if namespace == "atb" and not hasattr(torch.ops.atb, name):
            library.define(text)
            library.impl(name, functools.partial(_call, namespace, name), "PrivateUse1")
            setattr(torch_npu, name, getattr(torch.ops.atb, name))
    return library


def _call(namespace: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return _kernel(namespace, name)(*args, **kwargs)


@functools.cache
def _kernel(namespace: str, name: str) -> Callable[..., Any]:
    """Returns a kernel that applies the formula to views of the memory, or that refuses; imports formulas at the first
    call.
    """
    formula = formulas().get(name)
    if formula is None:
        return functools.partial(_refuse, name)
    base, _, overload = name.partition(".")
    computed = Operator(
        name, getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")._schema, formula
    )
    return on_host(computed) if formula.on_host else computed


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"npu::{name} is not among the operators of the emulator: see docs/npu-operators.md")
