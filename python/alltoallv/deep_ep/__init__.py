"""Provides the interface of the package deep_ep, for programs that send the tokens of a mixture of experts through it.

It works on CPU tensors over shared memory, between hosts over TCP; on NPUs it has not been run yet. A program that
imports ``deep_ep`` runs unchanged after:

    import alltoallv.deep_ep

    alltoallv.deep_ep.install()  # before it looks for deep_ep

`Buffer` has dispatch, combine, layout and the low-latency calls of version 1, `ElasticBuffer` dispatch and combine of
version 2. A token goes once to each rank that has one of its experts. Calls are done when they return, and so are
events; streams, numbers of SMs and sizes of buffers are accepted and ignored. HybridEPBuffer is missing.

An argument that is wrong on any rank raises `alltoallv.errors.InvalidParamError` or `InvalidTensorError`, ranks that
disagree `PeerMismatchError`, and one that is lost or late `PeerLostError` or `CommTimeoutError`, on every rank.
"""

from __future__ import annotations

import sys

import torch

from alltoallv.deep_ep import utils
from alltoallv.deep_ep.buffers import Buffer
from alltoallv.deep_ep.elastic import ElasticBuffer
from alltoallv.deep_ep.handles import EPHandle, LowLatencyHandle
from alltoallv.deep_ep.utils import Config, EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "LowLatencyHandle",
    "install",
    "topk_idx_t",
]

topk_idx_t = torch.int64
"""The dtype of expert numbers."""


def install() -> None:
    """Makes ``import deep_ep`` find this package.

    Raises:
        ImportError: the program has imported another deep_ep already.
    """
    this = sys.modules[__name__]
    if sys.modules.setdefault("deep_ep", this) is not this:
        raise ImportError(f"deep_ep is {sys.modules['deep_ep'].__name__} already, expected a call before its import")
    sys.modules["deep_ep.utils"] = utils
