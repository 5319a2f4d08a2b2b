"""Layers of vllm-ascend that keep a state instead of keys and values: causal convolutions and the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.registry import expect, present
from alltoallv_emulator.vllm_ascend import Table


def _convolve(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activates: bool) -> Tensor:
    """Returns sum_i weight[i] * row[t + i] of the rows of history and x, one for each row of x."""
    rows = torch.cat([history, x]).float()
    y = (rows.unfold(0, len(weight), 1) * weight.float().T).sum(-1)
    y = y if bias is None else y + bias.float()
    return functional.silu(y) if activates else y


def _causal_conv1d(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor | None,
    cache_indices_opt: Tensor | None,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """Convolves the rows of each sequence with those before them, which its line of conv_state has; fills output.

    ``weight`` is [width, dim], ``conv_state`` [lines, at least width - 1, dim]. With ``run_mode`` 0 a sequence begins
    with zeros where its ``initial_state_mode_opt`` is 0. With 1, steps, x may also be [sequences, dim] or [sequences,
    length, dim]; of the last step's rows only the accepted ones count. Sequences with ``pad_slot_id`` are left out.
    """
    expect(run_mode in (0, 1), "run_mode", run_mode, "0 (whole prompts) or 1 (steps)")
    expect(activation_mode in (0, 1), "activation_mode", activation_mode, "0 or 1 (SiLU)")
    width = len(weight)
    fits = conv_state.dim() == 3 and conv_state.size(1) >= width - 1
    expect(fits, "conv_state", conv_state, f"lines of {width - 1} rows at least")
    accepted = None if num_accepted_tokens_opt is None else num_accepted_tokens_opt.tolist()
    steps = run_mode == 1
    expect(accepted is None or (steps and width == 4), "num_accepted_tokens", accepted, "None, but in steps of width 4")
    if query_start_loc_opt is None:
        expect(steps, "query_start_loc", None, "where sequences start and end, for run_mode 0")
        length = x.size(1) if x.dim() == 3 else 1
        starts = list(range(0, len(x) * length + 1, length))
    else:
        starts = query_start_loc_opt.tolist()
    count = len(starts) - 1
    lines = list(range(count)) if cache_indices_opt is None else cache_indices_opt.reshape(-1).tolist()
    expect(len(lines) >= count, "cache_indices", lines, f"a line for each of {count} sequences")
    rows, written = x.reshape(-1, x.size(-1)), output.view(-1, x.size(-1))
    for number, (start, end) in enumerate(pairwise(starts)):
        if end <= start or lines[number] == pad_slot_id:
            continue
        state, own = conv_state[lines[number]], rows[start:end]
        first = 0 if accepted is None else min(max(accepted[number] - 1, 0), len(state) - width + 1)
        history = state[first : first + width - 1].clone()
        if not steps and initial_state_mode_opt is not None and not initial_state_mode_opt[number]:
            history.zero_()
        written[start:end] = _convolve(history, own, weight, bias_opt, activation_mode == 1).to(output.dtype)
        kept = torch.cat([history, own])
        grown = accepted is not None and width - 2 + len(own) <= len(state)
        kept = kept[1:] if grown else kept[1 - width :]  # rows that the next step may not accept stay before the others
        state[: len(kept)] = kept
    return output


def _causal_conv1d_310(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    initial_state_mode: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """Computes npu_causal_conv1d_custom into a new tensor; rows of sequences that are left out are zeros."""
    y, inputs = torch.zeros(x.shape, dtype=x.dtype), (conv_states, bias, query_start_loc, cache_indices)
    return _causal_conv1d(y, x, weight, *inputs, initial_state_mode, None, activation_mode, pad_slot_id, run_mode)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Returns [rows, heads, size] in float32 for more heads, each for a group of them."""
    return x.float().repeat_interleave(heads // x.size(1), 1)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    state: Tensor,
    starts: Sequence[int],
    ssm_state_indices: Tensor,
    g: Tensor | None,
    num_accepted_tokens: Tensor | None,
    scale: float,
) -> Tensor:
    """Takes the rows of each sequence one after the other: S = S * exp(g); S += beta * (v - S k) k^T; y = scale * S q.

    ``state`` is [slots, heads, size of values, size of keys]. Row t writes S to slot ``ssm_state_indices[t]``; the
    first S of a sequence is in the slot of its first row, or of the last that was accepted.
    """
    heads, slots = value.size(1), ssm_state_indices.reshape(-1).tolist()
    fits = len(slots) >= starts[-1] and all(0 <= slot < len(state) for slot in slots[: starts[-1]])
    expect(fits, "ssm_state_indices", slots, f"slots below {len(state)} for {starts[-1]} rows")
    q, k, v = _by_head(query, heads) * scale, _by_head(key, heads), value.float()
    decay = torch.ones(value.shape[:2]) if g is None else g.float().exp()
    strength = torch.ones(value.shape[:2]) if beta is None else beta.float()
    y = torch.zeros(value.shape)
    for number, (start, end) in enumerate(pairwise(starts)):
        if end <= start:
            continue
        last = 0 if num_accepted_tokens is None else int(num_accepted_tokens[number]) - 1
        expect(
            0 <= last < end - start, "num_accepted_tokens", last + 1, f"1 to {end - start}, as the sequence has rows"
        )
        own = state[slots[start + last]].float()
        for row in range(start, end):
            own = own * decay[row].view(-1, 1, 1)
            change = (v[row] - torch.einsum("hvk,hk->hv", own, k[row])) * strength[row].unsqueeze(-1)
            own = own + change.unsqueeze(-1) * k[row].unsqueeze(1)
            y[row] = torch.einsum("hvk,hk->hv", own, q[row])
            state[slots[row]] = own.to(state.dtype)
    return y


