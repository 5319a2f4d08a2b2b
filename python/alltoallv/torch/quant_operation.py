"""The ATB-shaped quantized AllReduce on torch tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from alltoallv import _core, hccl
from alltoallv.backends.hccl import DeviceMember
from alltoallv.communicator import Communicator, connect
from alltoallv.errors import InvalidTensorError
from alltoallv.params import DeviceInfo
from alltoallv.quant_operations import QuantOperation
from alltoallv.quant_params import QuantAllReduceParam, QuantType
from alltoallv.quantization import Quantization, QuantizedReduction
from alltoallv.torch.quantized_calls import ErrorFeedback
from alltoallv.torch.tensors import as_input, check_apart, check_output, core_name, empty


class QuantAllReduceOperation(QuantOperation[Tensor]):
    """`alltoallv.QuantAllReduceOperation` on tensors of the CPU or of an NPU, with the same bits.

    On an NPU the codes travel over HCCL, as bytes of an all-to-all and an all-gather, and are summed on the device. A
    call is enqueued on torch's current stream; the host waits only to read ``scale`` and ``offset``, which the ranks
    compare.
    """

    def __init__(
        self,
        param: QuantAllReduceParam,
        communicator: Communicator | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        super().__init__(param, communicator, device=device)
        self._param = param
        self._communicator = communicator
        self._npu = communicator is not None and communicator.backend == "hccl"
        self._checks_device = device is None
        self._member: DeviceMember | None = None

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

        An allocated output lies in shared memory for a tensor of the CPU, else on the device of `x`. On NPU
        ``timeout`` is the communicator's own, and ``HcclError`` is raised, too.
        """
        if self._communicator is None and self._plan is None and isinstance(x, Tensor):
            self._npu = x.device.type == "npu"
        return self._reduce(x, scale, offset, out, error_feedback, timeout)

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        core = connect(param, self._npu)
        self._communicator = Communicator(core)
        return core

    def _as_input(self, name: str, x: Tensor) -> Tensor:
        x = as_input(name, x)
        expected = "npu" if self._npu else "cpu"
        if x.device.type != expected:
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
        if self._npu:
            return torch.empty(like.shape, dtype=kind, device=like.device)
        return empty(tuple(like.shape), kind)

    def _execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], timeout: float) -> None:
        if not self._npu:
            places, targets = ([(a.data_ptr(), a.nbytes) for a in tensors] for tensors in (inputs, outputs))
            self._core.execute(places, targets, timeout)
            return
        assert self._communicator is not None  # setup has connected
        if self._member is None:
            self._member = DeviceMember(self._communicator)
        x, out, states = inputs[0], outputs[0], outputs[1:]
        if out.data_ptr() != x.data_ptr() or out.dtype != x.dtype:
            self._checked(check_apart, out, x)
        self._member.quantized_reduce(self._request(inputs, core_name(out.dtype)), out, x, *states).run()

    def _request(self, inputs: Sequence[Tensor], out_dtype: str) -> QuantizedReduction:
        x, counts = inputs[0], (inputs[0].numel(),)
        dtype = core_name(x.dtype)
        if self._param.quant_type == QuantType.DYNAMIC:
            return QuantizedReduction("quantized_all_reduce", dtype, out_dtype, counts, self._param.quantization)
        scale, offset = (tensor.cpu().float().view(-1).numpy() for tensor in inputs[1:])
        return QuantizedReduction(
            "quantized_all_reduce", dtype, out_dtype, counts, Quantization(), scale, offset=float(offset[0])
        )
