"""Collectives on NumPy arrays. ``group`` is a `Communicator`; None means the default one of this job.

Every function is collective: all ranks of the group call it, in the same order. Errors that concern several ranks are
raised on all of them. With ``async_op=True`` a function returns a `Work` at once; do not touch the given arrays until
it is done.
"""

from alltoallv._calls.front_end import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation, QuantAllReduceOperation
from alltoallv.numpy import collectives, exchange, messages, quantized, resharding
from alltoallv.numpy.arrays import Work
from alltoallv.numpy.collectives import *
from alltoallv.numpy.exchange import *
from alltoallv.numpy.exchange import MoEDispatcher, Plan
from alltoallv.numpy.messages import *
from alltoallv.numpy.quantized import *
from alltoallv.numpy.resharding import *

__all__ = ["AllToAllVOperation", "MoEDispatcher", "Plan", "QuantAllReduceOperation", "Work"]
__all__ += collectives.__all__
__all__ += exchange.__all__
__all__ += messages.__all__
__all__ += quantized.__all__
__all__ += resharding.__all__

_publish(globals())
