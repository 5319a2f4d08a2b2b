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

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions
from torch._C._distributed_c10d import Work as TorchWork

from alltoallv.torch.api.p2p import prepare_recv, prepare_send
from alltoallv.torch.eager import collectives
from alltoallv.torch.eager.declaration import Collective, Method
from alltoallv.torch.process_group import engines, shrink
from alltoallv.torch.process_group.carried import CarriedGroup
from alltoallv.torch.process_group.group import NAME


class AllToAllVGroup(CarriedGroup):
    """Runs a group's CPU collectives over its communicator; see the module. `_add` adds those that are declared."""

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

    def barrier(self, opts: Any = None) -> TorchWork:
        opts = opts or BarrierOptions()
        device = opts.device.type if opts.device is not None else "cpu"
        if device == "cpu":
            return self._run("barrier", collectives.barrier, [], [], opts, ())
        return self._kept(self._engine(device).barrier(opts))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Does a `barrier`, which names late ranks; ``dist.monitored_barrier`` itself insists on backend gloo."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts)

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


def _add(row: Collective, method: Method) -> None:
    """Gives the group the methods of a collective. What does not change from call to call is found here."""
    name, options, parameters = method.names[0], method.options, method.parameters
    outputs, inputs = _reader(row.outputs, method.flat), _reader(row.inputs, method.flat)
    tensors = 2 if row.inputs else 1
    expected = tensors + method.arguments

    def call(self: AllToAllVGroup, *given: Any, opts: Any = None) -> TorchWork | None:
        if len(given) > expected:
            given, opts = given[:-1], given[-1]
        opts = opts or options()
        ins = inputs(given[1]) if tensors == 2 else []
        return self._run(name, row, outputs(given[0]), ins, opts, given, parameters(opts, *given[tensors:]))

    def call_each(self: AllToAllVGroup, *given: Any, opts: Any = None) -> TorchWork:
        if len(given) > tensors:
            given, opts = given[:-1], given[-1]
        opts = opts or options()
        if not self._carries([x for each in given for x in each]):
            return self._hand_over(method.coalesced[0], *given, opts)
        calls = zip(*given, strict=True)
        return self._all([call(self, *(x if method.flat else [x] for x in each), opts=opts) for each in calls])

    for names, function in ((method.names, call), (method.coalesced, call_each)):
        for each in names:
            setattr(AllToAllVGroup, each, function)


def _reader(name: str, flat: bool) -> Callable[[Any], list[Tensor] | None]:
    """Returns what finds the tensors of one side in an argument.

    It returns None if the rank has tensors on several devices, which torch's engines take.
    """
    if name.endswith("_list"):  # without entries on ranks other than the root
        return (lambda given: given) if flat else lambda given: _only(given) if given else []
    return (lambda given: [given]) if flat else lambda given: given if len(given) == 1 else None


def _only(given: list[list[Tensor]]) -> list[Tensor] | None:
    return given[0] if len(given) == 1 else None


class _Devices(list[str]):
    """Lists the devices whose tensors a group carries, when a group is made: looking at import would fix them."""

    def __iter__(self) -> Iterator[str]:
        return iter(["cpu", *engines.accelerators()])


def _register() -> None:
    for row in collectives.COLLECTIVES.values():
        if row.method is not None:
            _add(row, row.method)
    dist.Backend.register_backend(NAME, AllToAllVGroup, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability[NAME] = _Devices()
    shrink.install()


_register()
