"""Our own party: alltoallv through one of its interfaces, and the limits that the memory sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

import alltoallv
import alltoallv.numpy as an
from alltoallv import _core
from alltoallv.bench.cases import APIS, Case
from alltoallv.bench.contenders import Array, Contender, Prepared
from alltoallv.communicator import Communicator
from alltoallv.counts import packed
from alltoallv.quantization import Gather


class OurParty:
    """One communicator for everything."""

    def __init__(self, api: str) -> None:
        self._comm = Communicator.from_env(domain="bench:1024")
        self.rank, self.size = self._comm.rank, self._comm.size
        ours = interface(api, self._comm)
        self.contenders: Mapping[str, Contender] = {
            "ours": ours,
            "full": Full(ours, self.size),
            "ours-full": QuantizedSum(self._comm, "full"),
            "ours-fp32": QuantizedSum(self._comm, None),
            "copy": Copy(),
            "copy-nt": StreamingCopy(),
            **{f"ours-{name}": Lazy(name, self._comm) for name in APIS},  # overhead compares them in one run
        }

    def barrier(self) -> None:
        an.barrier(group=self._comm)


def interface(api: str, comm: Communicator) -> Contender:
    """The contender of one of `APIS`."""
    makers: dict[str, Callable[[Communicator], Contender]] = {
        "numpy": NumpyInterface,
        "plan": PlanInterface,
        "core": CoreInterface,
        "torch": TorchInterface,
        "torch-plan": TorchPlanInterface,
        "mindspore": MindSporeInterface,
    }
    return makers[api](comm)


class Lazy:
    """Imports the interface's framework when it is first asked."""

    def __init__(self, api: str, comm: Communicator) -> None:
        self._make: Callable[[], Contender] = lambda: interface(api, comm)

    def prepare(self, case: Case) -> Prepared:
        return self._make().prepare(case)


def make_output(case: Case, elements: int) -> Array | None:
    """Where the result goes; None lets the operator allocate."""
    if case.output == "allocated":
        return None
    if case.output == "empty":
        return alltoallv.empty(elements, case.dtype)
    return np.empty(elements, case.dtype)


