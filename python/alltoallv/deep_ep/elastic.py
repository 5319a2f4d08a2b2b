"""The buffer of version 2, whose rows may lie by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alltoallv.deep_ep import handles
from alltoallv.deep_ep.buffers import BaseBuffer, Tokens, as_tokens
from alltoallv.deep_ep.handles import EPHandle
from alltoallv.deep_ep.utils import EventOverlap
from alltoallv.torch.api.collectives import barrier
from alltoallv.torch.eager import group as groups


class ElasticBuffer(BaseBuffer):
    """The buffer of version 2: one call for dispatch, without a layout before it.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        num_bytes: Kept as attribute.
        num_max_tokens_per_rank: The most rows that a dispatch may have, unless it says so itself; 0: any number.
        deterministic: Results always are.
        allow_multiple_reduction: Whether `combine` rounds the sum of a rank's expanded rows to their dtype before the
            ranks' sums are added.
        num_cpu_bytes, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode, prefer_overlap_with_compute, sl_idx,
            num_allocated_qps, num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy: Ignored: they are about
            memory, links and kernels that are not used here. Codes and their scales are given as a pair; the group's
            timeout counts.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank
        self.allow_multiple_reduction = allow_multiple_reduction

    @property
    def rank_idx(self) -> int:
        """This rank's number in the group."""
        return groups.rank_in(self.group)

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the group."""
        return groups.world_size(self.group)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns 1 and the number of ranks: rows travel in one step between hosts too."""
        return 1, self.num_ranks

    get_physical_domain_size = get_logical_domain_size

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False) -> None:
        """Waits for all ranks; both arguments are ignored: the call is done when it returns."""
        self._check_usable()
        barrier(group=self.group)

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns 0: no memory is needed."""
        return 0

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Returns 0: no SMs are needed."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: no queues are needed."""
        return 0

    def dispatch(
        self,
        x: Tokens,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tokens, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Does `Buffer.dispatch`; the handle has the experts' counts.

        Args:
            x, topk_idx, handle: See `Buffer.dispatch`.
            topk_weights: See `Buffer.dispatch`; with a handle they travel along as well.
            cumulative_local_expert_recv_stats: Integers, one per local expert, to which its rows are added; not with a
                handle.
            num_experts: Experts on all ranks together; with a handle, the handle's or None.
            num_max_tokens_per_rank: The most rows that ``x`` may have, equal on all ranks; None: the constructor's, or
                the handle's.
            expert_alignment: The experts' counts are rounded up to multiples of it; with a handle, the handle's or
                None.
            num_sms: Kept in the handle.
            num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream,
                allocate_on_comm_stream: Ignored: the call is done when it returns.
            do_handle_copy: Whether the handle has a copy of ``topk_idx``.
            do_cpu_sync: False: results have the rows of the worst case; not True with a handle.
            do_expand: Rows lie by expert, one for each choice, each expert's from a multiple of the alignment on, in
                the order of the rows that arrive; with a handle, as it was dispatched.
            do_zero_padding: With ``do_expand`` only; rows between experts are always zeros.
            use_tma_aligned_col_major_sf: The scales' columns are contiguous, from multiples of 4 rows on.

        Returns:
            Rows received; their experts, None where expanded; their weights, ``[rows, k]`` or where expanded
            ``[rows]``, None without ``topk_weights``; the handle; an event.
        """
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        with torch.no_grad():
            if not do_expand:
                self._refuse(x, "without do_expand", do_zero_padding=do_zero_padding)
            if handle is not None:
                unsupported = {"topk_idx": topk_idx, "do_cpu_sync": do_cpu_sync}
                unsupported["cumulative_local_expert_recv_stats"] = cumulative_local_expert_recv_stats
                self._refuse(x, "with a handle", **unsupported)
                settings = {"num_experts": num_experts, "expert_alignment": expert_alignment}
                settings |= {"num_max_tokens_per_rank": num_max_tokens_per_rank}
                for name, value in settings.items():
                    other = None if value in (None, getattr(handle, name)) else value
                    self._refuse(x, f"with a handle of {getattr(handle, name)}", **{name: other})
                if do_expand != handle.do_expand:
                    self._refuse(x, f"as {do_expand} with a handle of {handle.do_expand}", do_expand=1)
                received, weights = self._send_again(x, handle, topk_weights)
            else:
                waits = do_cpu_sync is not False
                ids = topk_idx.clone() if do_handle_copy and topk_idx is not None else topk_idx
                alignment = 1 if expert_alignment is None else expert_alignment
                arguments = ids, topk_weights, ("num_experts", num_experts), alignment, 0, most
                kept: dict[str, Any] = {"do_expand": do_expand, "num_sms": num_sms}
                stats = cumulative_local_expert_recv_stats
                received, _, weights, handle = self._send(x, *arguments, stats, waits=waits, **kept)
            if do_expand:
                slots, rows = handle.slots, handle.num_expanded_tokens
                parts = (received,) if isinstance(received, Tensor) else received
                received = as_tokens([handles.expand(part, slots, rows) for part in parts])
                weights = None if weights is None else handles.expand_weights(weights, slots, rows)
            if use_tma_aligned_col_major_sf and not isinstance(received, Tensor):
                received = received[0], _by_columns(received[1])
            local_ids = None if do_expand else handle.recv_topk_idx
            return received, local_ids, weights, handle, self.capture()

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Does `Buffer.combine`; arguments from ``num_sms`` on are ignored: the call is done when it returns.

        Where the handle says that rows are expanded, each rank adds up its rows of a token first, in the order of its
        choices, and ``topk_weights`` are ``[rows]``.
        """
        wide = not self.allow_multiple_reduction
        return *self._collect(x, handle, topk_weights, bias, wide), self.capture()


def _by_columns(scales: Tensor) -> Tensor:
    """Returns scales whose columns are contiguous, each from a multiple of 4 rows on."""
    (rows, columns), step = scales.shape, -(-len(scales) // 4) * 4
    return torch.empty_strided((rows, columns), (1, step), dtype=scales.dtype, device=scales.device).copy_(scales)
