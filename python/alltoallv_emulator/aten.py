"""Runs aten operators on emulated npu tensors with the CPU's kernels, on the same memory.

torch_npu's wheel gives an npu tensor its memory, streams, events, copies and views; what it computes with are kernels
of CANN, which do not exist here. :func:`install` puts in their place, for every operator that has a CPU kernel: wait
for the current stream, make CPU tensors over the memory of the npu tensors, run the operator on them, and give a fresh
result memory of the npu's own. The results are therefore the CPU's, bit for bit. What has no CPU kernel keeps
torch_npu's and fails in the emulator with an error that names it.

``python -m alltoallv run --emulate-npu`` installs this in every rank as soon as torch_npu has been imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from alltoallv.quantization.spec import providers
from alltoallv_emulator import graphs, kernels, operators
from alltoallv_emulator.host_views import host_view, on_host, synchronize, to_npu

__all__ = ["install"]

# torch_npu's own operators for memory, views and their bookkeeping stay: they are what the emulator is to run.
_KEPT = {
    "empty.memory_format", "empty_strided", "empty_like", "new_empty_strided", "resize_", "_copy_from_and_resize",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to",
    "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "copy_",
}  # fmt: skip

_BASE_FORMATS = {0, 1, 2, 30}  # for others torch_npu copies by operators of CANN

_libraries: list[Any] = []  # registrations live as long as these


def install() -> None:
    """Registers the operators. torch_npu must have been imported before; a second call does nothing."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    registered = {key: set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in _KEYS}
    for name, operator in _operators(registered["PrivateUse1"] | registered["CPU"]):
        kernel = _replacement(name, operator)
        if kernel is not None:
            library.impl(name, kernel, "PrivateUse1")
    for name, _ in _operators(registered["AutogradPrivateUse1"]):
        library.impl(name, _like_cpu(name), "AutogradPrivateUse1", with_keyset=True)
    library.impl(
        "copy_", _copy(torch.library.get_kernel("aten::copy_", "PrivateUse1")), "PrivateUse1", with_keyset=True
    )
    _libraries.append(operators.install())
    graphs.install()
    providers["npu"] = _interpreted_kernels


def _interpreted_kernels() -> Any:
    return kernels.InterpretedKernels() if kernels.available() else None


_KEYS = ("PrivateUse1", "CPU", "AutogradPrivateUse1")
# Dispatch keys whose kernels compute an operator of CPU tensors.
_KERNELS = (
    "CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd",
)  # fmt: skip


