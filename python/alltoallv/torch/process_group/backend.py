"""The backend ``alltoallv`` of torch.distributed, registered by ``import alltoallv.torch``.

::

    dist.init_process_group("alltoallv")                      # or "cpu:alltoallv", or "cpu:alltoallv,cuda:nccl"

Over shared memory, for dense CPU tensors of ranks on one host: all_to_all, all_to_all_single, all_gather,
all_gather_into_tensor (all_gather_single), all_reduce, reduce_scatter, reduce_scatter_tensor (reduce_scatter_single),
broadcast and barrier, their coalesced forms, and what is made of them: DDP, FSDP2, functional collectives, object
collectives. Handed to gloo: point-to-point, gather, scatter, reduce, sparse tensors, tensor subclasses, and reductions
that the core does not know (BAND, BOR, BXOR, PREMUL_SUM, integer AVG). Tensors of accelerators go to the engine that
the group's configuration names for them, NCCL and HCCL if it names none. Ranks on several hosts use gloo for
everything, which a warning says once.

What the core checks holds here too: ranks that disagree about operator, dtype or sizes all raise
`PeerMismatchError`, late and lost ranks are named, and `alltoallv.torch` functions called with such a group use the
same communicator. Errors of this rank's arguments are also the RuntimeError that torch's own engines raise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    _DistributedBackendOptions,
)
from torch._C._distributed_c10d import Work as TorchWork

from alltoallv._calls.guard import guard
from alltoallv._calls.repeats import arrays_of
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api import collectives as calls
from alltoallv.torch.api import profile
from alltoallv.torch.api.tensors import PLAIN
from alltoallv.torch.process_group import engines
from alltoallv.torch.process_group.group import NAME, EngineGroup
from alltoallv.torch.process_group.work import BackendWork, WorkList, in_turn


class BackendParamError(InvalidParamError, RuntimeError):
    """An argument that the collective does not accept."""


class BackendTensorError(InvalidTensorError, RuntimeError):
    """A tensor that the collective does not accept."""


class AllToAllVGroup(EngineGroup):
    """A group whose CPU collectives run over shared memory; see the module."""

    def __init__(self, options: _DistributedBackendOptions, engine_options: Any = None) -> None:
        super().__init__(options, engine_options)
        self._pending: list[BackendWork] = []

    # Collectives over shared memory.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllreduceOptions()
        if len(tensors) == 1 and self._carries(tensors) and calls.reduces(tensors[0], opts.reduceOp):
            return self._run(
                "all_reduce",
                opts,
                lambda c: calls.all_reduce(c, tensors[0], opts.reduceOp),
                (opts.reduceOp.op, tensors[0], tensors[0]),
            )
        return self._hand_over("allreduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllreduceCoalescedOptions()
        if self._carries(tensors) and all(calls.reduces(tensor, opts.reduceOp) for tensor in tensors):
            return self._all([self.allreduce([tensor], opts) for tensor in tensors])
        return self._hand_over("allreduce_coalesced", tensors, tensors, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> TorchWork:
        opts = opts or ReduceScatterOptions()
        if len(output_tensors) == len(input_tensors) == 1:
            output, inputs = output_tensors[0], input_tensors[0]
            if self._carries([output, *inputs]) and calls.reduces(output, opts.reduceOp):
                return self._run(
                    "reduce_scatter", opts, lambda c: calls.reduce_scatter(c, output, inputs, opts.reduceOp)
                )
        return self._hand_over("reduce_scatter", output_tensors, output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        opts = opts or ReduceScatterOptions()
        if self._carries((output, input)) and calls.reduces(output, opts.reduceOp):
            return self._run(
                "reduce_scatter",
                opts,
                lambda c: calls.reduce_scatter_single(c, output, input, opts.reduceOp),
                (opts.reduceOp.op, input, output),
            )
        return self._hand_over("_reduce_scatter_base", (output,), output, input, opts)

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or ReduceScatterOptions()
        if self._carries([*output_tensors, *input_tensors]) and all(
            calls.reduces(output, opts.reduceOp) for output in output_tensors
        ):
            pairs = zip(output_tensors, input_tensors, strict=True)
            return self._all([self.reduce_scatter_single(*pair, opts) for pair in pairs])
        return self._hand_over("reduce_scatter_tensor_coalesced", output_tensors, output_tensors, input_tensors, opts)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllgatherOptions()
        if len(output_tensors) == len(input_tensors) == 1:
            outputs, tensor = output_tensors[0], input_tensors[0]
            if self._carries([tensor, *outputs]):
                return self._run("all_gather", opts, lambda c: calls.all_gather(c, outputs, tensor))
        return self._hand_over("allgather", input_tensors, output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or AllgatherOptions()
        if self._carries([*input_list, *(tensor for outputs in output_lists for tensor in outputs)]):
            # One list of outputs per rank here, one per tensor there.
            per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
            pairs = zip(per_tensor, input_list, strict=True)
            return self._all([self.allgather([outputs], [tensor], opts) for outputs, tensor in pairs])
        return self._hand_over("allgather_coalesced", input_list, output_lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        opts = opts or AllgatherOptions()
        if self._carries((output, input)):
            return self._run(
                "all_gather_into_tensor",
                opts,
                lambda c: calls.all_gather_single(c, output, input),
                (None, input, output),
            )
        return self._hand_over("_allgather_base", (input,), output, input, opts)

    def all_gather_single_coalesced(
        self, output_list: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or AllgatherOptions()
        if self._carries([*output_list, *input_list]):
            pairs = zip(output_list, input_list, strict=True)
            return self._all([self.all_gather_single(*pair, opts) for pair in pairs])
        return self._hand_over("allgather_into_tensor_coalesced", input_list, output_list, input_list, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> TorchWork:
        opts = opts or AllToAllOptions()
        splits = output_split_sizes, input_split_sizes
        if self._carries((output, input)):
            return self._run(
                "all_to_all_single",
                opts,
                lambda c: calls.all_to_all_single(c, output, input, *splits),
                (splits, input, output),
            )
        return self._hand_over("alltoall_base", (input,), output, input, *splits, opts)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllToAllOptions()
        if self._carries([*output_tensors, *input_tensors]):
            return self._run("all_to_all", opts, lambda c: calls.all_to_all(c, output_tensors, input_tensors))
        return self._hand_over("alltoall", input_tensors, output_tensors, input_tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or BroadcastOptions()
        if len(tensors) == 1 and self._carries(tensors):
            return self._run("broadcast", opts, lambda c: calls.broadcast(c, tensors[0], opts.rootRank))
        return self._hand_over("broadcast", tensors, tensors, opts)

    def barrier(self, opts: Any = None) -> TorchWork:
        opts = opts or BarrierOptions()
        device = opts.device.type if opts.device is not None else "cpu"
        if device == "cpu" and self.communicator is not None:
            return self._run("barrier", opts, calls.barrier)
        return self._kept(self._engine(device).barrier(opts))

    # Names of older versions of torch.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # The way of one collective.

    def _carries(self, tensors: Sequence[Tensor]) -> bool:
        """Whether shared memory does: every rank must answer alike."""
        return self.communicator is not None and all(
            tensor.is_cpu and type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.dtype in calls.MOVABLE
            for tensor in tensors
        )

    def _run(
        self,
        name: str,
        opts: Any,
        prepare: Callable[[Communicator], calls.Operation],
        repeated: tuple[Hashable, Tensor, Tensor] | None = None,
    ) -> TorchWork:
        """``repeated``: what a call depends on beside its one input and one output, and these."""
        comm = self.communicator
        assert comm is not None
        in_turn()
        limit = opts.timeout.total_seconds()
        if limit <= 0:
            limit = self._gloo.options._timeout.total_seconds()  # what all ways to set a group's timeout reach
        async_op = getattr(opts, "asyncOp", True)
        if repeated and not async_op:
            values, input, output = repeated
            what = "backend", name, values
            if comm.repeats.run(what, input, output, limit) is not None:
                return self._kept(BackendWork((), [output]))
        try:
            with guard(comm, name):
                operation = prepare(comm)
        except InvalidParamError as error:
            raise BackendParamError(str(error), error.code) from None
        except InvalidTensorError as error:
            raise BackendTensorError(str(error), error.code) from None
        if repeated and not async_op and operation.on_arrays:
            arrays = arrays_of(input, input.numel(), output, tuple(output.shape))
            comm.repeats.keep(what, input, output, operation.on_arrays(arrays))
        with profile.span(name, comm, operation.itemsize, operation.sends, operation.recvs, async_op=async_op):
            if not async_op:
                operation.run(limit)
                operation.finish()
                return self._kept(BackendWork((), operation.result))
            call = operation.submit(limit)
        keep, finish = operation.keep, operation.finish if operation.copies else None
        work = BackendWork((call,), operation.result, finish, keep, self._futures)
        with self._lock:  # the tensors must live until the operator is done, also when nobody holds the work
            self._pending = [other for other in self._pending if not other.ended()]
            self._pending.append(work)
        return self._kept(work)

    def _all(self, works: list[TorchWork]) -> TorchWork:
        return works[0] if len(works) == 1 else WorkList(works)


def _is_dense(tensor: Tensor) -> bool:
    dense = tensor.is_cpu and tensor.layout is torch.strided
    return dense and type(tensor) in PLAIN and tensor.dtype in calls.MOVABLE


class _Devices(list[str]):
    """Devices whose tensors a group carries here. Found when a group is made: to look at import would fix which."""

    def __iter__(self) -> Iterator[str]:
        return iter(["cpu", *engines.accelerators()])


def _register() -> None:
    dist.Backend.register_backend(NAME, AllToAllVGroup, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability[NAME] = _Devices()


_register()
