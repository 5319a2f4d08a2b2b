"""A call of every function of `alltoallv.torch` on tensors of one device, and the devices that docs/api states."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import alltoallv.torch as at
from alltoallv import AllToAllVParam, QuantAllReduceParam, QuantType
from alltoallv.errors import AllToAllVError

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from devices import DEVICES
from devices import cells as cells

SENDS = [[1, 3], [2, 2]]  # rows that rank r of 2 sends to rank j
Call = Callable[[Any], Any]  # of a device
PAGES = {"": "torch", "functional.": "torch.functional", "nn.": "torch.nn"}


def tables(device: str) -> dict[str, str]:
    """What the tables of docs/api say of each name on a device, such as ``"NPU"``."""
    return {
        prefix + name: cell.split(" | ")[DEVICES[module][0].split(" | ").index(device)]
        for prefix, module in PAGES.items()
        for name, cell in cells(module).items()
        if cell
    }


def calls(rank: int, size: int) -> dict[str, Call]:
    """A call of each name, by name; each returns tensors, equal on every kind of device bit for bit."""
    sends = SENDS[rank] if size == 2 else [4] * size
    recvs = [SENDS[j][rank] for j in range(2)] if size == 2 else [4] * size

    everyone = list(range(size))
    layouts = (everyone, [0]), (everyone, [None])  # rows divided over the ranks, and a copy on each

    def rows(device: Any, count: int = 4) -> Tensor:
        return (torch.arange(count * 4.0) + 100 * rank).view(count, 4).to(device)

    def into(name: str, shape: tuple[int, ...], *arguments: Any, **named: Any) -> Call:
        """A call of a function that writes into its first argument."""

        def call(device: Any) -> Tensor:
            out = torch.zeros(shape).to(device)
            getattr(at, name)(out, *(given(device) if callable(given) else given for given in arguments), **named)
            return out

        return call

    def changed(name: str, *arguments: Any) -> Call:
        def call(device: Any) -> Tensor:
            x = rows(device)
            getattr(at, name)(x, *arguments)
            return x

        return call

    def several(make: Callable[[Any, list[Tensor]], None], parts: Callable[[], list[int]]) -> Call:
        def call(device: Any) -> Tensor:
            outs = [torch.zeros(count, 4).to(device) for count in parts()]
            make(device, outs)
            return torch.cat(outs)

        return call

    def gather(device: Any) -> Tensor:
        outs = [torch.zeros(4, 4).to(device) for _ in range(size)] if rank == 0 else None
        at.gather(rows(device), outs, 0)
        return torch.cat(outs) if outs else rows(device)

    def scatter(device: Any) -> Tensor:
        out = torch.zeros(4, 4).to(device)
        at.scatter(out, [rows(device) + j for j in range(size)] if rank == 0 else None, 0)
        return out

    def scattered_and_gathered(device: Any) -> Tensor:
        counts = [1, 3] if size == 2 else [4]
        local, come = (counts, [counts[rank]] * size) if size == 2 else (counts, counts)
        return at.global_gather(at.global_scatter(rows(device), local, come) * 2, local, come)

    def message(device: Any, *, later: bool) -> Tensor:
        x, out = rows(device), torch.zeros(4, 4).to(device)
        if later:
            other = (rank + 1) % size
            works = at.isend(x, other), at.irecv(out, other)
            for work in works:
                assert work is not None
                work.wait()
        elif rank == 0:
            at.send(x, 1)
        else:
            at.recv(out, 0)
        return out

    def counted(device: Any) -> Tensor:
        counts = torch.tensor(sends).to(device)
        received = at.all_to_all_v(rows(device), counts, unit="row", capacity=8)
        received.check()
        return received.output

    def operation(device: Any) -> Tensor:
        places = [0, sends[0]] if size == 2 else [0]
        param = AllToAllVParam(rank=rank, rank_size=size, send_counts=sends, sdispls=places)
        param.recv_counts, param.rdispls = recvs, [0, recvs[0]] if size == 2 else [0]
        return at.AllToAllVOperation(param)(rows(device).view(-1)[: sum(sends)])

    def quantized_operation(device: Any) -> Tensor:
        param = QuantAllReduceParam(rank=rank, rank_size=size, quant_type=QuantType.DYNAMIC)
        return at.QuantAllReduceOperation(param)(rows(device))

    def hook(device: Any) -> Tensor:
        torch.manual_seed(rank)
        net = torch.nn.Linear(4, 4)
        with torch.no_grad():
            for number, parameter in enumerate(net.parameters()):
                parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) / (4 + number))
        model = torch.nn.parallel.DistributedDataParallel(net.to(device))
        model.register_comm_hook(None, at.QuantizedCommHook())
        model(rows(device) / 64).sum().backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters() if parameter.grad is not None])

    def dispatched(device: Any) -> Tensor:
        dispatcher = at.nn.MoEDispatcher(4)
        ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]]).to(device)
        received, _, state = dispatcher.dispatch(rows(device), ids, torch.full((4, 2), 0.5).to(device))
        return dispatcher.combine(received * 2, state)

    def dispatched_statically(device: Any) -> Tensor:
        dispatcher = at.nn.StaticMoEDispatcher(4, 4)
        ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]]).to(device)
        received, _, state = dispatcher.dispatch(rows(device), ids, torch.full((4, 2), 0.5).to(device))
        return dispatcher.combine(received * 2, state)

    def resharded(device: Any) -> Tensor:
        return at.reshard(rows(device), *layouts, device=device)

    def reshard_plan(device: Any) -> Tensor:
        return at.ReshardPlan((4 * size, 4), torch.float32, *layouts, device=device)(rows(device))

    def resharded_state(device: Any) -> list[Tensor]:
        return list(at.reshard_state({"a": rows(device), "b": rows(device) + 1}, *layouts, device=device).values())

    def plain(name: str) -> Call:
        return lambda device: getattr(at, name)(rows(device))

    weight = torch.arange(8.0).view(2, 4)
    return {
        **{name: plain(name) for name in at.__all__ if _needed(getattr(at, name)) == ["input"]},
        **{name: changed(name) for name in at.__all__ if _needed(getattr(at, name)) == ["tensor"]},
        "AllToAllVOperation": operation,
        "Plan": lambda device: at.Plan(sends, recvs, device=torch.device(device).type)(
            rows(device).view(-1)[: sum(sends)]
        ),
        "QuantAllReduceOperation": quantized_operation,
        "QuantizedCommHook": hook,
        "ReshardPlan": reshard_plan,
        "all_gather": several(lambda device, outs: at.all_gather(outs, rows(device)), lambda: [4] * size),
        "all_gather_into_tensor": into("all_gather_into_tensor", (4 * size, 4), rows),
        "all_to_all": several(lambda device, outs: at.all_to_all(outs, list(rows(device).split(sends))), lambda: recvs),
        "all_to_all_nd": lambda device: at.all_to_all_nd(rows(device), 1, 0),
        "all_to_all_single": into("all_to_all_single", (4, 4), rows),
        "all_to_all_v": lambda device: [at.all_to_all_v(rows(device), sends, to, unit="row") for to in (recvs, None)],
        "all_to_all_v(capacity=)": counted,
        "barrier": lambda device: at.barrier(),
        "broadcast": changed("broadcast", 0),
        "empty": lambda device: at.empty((2, 2), torch.float32).zero_().to(device),
        "exchange_counts": lambda device: at.exchange_counts(torch.tensor(sends).to(device)),
        "from_group": lambda device: at.from_group(dist.group.WORLD, device=torch.device(device).type) and None,
        "functional.all_gather": lambda device: at.functional.all_gather(rows(device)),
        "functional.all_reduce": lambda device: at.functional.all_reduce(rows(device)),
        "functional.all_to_all_single": lambda device: at.functional.all_to_all_single(rows(device), recvs, sends),
        "functional.reduce_scatter": lambda device: at.functional.reduce_scatter(rows(device)),
        "gather": gather,
        "global_gather": scattered_and_gathered,
        "global_scatter": scattered_and_gathered,
        "heads_to_sequence": lambda device: at.heads_to_sequence(rows(device), sequence_dim=0, heads_dim=1),
        "irecv": lambda device: message(device, later=True),
        "isend": lambda device: message(device, later=True),
        "nn.AllToAllV": lambda device: at.nn.AllToAllV()(rows(device), sends, recvs),
        "nn.MoEDispatcher": dispatched,
        "nn.StaticMoEDispatcher": dispatched_statically,
        "quantized_all_to_all": lambda device: at.quantized_all_to_all(rows(device), sends, recvs),
        "quantized_linear_all_reduce": lambda device: at.quantized_linear_all_reduce(rows(device), weight.to(device)),
        "recv": lambda device: message(device, later=False),
        "reduce": changed("reduce", 0),
        "reduce_scatter": lambda device: _scattered(device, rows, size),
        "reduce_scatter_tensor": into("reduce_scatter_tensor", (4, 4), lambda device: rows(device, 4 * size)),
        "reshard": resharded,
        "reshard_state": resharded_state,
        "row_parallel_linear": lambda device: at.row_parallel_linear(rows(device), weight.to(device), leaves=2 * size),
        "scatter": scatter,
        "send": lambda device: message(device, later=False),
        "sequence_to_heads": lambda device: at.sequence_to_heads(rows(device), sequence_dim=0, heads_dim=1),
    }


def _needed(value: Any) -> list[str]:
    """The arguments that a function must be given."""
    given = inspect.signature(value).parameters.values() if inspect.isfunction(value) else ()
    return [each.name for each in given if each.default is each.empty]


def _scattered(device: Any, rows: Callable[..., Tensor], size: int) -> Tensor:
    out = torch.zeros(4, 4).to(device)
    at.reduce_scatter(out, [rows(device) + j for j in range(size)])
    return out


def outcome(call: Call, device: Any) -> Any:
    """What a call returns, as tensors in host memory, or the error that it raises."""
    try:
        found = call(device)
    except AllToAllVError as error:
        return error
    found = [] if found is None else [found] if isinstance(found, Tensor) else found
    return [each.detach().cpu() for each in found]
