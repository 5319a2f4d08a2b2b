"""Keeps ``paddle.jit.to_static`` out of this package: the checks around a call are not part of a graph."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import paddle

import alltoallv


def leave_out(front_end: ModuleType) -> None:
    """Makes graphs with ``full_graph=False`` end before these functions and begin again after them."""
    paddle.jit.ignore_module([front_end])
    # Paddle 3.3 fails to generate code if it has to break a function between two attributes of a tensor.
    skip = getattr(paddle.framework.core, "eval_frame_skip_file_prefix", None)
    if skip is not None:
        skip((f"{Path(alltoallv.__file__).parent}/",))