class NumpyInterface:
    """alltoallv.numpy, one call at a time."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def prepare(self, case: Case) -> Prepared:
        x, comm = case.input(self._comm.rank), self._comm
        if case.collective == "allgather":
            out = make_output(case, x.size * comm.size)
            return Prepared(lambda: an.all_gather(x, out=out, group=comm), np.ravel, x, output=out)
        if case.collective == "quantized":
            return QuantizedSum(comm, "quantized").prepare(case)
        if case.collective == "allreduce":
            out = make_output(case, x.size)
            return Prepared(lambda: an.all_reduce(x, out=out, group=comm), np.ravel, x, output=out)
        sends, recvs = case.layout(comm.rank, comm.size)
        out = make_output(case, sum(recvs))
        return Prepared(lambda: an.all_to_all_v(x, sends, recvs, out=out, group=comm), np.ravel, x, output=out)


class PlanInterface(NumpyInterface):
    """alltoallv.numpy.Plan, made once; other collectives have none."""

    def prepare(self, case: Case) -> Prepared:
        if case.collective not in ("alltoallv", "overhead"):
            return super().prepare(case)
        comm, x = self._comm, case.input(self._comm.rank)
        sends, recvs = case.layout(comm.rank, comm.size)
        out = make_output(case, sum(recvs))
        plan = an.Plan(sends, recvs, case.dtype, group=comm)
        return Prepared(lambda: plan(x, out), np.ravel, x, output=out)


class CoreInterface(NumpyInterface):
    """A plan of the extension on addresses, without checks of arrays, always into the same output."""

    def prepare(self, case: Case) -> Prepared:
        if case.collective not in ("alltoallv", "overhead"):
            return super().prepare(case)
        comm, x = self._comm, case.input(self._comm.rank)
        sends, recvs = case.layout(comm.rank, comm.size)
        out = make_output(case, sum(recvs))
        result = alltoallv.empty(sum(recvs), case.dtype) if out is None else out
        plan = _core.Plan(comm.core, "all_to_all_v", case.dtype, sends, packed(sends), recvs, packed(recvs))
        run, source, target = plan.run, x.ctypes.data, result.ctypes.data
        return Prepared(lambda: run(source, target), lambda _: result, x, output=result)


class TorchInterface:
    """alltoallv.torch."""

    def __init__(self, comm: Communicator) -> None:
        import torch

        torch.set_num_threads(1)
        self._comm = comm

    def prepare(self, case: Case) -> Prepared:
        import torch

        import alltoallv.torch as at

        comm, source = self._comm, case.input(self._comm.rank)
        x = torch.from_numpy(source)
        if case.collective == "allreduce":
            return Prepared(lambda: at.functional.all_reduce(x, group=comm), lambda y: y.numpy(), source)
        if case.collective == "allgather":
            gathered = at.empty(x.numel() * comm.size, x.dtype)
            return Prepared(
                lambda: at.all_gather_into_tensor(gathered, x, group=comm),
                lambda _: gathered.numpy(),
                source,
                output=gathered.numpy(),
            )
        sends, recvs = case.layout(comm.rank, comm.size)
        target = make_output(case, sum(recvs))
        out = None if target is None else torch.from_numpy(target)
        return Prepared(
            lambda: at.all_to_all_v(x, sends, recvs, out=out, group=comm), lambda y: y.numpy(), source, output=target
        )


class TorchPlanInterface(TorchInterface):
    """alltoallv.torch.Plan, made once; other collectives have none."""

    def prepare(self, case: Case) -> Prepared:
        if case.collective not in ("alltoallv", "overhead"):
            return super().prepare(case)
        import torch

        import alltoallv.torch as at

        comm, source = self._comm, case.input(self._comm.rank)
        x = torch.from_numpy(source)
        sends, recvs = case.layout(comm.rank, comm.size)
        target = make_output(case, sum(recvs))
        out = None if target is None else torch.from_numpy(target)
        plan = at.Plan(sends, recvs, x.dtype, group=comm)
        return Prepared(lambda: plan(x, out), lambda y: y.numpy(), source, output=target)


class MindSporeInterface:
    """alltoallv.mindspore."""

    def __init__(self, comm: Communicator) -> None:
        import mindspore

        mindspore.set_device("CPU")
        self._comm = comm

    def prepare(self, case: Case) -> Prepared:
        import mindspore

        import alltoallv.mindspore as am

        comm, source = self._comm, case.input(self._comm.rank)
        x = mindspore.Tensor(source)
        if case.collective == "allgather":
            out = am.empty((x.size * comm.size,), x.dtype)
            return Prepared(lambda: am.all_gather_into_tensor(out, x, group=comm), lambda _: out.asnumpy(), source)
        if case.collective != "alltoallv":
            raise ValueError(f"alltoallv.mindspore has no {case.collective}")
        sends, recvs = case.layout(comm.rank, comm.size)
        return Prepared(lambda: am.all_to_all_v(x, sends, recvs, group=comm), lambda y: y.asnumpy(), source)


class QuantizedSum:
    """The int8 sum with groups of 128, gathered quantized or in full; or, with None, the sum in float32."""

    def __init__(self, comm: Communicator, gather: Gather | None) -> None:
        self._comm, self._gather = comm, gather

    def prepare(self, case: Case) -> Prepared:
        comm, gather, x = self._comm, self._gather, case.input(self._comm.rank)
        out = make_output(case, x.size)
        if gather is None:
            return Prepared(lambda: an.all_reduce(x, out=out, group=comm), np.ravel, x, output=out)
        call = partial(an.quantized_all_reduce, x, gather=gather, out=out, group=comm)
        return Prepared(call, np.ravel, x, output=out)


class Full:
    """Beside a sparse exchange: the same bytes to every peer."""

    def __init__(self, ours: Contender, size: int) -> None:
        self._ours, self._size = ours, size

    def prepare(self, case: Case) -> Prepared:
        full = replace(case, nbytes=case.nbytes * self._size, pattern="uniform")
        prepared = self._ours.prepare(full)
        prepared.exact = False  # of another case
        return prepared


class Copy:
    """Each rank copies its own bytes once, with nobody to wait for: what the memory allows."""

    def prepare(self, case: Case) -> Prepared:
        x = np.ones(case.count, case.dtype)
        out = np.ones_like(x)
        return Prepared(lambda: np.copyto(out, x), lambda _: out, x, exact=False)


class StreamingCopy:
    """The same with non-temporal stores."""

    def prepare(self, case: Case) -> Prepared:
        x = np.ones(case.count, case.dtype)
        out = np.ones_like(x)
        copy, target, source, nbytes = _core.kernel_copy_streaming, out.ctypes.data, x.ctypes.data, x.nbytes
        return Prepared(lambda: copy(target, source, nbytes), lambda _: out, x, exact=False)
