"""The adapter of torch tensors for code that takes tensors of any framework, and error feedback in such tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.adapters import Adapter, Region
from alltoallv._calls.guard import COUNT_NAMES
from alltoallv.errors import BackendUnavailableError, InvalidTensorError
from alltoallv.quantization.requests import Feedback
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import Received, Work, counts_on_device
from alltoallv.torch.eager.observers import between_graphs
from alltoallv.torch.eager.tensors import as_input, check_tensor, core_name, empty, is_contiguous, region
from alltoallv.torch.engines.device import DeviceMember
from alltoallv.torch.engines.hccl import HcclMember, Streams
from alltoallv.torch.graph import calling, ops
from alltoallv.torch.graph.calling import is_watched


class ErrorFeedback(Feedback[Tensor]):
    """Keeps what quantization has lost of one vector, such as a gradient, in tensors on the vector's device.

    Give the same object to every reduction of that vector, one at a time. `state_dict` has ``error``, float32, one per
    element, and with ``gather="quantized"`` also ``gather_error``, one per element of the part that this rank reduces.
    Every rank has its own state: save it per rank. After a call that failed the state is undefined: `reset` it.
    """

    _title = "alltoallv.torch.ErrorFeedback"

    def _placed(self, array: Tensor, like: Tensor) -> Tensor:
        return array.to(like.device)

    def _zeros(self, count: int, like: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, device=like.device)

    def _copy(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.tensor(value, dtype=torch.float32, device="cpu").reshape(-1)
        return value.detach().to(torch.float32, copy=True).reshape(-1)

    def _count(self, array: Tensor) -> int:
        return array.numel()


T = TypeVar("T")


class _Tensors(Adapter[Tensor]):
    kind, tensor, feedback, handle = "a torch tensor", Tensor, ErrorFeedback, Work

    def check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)

    def contiguous(self, x: Tensor) -> Tensor:
        return as_input("x", x)

    def writable(self, x: Tensor) -> bool:
        return is_contiguous(x)

    name, region = staticmethod(core_name), staticmethod(region)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        return empty(shape, kind) if like.is_cpu else torch.empty(shape, dtype=kind, device=like.device)

    def key(self, x: Tensor) -> tuple[Hashable, ...]:
        return tuple(x.shape), x.dtype, x.device

    def device(self, x: Tensor) -> str:
        return str(x.device.type)

    call = staticmethod(between_graphs(lambda function, *args: function(*args)))

    def launch(self, x: Tensor, out: Tensor, start: Callable[[Region, Region, int], None]) -> None:
        if is_watched():
            calling.watch_launch(_launches.setdefault(start, partial(_launch, start)), x, out)
        else:
            _launch(start, x, out)

    def watches(self) -> bool:
        return is_watched()

    def show(self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], run: Callable[[], None]) -> None:
        if not is_watched():
            return run()
        states = [x for x in outputs if isinstance(x, Tensor)]  # others are NumPy's
        calling.watch_call(name, None, states, list(inputs), run)

    def engine(self, x: Tensor, member: Any) -> DeviceMember:
        if member is not None:
            return HcclMember(member)
        if not dist.is_initialized():
            raise BackendUnavailableError(
                f"x lies on {x.device} and torch.distributed has no default group, expected one, or a communicator "
                "made by alltoallv.torch.from_group",
                id=5065,
            )
        of_group = groups.resolve(None, groups.device_of(x))
        if not isinstance(of_group, DeviceMember):
            raise InvalidTensorError(
                f"x lies on {x.device}, expected cpu, or a device that the default group moves", 14, id=2126
            )
        return of_group

    def check_place(self, engine: Any, *tensors: Tensor) -> None:
        calls.check_place(engine, *tensors)

    def exchange(self, engine: Any, operator: str, out: Tensor, x: Tensor, layout: Any) -> None:
        calls.exchange(engine, operator, out.view(-1), x.view(-1), layout).run()

    def exchange_counted(self, engine: Any, x: Tensor, counts: Sequence[Any], capacity: int) -> Received:
        sends, sdispls, recvs = [
            None if each is None else counts_on_device(name, each, x.device, engine.size)
            for name, each in zip(COUNT_NAMES, counts, strict=True)
        ]
        flat, *others = ops.all_to_all_v_counted(x.view(-1), sends, sdispls, recvs, capacity, 1, engine)
        return Received(flat.view(1, capacity), *others)

    def reduce(self, engine: Any, request: QuantizedReduction, tensors: Sequence[Tensor]) -> None:
        engine.quantized_reduce(request, *tensors).run()

    def values(self, x: Tensor) -> Any:
        return x.detach().to("cpu", torch.float32).numpy()


def _launch(start: Callable[[Region, Region, int], None], x: Tensor, out: Tensor) -> None:
    if x.is_cpu:
        start(region(x), region(out), 0)
    else:
        Streams().launch(x.device, lambda stream: start(region(x), region(out), stream), True, lambda: ())


_launches: dict[Any, Any] = {}  # what the modes have seen, by what it starts
ADAPTER = _Tensors()
