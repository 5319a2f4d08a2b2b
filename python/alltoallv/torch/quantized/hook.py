"""A communication hook for DistributedDataParallel: gradients are averaged as codes, with error feedback."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import Format, Gather, Quantization, coding
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.observers import hide
from alltoallv.torch.quantized.feedback import BucketFeedback
from alltoallv.torch.quantized.functions import quantized_all_reduce


class QuantizedCommHook:
    """Averages the gradients of DDP with `quantized_all_reduce`.

        hook = QuantizedCommHook(bits=8)
        model.register_comm_hook(None, hook)

    The rounding error of one step is added in the next (`BucketFeedback`); it follows its parameters when DDP regroups
    its buckets, as it does after the first step. Save it with `state_dict` beside the model, on every
    rank, and load it before the first step of the same model on as many ranks. Steps without gradients everywhere
    (``no_sync``) do not call the hook.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        bits: int = 8,
        format: Format | None = None,
        group_size: int | None = None,
        gather: Gather = "quantized",
        error_feedback: bool = True,
    ) -> None:
        """Takes the arguments of `quantized_all_reduce`; ``group`` is DDP's process group.

        Raises:
            InvalidParamError: an argument is wrong.
        """
        self.format = coding(bits, format)
        quantization = Quantization.checked(self.format, group_size, gather, "avg", "saturate")
        self.group = group
        self.group_size, self.gather = quantization.group_size, gather
        self.error_feedback = error_feedback
        self._feedback = BucketFeedback(quantization)
        # DDP asks a hook for its name, and for its annotations as objects, hence no postponed ones in this file.
        self.__name__ = self.__qualname__ = type(self).__name__

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages one bucket; DDP calls it for every bucket, in the same order on every rank."""
        gradient = bucket.buffer()
        comm = groups.resolve(self.group, device_of(gradient))
        if comm is None:
            raise InvalidParamError("this rank is not a member of the hook's group", id=1456)
        feedback = None
        if self.error_feedback:
            with guard(comm, "quantized_all_reduce"):
                feedback = self._feedback.of(bucket.parameters(), comm.rank, comm.size)
        _, work = quantized_all_reduce(
            gradient,
            format=self.format,
            group_size=self.group_size,
            gather=self.gather,
            op="avg",
            out=gradient,
            error_feedback=feedback,
            group=comm,
            async_op=True,
        )
        return work.get_future()

    def state_dict(self) -> dict[str, Any]:
        """Returns the error feedback by parameter, and which parameters share a bucket: tensors, numbers and lists."""
        return self._feedback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads copies of a state that `state_dict` returned on this rank.

        Raises:
            InvalidParamError: it is of another group size; or, which may show in the first step only, of another model,
                rank or number of ranks.
        """
        self._feedback.load_state_dict(state)


hide(QuantizedCommHook)
