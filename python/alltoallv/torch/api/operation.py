"""The ATB-shaped AllToAllV operator on torch tensors."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv.atb.operations import Operation
from alltoallv.atb.params import AllToAllVParam, DeviceInfo
from alltoallv.communicator import Communicator, connect
from alltoallv.errors import InvalidTensorError
from alltoallv.launch import hccl
from alltoallv.torch.api.tensors import as_input, check_output, core_name, empty
from alltoallv.torch.engines.npu import Streams
from alltoallv.torch.graph.graphs import between_graphs


class AllToAllVOperation(Operation[Tensor]):
    """`alltoallv.AllToAllVOperation` on tensors of the CPU or of an NPU.

    On an NPU it is launched on torch's current stream, over HCCL, and the host does not wait; the param is checked
    against the device's family and the number of devices, at the first call if not when it is made.
    """

    def __init__(
        self,
        param: AllToAllVParam,
        communicator: Communicator | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        super().__init__(param, communicator, device=device)
        self._npu = False
        self._checks_device = device is None
        if communicator is not None:
            self._npu = communicator.backend == "hccl"

    @between_graphs
    def __call__(self, x: Tensor, *, out: Tensor | None = None, timeout: float | None = None) -> Tensor:
        """Exchanges `x`, a tensor of any shape of 1 to 8 dimensions and one of ATB's seven dtypes.

        Arguments, result and errors are those of `alltoallv.AllToAllVOperation`; an allocated output lies in shared
        memory for a tensor of the CPU, else on the device of `x`. On NPU ``HcclError`` is raised, too.
        """
        if self._communicator is None and self._plan is None and isinstance(x, Tensor):
            self._npu = x.device.type == "npu"
        return self._exchange(x, out, timeout)

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        return connect(param, self._npu)

    def _as_input(self, x: Tensor) -> Tensor:
        x = as_input("x", x)
        expected = "npu" if self._npu else "cpu"
        if x.device.type != expected:
            raise InvalidTensorError(f"x lies on {x.device}, expected {expected}, as the operation's communicator", 14)
        if self._npu and self._checks_device:
            _core.check_create(self.param, DeviceInfo(*hccl.devices()))
            self._checks_device = False
        return x

    def _check_output(self, out: Tensor) -> None:
        check_output("out", out, out.dtype)  # the core compares it with the input's

    def _key(self, x: Tensor) -> tuple[Hashable, ...]:
        return tuple(x.shape), x.dtype, x.device

    def _describe(self, x: Tensor) -> _core.TensorDesc:
        return _core.TensorDesc(x.shape, core_name(x.dtype))

    def _allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device) if self._npu else empty(shape, like.dtype)

    def _execute(self, x: Tensor, out: Tensor, timeout: float) -> None:
        def start(stream: int) -> None:
            self._core.execute(x.data_ptr(), x.nbytes, out.data_ptr(), out.nbytes, timeout, stream)

        if self._npu:
            Streams().launch(x.device, start, True, lambda: ())
        else:
            start(0)
