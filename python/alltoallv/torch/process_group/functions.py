"""Lets functions of ``torch.distributed`` take groups of this backend that torch's own refuse.

`monitored_barrier` takes gloo alone, by name. The last step of `shrink_group` makes a group of torch's C++ class out of
a C++ engine, which no Python group is, so that calls of the smaller group would never reach this backend;
`split_group` refuses groups without an accelerator, `_set_pg_timeout` knows gloo and NCCL alone, and
`batch_isend_irecv` coalesces messages for torch's own class of groups only: NCCL would wait for the first before it
takes the second. For groups of this backend the same steps are done here.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from alltoallv._calls.collectives import barrier_plan
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.torch.eager.observers import between_graphs
from alltoallv.torch.process_group.group import EngineGroup

_c10d: Any = dist.distributed_c10d
_HOST = torch.empty(0, device="cpu")
# From torch 2.14 on the order of the ranks given to split_group counts, and those that are in no part get a number.
_KEEPS_ORDER = torch.__version__ >= (2, 14)
_IN_NO_PART = dist.GroupMember.NON_GROUP_MEMBER if _KEEPS_ORDER else None


def install() -> None:
    """Replaces the functions that this torch has; other groups go to torch's."""
    _install_monitored_barrier()
    _install_set_timeout()
    _install_batch()
    if hasattr(_c10d, "shrink_group"):
        _install_shrink_and_split()


