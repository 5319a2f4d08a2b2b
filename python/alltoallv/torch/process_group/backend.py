"""The backend ``alltoallv`` of torch.distributed, registered by ``import alltoallv.torch``.

::

    dist.init_process_group("alltoallv")                      # or "cpu:alltoallv", or "cpu:alltoallv,cuda:nccl"

It carries dense CPU tensors, over shared memory on a host and TCP between hosts, in every collective of
torch.distributed, send and recv with tags and from any source, the coalesced forms, and what is made of them: DDP,
FSDP2, functional collectives, object collectives, pipelines. Sparse tensors and tensor subclasses are passed to gloo,
after all ranks have agreed on that.
Tensors of accelerators go to the engine that the group's configuration names for them, NCCL and HCCL if it names none.

The core checks calls here, too: ranks that disagree about operator, dtype or sizes all raise
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

from alltoallv.torch.api.p2p import prepare_recv, prepare_send
from alltoallv.torch.eager import collectives as calls
from alltoallv.torch.eager.declaration import Parameters
from alltoallv.torch.process_group import engines, shrink
from alltoallv.torch.process_group.carried import CarriedGroup
from alltoallv.torch.process_group.group import NAME

_EVEN = Parameters(unit="element")  # split into equal parts


class AllToAllVGroup(CarriedGroup):
    """Runs a group's CPU collectives over its communicator; see the module."""

    # Collectives over the communicator. Lists with several tensors, for several devices of a rank, are passed to torch.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllreduceOptions()
        return self._run("allreduce", calls.all_reduce, _one(tensors), [], opts, (tensors,), Parameters(opts.reduceOp))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or AllreduceCoalescedOptions()
        if self._carries(tensors):
            return self._all([self.allreduce([tensor], opts) for tensor in tensors])
        return self._hand_over("allreduce_coalesced", tensors, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> TorchWork:
        opts, given = opts or ReduceScatterOptions(), (output_tensors, input_tensors)
        outs, ins = _one(output_tensors), _only(input_tensors)
        return self._run("reduce_scatter", calls.reduce_scatter, outs, ins, opts, given, Parameters(opts.reduceOp))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        opts, row = opts or ReduceScatterOptions(), calls.reduce_scatter_tensor
        return self._run(
            "_reduce_scatter_base", row, [output], [input], opts, (output, input), Parameters(opts.reduceOp)
        )

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> TorchWork:
        return self._each(
            "reduce_scatter_tensor_coalesced",
            self.reduce_scatter_single,
            output_tensors,
            input_tensors,
            opts or ReduceScatterOptions(),
        )

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> TorchWork:
        outs, ins, given = _only(output_tensors), _one(input_tensors), (output_tensors, input_tensors)
        return self._run("allgather", calls.all_gather, outs, ins, opts or AllgatherOptions(), given)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or AllgatherOptions()
        if self._carries([*input_list, *(tensor for outputs in output_lists for tensor in outputs)]):
            # One list of outputs per rank here, one per tensor there.
            per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
            pairs = zip(per_tensor, input_list, strict=True)
            return self._all([self.allgather([outputs], [tensor], opts) for outputs, tensor in pairs])
        return self._hand_over("allgather_coalesced", output_lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        opts, row = opts or AllgatherOptions(), calls.all_gather_into_tensor
        return self._run("_allgather_base", row, [output], [input], opts, (output, input))

    def all_gather_single_coalesced(
        self, output_list: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or AllgatherOptions()
        return self._each("allgather_into_tensor_coalesced", self.all_gather_single, output_list, input_list, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> TorchWork:
        splits, opts = (output_split_sizes, input_split_sizes), opts or AllToAllOptions()
        # By length, for Megatron gives tensors.
        even = len(output_split_sizes) == len(input_split_sizes) == 0
        parameters = _EVEN if even else Parameters(counts=splits, unit="element")
        given = output, input, *splits
        return self._run("alltoall_base", calls.all_to_all_single, [output], [input], opts, given, parameters)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> TorchWork:
        given = output_tensors, input_tensors
        return self._run("alltoall", calls.all_to_all, *given, opts or AllToAllOptions(), given)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or BroadcastOptions()
        return self._run(
            "broadcast", calls.broadcast, _one(tensors), [], opts, (tensors,), Parameters(root=opts.rootRank)
        )

    def barrier(self, opts: Any = None) -> TorchWork:
        opts = opts or BarrierOptions()
        device = opts.device.type if opts.device is not None else "cpu"
        if device == "cpu":
            return self._run("barrier", calls.barrier, [], [], opts, ())
        return self._kept(self._engine(device).barrier(opts))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Does a `barrier`, which names late ranks; ``dist.monitored_barrier`` itself insists on backend gloo."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts)

    # Methods that older versions of torch call by these names.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts = opts or ReduceOptions()
        return self._run(
            "reduce", calls.reduce, _one(tensors), [], opts, (tensors,), Parameters(opts.reduceOp, opts.rootRank)
        )

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> TorchWork:
        opts, given = opts or GatherOptions(), (output_tensors, input_tensors)
        outs, ins = _only(output_tensors or [[]]), _one(input_tensors)
        return self._run("gather", calls.gather, outs, ins, opts, given, Parameters(root=opts.rootRank))

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None) -> TorchWork:
        opts, given = opts or ScatterOptions(), (output_tensors, input_tensors)
        outs, ins = _one(output_tensors), _only(input_tensors or [[]])
        return self._run("scatter", calls.scatter, outs, ins, opts, given, Parameters(root=opts.rootRank))

    # Messages, which concern only two ranks.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> TorchWork:
        if len(tensors) == 1 and self._carries(tensors):
            return self._post("send", lambda c: prepare_send(c, tensors[0], dst, tag, waits=False))
        return super().send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> TorchWork:
        if len(tensors) == 1 and self._carries(tensors):
            return self._post("recv", lambda c: prepare_recv(c, tensors[0], src, tag, waits=False))
        return super().recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        if len(tensors) == 1 and self._carries(tensors):
            return self._post("recv", lambda c: prepare_recv(c, tensors[0], None, tag, waits=False))
        return super().recv_anysource(tensors, tag)


def _one(tensors: list[Tensor]) -> list[Tensor] | None:
    return tensors if len(tensors) == 1 else None


def _only(lists: list[list[Tensor]]) -> list[Tensor] | None:
    return lists[0] if len(lists) == 1 else None


class _Devices(list[str]):
    """Lists the devices whose tensors a group carries, when a group is made: looking at import would fix them."""

    def __iter__(self) -> Iterator[str]:
        return iter(["cpu", *engines.accelerators()])


def _register() -> None:
    dist.Backend.register_backend(NAME, AllToAllVGroup, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability[NAME] = _Devices()
    shrink.install()


_register()
