"""``paddle.jit.to_static`` does not enter this package: the checks around a call are no part of a graph."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import paddle

import alltoallv
from alltoallv._calls import exchanges
from alltoallv.quantization import functions


def leave_out(front_end: ModuleType) -> None:
    """With ``full_graph=False`` graphs end before these functions, and begin again after them."""
    paddle.jit.ignore_module([front_end, exchanges, functions])
    # Paddle (3.3) cannot make code of what it has to break up between two attributes of a tensor.
    skip = getattr(paddle.framework.core, "eval_frame_skip_file_prefix", None)
    if skip is not None:
        skip((f"{Path(alltoallv.__file__).parent}/",))
