"""Collectives on Paddle tensors on CPU, where Paddle itself refuses alltoall_single, global_scatter and global_gather.

``group`` is None for all ranks of the job, a group made by `new_group` or by ``paddle.distributed.new_group``, or a
`Communicator`. Jobs start with ``python -m paddle.distributed.launch`` or ``python -m alltoallv run``; without a
launcher the job is one process. ``init_parallel_env`` is not needed, but harmless. A rank outside the group gets a
warning and None, as in Paddle.

All functions except the messages (`send`, `recv`, ...) are collective: all ranks of the group call them, in the same
order. Errors that concern several ranks are raised on all of them. With ``sync_op=False`` (``async_op=True``) a
function returns a `Task` at once; do not touch the given tensors until its ``wait()`` has returned.

Functions that return a new tensor have gradients of every order. Functions that write into a given one have none.
"""

import os as _os
import sys as _sys

import alltoallv as _alltoallv
from alltoallv._calls.signature import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation
from alltoallv.atb.quant_operations import QuantAllReduceOperation
from alltoallv.paddle import _needs as _needs

# isort: split
import paddle as _paddle

from alltoallv.paddle import stream
from alltoallv.paddle.collectives import (
    all_gather,
    all_reduce,
    all_reduce_leaves,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    row_parallel_linear,
    scatter,
)
from alltoallv.paddle.dimensions import all_to_all_nd, heads_to_sequence, sequence_to_heads
from alltoallv.paddle.exchange import (
    all_to_all,
    all_to_all_v,
    alltoall,
    alltoall_single,
    exchange_counts,
    global_gather,
    global_scatter,
)
from alltoallv.paddle.group import is_initialized, new_group, wait
from alltoallv.paddle.installation import install, uninstall
from alltoallv.paddle.messages import P2POp, batch_isend_irecv, irecv, isend, recv, send
from alltoallv.paddle.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from alltoallv.paddle.quantized import (
    Bounded,
    ErrorFeedback,
    quantized_all_reduce,
    quantized_all_to_all,
    quantized_linear_all_reduce,
    quantized_reduce_scatter,
)
from alltoallv.paddle.resharding import ReshardPlan, reshard, reshard_state
from alltoallv.paddle.tensors import empty
from alltoallv.paddle.work import Task

__all__ = [
    "AllToAllVOperation",
    "Bounded",
    "ErrorFeedback",
    "P2POp",
    "QuantAllReduceOperation",
    "ReshardPlan",
    "Task",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_leaves",
    "all_to_all",
    "all_to_all_nd",
    "all_to_all_v",
    "alltoall",
    "alltoall_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "empty",
    "exchange_counts",
    "gather",
    "gather_object",
    "global_gather",
    "global_scatter",
    "heads_to_sequence",
    "install",
    "irecv",
    "is_initialized",
    "isend",
    "new_group",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_linear_all_reduce",
    "quantized_reduce_scatter",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reshard",
    "reshard_state",
    "row_parallel_linear",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "sequence_to_heads",
    "stream",
    "uninstall",
    "wait",
]

_publish(globals())

# The checks around a call are not part of a graph: with full_graph=False it ends before these functions.
_paddle.jit.ignore_module([_sys.modules[__name__]])
# Paddle 3.3 fails to generate code if it has to break a function between two attributes of a tensor.
if (_skip := getattr(_paddle.framework.core, "eval_frame_skip_file_prefix", None)) is not None:
    _skip((_os.path.dirname(_alltoallv.__file__) + "/",))
