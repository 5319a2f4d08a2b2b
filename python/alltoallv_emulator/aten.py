"""Runs aten operators on emulated npu tensors with the CPU's kernels, on the same memory.

torch_npu's wheel gives an npu tensor its memory, streams, events, copies and views; what it computes with are kernels
of CANN, which do not exist here. :func:`install` puts in their place, for every operator that has a CPU kernel: wait
for the current stream, make CPU tensors over the memory of the npu tensors, run the operator on them, and give a fresh
result memory of the npu's own. The results are therefore the CPU's, bit for bit. What has no CPU kernel keeps
torch_npu's and fails in the emulator with an error that names it.

``python -m alltoallv run --emulate-npu`` installs this in every rank as soon as torch_npu has been imported.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from alltoallv._calls.kernels import providers
from alltoallv_emulator import graphs

__all__ = ["host_view", "install", "on_host"]

# torch_npu's own operators for memory, views and their bookkeeping stay: they are what the emulator is to run.
_KEPT = {
    "empty.memory_format", "empty_strided", "empty_like", "new_empty_strided", "resize_", "_copy_from_and_resize",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to",
    "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "copy_",
}  # fmt: skip

_PLAIN = {int, float, bool, str, type(None), torch.dtype}  # arguments that are passed to the host unchanged
_CPU = torch.device("cpu")
_MOST_HOSTS = 10_000

_libraries: list[Any] = []  # registrations live as long as these
_hosts: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}  # CPU tensors over all of a storage's memory
_streams: dict[tuple[int, int], Any] = {}  # by device and handle; a handle is never used again
_generators: dict[int, tuple[torch.Generator, tuple[int, int]]] = {}  # by the npu generator's id


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
    from alltoallv_emulator import operators  # these use this module

    _libraries.append(operators.install())
    graphs.install()
    providers["npu"] = _interpreted_kernels


def _interpreted_kernels() -> Any:
    from alltoallv_emulator import kernels

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
    return on_host(operator) if kernels else None


def _like_cpu(name: str) -> Callable[..., Any]:
    """Makes an operator's gradients those of the CPU, if torch_npu has its own."""
    kernel = torch.library.get_kernel(f"aten::{name}", "AutogradCPU")
    return kernel.call_boxed


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor over the memory of an npu tensor. The caller waits for the tensor's stream first."""
    storage, dtype = tensor.untyped_storage(), tensor.dtype
    key = storage.data_ptr(), storage.nbytes(), dtype
    whole = _hosts.get(key)
    if whole is None:
        if len(_hosts) > _MOST_HOSTS:
            _hosts.clear()
        with torch.inference_mode(False):
            host = torch._C._construct_storage_from_data_pointer(key[0], _CPU, key[1])
            whole = _hosts[key] = torch.empty(0, dtype=dtype).set_(host)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _is_npu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def synchronize(device: torch.device) -> None:
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


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Applies ``change`` to every leaf of a tree; torch's pytree takes ten times as long."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(change, one) for one in tree])
    if kind is dict:
        return {name: _mapped(change, one) for name, one in tree.items()}
    return tree_map(change, tree) if isinstance(tree, tuple) else change(tree)  # named results


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """Returns the CPU generator that draws for an npu generator; it starts anew when that is seeded or gets a state."""
    state = generator.get_state()  # seed and offset, 8 bytes each
    seed, offset = state.view(torch.int64).tolist()
    known = _generators.get(id(generator))
    if known is None or known[1] != (seed, offset):
        host = torch.Generator().manual_seed((seed + offset) % 2**63)
    else:
        host = known[0]
    state.view(torch.int64)[1] = offset + 4  # so that a later set_seed or set_state is noticed
    generator.set_state(state)
    _generators[id(generator)] = host, (seed, offset + 4)
    return host