def _operators(names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields the aten operators among the registered names. torch_npu also registers names without a schema."""
    for name in sorted(names):
        namespace, _, qualified = name.partition("::")
        base, _, overload = qualified.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        operator = getattr(packet, overload or "default", None)
        if operator is not None:
            yield qualified, operator


def _replacement(name: str, operator: Any) -> Callable[..., Any] | None:
    if name in _KEPT:
        return None
    kernels = [key for key in _KERNELS if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)]
    if "CompositeImplicitAutograd" in kernels and "CPU" not in kernels:
        return operator.decompose  # decomposes into operators that are here
    if any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns):
        return None  # a view
    if torch.Tag.inplace_view in operator.tags:
        return None  # changes the tensor, not its memory
    if name == "_to_copy":
        return _to_copy(operator)
    if name in ("div_.Tensor", "div_.Scalar"):
        return _div_(on_host(operator))
    if name in ("histc", "histc.out"):
        return on_host(operator, _histc)
    if name in ("linalg_qr", "linalg_qr.out"):
        return on_host(operator, _qr)
    if not kernels:
        return None
    return on_host(operator, _of_scalars(operator) if _loses_scalars(operator) else None)


def _loses_scalars(operator: Any) -> bool:
    """Returns whether an overload for scalars hands them on to this one, which cannot take them as numbers.

    It hands them on as tensors, of which torch makes numbers again for an operator in Python.
    """
    base = operator._schema.name.partition("::")[2]
    if torch._C._should_allow_numbers_as_tensors(base):
        return False
    return any("scalar" in name.lower() for name in getattr(torch.ops.aten, base).overloads())


def _of_scalars(operator: Any) -> Callable[..., Any]:
    """Runs an operator, or its overload for scalars where there is a number for a tensor."""
    every = getattr(torch.ops.aten, operator._schema.name.partition("::")[2])
    tensors = [str(argument.type) == "Tensor" for argument in operator._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        fits = all(isinstance(value, torch.Tensor) for value, tensor in zip(args, tensors, strict=False) if tensor)
        return (operator if fits else every)(*args, **kwargs)

    return run


def _like_cpu(name: str) -> Callable[..., Any]:
    """Makes an operator's gradients the CPU's, if torch_npu has its own."""
    kernel = torch.library.get_kernel(f"aten::{name}", "AutogradCPU")
    return kernel.call_boxed


def _div_(on_floats: Callable[..., Any]) -> Callable[..., Any]:
    """Divides integers in place as NPUs do, towards zero. ReduceOp.AVG needs it, and the CPU refuses it."""

    def run(target: torch.Tensor, other: Any) -> Any:
        if target.is_floating_point() or target.is_complex():
            return on_floats(target, other)
        return target.copy_(torch.div(target, other, rounding_mode="trunc"))

    return run


def _histc(
    tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Counts integers as NPUs do, exactly and in their dtype; the CPU only counts floating point numbers."""
    if tensor.is_floating_point():
        return torch.histc(tensor, bins, min, max, out=out)
    values, low, high = tensor.reshape(-1).long(), int(min), int(max)
    if low == high and len(values):
        low, high = int(values.min()), int(values.max())
    if low == high:
        low, high = low - 1, high + 1
    if low > high:
        raise RuntimeError(f"torch.histc: max must be larger than min, but got min {low} and max {high}")
    inside = values[(values >= low) & (values <= high)]
    places = ((inside - low) * bins).div(high - low, rounding_mode="floor").clamp(max=bins - 1)
    counts = places.bincount(minlength=bins).to(tensor.dtype)
    return counts if out is None else out.resize_(counts.size()).copy_(counts)


def _qr(matrix: torch.Tensor, mode: str = "reduced", **outs: torch.Tensor) -> Any:
    """Decomposes float16 too, as NPUs do: in float32, rounded at the end. The CPU refuses it."""
    given = tuple(outs[name] for name in ("Q", "R") if name in outs)  # torch hands them on in any order
    if matrix.dtype != torch.float16:
        return torch.linalg.qr(matrix, mode, out=given or None)
    results = [part.half() for part in torch.linalg.qr(matrix.float(), mode)]
    for out, part in zip(given, results, strict=False):
        out.resize_(part.size()).copy_(part)
    return given or tuple(results)


def _to_copy(operator: Any) -> Callable[..., Any]:
    """Runs _to_copy on one device like all operators; between host and device it copies before it returns."""
    here, between = on_host(operator), torch.library.get_kernel("aten::_to_copy", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(tensor: torch.Tensor, **kwargs: Any) -> Any:
        from_npu, device = not tensor.is_cpu, kwargs.get("device") or tensor.device
        if from_npu and device == tensor.device:
            return here(tensor, **kwargs)
        if kwargs.keys() <= {"device", "dtype"} and tensor.layout == torch.strided:
            if from_npu and device.type == "cpu":
                synchronize(tensor.device)
                return host_view(tensor).to(device, kwargs.get("dtype"), copy=True)
            if device.type == "npu" and not from_npu:
                if device.index is None:
                    device = torch.device("npu", torch.npu.current_device())
                synchronize(device)
                return to_npu(tensor, device, kwargs.get("dtype"))
        return between.call_boxed(keys, tensor, **kwargs)

    return run


def _copy(native: Any) -> Callable[..., Any]:
    """Runs copy_ on torch_npu's stream if it only moves bytes and nobody waits; else the CPU's kernel on host views."""
    format_of = torch.ops.npu.get_npu_format.default

    def run(keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        graphs.check_waiting()
        moves = (
            (non_blocking or target.is_cpu == source.is_cpu)
            and target.dtype == source.dtype
            and target.size() == source.size()
            and target.is_conj() == source.is_conj()
            and target.is_neg() == source.is_neg()
            and target.is_contiguous()
            and source.is_contiguous()
            and all(tensor.is_cpu or format_of(tensor) in _BASE_FORMATS for tensor in (target, source))
        )
        if moves:
            return native.call_boxed(keys, target, source, non_blocking)
        for device in {tensor.device for tensor in (target, source) if not tensor.is_cpu}:
            synchronize(device)
        host_target, host_source = (tensor if tensor.is_cpu else host_view(tensor) for tensor in (target, source))
        host_target.copy_(host_source)
        return target

    return run
