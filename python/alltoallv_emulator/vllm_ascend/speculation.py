"""Speculative decoding of vllm-ascend: drafts from n-grams, and the inputs of a draft model."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import expect
from alltoallv_emulator.vllm_ascend import Table


def _draft(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    """Returns up to k tokens that follow the first earlier place of the shortest suffix that has one."""
    for size in range(min_n, min(max_n, len(tokens) - 1) + 1):
        suffix = tokens[len(tokens) - size :]
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + k]
    return []


def _ngram_spec_decode(
    token_ids: Tensor,
    num_tokens_no_spec: Tensor,
    sampled_token_ids: Tensor,
    discard_request_mask: Tensor,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Appends each request's valid tokens to ``token_ids``, and drafts k more.

    Returns ``token_ids``, each request's last token, the drafts (-1 where there is none) and how many each has. A
    sampled token is valid if it is neither -1 nor beyond the vocabulary, and the request is not discarded.
    """
    expect(1 <= min_n <= max_n, "min_n", min_n, f"from 1 to max_n, which is {max_n}")
    last, drafts = [], torch.full((len(token_ids), k), -1, dtype=torch.int32)
    for row, (tokens, sampled) in enumerate(zip(token_ids, sampled_token_ids.tolist(), strict=True)):
        before = int(num_tokens_no_spec[row])
        sampled = [token if token < vocab_size and not discard_request_mask[row] else -1 for token in sampled]
        valid = min(sum(token != -1 for token in sampled), max(len(tokens) - before, 0))
        if not valid:
            last.append(int(tokens[max(before - 1, 0)]))
            continue
        last.append(sampled[valid - 1])
        tokens[before : before + valid] = torch.tensor(sampled[:valid], dtype=tokens.dtype)
        draft = _draft(tokens[: before + valid].tolist(), min_n, max_n, k)
        drafts[row, : len(draft)] = torch.tensor(draft, dtype=torch.int32)
    counts = (drafts == -1).int().cumsum(1).eq(0).sum(1)
    return token_ids, torch.tensor(last, dtype=torch.int32), drafts, counts.int()


def _ngram_shapes(
    token_ids: Tensor, *others: object, k: int = 0, **more: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    number = k or others[-1]
    assert isinstance(number, int)
    each = token_ids.new_empty(len(token_ids), dtype=torch.int32)
    return token_ids, each, token_ids.new_empty((len(token_ids), number), dtype=torch.int32), torch.empty_like(each)


def _expand_eagle_inputs(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    total_draft_tokens: int,
) -> tuple[Tensor, ...]:
    """Lays out each request's rows for a draft model: its accepted tokens, the next one, drafting and rejected rows.

    With ``shift_input_ids`` the accepted tokens come without their first, and the last result has where each row of the
    input went. Results: tokens, positions, which rows are rejected and which are drafting ones, where the next token
    and the drafting rows are, and that last one.
    """
    slots, shift = num_padding_slots_per_request, int(shift_input_ids)
    expect(slots > 0, "num_padding_slots_per_request", slots, "more than 0")
    starts, ends = query_start_loc.tolist(), query_end_loc.tolist()
    targets, positions = target_token_ids.tolist(), target_positions.tolist()
    inputs = torch.zeros(2, total_draft_tokens, dtype=torch.int32)
    masks = torch.zeros(2, total_draft_tokens, dtype=torch.int8)
    news: list[int] = []
    places = torch.zeros(len(targets), dtype=torch.int32)
    for number, (start, end, following) in enumerate(zip(starts, ends, starts[1:], strict=False)):
        rejected, valid = max(following - end - 1, 0), max(end - start + 1 - shift, 0)
        first = start + number * (slots - shift)
        rows = first + valid + slots + rejected
        expect(rows <= total_draft_tokens, "total_draft_tokens", total_draft_tokens, f"{rows} at least")
        accepted = targets[start + shift :] if shift else targets[start:following]
        tokens = [accepted[min(i, len(accepted) - 1)] if accepted else 0 for i in range(valid)]
        tokens += [int(next_token_ids[number]), *[parallel_drafting_token_id] * (slots - 1)]
        tokens += [padding_token_id] * rejected
        own = slice(first, rows)
        inputs[:, own] = masks[:, own] = 0  # the rows of the request before may reach into these
        inputs[0, own] = torch.tensor(tokens, dtype=torch.int32)
        inputs[1, first : first + valid + slots] = positions[start] + torch.arange(valid + slots, dtype=torch.int32)
        masks[0, first + valid + slots : rows] = 1
        masks[1, first + valid + 1 : first + valid + slots] = 1
        news += range(first + valid, first + valid + slots)
        if shift:
            places[start:following] = first + torch.arange(following - start, dtype=torch.int32)
    return inputs[0], inputs[1], masks[0], masks[1], torch.tensor(news, dtype=torch.int32), places


def _expand_eagle_shapes(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    total_draft_tokens: int,
) -> tuple[Tensor, ...]:
    rows = target_token_ids.new_empty(total_draft_tokens, dtype=torch.int32)
    mask = torch.empty_like(rows, dtype=torch.int8)
    news = rows.new_empty((len(query_start_loc) - 1) * num_padding_slots_per_request)
    return rows, torch.empty_like(rows), mask, torch.empty_like(mask), news, rows.new_empty(len(target_token_ids))


OPERATORS: Table = {
    "npu_ngram_spec_decode(Tensor(a!) token_ids, Tensor num_tokens_no_spec, Tensor sampled_token_ids,"
    " Tensor discard_request_mask, int vocab_size, int min_n, int max_n, int k) -> (Tensor token_ids,"
    " Tensor next_token_ids, Tensor draft_token_ids, Tensor num_valid_draft_tokens)": (
        _ngram_spec_decode,
        _ngram_shapes,
    ),
    "npu_copy_and_expand_eagle_inputs(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids,"
    " Tensor query_start_loc, Tensor query_end_loc, int padding_token_id, int parallel_drafting_token_id,"
    " int num_padding_slots_per_request, bool shift_input_ids, int total_draft_tokens) -> (Tensor out_input_ids,"
    " Tensor out_positions, Tensor out_is_rejected_token_mask, Tensor out_is_masked_token_mask,"
    " Tensor out_new_token_indices, Tensor out_hidden_state_mapping)": (_expand_eagle_inputs, _expand_eagle_shapes),
}
