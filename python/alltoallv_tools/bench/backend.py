"""``bench backend``: calls of torch.distributed on backend ``alltoallv`` and on gloo, on the same ranks.

``floor`` is a group in Python that does nothing, so that its time is torch's own part; ``exchange`` is what our group
calls in the extension. A synchronous call cannot cost less than both together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from alltoallv_tools.bench import report
from alltoallv_tools.bench.cases import Case
from alltoallv_tools.bench.competitors import Competitor, Prepared
from alltoallv_tools.tables import Table

LAYER = 64  # inputs and outputs of the linear layer whose steps are timed
_SIZES = {
    "all_to_all_single": 1024,
    "async all_to_all_single": 1024,
    "functional all_reduce": 1024,
    "DDP step": 4 * LAYER * (LAYER + 1),
    "100 new_group": 0,
    "21 groups": 0,
}
MEGATRON = "Megatron's groups"
if importlib.util.find_spec("megatron"):
    _SIZES[MEGATRON] = 0
CASES = [Case(name, nbytes, pattern="uniform") for name, nbytes in _SIZES.items()]
PAIR = [0, 1]
GROUPS = {"100 new_group": [PAIR] * 100, "21 groups": [[0], [1], PAIR] * 7}


def competitors(case: Case) -> tuple[str, ...]:
    """Returns the columns that can run this case; ``ours`` and ``gloo`` run every case."""
    some = {"all_to_all_single": ("floor", "exchange"), "async all_to_all_single": ("floor",)}
    return ("ours", "gloo", *some.get(case.collective, ()))


def header(title: str, columns: list[str]) -> str:
    """Returns the table's head: each competitor's median and minimum, and its median divided by ours."""
    text = f"# {title}\n# µs of a call, median and minimum of blocks; x: that competitor's median / ours\n"
    text += "# over: what ours takes beyond floor and exchange, of the medians and of the minima\n"
    return text + _table(columns).head()


def line(row: report.Row, columns: list[str]) -> str:
    """Formats the table row of one call."""
    times, figures = row["times"], list[Any]()
    for name in columns:
        measured = times.get(name)
        figures += [measured["median_us"], measured["min_us"], report.ratio(row, name)] if measured else [None] * 3
    for key in ("median_us", "min_us"):
        over = "exchange" in times
        figures.append(times["ours"][key] - times["floor"][key] - times["exchange"][key] if over else None)
    ours = times["ours"]["median_us"], times["ours"]["min_us"], report.wrong(row)
    return _table(columns).row(row["np"], row["collective"], row["nbytes"], *ours, *figures)


def _table(columns: list[str]) -> Table:
    own = ("np >3", "call >24", "size(B) >8", "time >10.2f", "min >10.2f", "#wrong >6")
    peers = (part for column in columns for part in (f"{column} >10.2f", "min >10.2f", "x >7.2f"))
    return Table(*own, *peers, "over >7.2f", "min >7.2f")


class BackendLibrary:
    """A job of torch.distributed whose ranks hold a group of each backend."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        import alltoallv.torch  # noqa: F401 - registers the backend

        torch.set_num_threads(1)
        dist.Backend.register_backend("nothing", _group_that_does_nothing(), extended_api=True, devices=["cpu"])
        dist.init_process_group("alltoallv")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        groups = {
            "ours": dist.group.WORLD,
            "gloo": dist.new_group(backend="gloo"),
            "floor": dist.new_group(backend="nothing"),
            "exchange": dist.group.WORLD,
        }
        self.competitors: Mapping[str, Competitor] = {name: Calls(name, group) for name, group in groups.items()}

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def _group_that_does_nothing() -> Callable[..., Any]:
    import torch.distributed as dist

    class Done(dist._Work):  # type: ignore[misc]
        def wait(self, timeout: Any = None) -> bool:
            return True

    class Nothing(dist.ProcessGroup):  # type: ignore[misc]
        def __init__(self, options: Any, _: Any = None) -> None:
            super().__init__(options.group_rank, options.group_size)

        def all_to_all_single(self, *_: Any) -> Done:
            return Done()

        alltoall_base = all_to_all_single  # its name in older releases

        def getBackendName(self) -> str:
            return "nothing"

    return Nothing


class Calls:
    """Prepares the call of any case on one group."""

    def __init__(self, name: str, group: Any) -> None:
        self._name, self._group = name, group

    def prepare(self, case: Case) -> Prepared:
        import torch
        import torch.distributed as dist
        import torch.distributed._functional_collectives as functional

        from alltoallv import _core

        group, source = self._group, case.input(dist.get_rank())
        x = torch.from_numpy(source)
        if case.collective in GROUPS:
            backend = "gloo" if self._name == "gloo" else "alltoallv"
            return Prepared(lambda: Groups(backend, GROUPS[case.collective]), lambda _: source, source, exact=False)
        if case.collective == MEGATRON:
            return Prepared(partial(MegatronGroups, self._name), lambda _: source, source, exact=False)
        if case.collective == "DDP step":
            return Prepared(_training_step(group), lambda _: source, source, exact=False)
        if case.collective == "functional all_reduce":
            reduce, wait = functional.all_reduce, functional.wait_tensor
            return Prepared(lambda: wait(reduce(x, "sum", group)), lambda y: y.numpy(), source)
        out, exchange = torch.empty_like(x), dist.all_to_all_single

        def waited() -> None:
            exchange(out, x, group=group, async_op=True).wait()

        call: Callable[[], Any] = waited
        if self._name == "exchange":
            call = partial(_core.all_to_all_single, group.communicator.core, out, x, None, None, False, None, False)
        elif not case.collective.startswith("async"):
            call = partial(exchange, out, x, group=group)
        return Prepared(call, lambda _: out.numpy(), source, exact=self._name != "floor", output=out.numpy())


class Groups:
    """Makes new groups; the rank drops a block's result, and with it the last reference to them, before the next
    begins.
    """

    def __init__(self, backend: str, members: list[list[int]]) -> None:
        import torch.distributed as dist

        self._destroy = dist.destroy_process_group
        self._groups = [dist.new_group(ranks, backend=backend) for ranks in members]

    def __del__(self) -> None:
        for group in getattr(self, "_groups", ()):
            self._destroy(group)


class MegatronGroups(Groups):
    """The groups that Megatron-core's initialize_model_parallel makes for tensor parallelism of all ranks."""

    def __init__(self, name: str) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        super().__init__("gloo", [])
        new_group = dist.new_group

        def of_backend(*args: Any, **kwargs: Any) -> Any:
            kwargs["backend"] = "gloo" if name == "gloo" else "alltoallv"  # not the default group's, which is ours
            group = new_group(*args, **kwargs)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._groups.append(group)
            return group

        dist.new_group = of_backend
        try:
            parallel_state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
        finally:
            dist.new_group = new_group
            parallel_state.destroy_model_parallel()


def _training_step(group: Any) -> Callable[[], Any]:
    """Returns a call that runs a linear layer forward and backward and averages its gradients over the group."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(LAYER, LAYER), process_group=group)
    x = torch.randn(8, LAYER)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step
