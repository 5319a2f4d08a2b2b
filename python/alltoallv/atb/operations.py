"""The ATB-shaped AllToAllV operator on tensors of any framework."""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from alltoallv import _core
from alltoallv._calls import adapters
from alltoallv._calls.adapters import Adapter, check_on_npu
from alltoallv._calls.protocol import Member
from alltoallv._calls.regions import Region
from alltoallv.atb.operation import A, Operation, describe
from alltoallv.atb.params import COUNTS, FIELDS, AllToAllVParam, DeviceInfo
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError


class AllToAllVOperation(Operation):
    """Exchanges data between all ranks as its param says. It is a plan, so a repeated call is cheap.

    Takes NumPy arrays and tensors of torch, MindSpore and Paddle, and returns the same kind. Checks and set-up are
    paid once per shape and dtype of the input. Calls are collective: every rank makes the same ones in the same order.
    When a rank's own checks fail in a call, the call fails on every rank. A call on the CPU blocks until this rank's
    output is complete. On an NPU it is launched on torch's current stream, over HCCL, and the host does not wait; the
    param is checked against the device's family and the number of devices, at the first call if not when it is made. On
    a GPU the engine of torch.distributed's group moves the data, as for `alltoallv.torch.all_to_all_v`.
    Results have gradients in MindSpore's PyNative mode alone; in its graphs the results of the cell
    `alltoallv.mindspore.AllToAllVCell` have.
    """

    def __init__(
        self,
        param: AllToAllVParam,
        communicator: Member | None = None,
        *,
        device: DeviceInfo | None = None,
        capacity: int | None = None,
    ) -> None:
        """Checks the param as ATB's CreateOperation does.

        Args:
            param: Copied; later changes have no effect.
            communicator: One of ``param.rank_size`` ranks in which this is ``param.rank``, for tensors of a GPU as
                `alltoallv.torch.from_group` makes it. Left out, the one that the param describes is found or made at
                the first call; tensors of a GPU use torch.distributed's default group.
            device: On NPU, the device whose family and count the param is checked against.
            capacity: For tensors of an NPU, of torch or MindSpore, whose counts lie on the device: how many elements
                this rank can receive. The param's four arrays are empty then, and a call takes the counts.

        Raises:
            InvalidParamError: a field has a value that ATB also refuses (docs/compatibility.md).
        """
        super().__init__(param, _core.AllToAllVParam, communicator, device)
        self._capacity, self._param = capacity, param
        if capacity is not None:
            param = _with_capacity(param, capacity)
        self._core = _core.AllToAllVOperation(param, device, self._given_core, self._connect)
        self._begin(self._core, "all_to_all_v", communicator)
        self._counted: Any = None  # the engine of calls with counts on the device
        self._starts: dict[float, partial[None]] = {}  # by timeout: alike for calls that are alike

    @property
    def param(self) -> _core.AllToAllVParam:
        """A copy of the param that the operation was made with; with a capacity its arrays are what is checked."""
        return self._core.param

    def infer_shape(self, x: object) -> tuple[int, ...]:
        """Returns the output's shape for `x`, after ATB's checks of it; the peers' call also raises their errors."""
        return tuple(self._checks.infer_shape([self._checked(describe, x)]).shape)

    @overload
    def __call__(self, x: A, *, out: A | None = None, timeout: float | None = None) -> A: ...
    @overload
    def __call__(self, x: Any, *, send_counts: Any, sdispls: Any = None, recv_counts: Any = None) -> Any: ...
    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        timeout: float | None = None,
        send_counts: Any = None,
        sdispls: Any = None,
        recv_counts: Any = None,
    ) -> Any:
        """Exchanges `x`.

        Args:
            x: Any shape of 1 to 8 dimensions, taken flat; one of ATB's seven dtypes: float16, float32, int8,
                int16, int32, int64, bfloat16. Copied first if it is not contiguous.
            out: Shape ``[1, sum(recv_counts)]``, kind and dtype of `x`, contiguous and writable, apart from `x` in
                memory. Left out, one is allocated: in shared memory, or on the NPU where `x` is.
            timeout: Seconds to wait for the peers; left out, the communicator's own.
            send_counts, sdispls, recv_counts: With a capacity, instead of `out` and `timeout`: see
                `alltoallv.torch.all_to_all_v`. They may lie on the device, and the host does not read them.

        Returns:
            `out`, or the tensor allocated; with a capacity the `Received` of the front end, without gradient, whose
            output has the shape ``[1, capacity]``.

        Raises:
            InvalidTensorError, InvalidParamError: an argument of this rank, or of a peer, is wrong; ``code`` is ATB's.
            PeerMismatchError: two ranks disagree about the operator, dtype or counts.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
            HcclError: on NPU, a call into HCCL failed.
        """
        counted = self._capacity is not None or send_counts is not None
        y: Any = None
        if not counted:
            adapter = adapters.by_class.get(type(x)) or self._adapter(x)
            y = adapter.call(self._run, x, out, timeout)
            if y is not None:
                return y
        adapter = self._adapter(x)
        if counted:
            return self._exchange_counted(adapter, x, (send_counts, sdispls, recv_counts), out, timeout)
        y = adapter.differentiated(self, x, out, None, timeout)
        return adapter.call(self._exchange, adapter, x, out, timeout) if y is None else y

    def _run(self, x: A, out: A | None, timeout: float | None) -> Any:
        """Runs on tensors for which the core is set up; returns None, with nothing done, for others."""
        return self._core.call(x, out, timeout)

    def _exchange(self, adapter: Adapter[A], x: A, out: A | None, timeout: float | None) -> A:
        self._find_engine(adapter, x)
        limit = self._checked(_core.read_timeout, timeout)
        x = self._checked(self._as_input, "x", x, adapter)
        if out is not None:
            self._checked(self._check_output, out, adapter)
        target = self._set_up(adapter, [x], out)

        if self._engine is not None:
            self._checked(_core.check_apart, adapter.region(target), adapter.region(x))
            param = self._core.param
            layout = param.send_counts, param.sdispls, param.recv_counts, param.rdispls
            adapter.exchange(self._engine, self._operator, target, x, layout)
            return target
        start = self._starts.get(limit) or self._starts.setdefault(limit, partial(_start, self._core, limit))
        if self._npu or adapter.queues() or adapter.watches():
            adapter.launch(x, target, start)
        else:
            start(adapter.region(x), adapter.region(target), 0)
        return target

    def _exchange_counted(self, adapter: Adapter[Any], x: Any, counts: tuple[Any, ...], out: Any, timeout: Any) -> Any:
        def check() -> int:
            if self._capacity is None or counts[0] is None:
                raise InvalidParamError("send_counts and capacity belong together, expected both or neither", id=1207)
            if out is not None or timeout is not None:
                raise InvalidParamError("capacity is given, expected a call without out and timeout", id=1208)
            check_on_npu("x", adapter.device(x))
            return self._capacity

        capacity = self._checked(check)
        x = self._checked(self._as_input, "x", x, adapter)
        self._planned(adapter, [x], None)
        if self._counted is None:
            self._counted = self._group or adapter.engine(x, self._communicator or Communicator(self._found))
        return adapter.exchange_counted(self._counted, x, counts, capacity)

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        self._found = super()._connect(param)
        return self._found

    def _check_create(self, device: DeviceInfo) -> None:
        _core.check_create(self.param, device)


def _with_capacity(param: AllToAllVParam, capacity: int) -> AllToAllVParam:
    """Returns a param for the core's checks of the tensors, where the counts lie on the device."""
    for name in COUNTS:
        if counts := getattr(param, name):
            raise InvalidParamError(f"{name} is {list(counts)}, expected none with a capacity", id=1209)
    _core.checked_least("capacity", capacity, 1)
    fields = {name: getattr(param, name) for name in FIELDS}
    nothing, others = (0,) * param.rank_size, (0,) * (param.rank_size - 1)
    fields |= {"send_counts": nothing, "sdispls": nothing}
    return AllToAllVParam(**fields | {"recv_counts": (capacity, *others), "rdispls": (0, *(capacity for _ in others))})


def _start(core: _core.AllToAllVOperation, limit: float, read: Region, written: Region, stream: int) -> None:
    core.execute([read], [written], limit, stream)
