"""The ATB-shaped quantized AllReduce on torch tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv.atb.params import DeviceInfo
from alltoallv.atb.quant_operations import QuantOperation
from alltoallv.atb.quant_params import QuantAllReduceParam, QuantType
from alltoallv.communicator import Communicator, connect
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.launch import hccl
from alltoallv.quantization.spec import Quantization, QuantizedReduction
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.calls import check_place
from alltoallv.torch.api.group import device_of
from alltoallv.torch.api.tensors import as_input, check_apart, check_output, core_name, empty
from alltoallv.torch.engines.group import TorchGroupCommunicator
from alltoallv.torch.engines.hccl import DeviceMember
from alltoallv.torch.graph.graphs import between_graphs
from alltoallv.torch.quantized.calls import ErrorFeedback

_OPERATOR = "quantized_all_reduce"


class QuantAllReduceOperation(QuantOperation[Tensor]):
    """`alltoallv.QuantAllReduceOperation` on tensors of the CPU, of a GPU or of an NPU, with the same bits.

    On a GPU or an NPU the codes travel over NCCL, HCCL or gloo, as bytes of an all-to-all and an all-gather, and are
    summed on the device. A call is enqueued on torch's current stream; the host waits only to read ``scale`` and
    ``offset``, which the ranks compare.

    ``communicator`` may also be what `alltoallv.torch.from_group` returns, for tensors of its device; without one,
    tensors on a GPU go through the default group of torch.distributed.
    """

    def __init__(
        self,
        param: QuantAllReduceParam,
        communicator: Communicator | TorchGroupCommunicator | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        group = communicator if isinstance(communicator, TorchGroupCommunicator) else None
        member = None if isinstance(communicator, TorchGroupCommunicator) else communicator
        super().__init__(param, member, device=device)
        self._given = communicator is not None
        self._npu = communicator is not None and communicator.backend == "hccl"
        self._checks_device = device is None
        self._engine: TorchGroupCommunicator | DeviceMember | None = None  # None in shared memory
        if group is not None:
            self._use(group)
        elif member is not None and self._npu:
            self._engine = DeviceMember(member)

    def _use(self, group: TorchGroupCommunicator) -> None:
        self._engine = group
        self._checks = _GroupChecks(self._core, self._param, group)

    @between_graphs
    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        *,
        out: Tensor | None = None,
        error_feedback: ErrorFeedback | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Reduces `x`. Arguments, result and errors are those of `alltoallv.QuantAllReduceOperation`.

        An allocated output lies in shared memory for a tensor of the CPU, else on the device of `x`. On GPU and NPU
        ``timeout`` is the communicator's own; on NPU ``HcclError`` is raised, too.
        """
        if not self._given and self._plan is None and isinstance(x, Tensor):
            self._npu = x.device.type == "npu"
            if self._engine is None and not (self._npu or x.is_cpu):
                self._use(_of_default_group(x))
        return self._reduce(x, scale, offset, out, error_feedback, timeout)

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        core = connect(param, self._npu)
        if self._npu:
            self._engine = DeviceMember(Communicator(core))
        return core

    def _as_input(self, name: str, x: Tensor) -> Tensor:
        x = as_input(name, x)
        if isinstance(self._engine, TorchGroupCommunicator):
            check_place(self._engine, x)
        elif x.device.type != (expected := "npu" if self._npu else "cpu"):
            raise InvalidTensorError(
                f"{name} lies on {x.device}, expected {expected}, as the operation's communicator", 14
            )
        if self._npu and self._checks_device:
            _core.QuantAllReduceOperation(self._param.core(), DeviceInfo(*hccl.devices()))
            self._checks_device = False
        return x

    def _check_output(self, out: Tensor) -> None:
        check_output("out", out, out.dtype)  # the core knows which it must be

    def _key(self, x: Tensor) -> Hashable:
        return tuple(x.shape), x.dtype, x.device

    def _describe(self, x: Tensor) -> _core.TensorDesc:
        return _core.TensorDesc(x.shape, core_name(x.dtype))

    def _allocate(self, like: Tensor, dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if like.is_cpu and self._engine is None:
            return empty(tuple(like.shape), kind)
        return torch.empty(like.shape, dtype=kind, device=like.device)

    def _execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], timeout: float) -> None:
        if self._engine is None:
            places, targets = ([(a.data_ptr(), a.nbytes) for a in tensors] for tensors in (inputs, outputs))
            self._core.execute(places, targets, timeout)
            return
        x, out, states = inputs[0], outputs[0], outputs[1:]
        self._checked(check_place, self._engine, x, out, *states)
        if out.data_ptr() != x.data_ptr() or out.dtype != x.dtype:
            self._checked(check_apart, out, x)
        request = self._checked(self._request, inputs, core_name(out.dtype))
        self._engine.quantized_reduce(request, out, x, *states).run()

    def _request(self, inputs: Sequence[Tensor], out_dtype: str) -> QuantizedReduction:
        x, counts = inputs[0], (inputs[0].numel(),)
        dtype = core_name(x.dtype)
        if self._param.quant_type == QuantType.DYNAMIC:
            return QuantizedReduction(_OPERATOR, dtype, out_dtype, counts, self._param.quantization)
        scale, offset = (tensor.cpu().float().view(-1).numpy() for tensor in inputs[1:])
        return QuantizedReduction(_OPERATOR, dtype, out_dtype, counts, Quantization(), scale, offset=float(offset[0]))


class _GroupChecks:
    """What the core's operation does as one rank of several, for a group of torch.distributed."""

    def __init__(
        self, core: _core.QuantAllReduceOperation, param: QuantAllReduceParam, group: TorchGroupCommunicator
    ) -> None:
        self._core, self._param, self._group = core, param, group

    def infer_shape(self, inputs: Sequence[_core.TensorDesc]) -> _core.TensorDesc:
        with guard(self._group, _OPERATOR):
            return self._core.check(inputs, [])

    def setup(self, inputs: Sequence[_core.TensorDesc], outputs: Sequence[_core.TensorDesc]) -> None:
        group, param = self._group, self._param
        with guard(group, _OPERATOR):
            self._core.check(inputs, outputs)
            if (param.rank, param.rank_size) != (group.rank, group.size):
                raise InvalidParamError(
                    f"rank and rank_size are {param.rank} and {param.rank_size}, expected {group.rank} and "
                    f"{group.size}, as in the group of domain '{group.domain}'"
                )

    def announce(self, code: int, message: str) -> None:
        self._group.fail(_OPERATOR, InvalidTensorError(message, code))


def _of_default_group(x: Tensor) -> TorchGroupCommunicator:
    """For tensors of a device that the param itself knows no communicator for."""
    if not dist.is_initialized():
        raise BackendUnavailableError(
            f"x lies on {x.device} and torch.distributed has no default group, expected one, or a communicator made by "
            "alltoallv.torch.from_group"
        )
    made = groups.resolve(None, device_of(x))
    assert isinstance(made, TorchGroupCommunicator)  # shared memory is the CPU's
    return made
