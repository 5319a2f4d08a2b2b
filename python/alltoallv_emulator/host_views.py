"""CPU tensors over the memory of emulated npu tensors, and operators that the CPU's kernels compute on them."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from alltoallv.npu_ops.registry import Operator
from alltoallv_emulator import graphs

__all__ = ["host_view", "on_host", "synchronize", "to_npu"]

_PLAIN = {int, float, bool, str, type(None), torch.dtype}  # arguments that are passed to the host unchanged
_CPU = torch.device("cpu")
# Operators that take tensors of the host beside tensors of a device, as all of ATB's do.
_MIXED = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_foreach_copy", "aten::_foreach_copy_", "aten::copy", "aten::resize_as_",
    "aten::_ctc_loss", "aten::_pack_padded_sequence", "_C_ascend::dispatch_ffn_combine",
    "_C_ascend::swap_blocks",
}  # fmt: skip
_LOWEST = 64  # an address below every tensor's, and aligned for every dtype

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # views and their npu tensors, in the order of the arguments

_memory: dict[torch.dtype, torch.Tensor] = {}  # a CPU tensor from _LOWEST on over all addresses
_streams: dict[tuple[int, int], Any] = {}  # by device and handle; a handle is never used again
_generators: dict[int, tuple[torch.Generator, tuple[int, int]]] = {}  # by the npu generator's id


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor over the memory of an npu tensor. The caller waits for the tensor's stream first."""
    memory = _memory.get(tensor.dtype)
    if memory is None:
        memory = _memory[tensor.dtype] = _all_memory(tensor.dtype)
    address = tensor.data_ptr()  # 0 if the tensor is empty
    offset = (address - _LOWEST) // tensor.itemsize if address else 0
    view = memory.as_strided(tensor.size(), tensor.stride(), offset).data  # .data: versions of its own for autograd
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def _all_memory(dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of a storage that no address is outside of; making a storage for each view takes longer."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype).set_(torch._C._construct_storage_from_data_pointer(_LOWEST, _CPU, 2**62))


def synchronize(device: torch.device) -> None:
    """Waits for the current stream of a device."""
    graphs.check_waiting()
    if device.index == torch.npu.current_device():
        key = device.index, _handles()(device.index)
        stream = _streams.get(key)
        if stream is None:
            stream = _streams[key] = torch.npu.current_stream(device.index)
        stream.synchronize()
    else:
        with torch.npu.device(device):  # also initializes the device at its first use
            torch.npu.current_stream().synchronize()


@functools.cache
def _handles() -> Callable[[int], int]:
    """Returns a function that gives the handle of a device's current stream."""
    handle: Callable[[int], int] = importlib.import_module("torch_npu._C")._npu_getCurrentRawStreamNoWait
    return handle


def _to_host(value: Any, views: _Pairs, asked: list[torch.device], places: set[torch.device]) -> Any:
    """Replaces npu tensors by views, which it adds to ``views``, and npu devices, added to ``asked``, by the CPU.

    Adds to ``places`` the devices of all tensors but the host's scalars, which go with any other.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        if not value.is_cpu or value.dim():
            places.add(value.device)
        if value.is_cpu:
            return value
        view = host_view(value)
        views.append((view, value))
        return view
    if kind is tuple or kind is list:
        return kind([_to_host(item, views, asked, places) for item in value])
    if kind is torch.device and value.type == "npu":
        asked.append(value if value.index is not None else torch.device("npu", torch.npu.current_device()))
        return _CPU
    if kind is torch.Generator and value.device.type == "npu":
        return _host_generator(value)
    return value


def _from_host(value: Any, views: _Pairs, device: torch.device) -> Any:
    """Replaces views by their npu tensors, and other CPU tensors by copies on the device."""
    if isinstance(value, torch.Tensor):
        for view, npu in views:
            if view is value:
                return npu
        return to_npu(value, device)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_from_host(item, views, device) for item in value])
    return tree_map(lambda item: _from_host(item, views, device), value) if isinstance(value, tuple) else value


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """Returns the CPU generator that draws for an npu generator; it starts anew when that is seeded or gets a state."""
    state = generator.get_state()  # seed and offset, 8 bytes each
    seed, offset = state.view(torch.int64).tolist()
    cached = _generators.get(id(generator))
    if cached is None or cached[1] != (seed, offset):
        host = torch.Generator().manual_seed((seed + offset) % 2**63)
    else:
        host = cached[0]
    state.view(torch.int64)[1] = offset + 4  # so that a later set_seed or set_state is noticed
    generator.set_state(state)
    _generators[id(generator)] = host, (seed, offset + 4)
    return host


@functools.cache
def _native() -> Any:
    """Returns the module that does in C++ what `on_host` says, for the arguments that nearly all calls have."""
    from alltoallv_emulator import _host

    stream = _handles() if os.environ.get("TASK_QUEUE_ENABLE") == "0" else None
    _host.install(torch.Tensor, torch.dtype, stream, synchronize, to_npu, torch.empty_like, graphs.waiting)
    return _host


def on_host(operator: Any, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns a function that runs the operator with the CPU's kernel on views of the same memory.

    A function of CPU tensors may take the kernel's place.
    """
    ours = isinstance(operator, Operator)  # our formulas write into the tensors that they get
    outs = set() if ours else {argument.name for argument in operator._schema.arguments if argument.is_out}
    name, call = operator._schema.name, function or getattr(operator, "_op", operator)
    mixed = name in _MIXED or name.startswith("atb::")

    def run(*args: Any, **kwargs: Any) -> Any:
        targets = {name: kwargs.pop(name) for name in outs if name in kwargs} if outs else {}
        views: _Pairs = []
        asked: list[torch.device] = []
        places: set[torch.device] = set()
        host_args = [_to_host(value, views, asked, places) for value in args]
        host_kwargs = {key: _to_host(value, views, asked, places) for key, value in kwargs.items()}
        for target in targets.values():
            _to_host(target, views, asked, places)
        if len(places) > 1 and not mixed:
            why = f"expected all tensors to be on the same device, but found {', '.join(sorted(map(str, places)))}"
            if isinstance(operator, Operator):
                operator.refuse(args, kwargs, why)
            raise RuntimeError(f"{name}: {why}")
        # Results go to the device that an argument names, else to the tensors' device.
        devices = [*asked, *[npu.device for _, npu in views]] or [torch.device("npu", torch.npu.current_device())]
        for used in devices if len(devices) == 1 else set(devices):
            synchronize(used)
        # An out may have any size before the call: the kernel fills a fresh tensor, which is then copied to it.
        fresh = {name: _empty_like_out(target) for name, target in targets.items()}
        results = call(*host_args, **host_kwargs, **fresh)
        if targets:
            written = [_fill_out(target, fresh[name]) for name, target in targets.items()]
            returned = len(operator._schema.returns)
            return None if returned == 0 else written[0] if returned == 1 else tuple(written)
        return _from_host(results, views, devices[0])

    return run if outs else _native().OnHost(call, run)


def _empty_like_out(target: Any) -> Any:
    if isinstance(target, (list, tuple)):
        return [_empty_like_out(item) for item in target]
    return torch.empty(0, dtype=target.dtype)


def _fill_out(target: Any, result: Any) -> Any:
    if isinstance(target, (list, tuple)):
        return [_fill_out(a, b) for a, b in zip(target, result, strict=True)]
    if target.size() != result.size():
        target.resize_(result.size())
    host_view(target).copy_(result)
    return target


def to_npu(result: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copies values to a fresh npu tensor, with the same strides if they describe dense memory."""
    if result.layout != torch.strided:
        raise NotImplementedError(f"the emulator has no npu tensors of layout {result.layout}")
    if dtype in (None, result.dtype) and result.is_contiguous() and not (result.is_conj() or result.is_neg()):
        target = torch.empty(result.size(), dtype=result.dtype, device=device)
        ctypes.memmove(target.data_ptr(), result.data_ptr(), result.nbytes)
        return target
    target = torch.empty_like(result, device=device, dtype=dtype)
    if result.numel() > 0:
        host_view(target).copy_(result)
    return target
