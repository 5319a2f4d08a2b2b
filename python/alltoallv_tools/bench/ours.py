"""Our own library: alltoallv through one of its interfaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

import alltoallv
import alltoallv.numpy as an
from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator
from alltoallv.quantization.spec import Gather
from alltoallv.testing.data_path import data_path
from alltoallv_tools.bench.cases import APIS, COUNTS, WAYS, Case
from alltoallv_tools.bench.competitors import Array, Competitor, Prepared
from alltoallv_tools.bench.limits import Copy, Full, Rounds, StreamingCopy


class OurLibrary:
    """Our library; all its competitors share one communicator, but for the competitors of a fixed data path."""

    def __init__(self, api: str) -> None:
        self._comm = Communicator.from_env(domain="bench:1024")
        self.rank, self.size = self._comm.rank, self._comm.size
        ours = interface(api, self._comm)
        rounds = Rounds(self._comm) if self._comm.stats()["processors"] < self.size else None
        self.competitors: Mapping[str, Competitor] = {
            "ours": ours,
            "full": Full(ours, self.size),
            "ours-full": OtherSum(ours, "full"),
            "ours-fp32": OtherSum(ours, None),
            **{f"ours-{name}": OtherSum(ours, "quantized", name) for name in _core.code_formats},
            **{path: Way(api, path, ours) for path in WAYS},
            "copy": Copy(rounds),
            "copy-nt": StreamingCopy(rounds),
            **{f"ours-{name}": Lazy(name, self._comm) for name in APIS},  # so that overhead can compare them in one run
            **{
                f"ours-{api}-{counts}": Lazy(api, self._comm, counts)
                for api, kinds in COUNTS.items()
                for counts in kinds
            },
        }

    def barrier(self) -> None:
        an.barrier(group=self._comm)


def interface(api: str, comm: Communicator) -> Interface:
    """Makes the competitor for one of `APIS`."""
    makers: dict[str, Callable[[Communicator], Interface]] = {
        "numpy": NumpyInterface,
        "plan": PlanInterface,
        "core": CoreInterface,
        "torch": TorchInterface,
        "torch-plan": TorchPlanInterface,
        "mindspore": MindSporeInterface,
    }
    return makers[api](comm)


class Lazy:
    """Imports an interface's framework when the interface is first used."""

    def __init__(self, api: str, comm: Communicator, counts: str = "") -> None:
        self._make: Callable[[], Interface] = lambda: interface(api, comm)
        self._counts = counts

    def prepare(self, case: Case) -> Prepared:
        library = self._make()
        library.counts = self._counts
        return library.prepare(case)


class Way:
    """The same interface on a communicator that takes one data path wherever that can serve."""

    def __init__(self, api: str, path: str, ours: Interface) -> None:
        self._api, self._path, self._ours = api, path, ours
        self._made: Interface | None = None

    def prepare(self, case: Case) -> Prepared:
        if self._made is None:
            with data_path(self._path):
                self._made = interface(self._api, Communicator.from_env(domain=f"bench-{self._path}:1024"))
                self._made.arrays = self._ours.arrays
        return self._made.prepare(case)


class OtherSum:
    """Sums as the same interface does, but with another gather or format, or in float32 (None), for comparison."""

    def __init__(self, ours: Interface, gather: Gather | None, format: Any = None) -> None:
        self._ours, self._gather, self._format = ours, gather, format

    def prepare(self, case: Case) -> Prepared:
        return self._ours.sum(case, self._gather, self._format)


def make_output(case: Case, elements: int) -> Array | None:
    """Allocates the output; None lets the operator allocate."""
    if case.output == "allocated":
        return None
    if case.output == "empty":
        return alltoallv.empty(elements, case.dtype)
    return np.empty(elements, case.dtype)