def _recurrent_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    beta: Tensor | None,
    scale: float | None,
    actual_seq_lengths: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    g: Tensor | None,
) -> Tensor:
    """Computes `_delta_rule`, in bfloat16. ``actual_seq_lengths`` has where the first sequence starts, and lengths."""
    starts = present(actual_seq_lengths, "actual_seq_lengths", "a start and the sequences' lengths").cumsum(0).tolist()
    slots = present(ssm_state_indices, "ssm_state_indices", "the slots of the rows")
    factor = present(scale, "scale", "a number")
    y = _delta_rule(query, key, value, beta, state, starts, slots, g, num_accepted_tokens, factor)
    return y.to(torch.bfloat16)


def _recurrent_delta_rule_310(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    state: Tensor,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    num_accepted_tokens: Tensor | None,
    scale_value: float,
) -> Tensor:
    """Computes `_delta_rule`, in the dtype of the values. ``actual_seq_lengths`` has the sequences' lengths."""
    expect(gk is None, "gk", gk, "None")
    starts = [0, *actual_seq_lengths.cumsum(0).tolist()]
    inputs = query, key, value, beta, state, starts, ssm_state_indices, g, num_accepted_tokens
    return _delta_rule(*inputs, scale_value).to(value.dtype)


def _sequences(x: Tensor, cu_seqlens: Sequence[int] | None) -> list[tuple[int, slice]]:
    """Returns the batch entry and the rows of each sequence of [batch, heads, rows, ...]."""
    if cu_seqlens is None:
        return [(number, slice(0, x.size(2))) for number in range(len(x))]
    expect(len(x) == 1, "cu_seqlens", cu_seqlens, "None, where the batch is not 1")
    return [(0, slice(start, end)) for start, end in pairwise(cu_seqlens)]


def _check_chunks(chunk_size: int | None, transposed: bool | None) -> int:
    expect(not transposed, "transpose_state_layout", transposed, "False")
    size = 64 if chunk_size is None else chunk_size
    expect(size > 0, "chunk_size", size, "more than 0")
    return size


