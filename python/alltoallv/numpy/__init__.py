"""Collectives on NumPy arrays. ``group`` is a `Communicator`; None means the default one of this job.

Every function is collective: all ranks of the group call it, in the same order. Errors that concern several ranks are
raised on all of them. With ``async_op=True`` a function returns a `Work` at once; do not touch the given arrays until
it is done.
"""

from alltoallv._calls.signature import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation
from alltoallv.atb.quant_operations import QuantAllReduceOperation
from alltoallv.numpy.dimensions import all_to_all_nd, heads_to_sequence, sequence_to_heads
from alltoallv.numpy.dispatcher import MoEDispatcher
from alltoallv.numpy.exchange import (
    all_gather,
    all_gather_into_tensor,
    all_gather_v,
    all_to_all,
    all_to_all_single,
    all_to_all_v,
    barrier,
    exchange_counts,
    global_gather,
    global_scatter,
)
from alltoallv.numpy.objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    recv_object,
    scatter_object,
    send_object,
)
from alltoallv.numpy.p2p import Envelope, MessageWork, irecv, isend, probe, recv, send, sendrecv
from alltoallv.numpy.plan import Plan
from alltoallv.numpy.quantized import (
    Bounded,
    ErrorFeedback,
    quantized_all_reduce,
    quantized_all_to_all,
    quantized_linear_all_reduce,
    quantized_reduce_scatter,
)
from alltoallv.numpy.reductions import all_reduce, reduce_scatter, row_parallel_linear, scan
from alltoallv.numpy.resharding import ReshardPlan, reshard, reshard_state
from alltoallv.numpy.rooted import broadcast, gather, reduce, scatter
from alltoallv.numpy.work import Work

__all__ = [
    "AllToAllVOperation",
    "Bounded",
    "Envelope",
    "ErrorFeedback",
    "MessageWork",
    "MoEDispatcher",
    "Plan",
    "QuantAllReduceOperation",
    "ReshardPlan",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_nd",
    "all_to_all_single",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "broadcast_object",
    "exchange_counts",
    "gather",
    "gather_object",
    "global_gather",
    "global_scatter",
    "heads_to_sequence",
    "irecv",
    "isend",
    "probe",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_linear_all_reduce",
    "quantized_reduce_scatter",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "reshard",
    "reshard_state",
    "row_parallel_linear",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "sequence_to_heads",
]

_publish(globals())