class Arrays:
    """The input and the output of an exchange, which an interface and its ways share: where memory lies changes a time
    as much as a way does.
    """

    def __init__(self) -> None:
        self._kept: tuple[Case, Array, Array | None] | None = None

    def of(self, case: Case, comm: Communicator) -> tuple[Array, Array | None]:
        """Returns what a rank sends, and where it receives; None lets the operator allocate."""
        if self._kept is None or self._kept[0] != case:
            received = case.received(comm.rank, comm.size)
            self._kept = (case, case.input(comm.rank), make_output(case, received))
        return self._kept[1:]


class Interface:
    """Runs a rank's collectives through one interface; `alltoallv_tools.bench.cases.outputs_of` names which it has."""

    counts = ""  # the form in which the functions get their counts, one of `COUNTS`; "" means lists

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.arrays = Arrays()

    def _calling(self, case: Case, function: Callable[..., Any], x: Any, out: Any) -> Callable[[], Any]:
        """Returns a call of ``function`` that passes the counts in the wanted form."""
        rank, size = self._comm.rank, self._comm.size
        comm = self._comm
        if self.counts == "new":
            step = cycle(case.layouts(rank, size)).__next__

            def call() -> Any:
                sends, recvs = step()
                return function(x, sends, recvs, out=out, group=comm)

            return call
        sends, recvs = (self._counted(each) for each in case.layout(rank, size))
        return lambda: function(x, sends, recvs, out=out, group=comm)

    def _counted(self, counts: list[int]) -> Any:
        if self.counts == "tuple":
            return tuple(counts)
        if self.counts == "array":
            return np.array(counts)
        if self.counts == "tensor":
            return self._tensor(np.array(counts))
        return counts

    def _tensor(self, array: Array) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no tensors")

    def prepare(self, case: Case) -> Prepared:
        if case.collective == "allgather":
            return self.gather(case)
        if case.collective == "allreduce":
            return self.sum(case, None)
        if case.collective == "quantized":
            return self.sum(case, "quantized")
        return self.exchange(case)

    def exchange(self, case: Case) -> Prepared:
        raise NotImplementedError(f"{type(self).__name__} has no {case.collective}")

    def gather(self, case: Case) -> Prepared:
        raise NotImplementedError(f"{type(self).__name__} has no {case.collective}")

    def sum(self, case: Case, gather: Gather | None, format: Any = None) -> Prepared:
        """Prepares a quantized sum (int8 in groups of 128 by default); without ``gather`` a sum in the case's dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no {case.collective}")


class NumpyInterface(Interface):
    """Calls the functions of alltoallv.numpy."""

    def exchange(self, case: Case) -> Prepared:
        x, out = self.arrays.of(case, self._comm)
        out = None if self.counts == "new" else out
        call = self._calling(case, an.all_to_all_v, x, out)
        return Prepared(call, np.ravel, x, exact=self.counts != "new", output=out)

    def gather(self, case: Case) -> Prepared:
        x, comm = case.input(self._comm.rank), self._comm
        out = make_output(case, x.size * comm.size)
        return Prepared(lambda: an.all_gather(x, out=out, group=comm), np.ravel, x, output=out)

    def sum(self, case: Case, gather: Gather | None, format: Any = None) -> Prepared:
        x, comm = case.input(self._comm.rank), self._comm
        out = make_output(case, x.size)
        call: Any = an.all_reduce
        if gather is not None:
            call = partial(an.quantized_all_reduce, gather=gather, format=format)
        return Prepared(lambda: call(x, out=out, group=comm), np.ravel, x, output=out)


class PlanInterface(Interface):
    """Runs an alltoallv.numpy.Plan that is made once."""

    def exchange(self, case: Case) -> Prepared:
        comm, (x, out) = self._comm, self.arrays.of(case, self._comm)
        sends, recvs = case.layout(comm.rank, comm.size)
        plan = an.Plan(sends, recvs, case.dtype, group=comm)
        return Prepared(lambda: plan(x, out), np.ravel, x, output=out)


class CoreInterface(Interface):
    """Runs a plan of the extension on addresses, without checks of arrays, always into the same output."""

    def exchange(self, case: Case) -> Prepared:
        comm, (x, out) = self._comm, self.arrays.of(case, self._comm)
        sends, recvs = case.layout(comm.rank, comm.size)
        result = alltoallv.empty(sum(recvs), case.dtype) if out is None else out
        plan = _core.Plan(comm.core, "all_to_all_v", case.dtype, sends, packed(sends), recvs, packed(recvs))
        run, source, target = plan.run, x.ctypes.data, result.ctypes.data
        return Prepared(lambda: run(source, target), lambda _: result, x, output=result)


class TensorInterface(Interface):
    """Calls a framework's functions on tensors that share the memory of the case's arrays."""

    def __init__(self, comm: Communicator, front: Any, tensor: Callable[[Array], Any], array: Callable[..., Array]):
        super().__init__(comm)
        self._front, self._make, self._array = front, tensor, array

    def _tensor(self, array: Array) -> Any:
        return self._make(array)

    def exchange(self, case: Case) -> Prepared:
        front, (source, target) = self._front, self.arrays.of(case, self._comm)
        target = None if self.counts == "new" else target
        x, out = self._tensor(source), None if target is None else self._tensor(target)
        call = self._calling(case, front.all_to_all_v, x, out)
        return Prepared(call, self._array, source, exact=self.counts != "new", output=target)

    def gather(self, case: Case) -> Prepared:
        front, comm, source = self._front, self._comm, case.input(self._comm.rank)
        x = self._tensor(source)
        out, target = self._output(case, source.size * comm.size)
        if out is None:
            return Prepared(lambda: front.functional.all_gather(x, group=comm), self._array, source)

        def call() -> Any:
            front.all_gather_into_tensor(out, x, group=comm)
            return out

        return Prepared(call, self._array, source, output=target)

    def sum(self, case: Case, gather: Gather | None, format: Any = None) -> Prepared:
        front, comm, source = self._front, self._comm, case.input(self._comm.rank)
        x = self._tensor(source)
        if gather is None:
            return Prepared(lambda: front.functional.all_reduce(x, group=comm), self._array, source)
        out, target = self._output(case, source.size)
        call = partial(front.quantized_all_reduce, x, gather=gather, format=format, out=out, group=comm)
        return Prepared(call, self._array, source, output=target)

    def _output(self, case: Case, elements: int) -> tuple[Any, Array | None]:
        target = make_output(case, elements)
        return (None if target is None else self._tensor(target)), target


class TorchInterface(TensorInterface):
    """Calls the functions of alltoallv.torch."""

    def __init__(self, comm: Communicator) -> None:
        import torch

        import alltoallv.torch as at

        torch.set_num_threads(1)
        super().__init__(comm, at, torch.from_numpy, lambda y: y.numpy())


class TorchPlanInterface(TorchInterface):
    """Runs an alltoallv.torch.Plan that is made once."""

    def exchange(self, case: Case) -> Prepared:
        source, target = self.arrays.of(case, self._comm)
        x, out = self._tensor(source), None if target is None else self._tensor(target)
        sends, recvs = case.layout(self._comm.rank, self._comm.size)
        plan = self._front.Plan(sends, recvs, x.dtype, group=self._comm)
        return Prepared(lambda: plan(x, out), self._array, source, output=target)


class MindSporeInterface(TensorInterface):
    """Calls the functions of alltoallv.mindspore."""

    def __init__(self, comm: Communicator) -> None:
        import mindspore

        import alltoallv.mindspore as am

        mindspore.set_device("CPU")
        super().__init__(comm, am, mindspore.Tensor.from_numpy, lambda y: y.asnumpy())

    def sum(self, case: Case, gather: Gather | None, format: Any = None) -> Prepared:
        """Prepares a sum in place; each call copies the input first, and the time includes the copy."""
        if gather is not None:
            return super().sum(case, gather, format)
        source = case.input(self._comm.rank)
        target = alltoallv.empty(source.shape, case.dtype) if case.output == "empty" else np.empty_like(source)
        tensor = self._tensor(target)

        def call() -> Any:
            np.copyto(target, source)
            self._front.all_reduce(tensor, group=self._comm)
            return tensor

        return Prepared(call, self._array, source, output=target)
