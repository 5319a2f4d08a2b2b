"""A communication hook for DistributedDataParallel: gradients are averaged as codes, with error feedback."""

import math
from collections.abc import Sequence
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
from alltoallv.torch.quantized.adapter import ErrorFeedback
from alltoallv.torch.quantized.functions import quantized_all_reduce

_KEYS = ("shapes", "group_size", "rank", "size", "buckets")


class BucketFeedback:
    """One `ErrorFeedback` per bucket of parameters; what a parameter has lost follows it into other buckets.

    Parameters are numbered by their first appearance, and a saved state knows them by number: DDP's first step has
    them in an order that depends on the model alone, later ones in the order in which gradients were ready.
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._parameters: list[Tensor] = []  # kept, so that none is freed and another takes its id
        self._numbers: dict[int, int] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._buckets: dict[tuple[int, ...], ErrorFeedback] = {}
        self._member: tuple[int, int] | None = None  # rank and size to which the gathers' errors belong

    def of(self, parameters: Sequence[Tensor], rank: int, size: int) -> ErrorFeedback:
        """Returns the state of a bucket of these parameters, flat, one after the other; for the average over all ranks.

        Raises:
            InvalidParamError: the loaded state is of another rank, number of ranks or model.
        """
        if self._member not in (None, (rank, size)):
            was = "rank {} of {}".format(*self._member or ())
            raise InvalidParamError(f"the error feedback is of {was}, expected this rank's, {rank} of {size}", id=1450)
        layout = tuple(map(self._number, parameters))
        self._member = rank, size
        if layout not in self._buckets:
            self._buckets[layout] = self._gathered(layout, parameters[0].device)
        return self._buckets[layout]

    def state_dict(self) -> dict[str, Any]:
        """Returns the parameters' shapes by number, and for every bucket their numbers and the arrays themselves."""
        rank, size = self._member or (0, 0)
        buckets = [{"parameters": list(layout), **bucket.state_dict()} for layout, bucket in self._buckets.items()]
        shapes = [list(shape) for shape in self._shapes]
        return dict(zip(_KEYS, (shapes, self._quantization.group_size, rank, size, buckets), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads copies of a state that `state_dict` returned; parameters get theirs as they appear.

        Raises:
            InvalidParamError: it is no state of `state_dict`, or of another group size or model.
        """
        if not isinstance(state, dict) or set(state) != set(_KEYS):
            shown = sorted(map(str, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
            raise InvalidParamError(f"the state is {shown}, expected a dict of {', '.join(_KEYS)}", id=1178)
        if state["group_size"] != self._quantization.group_size and state["buckets"]:
            raise InvalidParamError(
                f"the state has group_size {state['group_size']}, expected {self._quantization.group_size}", id=1452
            )
        shapes = [tuple(shape) for shape in state["shapes"]]
        for number, parameter in enumerate(self._parameters):
            _check_shape(number, parameter, shapes)
        buckets = {}
        for bucket in state["buckets"]:
            arrays = dict(bucket)
            layout = tuple(arrays.pop("parameters"))
            feedback = buckets[layout] = ErrorFeedback()
            feedback.load_state_dict(arrays)
            error, count = feedback.state_dict()["error"], sum(math.prod(shapes[number]) for number in layout)
            if error is not None and error.numel() != count:
                raise InvalidParamError(
                    f"the state of a bucket has {error.numel()} elements, its parameters {count}", id=1453
                )
        self._shapes, self._buckets = shapes, buckets
        self._member = (state["rank"], state["size"]) if buckets else None

    def _number(self, parameter: Tensor) -> int:
        number = self._numbers.get(id(parameter))
        if number is None:
            number = len(self._parameters)
            if number == len(self._shapes):
                self._shapes.append(tuple(parameter.shape))
            _check_shape(number, parameter, self._shapes)
            self._parameters.append(parameter)
            self._numbers[id(parameter)] = number
        return number

    def _gathered(self, layout: tuple[int, ...], device: torch.device) -> ErrorFeedback:
        """Returns the state of a new bucket: what its parameters have lost in their old ones."""
        for old in [old for old in self._buckets if not set(old).isdisjoint(layout)]:
            self._split(old, self._buckets.pop(old))
        feedback = ErrorFeedback()
        alone = [self._buckets.pop((number,), None) for number in layout]
        if any(alone):
            errors = [None if bucket is None else bucket.state_dict()["error"] for bucket in alone]
            pieces = []
            for number, error in zip(layout, errors, strict=True):
                if error is None:
                    error = torch.zeros(math.prod(self._shapes[number]), dtype=torch.float32, device=device)
                pieces.append(error.to(device))
            feedback.load_state_dict({"error": torch.cat(pieces), "gather_error": None})
        return feedback

    def _split(self, layout: tuple[int, ...], bucket: ErrorFeedback) -> None:
        """Splits a bucket into buckets of one parameter.

        The rounding error of the average becomes this rank's, times the number of ranks.
        """
        arrays = bucket.state_dict()
        error, lost = arrays["error"], arrays["gather_error"]
        if error is None:
            return
        if lost is not None and self._member is not None:
            rank, size = self._member
            begin, count = self._quantization.part(error.numel(), size, rank)
            error[begin : begin + count] += size * lost.to(error.device)
        for number, piece in zip(layout, error.split([math.prod(self._shapes[n]) for n in layout]), strict=True):
            piece_of_one = self._buckets[number,] = ErrorFeedback()
            piece_of_one.load_state_dict({"error": piece, "gather_error": None})


def _check_shape(number: int, parameter: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if number >= len(shapes) or shapes[number] != tuple(parameter.shape):
        stored = shapes[number] if number < len(shapes) else "none"
        raise InvalidParamError(
            f"the error feedback has shape {stored} for parameter {number} in the order of the first step, "
            f"expected {tuple(parameter.shape)}: it is of another model",
            id=1454,
        )


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
