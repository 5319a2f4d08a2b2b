"""CPU tensors over the memory of emulated npu tensors, and operators that the CPU's kernels compute on them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from alltoallv_emulator import graphs

__all__ = ["host_view", "on_host", "synchronize", "to_npu"]

_PLAIN = {int, float, bool, str, type(None), torch.dtype}  # arguments that are passed to the host unchanged
_CPU = torch.device("cpu")
_MOST_HOSTS = 10_000

_hosts: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}  # CPU tensors over all of a storage's memory
_streams: dict[tuple[int, int], Any] = {}  # by device and handle; a handle is never used again
_generators: dict[int, tuple[torch.Generator, tuple[int, int]]] = {}  # by the npu generator's id


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

        def back(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return views[id(value)][1] if id(value) in views else to_npu(value, device)

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
        return _mapped(back, results)

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


def to_npu(result: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copies values to a fresh npu tensor, with the same strides if they describe dense memory."""
    if result.layout != torch.strided:
        raise NotImplementedError(f"the emulator has no npu tensors of layout {result.layout}")
    target = torch.empty_like(result, device=device, dtype=dtype)
    if result.numel() > 0:
        host_view(target).copy_(result)
    return target