def on_host(operator: Any) -> Callable[..., Any]:
    """Returns a function that runs the operator with the CPU's kernel on views of the same memory."""
    outs = {argument.name for argument in operator._schema.arguments if argument.is_out}

    call = getattr(operator, "_op", operator)

    def run(*args: Any, **kwargs: Any) -> Any:
        targets = {name: kwargs.pop(name) for name in outs if name in kwargs} if outs else {}
        seen: dict[torch.device, None] = {}  # devices of the tensors, in the order of the arguments
        asked: list[torch.device] = []
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # view's id -> (view, npu tensor)

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.device.type != "npu":
                    return value
                seen[value.device] = None
                view = host_view(value)
                views[id(view)] = view, value
                return view
            if isinstance(value, torch.device) and value.type == "npu":
                asked.append(value if value.index is not None else torch.device("npu", torch.npu.current_device()))
                return _CPU
            if isinstance(value, torch.Generator) and value.device.type == "npu":
                return _host_generator(value)
            return value

        def to_npu(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return views[id(value)][1] if id(value) in views else _to_npu(value, device)

        host_args = [value if type(value) in _PLAIN else _mapped(to_host, value) for value in args]
        host_kwargs = {name: _mapped(to_host, value) for name, value in kwargs.items()}
        _mapped(to_host, targets)
        # Results go to the device that an argument names, else to that of the tensors.
        device = next(iter((*asked, *seen)), None) or torch.device("npu", torch.npu.current_device())
        for used in {**seen, device: None}:
            synchronize(used)
        # An out may have any size before the call: the kernel fills a fresh tensor, which is then copied to it.
        fresh = {name: _empty_like_out(target) for name, target in targets.items()}
        results = call(*host_args, **host_kwargs, **fresh)
        if targets:
            written = [_fill_out(target, fresh[name]) for name, target in targets.items()]
            returned = len(operator._schema.returns)
            return None if returned == 0 else written[0] if returned == 1 else tuple(written)
        return _mapped(to_npu, results)

    return run


def _empty_like_out(target: Any) -> Any:
    if isinstance(target, (list, tuple)):
        return [_empty_like_out(one) for one in target]
    return torch.empty(0, dtype=target.dtype)


def _fill_out(target: Any, result: Any) -> Any:
    if isinstance(target, (list, tuple)):
        return [_fill_out(a, b) for a, b in zip(target, result, strict=True)]
    if target.size() != result.size():
        target.resize_(result.size())
    host_view(target).copy_(result)
    return target


def _to_npu(result: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copies values to a fresh npu tensor, with the same strides if they describe dense memory."""
    if result.layout != torch.strided:
        raise NotImplementedError(f"the emulator has no npu tensors of layout {result.layout}")
    target = torch.empty_like(result, device=device, dtype=dtype)
    if result.numel() > 0:
        host_view(target).copy_(result)
    return target


def _to_copy(operator: Any) -> Callable[..., Any]:
    """Runs _to_copy on one device like all operators; between host and device it copies before it returns."""
    here, between = on_host(operator), torch.library.get_kernel("aten::_to_copy", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(tensor: torch.Tensor, **kwargs: Any) -> Any:
        device = kwargs.get("device") or tensor.device
        if _is_npu(tensor) and device == tensor.device:
            return here(tensor, **kwargs)
        if kwargs.keys() <= {"device", "dtype"} and tensor.layout == torch.strided:
            if _is_npu(tensor) and device.type == "cpu":
                synchronize(tensor.device)
                return host_view(tensor).to(device, kwargs.get("dtype"), copy=True)
            if device.type == "npu" and tensor.device.type == "cpu":
                if device.index is None:
                    device = torch.device("npu", torch.npu.current_device())
                synchronize(device)
                return _to_npu(tensor, device, kwargs.get("dtype"))
        return between.call_boxed(keys, tensor, **kwargs)

    return run


def _copy(native: Any) -> Callable[..., Any]:
    """Runs copy_ on torch_npu's stream if it only moves bytes and nobody waits; else the CPU's kernel on host views."""

    def run(keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        graphs.check_waiting()
        moves = (
            (non_blocking or _is_npu(target) == _is_npu(source))
            and target.dtype == source.dtype
            and target.size() == source.size()
            and target.is_contiguous()
            and source.is_contiguous()
        )
        if moves:
            return native.call_boxed(keys, target, source, non_blocking)
        sides = [tensor for tensor in (target, source) if _is_npu(tensor)]
        for device in {tensor.device for tensor in sides}:
            synchronize(device)
        host_target, host_source = (host_view(t) if _is_npu(t) else t for t in (target, source))
        host_target.copy_(host_source)
        return target

    return run