def _chunk_states(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool | None,
    chunk_size: int | None,
    save_new_value: bool | None,
    cu_seqlens: list[int] | None,
    chunk_indices: list[int] | None,
    use_exp2: bool | None,
    transpose_state_layout: bool | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the states before each chunk of rows, the values less what the states give, and the last states.

    In a chunk: v = u - w h, then h = h * exp(g of its last row) + sum_i k_i^T v_i * exp(g of the last row - g_i).
    ``k`` and ``w`` are [batch, heads, rows, size], ``u`` has more heads, ``g`` [batch, heads, rows] is the sum within
    the chunk. With ``cu_seqlens`` the batch is one, and its sequences have chunks of their own.
    """
    expect(gk is None, "gk", gk, "None")
    expect(not use_exp2, "use_exp2", use_exp2, "False")
    expect(save_new_value is None or save_new_value, "save_new_value", save_new_value, "True")
    size = _check_chunks(chunk_size, transpose_state_layout)
    heads, sequences = u.size(1), _sequences(u, cu_seqlens)
    keys, weights = (each.float().repeat_interleave(heads // each.size(1), 1) for each in (k, w))
    h, new, last = torch.zeros(_states(k, u, cu_seqlens, chunk_indices, size)), torch.zeros(u.shape), []
    expect(g is not None or gk is None, "g", g, "decays")
    chunk = 0
    for number, (entry, rows) in enumerate(sequences):
        state = torch.zeros(heads, k.size(-1), u.size(-1)) if initial_state is None else initial_state[number].float()
        chunk = chunk if cu_seqlens is not None else 0
        for start in range(rows.start, rows.stop, size):
            part = slice(start, min(start + size, rows.stop))
            h[entry, :, chunk] = state
            chunk += 1
            values = u[entry, :, part].float() - weights[entry, :, part] @ state
            new[entry, :, part] = values
            if g is not None:
                sums = g[entry, :, part].float()
                values = values * (sums[:, -1:] - sums).exp().unsqueeze(-1)
                state = state * sums[:, -1].exp().view(-1, 1, 1)
            state = state + keys[entry, :, part].mT @ values
        last.append(state)
    dtype = k.dtype if initial_state is None else initial_state.dtype
    final = torch.stack(last).to(dtype) if output_final_state else None
    return h.to(k.dtype), new.to(u.dtype), final


def _states(
    k: Tensor, u: Tensor, cu_seqlens: Sequence[int] | None, chunk_indices: Sequence[int] | None, size: int
) -> tuple[int, ...]:
    """Returns the shape of the states before all chunks."""
    lengths = [rows.stop - rows.start for _, rows in _sequences(u, cu_seqlens)]
    chunks = sum(-(-length // size) for length in lengths) if cu_seqlens is not None else -(-u.size(2) // size)
    pairs = chunks if chunk_indices is None else len(chunk_indices) // 2
    expect(pairs == chunks, "chunk_indices", chunk_indices, f"pairs for {chunks} chunks")
    return len(u), u.size(1), chunks, k.size(-1), u.size(-1)


def _chunk_states_shapes(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    chunk_size: int | None = None,
    save_new_value: bool | None = True,
    cu_seqlens: list[int] | None = None,
    chunk_indices: list[int] | None = None,
    use_exp2: bool | None = False,
    transpose_state_layout: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    shape = _states(k, u, cu_seqlens, chunk_indices, chunk_size or 64)
    of_state = k if initial_state is None else initial_state
    final = of_state.new_empty((len(_sequences(u, cu_seqlens)), shape[1], *shape[3:])) if output_final_state else None
    return k.new_empty(shape), torch.empty_like(u), final


def _chunk_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    scale: float,
    g: Tensor | None,
    cu_seqlens: list[int] | None,
    chunk_indices: list[int] | None,
    chunk_size: int | None,
    transpose_state_layout: bool | None,
) -> Tensor:
    """Returns scale * (exp(g_i) q_i h + sum over rows j up to i of the chunk of (q_i k_j) exp(g_i - g_j) v_j).

    ``h`` has the states before the chunks, [batch, heads, chunks, size, size of values] or with both in one dimension.
    """
    size, heads = _check_chunks(chunk_size, transpose_state_layout), v.size(1)
    states = (h.unflatten(2, (-1, q.size(-1))) if h.dim() == 4 else h).float()
    shape = _states(k, v, cu_seqlens, chunk_indices, size)
    expect(states.shape == shape, "h", h, f"{shape}, the states before the chunks")
    queries, keys = (each.float().repeat_interleave(heads // each.size(1), 1) for each in (q, k))
    y, chunk = torch.zeros(v.shape), 0
    for entry, rows in _sequences(v, cu_seqlens):
        chunk = chunk if cu_seqlens is not None else 0
        for start in range(rows.start, rows.stop, size):
            part = slice(start, min(start + size, rows.stop))
            own = queries[entry, :, part]
            shares, before = own @ keys[entry, :, part].mT, own @ states[entry, :, chunk]
            if g is not None:
                sums = g[entry, :, part].float()
                shares = shares * (sums.unsqueeze(-1) - sums.unsqueeze(-2)).clamp(max=0).exp()
                before = before * sums.exp().unsqueeze(-1)
            y[entry, :, part] = scale * (before + shares.tril() @ v[entry, :, part].float())
            chunk += 1
    return y.to(v.dtype)


def _gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float, threshold: float
) -> tuple[Tensor, Tensor]:
    """Returns -exp(A_log) * softplus(a + dt_bias) in float32 and the sigmoid of b, of a batch of one sequence."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return decay.unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


def _gdn_gating_shapes(A_log: Tensor, a: Tensor, b: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
    return a.new_empty((1, *a.shape), dtype=torch.float32), b.new_empty((1, *b.shape))


def _delta_rule_shapes(query: Tensor, key: Tensor, value: Tensor, *others: object, **more: object) -> Tensor:
    return torch.empty_like(value, dtype=torch.bfloat16)


OPERATORS: Table = {
    "npu_fused_gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, float threshold=20.0)"
    " -> (Tensor g, Tensor beta_output)": (_gdn_gating, _gdn_gating_shapes),
    "npu_causal_conv1d_custom(Tensor output, Tensor x, Tensor weight, Tensor conv_state, Tensor? bias_opt,"
    " Tensor? query_start_loc_opt, Tensor? cache_indices_opt, Tensor? initial_state_mode_opt,"
    " Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, int run_mode) -> Tensor": (
        _causal_conv1d,
        lambda output, *others, **more: output,
    ),
    "npu_causal_conv1d_310(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_states, Tensor? query_start_loc,"
    " Tensor? cache_indices, Tensor? initial_state_mode, Tensor? num_accepted_tokens, int activation_mode,"
    " int pad_slot_id, int run_mode) -> Tensor": (
        _causal_conv1d_310,
        lambda x, *others, **more: x.new_empty(x.shape),
    ),
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None,"
    " float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None,"
    " Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor": (
        _recurrent_delta_rule,
        _delta_rule_shapes,
    ),
    "npu_recurrent_gated_delta_rule_310(Tensor query, Tensor key, Tensor value, Tensor beta, Tensor(a!) state,"
    " Tensor actual_seq_lengths, Tensor ssm_state_indices, Tensor? g, Tensor? gk, Tensor? num_accepted_tokens,"
    " float scale_value=1.0) -> Tensor": (
        _recurrent_delta_rule_310,
        lambda query, key, value, *others, **more: torch.empty_like(value),
    ),
    "chunk_gated_delta_rule_fwd_h(Tensor k, Tensor w, Tensor u, Tensor? g=None, *, Tensor? gk=None,"
    " Tensor? initial_state=None, bool? output_final_state=False, int? chunk_size=None, bool? save_new_value=True,"
    " int[]? cu_seqlens=None, int[]? chunk_indices=None, bool? use_exp2=False, bool? transpose_state_layout=False)"
    " -> (Tensor h_out, Tensor v_new_out, Tensor final_state_out)": (_chunk_states, _chunk_states_shapes),
    "chunk_fwd_o(Tensor q, Tensor k, Tensor v, Tensor h, float scale, *, Tensor? g=None, Tensor? g_gamma=None,"
    " int[]? cu_seqlens=None, int[]? chunk_indices=None, int? chunk_size=None, bool? transpose_state_layout=False)"
    " -> Tensor": (_chunk_outputs, lambda q, k, v, *others, **more: torch.empty_like(v)),
}
