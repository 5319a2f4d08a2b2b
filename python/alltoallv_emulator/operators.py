"""torch_npu's own operators (``npu::``, ``atb::``) on emulated NPUs, computed by the formulas of `alltoallv.npu_ops`.

Every operator is computed by a function of CPU tensors over the memory of the npu tensors. Where torch_npu has a
gradient for an operator, its own autograd calls the operator's backward operator, which has a formula as well. What has
none raises NotImplementedError in the caller, before it gets into torch_npu's queue of launches: an operator that fails
in there takes all later ones with it. docs/npu-operators.md lists the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from alltoallv.npu_ops.registry import Operator, exchanges, formulas
from alltoallv_emulator import exchange, windows
from alltoallv_emulator.host_views import on_host

__all__ = ["install"]

# torch_npu's own kernels that stay: they only do bookkeeping or consist of aten operators.
_KEPT = {
    "get_storage_size", "copy_memory_", "npu_change_data_ptr", "set_op_timeout_ms", "npu_reshape", "npu_reshape.out",
    "super_kernel_scope_begin", "super_kernel_scope_end", "get_npu_format", "print_npugraph_tensor",
    "save_npugraph_tensor", "save_npugraph_tensor.tensor_list",
}  # fmt: skip


def install() -> list[Any]:
    """Registers the operators of the installed torch_npu; they live as long as the result."""
    exchanges["npu"] = exchange.all_to_all
    windows.install()
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("npu", "atb")}
    for qualified in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")):
        namespace, _, name = qualified.partition("::")
        if namespace in libraries and name not in _KEPT:
            libraries[namespace].impl(name, functools.partial(_call, namespace, name), "PrivateUse1")
    return list(libraries.values())


def _call(namespace: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    return _kernel(namespace, name)(*args, **kwargs)


@functools.cache
def _kernel(namespace: str, name: str) -> Callable[..., Any]:
    """Returns a kernel that applies the formula to views of the memory, or that refuses; imports formulas at the first
    call.
    """
    formula = windows.FORMULAS.get(name) or formulas().get(name)
    if formula is None:
        return functools.partial(_refuse, f"{namespace}::{name}")
    base, _, overload = name.partition(".")
    computed = (windows.OneSided if name in windows.FORMULAS else Operator)(
        name, getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")._schema, formula
    )
    return on_host(computed) if formula.on_host else computed


def _refuse(name: str, /, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"{name} is not among the operators of the emulator: see docs/npu-operators.md")
