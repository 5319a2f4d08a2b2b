"""Collectives on torch tensors.

``group`` is a ProcessGroup of torch.distributed, a `Communicator`, or None for the default group (without
``init_process_group``: all ranks that the launcher started). The ranks of a ProcessGroup find each other through its
store at the first call. On one host they share memory, between hosts they use TCP (a group of MPI its MPI); tensors on
a GPU use the group's own engine, such as NCCL. The checks before data move are the same (see `from_group`). A rank
outside the group gets a warning and None, as in torch.distributed.

Every function is collective: all ranks of the group call it, in the same order. Errors that concern several ranks are
raised on all of them. With ``async_op=True`` a function returns at once, with a handle like ``torch.distributed.Work``;
the tensors given must not be touched until it is done.

Outputs that a function allocates lie in shared memory where that moves the data (see `empty`). Calls without gradients
go straight to the core; with gradients, and in a graph, they are the operators of `alltoallv.torch.graph.ops`, which
torch's dispatcher sees where somebody watches it: a graph, a mode, a profiler.
"""

from alltoallv._calls.front_end import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation, QuantAllReduceOperation
from alltoallv.torch import _needs as _needs
from alltoallv.torch import functional, nn
from alltoallv.torch.api import collectives, exchange, p2p, reductions, resharding
from alltoallv.torch.api.collectives import *
from alltoallv.torch.api.exchange import *
from alltoallv.torch.api.exchange import Plan
from alltoallv.torch.api.p2p import *
from alltoallv.torch.api.reductions import *
from alltoallv.torch.api.resharding import *
from alltoallv.torch.eager.calls import Received, Work
from alltoallv.torch.eager.group import from_group
from alltoallv.torch.eager.tensors import empty
from alltoallv.torch.process_group import backend as backend
from alltoallv.torch.process_group.group import GroupOptions
from alltoallv.torch.quantized import functions as quantized_functions
from alltoallv.torch.quantized.adapter import ErrorFeedback
from alltoallv.torch.quantized.functions import *
from alltoallv.torch.quantized.hook import QuantizedCommHook

__all__ = [
    "AllToAllVOperation",
    "ErrorFeedback",
    "GroupOptions",
    "Plan",
    "QuantAllReduceOperation",
    "QuantizedCommHook",
    "Received",
    "Work",
    "empty",
    "from_group",
    "functional",
    "nn",
]
__all__ += collectives.__all__
__all__ += exchange.__all__
__all__ += p2p.__all__
__all__ += quantized_functions.__all__
__all__ += reductions.__all__
__all__ += resharding.__all__

_publish(globals())
