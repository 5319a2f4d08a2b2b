"""Plans an exchange that repeats: counts are read and checked once, a call checks only its two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Counts, check_length, plan_request
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.declaration import COLLECTIVES, Parameters
from alltoallv.torch.eager.group import Group
from alltoallv.torch.eager.tensors import check_contiguous, check_output, check_tensor, core_name, region
from alltoallv.torch.graph import watched
from alltoallv.torch.graph.watched import is_watched


class Plan(_core.ArrayPlan):
    """Does `all_to_all_v` with counts that are given once, without gradients.

    Making a plan talks to no peer, except that the first use of a ProcessGroup is collective. Calling it is collective.
    A peer may use the function of the same name instead: the two are the same operator. A call is
    ``plan(input, out=None)``:

    Args:
        input: Contiguous tensor of the plan's dtype, of ``input_size`` elements, taken flat; more with ``sdispls``.
        out: Where to receive: contiguous, of the plan's dtype, at least ``output_size`` elements, apart from ``input``
            in memory. Elements that no region covers keep their value. Left out, a flat tensor of ``output_size``
            elements is allocated, in shared memory where that moves the data, gaps zero.

    Returns:
        The output, without gradient.

    Raises:
        The errors of `all_to_all_v`; InvalidParamError for an input that requires grad while gradients are recorded.
    """

    def __init__(
        self,
        send_counts: Counts,
        recv_counts: Counts,
        dtype: torch.dtype = torch.float32,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
        group: Group = None,
        device: str = "cpu",
    ) -> None:
        """Takes the arguments of `all_to_all_v`, in elements; ``device`` is the kind of device of the tensors.

        Raises:
            InvalidParamError, InvalidTensorError: an argument is wrong; the peers' next call also raises it.
        """
        comm = groups.resolve(group, device)
        if comm is None:
            raise InvalidParamError(
                "group is one that this rank is not a member of, expected a group with this rank", id=1422
            )
        self._communicator = comm
        with guard(comm, "all_to_all_v"):
            self.dtype = dtype
            self._covers = sdispls is None
            self.input_size, request = plan_request(comm.size, send_counts, recv_counts, sdispls, rdispls)
            (self.output_size,), self._gaps, self._layout = request.shape, request.has_gaps, request.layout
            name = core_name(dtype)
            plan = request.plan(comm.core, "all_to_all_v", name) if isinstance(comm, Communicator) else None
            super().__init__(plan, self.input_size, self.output_size, self._covers)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, out: Tensor | None = None) -> Tensor:
            """Exchanges ``input`` and returns the output; for shapes and errors see above."""

    def _checked(self, input: Tensor, out: Tensor | None, timeout: None) -> Tensor:
        """Checks and runs a call on unusual or wrong tensors; the usual ones take a shorter way."""
        comm = self._communicator
        with guard(comm, "all_to_all_v"):
            if timeout is not None:
                raise TypeError("timeout is given, expected none: set the timeout on the group")
            self._check_input(input)
            if out is None:
                out = calls.new_output(comm, self.output_size, input)
                if self._gaps:
                    out.zero_()
            else:
                check_output("out", out, self.dtype)
                check_length("out", out.numel(), self.output_size, False)
                _core.check_apart(region(out), region(input))
            call = None if is_watched() else calls.exchange(comm, "all_to_all_v", out, input, self._layout)
        if call is not None:
            call.run()
            return out
        sends, sdispls, recvs, rdispls = self._layout
        parameters = Parameters(counts=(sends, recvs, sdispls, rdispls), unit="element")
        flat = out.view(-1)[: self.output_size], input.view(-1)[: self.input_size]
        watched.collective(comm, COLLECTIVES["all_to_all_v"], flat[:1], flat[1:], parameters, -1.0, False)
        return out

    def _check_input(self, input: Tensor) -> None:
        check_tensor("input", input)
        if input.dtype != self.dtype:
            raise InvalidTensorError(f"input has dtype {input.dtype}, expected {self.dtype} as the plan", 13, id=2064)
        check_contiguous("input", input)
        check_length("input", input.numel(), self.input_size, self._covers)
        if input.requires_grad and torch.is_grad_enabled():
            raise InvalidParamError("input requires grad, which a plan does not follow: use all_to_all_v", id=1423)
