"""A communication hook for DistributedDataParallel: gradients are averaged as codes, with error feedback."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.errors import InvalidParamError
from alltoallv.quantization import Gather, Quantization
from alltoallv.torch import group as groups
from alltoallv.torch.group import Group, device_of
from alltoallv.torch.quantized import quantized_all_reduce
from alltoallv.torch.quantized_calls import ErrorFeedback


class QuantizedCommHook:
    """Averages the gradients of DDP with `quantized_all_reduce`.

        hook = QuantizedCommHook(bits=8)
        model.register_comm_hook(None, hook)

    Each bucket has an `ErrorFeedback` of its own: what the rounding of one step loses is added in the next. Save it
    with `state_dict` beside the model, on every rank; DDP rebuilds its buckets after the first step, then those states
    begin anew. Steps without gradients everywhere (``no_sync``) do not come here.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        bits: int = 8,
        group_size: int = 128,
        gather: Gather = "quantized",
        error_feedback: bool = True,
    ) -> None:
        """Takes the arguments of `quantized_all_reduce`; ``group`` is DDP's process group.

        Raises:
            InvalidParamError: an argument.
        """
        Quantization(bits, group_size, gather).check()
        self.group = group
        self.bits, self.group_size, self.gather = bits, group_size, gather
        self.error_feedback = error_feedback
        self._states: dict[int, ErrorFeedback] = {}
        self._counts: dict[int, int] = {}
        # DDP asks a hook for its name; and for its annotations as objects, hence no postponed ones in this file.
        self.__name__ = self.__qualname__ = type(self).__name__

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls for every bucket, in the same order on every rank."""
        gradient = bucket.buffer()
        _, work = quantized_all_reduce(
            gradient,
            bits=self.bits,
            group_size=self.group_size,
            gather=self.gather,
            op="avg",
            out=gradient,
            error_feedback=self._feedback(bucket.index(), gradient) if self.error_feedback else None,
            group=self.group,
            async_op=True,
        )
        if groups.resolve(self.group, device_of(gradient)) is None or work is None:
            raise InvalidParamError("this rank is not a member of the hook's group")
        future: torch.futures.Future[Tensor] = work.get_future()
        return future

    def _feedback(self, index: int, gradient: Tensor) -> ErrorFeedback:
        if self._counts.get(index) != gradient.numel():  # a new bucket, or DDP has made other ones
            self._counts[index] = gradient.numel()
            self._states[index] = ErrorFeedback()
        return self._states[index]

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The error feedback of every bucket, with its number of elements."""
        return {i: {"count": self._counts[i], **state.state_dict()} for i, state in self._states.items()}

    def load_state_dict(self, states: dict[int, dict[str, Any]]) -> None:
        """Takes copies of what `state_dict` gave."""
        self._states, self._counts = {}, {}
        for index, state in states.items():
            arrays = dict(state)
            self._counts[index] = arrays.pop("count")
            self._states[index] = ErrorFeedback()
            self._states[index].load_state_dict(arrays)