def _install_monitored_barrier() -> None:
    of_torch = _c10d.monitored_barrier

    @between_graphs
    @functools.wraps(of_torch)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        target = dist.group.WORLD if group is None else group
        if not isinstance(target, EngineGroup):
            return of_torch(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        if limit is not None:
            _c10d._check_valid_timeout(limit)
        return target.monitored_barrier(limit, wait_all_ranks)

    _c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _install_set_timeout() -> None:
    of_torch = _c10d._set_pg_timeout

    @functools.wraps(of_torch)
    def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        target = dist.group.WORLD if group is None else group
        if isinstance(target, EngineGroup):
            target.set_timeout(timeout)
        else:
            of_torch(timeout, group)

    _c10d._set_pg_timeout = set_timeout


def _install_batch() -> None:
    of_torch = _c10d.batch_isend_irecv

    @between_graphs
    @functools.wraps(of_torch)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        first = p2p_op_list[0] if isinstance(p2p_op_list, list) and p2p_op_list else None
        group, device = getattr(first, "group", None) or dist.group.WORLD, getattr(first, "tensor", _HOST).device
        coalesces = isinstance(group, EngineGroup) and device.type == "cuda"  # torch_npu has its own way
        if not (coalesces and group._get_backend(device).supports_coalescing):
            works: list[Any] = of_torch(p2p_op_list)
            return works
        _c10d._check_p2p_op_list(p2p_op_list)
        with _c10d._coalescing_manager(group, device, async_ops=True) as coalescing:
            for each in p2p_op_list:
                peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        works = coalescing.works
        return works

    _c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _install_shrink_and_split() -> None:
    of_torch, split_of_torch = _c10d.shrink_group, _c10d.split_group

    @between_graphs
    @functools.wraps(of_torch)
    def shrink_group(
        ranks_to_exclude: list[int],
        group: dist.ProcessGroup | None = None,
        shrink_flags: int = _c10d.SHRINK_DEFAULT,
        pg_options: Any = None,
    ) -> dist.ProcessGroup:
        target = dist.group.WORLD if group is None else group
        if isinstance(target, EngineGroup):
            return _shrink(target, ranks_to_exclude, shrink_flags, pg_options)
        smaller: dist.ProcessGroup = of_torch(ranks_to_exclude, group, shrink_flags, pg_options)
        return smaller

    @between_graphs
    @functools.wraps(split_of_torch)
    def split_group(
        parent_pg: dist.ProcessGroup | None = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> dist.ProcessGroup | int | None:
        parent = dist.group.WORLD if parent_pg is None else parent_pg
        if isinstance(parent, EngineGroup) and not _has_device():
            return _split(parent, split_ranks or [], timeout, pg_options, group_desc, **more)
        split: dist.ProcessGroup | int | None = split_of_torch(
            parent_pg, split_ranks, timeout, pg_options, group_desc, **more
        )
        return split

    _c10d.shrink_group = dist.shrink_group = shrink_group
    _c10d.split_group = dist.split_group = split_group


def _has_device() -> bool:
    """Whether torch's own can split a group: the default group belongs to one accelerator."""
    return torch.accelerator.is_available() and _c10d._get_default_group().bound_device_id is not None


def _split(
    parent: EngineGroup,
    split_ranks: list[list[int]],
    timeout: timedelta | None,
    engine_options: Any,
    description: str | None,
    backend: str | None = None,
) -> dist.ProcessGroup | int | None:
    """Returns this rank's one of the groups, which all ranks of ``parent`` make; what torch's does if it is in none."""
    own = _c10d._world.pg_map[parent][0], _c10d._world.pg_backend_config.get(parent, "")
    with guard(parent.communicator, "barrier"):
        if backend is not None and backend.lower() not in map(str, own):
            raise InvalidParamError(f"backend is {backend!r}, expected None or {str(own[0])!r}, the parent's", id=1446)
        every = [rank for ranks in split_ranks for rank in ranks]
        are_valid = set(every) <= set(range(parent.size()))
        if not every or not all(split_ranks) or len(set(every)) < len(every) or not are_valid:
            raise InvalidParamError(
                f"split_ranks is {split_ranks}, expected lists of ranks 0 to {parent.size() - 1}, each at most once",
                id=1447,
            )
    barrier_plan(parent.communicator).run(0, 0, parent.timeout.total_seconds())  # raises another rank's refusal
    own_ranks = next((ranks for ranks in split_ranks if parent.rank() in ranks), split_ranks[0])
    own_ranks = list(own_ranks) if _KEEPS_ORDER else sorted(own_ranks)
    group = parent.split_group(own_ranks, timeout, engine_options, None, description)
    if group is None:
        return _IN_NO_PART
    of_job = [dist.get_process_group_ranks(parent)[rank] for rank in own_ranks]
    _register(group, own[0], group.get_group_store(), group.group_name, own[1], of_job)
    return group


def _register(group: Any, backend: str, store: Any, name: str, config: str, of_job: list[int]) -> None:
    # Torch 2.10 has it under its older name.
    register = getattr(_c10d, "_register_pg_in_world", None) or _c10d._update_process_group_global_state
    register(
        pg=group,
        backend_name=backend,
        store=store,
        group_name=name,
        backend_config=config,
        rank_mapping={rank: new for new, rank in enumerate(of_job)},
    )


def _shrink(group: EngineGroup, ranks_to_exclude: list[int], flags: int, engine_options: Any) -> EngineGroup:
    """Returns the group of the ranks that are not excluded, all of which call this; the old one is destroyed."""
    _c10d._validate_shrink_inputs(ranks_to_exclude, flags)
    target = _c10d._prepare_shrink_target_group(group)
    excluded = _c10d._validate_and_process_excluded_ranks(ranks_to_exclude, target)
    is_default = target["is_default_group"]
    backend, store = _c10d._world.pg_map[group]
    config = _c10d._world.pg_backend_config.get(group, "")
    if flags == _c10d.SHRINK_ABORT:
        group.abort()
    ranks = [rank for rank in range(group.size()) if rank not in excluded]
    of_job = [dist.get_process_group_ranks(group)[rank] for rank in ranks]
    name = f"{target['group_name']}:shrunk:{'-'.join(map(str, sorted(excluded)))}"
    own = _DistributedBackendOptions()
    own.store = dist.PrefixStore(f"{name}/", store)
    own.group_rank, own.group_size = ranks.index(group.rank()), len(ranks)
    own.timeout, own.group_id, own.global_ranks_in_group = group.timeout, name, ranks if is_default else of_job
    smaller = type(group)(own, group.options_for(engine_options))
    if is_default:
        own.global_ranks_in_group = []  # its ranks are the job's from now on
        _c10d._destroy_all_other_groups(exclude_group=group)
    _c10d._cleanup_original_group(group, is_default)
    smaller._set_group_name(name)
    smaller._set_group_desc("default:shrunken" if is_default else f"{target['group_name']}:shrunk")
    if is_default:
        _c10d._update_default_pg(smaller)
    _register(smaller, backend, own.store, name, config, of_job)
    return smaller
