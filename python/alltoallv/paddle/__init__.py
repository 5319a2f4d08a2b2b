"""Collectives on Paddle tensors on CPU, where Paddle itself refuses alltoall_single, global_scatter and global_gather.

``group`` is None for all ranks of the job, a group made by `new_group` or by ``paddle.distributed.new_group``, or a
`Communicator`. Jobs start with ``python -m paddle.distributed.launch`` or ``python -m alltoallv run``; without a
launcher the job is one process. ``init_parallel_env`` is not needed, and does no harm. A rank outside the group gets a
warning and None, as in Paddle.

Every function is collective: all ranks of the group call it, in the same order. Errors that concern several ranks are
raised on all of them. With ``sync_op=False`` (``async_op=True``) a function returns at once, with a `Task`; the tensors
given must not be touched until its ``wait()`` has returned.

What returns a new tensor has gradients, of every order. What writes into a given one has none, as in Paddle.
"""

import sys

from alltoallv.atb.operations import AllToAllVOperation
from alltoallv.atb.quant_operations import QuantAllReduceOperation
from alltoallv.paddle import graphs
from alltoallv.paddle.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from alltoallv.paddle.exchange import all_to_all_v, alltoall, alltoall_single, exchange_counts
from alltoallv.paddle.group import new_group
from alltoallv.paddle.moe import global_gather, global_scatter
from alltoallv.paddle.quantized import (
    ErrorFeedback,
    quantized_all_reduce,
    quantized_all_to_all,
    quantized_reduce_scatter,
)
from alltoallv.paddle.tensors import empty
from alltoallv.paddle.work import Task

__all__ = [
    "AllToAllVOperation",
    "ErrorFeedback",
    "QuantAllReduceOperation",
    "Task",
    "all_gather",
    "all_reduce",
    "all_to_all_v",
    "alltoall",
    "alltoall_single",
    "barrier",
    "broadcast",
    "empty",
    "exchange_counts",
    "global_gather",
    "global_scatter",
    "new_group",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_reduce_scatter",
    "reduce_scatter",
]

graphs.leave_out(sys.modules[__name__])
