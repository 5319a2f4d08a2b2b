"""Rows between ranks that have the attention and ranks that have the experts (FFN), through windows of both."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from alltoallv_emulator import windows

from .member import Member

__all__ = [
    "AttentionToFfnBuffer", "FFNToAttentionBuffer", "attention_to_ffn", "ffn_to_attention",
    "get_buffer_for_attention_to_ffn", "get_buffer_for_ffn_to_attention",
]  # fmt: skip

_npu: Any = importlib.import_module("torch_npu")


class _Buffer(Member):
    """A rank with a window. Every rank of the group makes one, at the same time."""

    def __init__(self, group: dist.ProcessGroup, world_size: int, info: Sequence[int], data: Sequence[int]) -> None:
        super().__init__(group)
        if world_size != self.world_size:
            raise ValueError(f"world_size is {world_size}, expected {self.world_size}, the size of the group")
        self.ep_world_size = world_size
        self.ccl_buffer_size = windows.window_bytes(info, data, 2)  # no element is larger
        self.context: Tensor | None = windows.make(group, self.ccl_buffer_size, range(world_size))

    def destroy(self) -> None:
        """Frees the window."""
        windows.drop(self.group)
        self.context = None

    def get_window_addr(self) -> int:
        """Returns the address of this rank's window, 0 once it is destroyed."""
        return 0 if self.context is None else self.context.data_ptr()


class AttentionToFfnBuffer(_Buffer):
    """The window of a rank that has attention."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        world_size: int,
        ffn_token_info_table_shape: Sequence[int],
        ffn_token_data_shape: Sequence[int],
        quant_mode: int = 0,
    ) -> None:
        if quant_mode not in (0, 2):
            raise NotImplementedError(f"quant_mode is {quant_mode}, expected 0 or 2: others are for Ascend 950 only")
        self.ffn_token_info_table_shape = list(ffn_token_info_table_shape)
        self.ffn_token_data_shape = list(ffn_token_data_shape)
        self.quant_mode = quant_mode
        super().__init__(group, world_size, self.ffn_token_info_table_shape, self.ffn_token_data_shape)


class FFNToAttentionBuffer(_Buffer):
    """The window of a rank that has experts, with room for the rows of all other ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        world_size: int,
        token_info_table_shape: Sequence[int],
        token_data_shape: Sequence[int],
        window_addr: int | None = None,
        window_size: int | None = None,
    ) -> None:
        if window_addr is not None or window_size is not None:
            raise NotImplementedError(
                "window_addr or window_size is given, expected None: they are for Ascend 950 only"
            )
        self.token_info_table_shape, self.token_data_shape = list(token_info_table_shape), list(token_data_shape)
        batches, tokens, each = token_info_table_shape
        info = world_size - 1, batches, 2 + tokens * each
        super().__init__(group, world_size, info, (world_size - 1, *token_data_shape))


def get_buffer_for_attention_to_ffn(
    group: dist.ProcessGroup,
    world_size: int,
    ffn_token_info_table_shape: Sequence[int],
    ffn_token_data_shape: Sequence[int],
    *,
    quant_mode: int = 0,
) -> AttentionToFfnBuffer:
    """Returns what `attention_to_ffn` takes of a group; meanwhile the other ranks make their buffers."""
    return AttentionToFfnBuffer(group, world_size, ffn_token_info_table_shape, ffn_token_data_shape, quant_mode)


def get_buffer_for_ffn_to_attention(
    group: dist.ProcessGroup,
    world_size: int,
    token_info_table_shape: Sequence[int],
    token_data_shape: Sequence[int],
    *,
    window_addr: int | None = None,
    window_size: int | None = None,
) -> FFNToAttentionBuffer:
    """Returns what `ffn_to_attention` takes of a group; meanwhile the other ranks make their buffers."""
    given = group, world_size, token_info_table_shape, token_data_shape
    return FFNToAttentionBuffer(*given, window_addr, window_size)


def attention_to_ffn(
    buffer: AttentionToFfnBuffer,
    x: Tensor,
    session_id: Tensor,
    micro_batch_id: Tensor,
    layer_id: Tensor,
    expert_ids: Tensor,
    expert_rank_table: Tensor,
    attn_token_info_table_shape: list[int],
    moe_expert_num: int,
    *,
    sync_flag: int = 0,
    ffn_start_rank_id: int = 0,
    scales: Tensor | None = None,
    active_mask: Tensor | None = None,
) -> None:
    """Writes tokens into the windows of the ranks of their experts, as torch_npu's `npu_attention_to_ffn`."""
    _npu.npu_attention_to_ffn(
        x, session_id, micro_batch_id, layer_id, expert_ids, expert_rank_table, buffer.group_name,
        buffer.ep_world_size, buffer.ffn_token_info_table_shape, buffer.ffn_token_data_shape,
        attn_token_info_table_shape, moe_expert_num, scales=scales, active_mask=active_mask,
        quant_mode=buffer.quant_mode, sync_flag=sync_flag, ffn_start_rank_id=ffn_start_rank_id,
    )  # fmt: skip


def ffn_to_attention(
    buffer: FFNToAttentionBuffer,
    x: Tensor,
    session_ids: Tensor,
    micro_batch_ids: Tensor,
    token_ids: Tensor,
    expert_offsets: Tensor,
    actual_token_num: Tensor,
    *,
    attn_rank_table: Tensor | None = None,
) -> None:
    """Writes rows into the windows of their attention workers, as torch_npu's `npu_ffn_to_attention`."""
    _npu.npu_ffn_to_attention(
        x, session_ids, micro_batch_ids, token_ids, expert_offsets, actual_token_num, buffer.group_name,
        buffer.ep_world_size, buffer.token_info_table_shape, buffer.token_data_shape, attn_rank_table=attn_rank_table,
    )  # fmt: skip
