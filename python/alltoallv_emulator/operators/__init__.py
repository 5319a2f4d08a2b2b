"""torch_npu's own operators (``npu::``) on emulated NPUs, written from their documented formulas in ordinary torch.

One module for each family. Every operator is computed by a function of CPU tensors over the memory of the npu tensors.
Where torch_npu has a gradient for an operator, its own autograd calls the operator's backward operator, which is here
as well. What is not here raises NotImplementedError in the caller, before it gets into torch_npu's queue of launches:
an operator that fails in there takes all later ones with it. docs/npu-operators.md lists the operators.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch

from alltoallv_emulator.operators import registry

__all__ = ["install"]

# Of torch_npu's own kernels, those that only do bookkeeping or are made of aten operators.
_KEPT = {
    "get_storage_size", "copy_memory_", "npu_change_data_ptr", "set_op_timeout_ms", "npu_reshape", "npu_reshape.out",
    "super_kernel_scope_begin", "super_kernel_scope_end",
}  # fmt: skip


def install() -> Any:
    """Registers the operators of the installed torch_npu; the result must live as long as they are to."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    library = torch.library.Library("npu", "IMPL")
    for qualified in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")):
        namespace, _, name = qualified.partition("::")
        if namespace == "npu" and name not in _KEPT:
            library.impl(name, registry.kernel(name), "PrivateUse1")
    return library
