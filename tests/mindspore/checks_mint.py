"""mint.distributed as ours, and as MindSpore's own under install(): every name, signatures, refusals, no warnings."""

from __future__ import annotations

import functools
import inspect
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, communication, mint, ops
from mindspore._c_expression import GroupOptions
from mint_calls import CALLS, call_broadcast, equal, given

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.mindspore import comm_func
from alltoallv.mindspore import distributed as ours

WORLD = "hccl_world_group"
THEIRS = {name: getattr(mint.distributed, name) for name in mint.distributed.__all__}


def call_all(d: Any) -> None:
    am.init()
    rank = ours.get_rank()
    for name, call in sorted(CALLS.items(), key=lambda item: item[0] != "init_process_group"):
        try:
            call(d, rank, 1 - rank)
        except Exception as error:
            raise AssertionError(f"mint.distributed.{name}: {error!r}") from error


def check_mint_mistake_of_one_rank(comm: Communicator) -> None:
    """A TypeError is that rank's alone, as in MindSpore's own tests: the next calls of all ranks meet."""
    am.init()
    x, objects = Tensor(given(comm.rank)), [None, None]
    wrong: list[Callable[[], object]] = [
        lambda: ours.all_reduce(x, "test"),
        lambda: ours.all_gather([1, 2], x),
        *(functools.partial(ours.gather_object, "x", given) for given in (None, {}, 1, [])),
        lambda: ours.all_to_all_single(x, 1),
        lambda: ours.barrier(async_op=1),
    ]
    for call in wrong if comm.rank == 0 else ():
        with pytest.raises(TypeError):
            call()
    ours.gather_object(comm.rank, objects)
    assert objects == ([0, 1] if comm.rank == 0 else [None, None])
    ours.all_reduce(x)
    equal(x, given(0) + given(1))


def check_mint_batch_ends_as_a_whole(comm: Communicator) -> None:
    """All messages have ended when the handle raises the error of one: nothing is written later."""
    am.init()
    other, out = 1 - comm.rank, ops.zeros((2, 3))
    sends = [ours.P2POp("isend", Tensor(given(comm.rank)), other) for _ in range(2)]
    receives = [ours.P2POp("irecv", x, other) for x in (ops.zeros(2), out)]
    (handle,) = ours.batch_isend_irecv([*sends, *receives])
    with pytest.raises(PeerMismatchError):
        handle.wait()
    equal(out, given(other))


def check_comm_func_mistake_of_one_rank(comm: Communicator) -> None:
    """A TypeError is that rank's alone; of other errors the other hears at once."""
    x, calls = Tensor(given(comm.rank)), functools.partial
    for call in (
        calls(comm_func.all_reduce, group=comm),
        calls(comm_func.reduce, dst=0, group=comm),
        calls(comm_func.broadcast, group=comm),
        calls(comm_func.all_gather_into_tensor, group=comm),
        calls(comm_func.reduce_scatter_tensor, group=comm),
        calls(comm_func.scatter_tensor, group=comm),
        calls(comm_func.gather_into_tensor, group=comm),
        calls(comm_func.all_to_all_with_output_shape, [(2, 3)] * 2, group=comm),
        calls(comm_func.all_to_all_single_with_output_shape, (2, 3), group=comm),
        calls(comm_func.all_to_all_v_c, input=x + 0, send_count_matrix=[1] * 4, group=comm),
    ):
        right = [x, x] if call.func is comm_func.all_to_all_with_output_shape else x
        if comm.rank == 0:
            with pytest.raises(TypeError):
                call(None)
        call(right)
    with pytest.raises(InvalidTensorError, match=r"tensor has shape \(\), expected at least 1 dimension"):
        comm_func.gather_into_tensor(Tensor(1.0) if comm.rank == 0 else x, group=comm)
    x = Tensor(given(comm.rank))  # those above have changed theirs
    equal(comm_func.reduce(x, 0, group=comm), given(0) + given(1) if comm.rank == 0 else given(1))


def check_a_name_means_one_group(comm: Communicator) -> None:
    """And "", which `new_group` returns on a rank outside, means none: it was the group of all ranks."""
    am.init()
    x, group = Tensor(given(comm.rank)), ours.new_group([1])
    for ranks in ([0, 1], [1, 0]):
        comm_func.create_group("named", ranks)
    for name, ranks in (("named", [comm.rank]), ("hccl_world_group", [0, 1]), ("", [0, 1])):
        with pytest.raises(ValueError, match="name"):
            comm_func.create_group(name, ranks)
    if comm.rank == 0:
        with pytest.raises(InvalidParamError, match="group is '', which new_group"):
            ours.all_reduce(x, group=group)
    else:
        ours.all_reduce(x, group=group)
    ours.all_reduce(x, group="named")
    equal(x, given(0) + given(1))
    comm_func.create_group("other", [0, 1])
    totals = {name: Tensor(np.full(3, factor)) for name, factor in (("named", 1.0), ("other", 10.0))}
    for name in list(totals) if comm.rank else reversed(totals):
        totals[name] = totals[name], ours.all_reduce(totals[name], group=name, async_op=True)
    for _, handle in totals.values():
        handle.wait()
    assert [float(total[0]) for total, _ in totals.values()] == [2, 20]
    for name in totals:
        comm_func.destroy_group(name)


