"""Imported first: without paddle, or with one of another meaning, it describes what to install."""

import inspect

from alltoallv.extras import extra

if next(iter(inspect.signature(extra("paddle", "paddle").distributed.alltoall_single).parameters)) != "out_tensor":
    raise ImportError(  # its alltoall and alltoall_single take the input first: a call by position would destroy it
        "alltoallv.paddle needs paddlepaddle 3, whose alltoall_single takes the output first: "
        "pip install 'alltoallv[paddle]'"
    )
