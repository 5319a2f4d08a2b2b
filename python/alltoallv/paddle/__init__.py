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
from alltoallv._calls.front_end import publish as _publish
from alltoallv.atb.operations import AllToAllVOperation, QuantAllReduceOperation
from alltoallv.paddle import _needs as _needs

# isort: split
import paddle as _paddle

from alltoallv.paddle import collectives, exchange, front_end, installation, messages, quantized, resharding, stream
from alltoallv.paddle.collectives import *
from alltoallv.paddle.exchange import *
from alltoallv.paddle.front_end import *
from alltoallv.paddle.front_end import Task, empty
from alltoallv.paddle.installation import *
from alltoallv.paddle.messages import *
from alltoallv.paddle.quantized import *
from alltoallv.paddle.resharding import *

__all__ = ["AllToAllVOperation", "QuantAllReduceOperation", "Task", "empty", "stream"]
__all__ += collectives.__all__
__all__ += exchange.__all__
__all__ += front_end.__all__
__all__ += installation.__all__
__all__ += messages.__all__
__all__ += quantized.__all__
__all__ += resharding.__all__

_publish(globals())

# The checks around a call are not part of a graph: with full_graph=False it ends before these functions.
_paddle.jit.ignore_module([_sys.modules[__name__]])
# Paddle 3.3 fails to generate code if it has to break a function between two attributes of a tensor.
if (_skip := getattr(_paddle.framework.core, "eval_frame_skip_file_prefix", None)) is not None:
    _skip((_os.path.dirname(_alltoallv.__file__) + "/",))
