"""Repeats an exchange: counts are read and checked once, a call checks only its two arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.adapters import not_contiguous
from alltoallv._calls.counts import Counts, check_length, plan_request
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import ADAPTER, Array, address, check_array, check_output, region, resolve


class Plan(_core.ArrayPlan):
    """`all_to_all_v` with counts that are given once.

    Making a plan does not communicate; calling it is collective. A peer may call the function of the same name instead:
    both are the same operator. A call is ``plan(input, out=None, *, timeout=None)``:

    Args:
        input: Contiguous array of the plan's dtype, with ``input_size`` elements, taken flat; more with ``sdispls``.
        out: The array for the result: contiguous, of the plan's dtype, with at least ``output_size`` elements, without
            overlap with ``input``. Elements outside the receive regions keep their value. By default a flat array of
            ``output_size`` elements is allocated in shared memory, with zeros in its gaps.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        The output.

    Raises:
        The errors of `all_to_all_v`.
    """

    def __init__(
        self,
        send_counts: Counts,
        recv_counts: Counts,
        dtype: npt.DTypeLike = np.float32,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
        group: Communicator | None = None,
    ) -> None:
        """The arguments are as for `all_to_all_v`, in elements.

        Raises:
            InvalidParamError, InvalidTensorError: an argument is wrong; the peers' next call also raises the error.
        """
        self._communicator = comm = resolve(group)
        with guard(comm, "all_to_all_v"):
            self.dtype = np.dtype(dtype)
            self._covers = sdispls is None
            self.input_size, request = plan_request(comm.size, send_counts, recv_counts, sdispls, rdispls)
            (self.output_size,), self._gaps = request.shape, request.has_gaps
            plan = request.plan(comm.core, "all_to_all_v", core_name(self.dtype))
            self._run = plan.run
            super().__init__(plan, self.input_size, self.output_size, self._covers)

    if TYPE_CHECKING:

        def __call__(self, input: Array, out: Array | None = None, *, timeout: float | None = None) -> Array:
            """Exchanges ``input`` and returns the output; for shapes and errors see above."""

    def _checked(self, input: Array, out: Array | None, timeout: float | None) -> Array:
        """Runs a call whose arrays the fast path does not take: arrays of rare kinds, and wrong ones."""
        with guard(self._communicator, "all_to_all_v"):
            self._check_input(input)
            if out is None:
                out = ADAPTER.new((self.output_size,), input, zero=self._gaps)
            else:
                check_output("out", out, self.dtype)
                check_length("out", out.size, self.output_size, False)
                _core.check_apart(region(out), region(input))
            source, target = address(input), address(out)
            limit = _core.read_timeout(timeout)
        self._run(source, target, limit)
        return out

    def _check_input(self, input: Array) -> None:
        check_array("input", input)
        if input.dtype != self.dtype:
            raise InvalidTensorError(f"input has dtype {input.dtype}, expected {self.dtype} as the plan", 13, id=2064)
        if not input.flags.c_contiguous:
            raise not_contiguous("input")
        check_length("input", input.size, self.input_size, self._covers)