def check_local_ranks_are_of_the_group(comm: Communicator) -> None:
    """The group was ignored."""
    am.init()
    rank = comm.rank
    alone, other = am.new_group([rank]), am.new_group([1 - rank])
    assert (comm_func.get_local_rank(), comm_func.get_local_rank_size()) == (rank, 2)
    assert (comm_func.get_local_rank(alone), comm_func.get_local_rank_size(alone)) == (0, 1)
    for function in (comm_func.get_local_rank, comm_func.get_local_rank_size):
        with pytest.raises(InvalidParamError, match=f"expected one of this rank, {rank}; its ranks are"):
            function(other)


def check_ignored_arguments_change_nothing(comm: Communicator) -> None:
    """The arguments in docs/migration.md; of another type, those that MindSpore checks are refused."""
    am.init()
    options, rank = GroupOptions(), comm.rank
    ours.init_process_group(group_name="all", pg_options=1, device_id=7, rank=9, timeout=timedelta(milliseconds=1))
    assert ours.get_rank() == rank
    message = comm_func.P2POp("irecv", Tensor(given(rank)), 1 - rank, recv_dtype=ms.int8)
    assert message.tensor.dtype == ms.float32
    for more in ({"timeout": 1}, {"pg_options": options}, {"use_local_synchronization": True}, {"group_desc": "some"}):
        assert ours.new_group([0, 1], **more) == ours.new_group([0, 1])
    ours.barrier(device_ids=[5])
    told: list[Any] = [rank, rank]
    ours.broadcast_object_list(told, 1, device="npu")
    assert told == [1, 1]
    if rank == 0:
        ours.send_object_list([2, 3], 1, device="npu")
    else:
        ours.recv_object_list(told, 0, device="npu")
        assert told == [2, 3]
    comm_func.create_group("with_options", [0, 1], options)
    assert comm_func.get_group_size("with_options") == 2
    comm_func.destroy_group("with_options")
    for call, names in (
        (functools.partial(comm_func.create_group, "with_options", [0, 1]), {"options": 1}),
        (functools.partial(ours.new_group, [0, 1]), {"pg_options": 1}),
        (functools.partial(comm_func.P2POp, "irecv", (2,), 1 - rank), {"recv_dtype": "float32"}),
        (ours.init_process_group, {"group_name": 1}),
    ):
        with pytest.raises(TypeError, match=next(iter(names))):
            call(**names)


def check_mint_no_warning_at_calls(comm: Communicator) -> None:
    am.init()
    with unittest.mock.patch("mindspore.log.warning") as warned:
        for dtype in (ms.float32, ms.bfloat16, ms.bool_):
            ours.all_gather_into_tensor(am.empty((4,), dtype), am.empty((2,), dtype))
            am.all_to_all_v(am.empty((2,), dtype), [1, 1])
    assert not warned.call_args_list


def check_mint_every_name(comm: Communicator) -> None:
    assert set(ours.__all__) == {*THEIRS, "TCPStore"}
    call_all(ours)


def check_mint_every_name_installed(comm: Communicator) -> None:
    with am.install():
        call_all(mint.distributed)
    assert {name: getattr(mint.distributed, name) for name in THEIRS} == THEIRS


def check_mint_signatures(comm: Communicator) -> None:
    """Names, order and defaults; ours may have more by keyword."""
    for name, theirs in THEIRS.items():
        mine = inspect.signature(getattr(ours, name)).parameters.values()
        mine = [(p.name, p.default) for p in mine if p.kind is not p.KEYWORD_ONLY]
        assert mine == [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()], name
    for name in communication.comm_func.__all__:
        theirs, mine = (inspect.signature(getattr(of, name)).parameters for of in (communication.comm_func, comm_func))
        assert list(mine) == list(theirs), name
        defaults = {key: parameter.default for key, parameter in theirs.items() if parameter.default != WORLD}
        assert defaults.items() <= {key: parameter.default for key, parameter in mine.items()}.items(), name


def check_mint_outputs_are_mints(comm: Communicator) -> None:
    """A gathered tensor has exactly the inputs' rows; outputs of all_to_all beyond one per rank are left alone."""
    am.init()
    x = Tensor(np.ones((3, 3), np.float32))
    for shape in ((3, 6), (2, 3, 3), (18,)):
        with pytest.raises(ValueError, match="output_tensor has shape"):
            ours.all_gather_into_tensor(Tensor(np.zeros(shape, np.float32)), x)
    outs = [Tensor(np.zeros((3, 3), np.float32)) for _ in range(5)]
    ours.all_to_all(outs, [x] * comm.size)
    assert [int(out.asnumpy().sum()) for out in outs] == [9, 9, 0, 0, 0]


def check_mint_without_a_launcher(comm: Communicator) -> None:
    """By an address that all ranks know."""
    am.init()
    rank = ours.get_rank()
    ours.destroy_process_group()
    with pytest.raises(ValueError, match="rank"):
        ours.init_process_group(init_method="tcp://127.0.0.1:29999", world_size=2)
    with pytest.raises(RuntimeError, match="TCP URL"):
        ours.init_process_group(init_method="127.0.0.1", world_size=2, rank=rank)
    ours.init_process_group(init_method="tcp://127.0.0.1:29999", world_size=2, rank=rank)
    call_broadcast(ours, rank, 1 - rank)
    ours.destroy_process_group()
    am.init(timeout=30)
