"""The backend ``alltoallv`` of torch.distributed, registered by ``import alltoallv.torch``.

::

    dist.init_process_group("alltoallv")                      # or "cpu:alltoallv", or "cpu:alltoallv,cuda:nccl"

For dense CPU tensors, over shared memory on a host and TCP between hosts: every collective of torch.distributed, send
and recv with tags and from any source, the coalesced forms, and what is made of them: DDP, FSDP2, functional
collectives, object collectives, pipelines. Handed to gloo, after all ranks have agreed that it is: sparse tensors and
tensor subclasses.
Tensors of accelerators go to the engine that the group's configuration names for them, NCCL and HCCL if it names none.

What the core checks holds here too: ranks that disagree about operator, dtype or sizes all raise
`PeerMismatchError`, late and lost ranks are named, and `alltoallv.torch` functions called with such a group use the
same communicator. Errors of this rank's arguments are also the RuntimeError that torch's own engines raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch._C._distributed_c10d import Work as TorchWork

from alltoallv import _core
from alltoallv.torch.api import collectives as calls
from alltoallv.torch.api import rooted
from alltoallv.torch.process_group import engines
from alltoallv.torch.process_group.carried import CarriedGroup
from alltoallv.torch.process_group.group import NAME


class AllToAllVGroup(CarriedGroup):
    """A group whose CPU collectives run over its communicator; see the module."""

    # Collectives over the communicator.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllreduceOptions()
        if len(tensors) == 1 and self._carries(tensors):
            return self._run(
                "all_reduce",
                opts,
                lambda c: calls.all_reduce(c, tensors[0], opts.reduceOp),
                lambda core, limit: calls.reduce_at_once(
                    core, "all_reduce", tensors[0], tensors[0], opts.reduceOp, limit
                ),
            )
        return self._hand_over("allreduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllreduceCoalescedOptions()
        if self._carries(tensors):
            return self._all([self.allreduce([tensor], opts) for tensor in tensors])
        return self._hand_over("allreduce_coalesced", tensors, tensors, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> TorchWork:
        opts = opts or ReduceScatterOptions()
        if len(output_tensors) == len(input_tensors) == 1:
            output, inputs = output_tensors[0], input_tensors[0]
            if self._carries([output, *inputs]):
                return self._run(
                    "reduce_scatter", opts, lambda c: calls.reduce_scatter(c, output, inputs, opts.reduceOp)
                )
        return self._hand_over("reduce_scatter", output_tensors, output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        opts = opts or ReduceScatterOptions()
        if self._carries((output, input)):
            return self._run(
                "reduce_scatter",
                opts,
                lambda c: calls.reduce_scatter_single(c, output, input, opts.reduceOp),
                lambda core, limit: calls.reduce_at_once(core, "reduce_scatter", input, output, opts.reduceOp, limit),
            )
        return self._hand_over("_reduce_scatter_base", (output,), output, input, opts)

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or ReduceScatterOptions()
        if self._carries([*output_tensors, *input_tensors]):
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
                lambda core, limit: _core.all_gather_into_tensor(core, output, input, False, limit),
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
                lambda core, limit: _core.all_to_all_single(core, output, input, *splits, False, limit, False),
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
        if device == "cpu":
            return self._run("barrier", opts, calls.barrier)
        return self._kept(self._engine(device).barrier(opts))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A `barrier`, which names late ranks; ``dist.monitored_barrier`` itself insists on backend gloo."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self._run("barrier", opts, calls.barrier)
        return None

    # Names of older versions of torch.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or ReduceOptions()
        if len(tensors) == 1 and self._carries(tensors):
            return self._run("reduce", opts, lambda c: rooted.reduce(c, tensors[0], opts.rootRank, opts.reduceOp))
        return self._hand_over("reduce", tensors, tensors, opts)

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or GatherOptions()
        outputs = output_tensors[0] if output_tensors else []
        if len(input_tensors) == 1 and self._carries([*input_tensors, *outputs]):
            return self._run("gather", opts, lambda c: rooted.gather(c, outputs, input_tensors[0], opts.rootRank))
        return self._hand_over("gather", input_tensors, output_tensors, input_tensors, opts)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None) -> TorchWork:
        opts = opts or ScatterOptions()
        inputs = input_tensors[0] if input_tensors else []
        if len(output_tensors) == 1 and self._carries([*output_tensors, *inputs]):
            return self._run("scatter", opts, lambda c: rooted.scatter(c, output_tensors[0], inputs, opts.rootRank))
        return self._hand_over("scatter", output_tensors, output_tensors, input_tensors, opts)

    # Messages, which concern two ranks alone.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> TorchWork:
        if len(tensors) == 1 and self._carries(tensors):
            return self._post("send", lambda c: rooted.send(c, tensors[0], dst, tag, waits=False))
        return super().send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> TorchWork:
        if len(tensors) == 1 and self._carries(tensors):
            return self._post("recv", lambda c: rooted.recv(c, tensors[0], src, tag, waits=False))
        return super().recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        if len(tensors) == 1 and self._carries(tensors):
            return self._post("recv", lambda c: rooted.recv(c, tensors[0], None, tag, waits=False))
        return super().recv_anysource(tensors, tag)


class _Devices(list[str]):
    """Devices whose tensors a group carries here. Found when a group is made: to look at import would fix which."""

    def __iter__(self) -> Iterator[str]:
        return iter(["cpu", *engines.accelerators()])


def _register() -> None:
    dist.Backend.register_backend(NAME, AllToAllVGroup, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability[NAME] = _Devices()


_register()
