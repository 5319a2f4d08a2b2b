"""Collectives on MindSpore tensors, in jobs started by ``msrun``, in PyNative and in graph mode.

``group`` is None for all ranks of the job, a name made by `new_group` or by MindSpore's own ``new_group`` or
``create_group``, or a `Communicator`. Call `init` first; ``mindspore.communication.init()`` is not needed, but
harmless. Without a launcher the job is one process.

Every function is collective: all ranks of the group call it, in the same order. Errors that concern several ranks are
raised on all of them. A call is made when Python reaches it: it waits until MindSpore has computed what it was asked to
compute, then exchanges host memory on the calling thread, so its output is complete when it returns. With
``async_op=True`` a function returns a `CommHandle` at once; do not touch the given tensors until its ``wait()`` has
returned.

All functions that move values have gradients in PyNative, also those that write into a given output. In a graph
(``ms.jit``, GRAPH_MODE) use the cells; the functions raise an error there. MindSpore's ``quantized`` and float8 dtypes
are not supported.
"""

from alltoallv.mindspore import _needs as _needs

# isort: split
from mindspore.graph._utils.check_jit_forbidden_api import add_jit_forbidden_module as _forbid

from alltoallv._calls.signature import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation
from alltoallv.atb.quant_operations import QuantAllReduceOperation
from alltoallv.mindspore.cells import (
    AllReduceLeaves,
    AllToAllVCell,
    QuantAllReduceCell,
    QuantizedAllReduce,
    QuantizedAllToAll,
    QuantizedReduceScatter,
)
from alltoallv.mindspore.collectives import (
    all_gather,
    all_reduce,
    all_reduce_leaves,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    row_parallel_linear,
    scatter,
)
from alltoallv.mindspore.dimensions import all_to_all_nd, heads_to_sequence, sequence_to_heads
from alltoallv.mindspore.dispatcher import MoEDispatcher
from alltoallv.mindspore.exchange import (
    all_gather_into_tensor,
    all_to_all_single,
    all_to_all_v,
    exchange_counts,
    global_gather,
    global_scatter,
)
from alltoallv.mindspore.graph import AllToAllV, DynamicAllToAllV
from alltoallv.mindspore.group import init, new_group
from alltoallv.mindspore.installation import install, uninstall
from alltoallv.mindspore.messages import irecv, isend, recv, send
from alltoallv.mindspore.quantized import (
    Bounded,
    ErrorFeedback,
    quantized_all_reduce,
    quantized_all_to_all,
    quantized_linear_all_reduce,
    quantized_reduce_scatter,
)
from alltoallv.mindspore.received import Received
from alltoallv.mindspore.resharding import ReshardPlan, reshard, reshard_state
from alltoallv.mindspore.tensors import empty
from alltoallv.mindspore.work import CommHandle

# A graph cannot hold these functions: MindSpore then reports that instead of reading their source.
_OURS = (
    *("collectives", "comm_func", "communication_ops", "counted", "dispatcher", "front_end", "group", "messages"),
    *("quantized", "tensors"),
)
_MINT = "mint.checks", "mint.groups", "mint.messages", "mint.objects"
_ATB = "atb.operation", "atb.operations", "atb.quant_operations"
_SHARED = "_calls.exchanges", "_calls.expert_rows", "quantization.functions"
_NAMES = "mindspore", "mindspore.distributed", *(f"mindspore.{_name}" for _name in (*_OURS, *_MINT))
for _module in (*_NAMES, *_ATB, *_SHARED):
    _forbid(f"alltoallv.{_module}")

__all__ = [
    "AllReduceLeaves",
    "AllToAllV",
    "AllToAllVCell",
    "AllToAllVOperation",
    "Bounded",
    "CommHandle",
    "DynamicAllToAllV",
    "ErrorFeedback",
    "MoEDispatcher",
    "QuantAllReduceCell",
    "QuantAllReduceOperation",
    "QuantizedAllReduce",
    "QuantizedAllToAll",
    "QuantizedReduceScatter",
    "Received",
    "ReshardPlan",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_leaves",
    "all_to_all",
    "all_to_all_nd",
    "all_to_all_single",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "empty",
    "exchange_counts",
    "gather",
    "global_gather",
    "global_scatter",
    "heads_to_sequence",
    "init",
    "install",
    "irecv",
    "isend",
    "new_group",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_linear_all_reduce",
    "quantized_reduce_scatter",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reshard",
    "reshard_state",
    "row_parallel_linear",
    "scatter",
    "send",
    "sequence_to_heads",
    "uninstall",
]

_publish(globals())
