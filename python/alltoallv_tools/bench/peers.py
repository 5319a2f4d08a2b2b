"""The libraries that we compare with; each runs in an environment where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from alltoallv_tools.bench.cases import COLLECTIVES, Case
from alltoallv_tools.bench.competitors import Competitor, Prepared

PEERS = ("gloo", "mpich", "openmpi", "impi", "mindspore")
SUPPORTED = {  # the collectives that a peer has; quantized reductions are compared with its sum
    "gloo": (*COLLECTIVES, "overhead"),
    "mpich": (*COLLECTIVES, "overhead"),
    "openmpi": (*COLLECTIVES, "overhead"),
    "impi": (*COLLECTIVES, "overhead"),
    "mindspore": ("allgather", "allreduce", "quantized"),
}


class MpiLibrary:
    """Calls mpi4py with NumPy buffers; arguments are packed once, as a careful user would."""

    def __init__(self, name: str) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.competitors: Mapping[str, Competitor] = {name: self}

    def barrier(self) -> None:
        self._comm.Barrier()

    def prepare(self, case: Case) -> Prepared:
        from mpi4py import MPI

        comm = self._comm
        x = case.input(comm.rank)
        kind = MPI._typedict[x.dtype.char]
        if case.collective == "allgather":
            out = np.empty(x.size * comm.size, x.dtype)
            send, recv = [x, x.size, kind], [out, x.size, kind]
            return Prepared(lambda: comm.Allgather(send, recv), lambda _: out, x, output=out)
        if case.collective in ("allreduce", "quantized"):
            out = np.empty_like(x)
            send, recv = [x, x.size, kind], [out, x.size, kind]
            return Prepared(lambda: comm.Allreduce(send, recv, MPI.SUM), lambda _: out, x, output=out)
        sends, recvs = (np.array(counts, np.int32) for counts in case.layout(comm.rank, comm.size))
        out = np.empty(recvs.sum(), x.dtype)
        send = [x, sends, (np.cumsum(sends) - sends).astype(np.int32), kind]
        recv = [out, recvs, (np.cumsum(recvs) - recvs).astype(np.int32), kind]
        return Prepared(lambda: comm.Alltoallv(send, recv), lambda _: out, x, output=out)


class GlooLibrary:
    """Calls torch.distributed on gloo."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.competitors: Mapping[str, Competitor] = {
            "gloo": self,
            "gloo-bf16": GlooSum(bfloat16_sum),
            "composed": GlooSum(composed_sum),
        }

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def prepare(self, case: Case) -> Prepared:
        import torch
        import torch.distributed as dist

        source = case.input(self.rank)
        x = torch.from_numpy(source)
        if case.collective in ("allreduce", "quantized"):
            buffer = x.clone()

            def reduce() -> None:
                buffer.copy_(x)  # gloo reduces in place; ours keeps its input
                dist.all_reduce(buffer)

            return Prepared(reduce, lambda _: buffer.numpy(), source)
        if case.collective == "allgather":
            out = torch.empty(x.numel() * self.size, dtype=x.dtype)
            return Prepared(
                lambda: dist.all_gather_into_tensor(out, x), lambda _: out.numpy(), source, output=out.numpy()
            )
        sends, recvs = case.layout(self.rank, self.size)
        out = torch.empty(sum(recvs), dtype=x.dtype)
        return Prepared(
            lambda: dist.all_to_all_single(out, x, recvs, sends), lambda _: out.numpy(), source, output=out.numpy()
        )


class GlooSum:
    """Sums with a function of a float32 tensor that combines gloo's collectives."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        self._reduce = reduce

    def prepare(self, case: Case) -> Prepared:
        import torch
        import torch.distributed as dist

        source = case.input(dist.get_rank())
        x, reduce = torch.from_numpy(source), self._reduce
        return Prepared(lambda: reduce(x), lambda y: y.numpy(), source)


def bfloat16_sum(x: Any) -> Any:
    """Sums all ranks' float32 ``x`` in bfloat16, which has half the bytes and three digits."""
    import torch
    import torch.distributed as dist

    short = x.to(torch.bfloat16)
    dist.all_reduce(short)
    return short.to(torch.float32)


def composed_sum(x: Any, group: int = 128) -> Any:
    """Sums all ranks' vectors ``x`` quantized, composed of torch operators and gloo as a user would do it."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()

    def quantize(values: Any) -> tuple[Any, Any]:
        groups = values.view(-1, group)
        scales = groups.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-30)
        return groups.div(scales).round_().to(torch.int8), scales

    codes, scales = quantize(torch.nn.functional.pad(x, (0, -x.numel() % (size * group))))
    got, factors = torch.empty_like(codes), torch.empty_like(scales)
    dist.all_to_all_single(got, codes)
    dist.all_to_all_single(factors, scales)
    codes, scales = quantize((got.float() * factors).view(size, -1).sum(0))
    dist.all_gather_into_tensor(got, codes)
    dist.all_gather_into_tensor(factors, scales)
    return (got.float() * factors).view(-1)[: x.numel()]


class MindSporeLibrary:
    """Calls MindSpore's own collectives on CPU."""

    def __init__(self) -> None:
        import mindspore
        from mindspore.communication import get_group_size, get_rank, init

        mindspore.set_device("CPU")
        init()
        self.rank, self.size = get_rank(), get_group_size()
        self.competitors: Mapping[str, Competitor] = {"mindspore": self}
        self._one = mindspore.Tensor(np.zeros(1, np.float32))
        self._sum = mindspore.ops.AllReduce()

    def barrier(self) -> None:
        self._sum(self._one).asnumpy()

    def prepare(self, case: Case) -> Prepared:
        import mindspore

        source = case.input(self.rank)
        x = mindspore.Tensor.from_numpy(source)  # shares the memory
        operator = mindspore.ops.AllGather() if case.collective == "allgather" else mindspore.ops.AllReduce()
        # MindSpore computes the result only when it is read.
        return Prepared(lambda: operator(x).asnumpy(), np.ravel, source)
