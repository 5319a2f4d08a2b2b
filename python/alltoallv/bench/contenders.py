"""Who is measured: each contender turns a case into a call that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import alltoallv
from alltoallv.bench.cases import Case
from alltoallv.communicator import Communicator
from alltoallv.counts import packed

Result = npt.NDArray[Any]
Call = Callable[[], Any]


class Contender(Protocol):
    """``prepare`` returns the call to time, and a function from the call's value to the result as a flat array."""

    name: str

    def prepare(self, case: Case) -> tuple[Call, Callable[[Any], Result]]: ...


class Ours:
    """alltoallv through one of its interfaces: numpy, torch, or a plan that is reused."""

    def __init__(self, comm: Communicator, api: str) -> None:
        self.name = "ours"
        self._comm = comm
        self._api = api

    def prepare(self, case: Case) -> tuple[Call, Callable[[Any], Result]]:
        if self._api == "torch":
            return self._torch(case)
        if self._api == "plan" and case.collective == "alltoallv":
            return self._plan(case)
        return self._numpy(case)

    def _layout(self, case: Case) -> tuple[list[int], list[int]]:
        counts = case.counts(self._comm.size)
        return counts[self._comm.rank].tolist(), counts[:, self._comm.rank].tolist()

    def _output(self, case: Case, elements: int) -> Result | None:
        if case.output == "allocated":
            return None
        if case.output == "empty":
            return alltoallv.empty(elements, case.dtype)
        return np.empty(elements, case.dtype)

    def _numpy(self, case: Case) -> tuple[Call, Callable[[Any], Result]]:
        import alltoallv.numpy as an

        x, comm = case.input(self._comm.rank), self._comm
        if case.collective == "allgather":
            out = self._output(case, x.size * comm.size)
            return lambda: an.all_gather(x, out=out, group=comm), np.ravel
        if case.collective == "allreduce":
            out = self._output(case, x.size)
            return lambda: an.all_reduce(x, out=out, group=comm), np.ravel
        sends, recvs = self._layout(case)
        out = self._output(case, sum(recvs))
        return lambda: an.all_to_all_v(x, sends, recvs, out=out, group=comm), np.ravel

    def _plan(self, case: Case) -> tuple[Call, Callable[[Any], Result]]:
        from alltoallv import _core

        x = case.input(self._comm.rank)
        sends, recvs = self._layout(case)
        out = self._output(case, sum(recvs))
        if out is None:
            out = alltoallv.empty(sum(recvs), case.dtype)
        plan = _core.Plan(self._comm.core, "all_to_all_v", case.dtype, sends, packed(sends), recvs, packed(recvs))
        source, target = x.ctypes.data, out.ctypes.data

        def run() -> Result:
            plan.run(source, target)
            return out

        run.input = x  # type: ignore[attr-defined]  # the plan knows only its address
        return run, np.ravel

    def _torch(self, case: Case) -> tuple[Call, Callable[[Any], Result]]:
        import torch

        import alltoallv.torch as at

        x, comm = torch.from_numpy(case.input(self._comm.rank)), self._comm
        if case.collective == "allreduce":
            return lambda: at.functional.all_reduce(x, group=comm), lambda y: y.numpy()
        if case.collective == "allgather":
            gathered = at.empty(x.numel() * comm.size, x.dtype)
            return lambda: at.all_gather_into_tensor(gathered, x, group=comm), lambda _: gathered.numpy()
        sends, recvs = self._layout(case)
        out = None
        if case.output == "empty":
            out = at.empty(sum(recvs), x.dtype)
        elif case.output == "private":
            out = torch.empty(sum(recvs), dtype=x.dtype)
        return lambda: at.all_to_all_v(x, sends, recvs, out=out, group=comm), lambda y: y.numpy()


class Gloo:
    """torch.distributed's gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.name = "gloo"
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._dist = dist

    def prepare(self, case: Case) -> tuple[Call, Callable[[Any], Result]]:
        import torch

        dist, rank, size = self._dist, self._dist.get_rank(), self._dist.get_world_size()
        x = torch.from_numpy(case.input(rank))
        if case.collective == "allreduce":
            buffer = x.clone()

            def reduce() -> Any:
                buffer.copy_(x)  # gloo reduces in place; ours keeps its input
                dist.all_reduce(buffer)
                return buffer

            return reduce, lambda y: y.numpy()
        if case.collective == "allgather":
            out = torch.empty(x.numel() * size, dtype=x.dtype)
            return lambda: dist.all_gather_into_tensor(out, x), lambda _: out.numpy()
        counts = case.counts(size)
        sends, recvs = counts[rank].tolist(), counts[:, rank].tolist()
        out = torch.empty(sum(recvs), dtype=x.dtype)
        return lambda: dist.all_to_all_single(out, x, recvs, sends), lambda _: out.numpy()


class Limit:
    """Each rank copies its own bytes once, with nobody to wait for: what the memory allows."""

    name = "limit"

    def prepare(self, case: Case) -> tuple[Call, Callable[[Any], Result]]:
        x = np.ones(case.count, case.dtype)
        out = np.empty_like(x)
        return lambda: np.copyto(out, x), lambda _: out
