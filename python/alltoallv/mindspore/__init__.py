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

from alltoallv._calls.front_end import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation, QuantAllReduceOperation
from alltoallv.mindspore import (
    cells,
    collectives,
    exchange,
    graph,
    group,
    installation,
    messages,
    quantized,
    resharding,
)
from alltoallv.mindspore.cells import *
from alltoallv.mindspore.collectives import *
from alltoallv.mindspore.exchange import *
from alltoallv.mindspore.exchange import MoEDispatcher
from alltoallv.mindspore.graph import *
from alltoallv.mindspore.group import *
from alltoallv.mindspore.installation import *
from alltoallv.mindspore.messages import *
from alltoallv.mindspore.quantized import *
from alltoallv.mindspore.resharding import *
from alltoallv.mindspore.tensors import CommHandle, Received, empty

# A graph cannot hold these functions: MindSpore then reports that instead of reading their source.
_OURS = (
    *("collectives", "comm_func", "communication_ops", "distributed", "exchange", "front_end", "group", "messages"),
    *("quantized", "tensors"),
)
_SHARED = "atb.operations", "_calls.exchanges", "quantization.functions"
_NAMES = "mindspore", *(f"mindspore.{_name}" for _name in _OURS)
for _module in (*_NAMES, *_SHARED):
    _forbid(f"alltoallv.{_module}")

__all__ = ["AllToAllVOperation", "CommHandle", "MoEDispatcher", "QuantAllReduceOperation", "Received", "empty"]
__all__ += cells.__all__
__all__ += collectives.__all__
__all__ += exchange.__all__
__all__ += graph.__all__
__all__ += group.__all__
__all__ += installation.__all__
__all__ += messages.__all__
__all__ += quantized.__all__
__all__ += resharding.__all__

_publish(globals())
