"""Collectives on NumPy arrays. ``group`` is a `Communicator`; None means the default one of this job.

Every function is collective: all ranks of the group call it, in the same order. Errors that concern several ranks are
raised on all of them. With ``async_op=True`` a function returns a `Work` at once; do not touch the given arrays until
it is done.
"""

from alltoallv._calls.front_end import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation
from alltoallv.atb.quant_operations import QuantAllReduceOperation
from alltoallv.numpy import (
    dimensions,
    exchange,
    objects,
    p2p,
    quantized,
    reductions,
    resharding,
    rooted,
)
from alltoallv.numpy.dimensions import *
from alltoallv.numpy.dispatcher import MoEDispatcher
from alltoallv.numpy.exchange import *
from alltoallv.numpy.objects import *
from alltoallv.numpy.p2p import *
from alltoallv.numpy.plan import Plan
from alltoallv.numpy.quantized import *
from alltoallv.numpy.reductions import *
from alltoallv.numpy.resharding import *
from alltoallv.numpy.rooted import *
from alltoallv.numpy.work import Work

__all__ = ["AllToAllVOperation", "MoEDispatcher", "Plan", "QuantAllReduceOperation", "Work"]
__all__ += dimensions.__all__
__all__ += exchange.__all__
__all__ += objects.__all__
__all__ += p2p.__all__
__all__ += quantized.__all__
__all__ += reductions.__all__
__all__ += resharding.__all__
__all__ += rooted.__all__

_publish(globals())
