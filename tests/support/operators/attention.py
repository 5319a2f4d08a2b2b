"""Attention for training and inference: the references go through sequences, heads and queries one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import FLOATS, HALVES, Case

Array = np.ndarray[Any, Any]
ORDER = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}


def attend(
    q: Array, k: Array, v: Array, scale: float, sees: Any, extra: Any = None, sink: Any = None
) -> tuple[Array, ...]:  # fmt: skip
    """Of [heads, length, size]: ``sees(i, j)`` shows whether query i sees key j, ``extra(head, i, j)`` is added.

    ``sink`` has for each head the score of one more key, which has no value.
    """
    heads, queries = q.shape[:2]
    result, top, total = np.zeros((heads, queries, v.shape[2])), np.zeros((heads, queries)), np.zeros((heads, queries))
    for head in range(heads):
        own = head * len(k) // heads
        for i in range(queries):
            seen = [j for j in range(k.shape[1]) if sees(i, j)]
            scores = np.array([scale * (q[head, i] @ k[own, j] + (extra(head, i, j) if extra else 0)) for j in seen])
            if not seen:  # there are no keys at all
                continue
            top[head, i] = scores.max() if sink is None else max(scores.max(), sink[head])
            weights = np.exp(scores - top[head, i])
            total[head, i] = weights.sum() + (0 if sink is None else np.exp(sink[head] - top[head, i]))
            result[head, i] = weights @ v[own, seen] / total[head, i]
    return result, top, total


def laid_out(x: Array, layout: str) -> Array:
    """From [batch, heads, length, size]."""
    made = x.transpose(ORDER[layout])
    return np.ascontiguousarray(made.reshape(*made.shape[:2], -1) if layout in ("BSH", "SBH") else made)


def brought_back(x: Array, layout: str, heads: int) -> Array:
    if x.ndim == 3:
        x = x.reshape(*x.shape[:2], heads, -1)
    return x.transpose(np.argsort(ORDER[layout]))


def seen(mode: int, mask: Any, before: int, after: int, queries: int, keys: int) -> Any:
    shift = keys - queries
    if mask is None:
        return lambda i, j: True
    return {
        0: lambda i, j: not mask[..., i, j].any(), 1: lambda i, j: not mask[..., i, j].any(),
        2: lambda i, j: j <= i, 3: lambda i, j: j <= i + shift,
        4: lambda i, j: i + shift - before <= j <= i + shift + after,
    }[mode]  # fmt: skip


def training(
    query: Array, key: Array, value: Array, head_num: int, input_layout: str, scale: float, sparse_mode: int = 0,
    atten_mask: Any = None, pse: Any = None, pre_tockens: int = 2**31 - 1, next_tockens: int = 2**31 - 1,
    pre_tokens: int = 2**31 - 1, next_tokens: int = 2**31 - 1,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, softmax_layout: str = "", prefix: Any = None,
    sink: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    before, after = min(pre_tockens, pre_tokens), min(next_tockens, next_tokens)

    def sees_of(b: int, count: int, queries: int, keys: int) -> Any:
        if sparse_mode == 5:
            return lambda i, j: not atten_mask[b, :, i, j].any()
        if sparse_mode == 6:
            return lambda i, j: j <= i + keys - queries or j < prefix[b]
        band = {7: b == count - 1, 8: b == 0}.get(sparse_mode)
        mode = sparse_mode if band is None else 4 if band else {7: 3, 8: 2}[sparse_mode]
        return seen(mode, atten_mask, before, after, queries, keys)

    if input_layout == "TND":
        q_parts, kv_parts = np.split(query, actual_seq_qlen[:-1]), np.split(key, actual_seq_kvlen[:-1])
        done = [
            attend(*(x.transpose(1, 0, 2) for x in (q, k, v)), scale,
                   sees_of(number, len(q_parts), len(q), len(k)), sink=sink)
            for number, (q, k, v) in enumerate(
                zip(q_parts, kv_parts, np.split(value, actual_seq_kvlen[:-1]), strict=True)
            )
        ]  # fmt: skip
        result = np.concatenate([one[0].transpose(1, 0, 2) for one in done])
        by_token = [[one[i].T if softmax_layout == "TND" else one[i] for one in done] for i in (1, 2)]
        flat = [np.concatenate([part.reshape(-1) for part in parts]) for parts in by_token]
        rows = [np.repeat(one[:, None], 8, -1).reshape(len(query), head_num, 8) for one in flat]
    else:
        q = brought_back(query, input_layout, head_num)
        kv_heads = key.shape[-1] // q.shape[3] if key.ndim == 3 else head_num
        k, v = (brought_back(x, input_layout, kv_heads) for x in (key, value))
        done = [
            attend(
                q[b],
                k[b],
                v[b],
                scale,
                sees_of(b, len(q), q.shape[2], k.shape[2]),
                None if pse is None else lambda h, i, j, b=b: pse[b, h, i, j],
                sink,
            )
            for b in range(len(q))
        ]
        result = laid_out(np.stack([one[0] for one in done]), input_layout)
        rows = [np.repeat(np.stack([one[i] for one in done])[..., None], 8, -1) for i in (1, 2)]
    return (result, *rows, None, None, None, None)


def to_train(layout: str, heads: int = 2, kv_heads: int = 2, queries: int = 3, keys: int = 4, **more: Any) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        q, k, v = (r.normal(size=(2, n, s, 4)) for n, s in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
        made = {name: make(r) if callable(make) else make for name, make in more.items()}
        return {
            "query": laid_out(q, layout), "key": laid_out(k, layout), "value": laid_out(v, layout),
            "head_num": heads, "input_layout": layout, "scale": 0.5, **made,
        }  # fmt: skip

    return inputs


def packed_sequences(kv_ends: tuple[int, ...] = (3, 7), **more: Any) -> Any:
    return lambda r: {
        "query": r.normal(size=(5, 2, 4)), "key": r.normal(size=(7, 2, 4)), "value": r.normal(size=(7, 2, 4)),
        "head_num": 2, "input_layout": "TND", "scale": 0.5, "actual_seq_qlen": [2, 5][: len(kv_ends)],
        "actual_seq_kvlen": list(kv_ends), "atten_mask": np.ones((8, 8), bool), "sparse_mode": 3, **more,
    }  # fmt: skip


ALIBI = 1030  # queries and keys, more than the rows that are given


def alibi(r: np.random.Generator) -> dict[str, Any]:
    """A bias by distance, of which the last 1024 rows are given."""
    distance = np.abs(np.arange(ALIBI)[:, None] - np.arange(ALIBI))
    pse = -np.array([0.5, 0.0625])[:, None, None] * distance
    q, k, v = (r.normal(size=(1, 2, ALIBI, 4)) for _ in range(3))
    return {
        "query": q, "key": k, "value": v, "head_num": 2, "input_layout": "BNSD", "scale": 0.5, "sparse_mode": 2,
        "atten_mask": COMPRESSED, "pse": pse[None, :, -1024:],
    }  # fmt: skip


def with_alibi(query: Array, key: Array, value: Array, scale: float, pse: Array, **_: Any) -> tuple[Any, ...]:
    # By distance, as the formula says; halves round it, and so does this.
    by_distance = pse[:, :, -1, ::-1]
    distance = np.arange(ALIBI)[:, None] - np.arange(ALIBI)
    scores = scale * (query @ key.transpose(0, 1, 3, 2) + by_distance[:, :, np.maximum(distance, 0)])
    scores = np.where(distance < 0, -np.inf, scores)
    top = scores.max(-1)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(-1)
    rows = [np.repeat(one[..., None], 8, -1) for one in (top, total)]
    return (weights / total[..., None] @ value, *rows, None, None, None, None)


ALL = ("query", "key", "value")
COMPRESSED = np.triu(np.ones((16, 16), bool), 1)
# Of two sequences with 3 queries and 4 keys.
PREFIXES = np.stack([np.triu(np.ones((3, 4), bool), 2) & (np.arange(4) >= prefix) for prefix in (1, 3)])[:, None]


def trains(inputs: Any, note: str, version: str = "", gradient: tuple[str, ...] = ALL) -> Case:
    return Case(
        f"npu_fusion_attention{version}", inputs, training, gradient=gradient, note=note, differentiable=1,
        runs=(f"npu_fusion_attention_grad{version}",),
    )  # fmt: skip


def inference(
    query: Array, key: Array, value: Array, input_layout: str, lengths: Any, sees: Any, q_lengths: Any = None,
    scale: float = 0.5, sink: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Of BNSD with a length for each sequence; rows behind the queries' are zeros."""
    results, sums = np.zeros((*query.shape[:3], value.shape[3])), np.full((*query.shape[:3], 1), np.inf)
    for b, length in enumerate(lengths):
        used = query.shape[2] if q_lengths is None else q_lengths[b]
        parts = query[b][:, :used], key[b][:, :length], value[b][:, :length]
        own = attend(*parts, scale, sees(b, used, length), sink=sink)
        results[b, :, :used] = own[0]
        sums[b, :, :used, 0] = own[1] + np.log(own[2])
    return results, sums


def blocks_of(rows: Array, table: Array, size: int, flat: bool) -> Array:
    """A cache whose blocks hold the sequences [batch, heads, length, size]; unused blocks are noise."""
    cache = np.full((table.max() + 2, rows.shape[1], size, rows.shape[3]), 9.0)
    for b in range(len(rows)):
        for number, block in enumerate(table[b]):
            cache[block] = rows[b][:, number * size : (number + 1) * size]
    return np.ascontiguousarray(cache.transpose(0, 2, 1, 3)).reshape(len(cache), size, -1) if flat else cache


TABLE = np.array([[3, 0], [1, 4]], np.int32)


def in_layout(x: Array, layout: str) -> Array:
    """From [batch, heads, length, size]."""
    return x.transpose(1, 0, 2, 3) if layout == "NBSD" else laid_out(x, layout)


def infers_layout(layout: str, queries: int, ropes: bool = False, **more: Any) -> Case:
    """Attention whose result has another layout than its inputs; with ``ropes`` both parts of the scores add up."""
    first, _, second = layout.partition("_")

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        sizes = {"query": (4, queries, 4), "key": (2, 5, 4), "value": (2, 5, 4)}
        if ropes:
            sizes |= {"query_rope": (4, queries, 2), "key_rope": (2, 5, 2)}
        tensors = {name: laid_out(r.normal(size=(2, *size)), first) for name, size in sizes.items()}
        return tensors | {
            "num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "scale": 0.5, "softmax_lse_flag": True,
            **more,
        }  # fmt: skip

    def reference(
        query: Array, key: Array, value: Array, query_rope: Any = None, key_rope: Any = None, **_: Any
    ) -> Any:
        q, k, v = (brought_back(x, first, heads) for x, heads in ((query, 4), (key, 2), (value, 2)))
        if query_rope is not None:
            q = np.concatenate([q, brought_back(query_rope, first, 4)], -1)
            k = np.concatenate([k, brought_back(key_rope, first, 2)], -1)
        before, after = more.get("pre_tokens", 2**31), more.get("next_tokens", 2**31)
        sees = seen(more.get("sparse_mode", 0), more.get("atten_mask"), before, after, queries, 5)
        result, lse = inference(q, k, v, "BNSD", [5, 5], lambda b, used, length: sees)
        return in_layout(result, second or first), lse

    return Case("npu_fused_infer_attention_score", inputs, reference, dtypes=HALVES, note=layout)


def infers_prefix(layout: str, used: int | None) -> Case:
    """Keys and values that every sequence has before its own, ``used`` of four."""

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        sizes = {"query": (2, 4, 3, 4), "key": (2, 2, 5, 4), "value": (2, 2, 5, 4)}
        sizes |= {"key_shared_prefix": (1, 2, 4, 4), "value_shared_prefix": (1, 2, 4, 4)}
        more = {} if used is None else {"actual_shared_prefix_len": [used]}
        tensors = {name: laid_out(r.normal(size=size), layout) for name, size in sizes.items()}
        return tensors | more | {
            "num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "scale": 0.5, "softmax_lse_flag": True,
            **CAUSAL,
        }  # fmt: skip

    def reference(query: Array, **known: Any) -> Any:
        each = []
        for name in ("key", "value"):
            first = brought_back(known[f"{name}_shared_prefix"], layout, 2)[:, :, :used]
            each.append(np.concatenate([np.repeat(first, 2, 0), brought_back(known[name], layout, 2)], 2))
        q, length = brought_back(query, layout, 4), each[0].shape[2]
        result, lse = inference(q, *each, "BNSD", [length, length], causal)
        return laid_out(result, layout), lse

    return Case("npu_fused_infer_attention_score", inputs, reference, dtypes=HALVES, note=f"{layout}, prefix")


def infers_packed(layout: str) -> Case:
    """Of sequences with 2 and 3 queries, and a token behind them, which belongs to none."""
    first, _, second = layout.partition("_")

    def by_head(x: Array) -> Array:
        return x.transpose(1, 0, 2)

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        tensors = {
            "query": r.normal(size=(6, 4, 4)),
            "key": r.normal(size=(9, 2, 4)),
            "value": r.normal(size=(9, 2, 4)),
        }
        if first == "NTD":
            tensors = {name: np.ascontiguousarray(by_head(x)) for name, x in tensors.items()}
        return tensors | {
            "num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "scale": 0.5, "softmax_lse_flag": True,
            "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [4, 9], **CAUSAL,
        }  # fmt: skip

    def reference(query: Array, key: Array, value: Array, **_: Any) -> Any:
        q, k, v = (x if first == "NTD" else by_head(x) for x in (query, key, value))
        result, lse = np.zeros(q.shape), np.full((6, 4, 1), np.inf)
        for own, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 9))):
            part = q[:, own], k[:, keys], v[:, keys]
            done = attend(*part, 0.5, causal(0, part[0].shape[1], part[1].shape[1]))
            result[:, own] = done[0]
            lse[own, :, 0] = (done[1] + np.log(done[2])).T
        return result if (second or first) == "NTD" else by_head(result), lse

    return Case("npu_fused_infer_attention_score", inputs, reference, dtypes=HALVES, note=layout)


def all_seen(b: int, queries: int, keys: int) -> Any:
    return lambda i, j: True


def causal(b: int, queries: int, keys: int) -> Any:
    return lambda i, j: j <= i + keys - queries


def infers(
    operator: str,
    queries: int,
    sees: Any,
    flat: bool | None,
    names: tuple[str, str, str, str],
    runs: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """Attention over a cache of blocks, or over tensors (``flat`` None), with lengths 3 and 7 of 8."""
    heads, kv_heads, factor, lengths = names
    rows = np.random.default_rng(1).normal(size=(2, 2, 2, 8, 4))
    rows = rows.astype(np.float16).astype(np.float64)  # so that every dtype but bfloat16 has the same

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        key, value = (one if flat is None else blocks_of(one, TABLE, 4, flat) for one in np.round(rows * 4) / 4)
        table = {} if flat is None else {"block_table": TABLE, "block_size": 4}
        return {
            "query": r.normal(size=(2, 4, queries, 4)), "key": key, "value": value, "input_layout": "BNSD", heads: 4,
            kv_heads: 2, factor: 0.5, lengths: [3, 7], **table, **more,
        }  # fmt: skip

    def reference(query: Array, learnable_sink: Any = None, **_: Any) -> Any:
        key, value = np.round(rows * 4) / 4
        result, lse = inference(query, key, value, "BNSD", [3, 7], sees, sink=learnable_sink)
        with_lse = more.get("softmax_lse_flag") or more.get("return_softmax_lse")
        return result if "flash" in operator else (result, lse if with_lse else None)

    return Case(operator, inputs, reference, dtypes=FLOATS if flat is None else HALVES, runs=runs)


# Of two sequences with 8 keys of 2 heads and 4 channels: the shape of scales, and which one a channel has.
SCALES: dict[int, tuple[tuple[int, ...], Any]] = {
    0: ((2, 1, 4), lambda b, h, j, d: (h, 0, d)),
    1: ((2, 8), lambda b, h, j, d: (b, j)),
    2: ((2,), lambda b, h, j, d: (h,)),
    3: ((2, 2, 8), lambda b, h, j, d: (b, h, j)),
    4: ((6, 4), lambda b, h, j, d: (TABLE[b, j // 4], j % 4)),
    5: ((6, 2, 4), lambda b, h, j, d: (TABLE[b, j // 4], h, j % 4)),
}


def infers_codes(mode: int, form: str = "old") -> Case:
    """Of int8 keys and values: (codes + offset) * scale. ``form`` "both": scales in one tensor; "nz": a cache in NZ."""
    shape, at = SCALES[mode]
    names = {"new": ("dequant_{1}_{0}", "{0}_quant_mode")}.get(form, ("{0}_antiquant_{1}", "{0}_antiquant_mode"))
    version, lengths, heads, kv_heads, factor = (
        "_v2" if form == "new" else "",
        *(
            ("actual_seq_kvlen", "num_query_heads", "num_key_value_heads", "softmax_scale")
            if form == "new"
            else ("actual_seq_lengths_kv", "num_heads", "num_key_value_heads", "scale")
        ),
    )

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {"query": r.normal(size=(2, 4, 3, 4)), "input_layout": "BNSD", lengths: [3, 7]}
        made |= {heads: 4, kv_heads: 2, factor: 0.5}
        if form == "both":
            made["antiquant_scale"] = np.float32(r.uniform(0.05, 0.2, (2, *shape)))
            made |= {"antiquant_offset": np.float32(r.normal(size=(2, *shape))), "antiquant_mode": mode}
        for name in ("key", "value"):
            codes = r.integers(-9, 9, (2, 2, 8, 4)).astype(np.int8)
            blocks = mode > 3 or form == "nz"
            made[name] = blocks_of(codes, TABLE, 4, False).astype(np.int8) if blocks else codes
            if form == "nz":
                made[name] = made[name].reshape(6, 2, 4, 2, 2).transpose(0, 1, 3, 2, 4).copy()
            if form != "both":
                made[names[0].format(name, "scale")] = np.float32(r.uniform(0.05, 0.2, shape))
                made[names[0].format(name, "offset")] = np.float32(r.normal(size=shape))
                made[names[1].format(name)] = mode
            if blocks:
                made |= {"block_table": TABLE, "block_size": 4}
        return made

    def sequences(codes: Array) -> Array:
        if form == "nz":
            codes = codes.transpose(0, 1, 3, 2, 4).reshape(6, 2, 4, 4)
        return np.stack([np.concatenate([codes[block] for block in row], 1) for row in TABLE])

    def reference(query: Array, **known: Any) -> Any:
        each = []
        for number, name in enumerate(("key", "value")):
            codes = sequences(known[name]) if "block_table" in known else known[name]
            scale, offset = (
                known[f"antiquant_{what}"][number] if form == "both" else known[names[0].format(name, what)]
                for what in ("scale", "offset")
            )
            values = np.zeros(codes.shape)
            for place in np.ndindex(values.shape):
                values[place] = (codes[place] + offset[at(*place)]) * scale[at(*place)]
            each.append(values)
        return inference(query, *each, "BNSD", [3, 7], all_seen)[0], None

    name = f"npu_fused_infer_attention_score{version}"
    return Case(name, inputs, reference, dtypes=HALVES, note=f"int8, mode {mode}, {form}")


OLD = ("num_heads", "num_key_value_heads", "scale", "actual_seq_lengths_kv")
NEW = ("num_query_heads", "num_key_value_heads", "softmax_scale", "actual_seq_kvlen")
PROMPT = ("num_heads", "num_key_value_heads", "scale_value", "actual_seq_lengths_kv")
INCRE = ("num_heads", "num_key_value_heads", "scale_value", "actual_seq_lengths")
SINK = np.float32([0.5, -1, 2, 0.25])
CAUSAL = {"atten_mask": COMPRESSED, "sparse_mode": 3}
INTO = {"out": [np.zeros((2, 4, 3, 4)), np.zeros(1)], "workspace": np.zeros(1)}
GRAPH = ("get_max_workspace", "infer_output")
CASES = [
    *(trains(to_train(layout), layout) for layout in ORDER),
    trains(to_train("BSH", heads=4), "heads of keys are shared"),
    trains(to_train("BNSD", atten_mask=np.eye(3, 4, 1, dtype=bool)), "mask"),
    *(
        trains(
            to_train("BNSD", queries=queries, sparse_mode=mode, atten_mask=COMPRESSED, **more), f"sparse_mode {mode}"
        )
        for mode, queries, more in ((2, 3, {}), (3, 3, {}), (4, 4, {"pre_tockens": 1, "next_tockens": 1}))
    ),
    trains(to_train("BNSD", pse=lambda r: r.normal(size=(2, 2, 3, 4))), "pse", gradient=(*ALL, "pse")),
    trains(packed_sequences(), "TND"),
    trains(packed_sequences(softmax_layout="TND"), "TND, and softmax by token"),
    trains(to_train("BNSD", sparse_mode=5, prefix=[1, 3], atten_mask=PREFIXES), "a prefix of its own mask"),
    trains(to_train("BSND", sparse_mode=6, prefix=[2, 4], atten_mask=COMPRESSED), "a prefix"),
    trains(packed_sequences(sparse_mode=6, prefix=[3, 2]), "prefixes, TND", "_v2"),
    trains(packed_sequences(sparse_mode=7, pre_tokens=7, next_tokens=-1), "a part of the last sequence", "_v2"),
    trains(packed_sequences(sparse_mode=8, pre_tockens=7, next_tockens=-1), "a part of the first sequence"),
    trains(packed_sequences((7, 7)), "a sequence without keys"),
    Case("npu_fusion_attention", alibi, with_alibi, note="compressed alibi"),
    trains(to_train("SBH", sparse_mode=2, atten_mask=COMPRESSED), "SBH", "_v2"),
    trains(to_train("BSH", heads=4, sink=SINK), "sink", gradient=(*ALL, "sink")),
    trains(packed_sequences(sink=np.float32([0.5, -1])), "sink, TND", "_v2", gradient=(*ALL, "sink")),
    infers("npu_fused_infer_attention_score", 3, all_seen, None, OLD, softmax_lse_flag=True),
    infers("npu_fused_infer_attention_score", 3, causal, None, OLD, softmax_lse_flag=True, **CAUSAL),
    *(infers("npu_fused_infer_attention_score", 1, all_seen, flat, OLD, **CAUSAL) for flat in (True, False)),
    infers("npu_fused_infer_attention_score", 3, causal, True, OLD, **CAUSAL),
    *(
        infers_layout(layout, 3, **CAUSAL)
        for layout in ("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND")
    ),
    infers_layout("BNSD_NBSD", 1),
    infers_layout("BSND_NBSD", 1, True),
    infers_layout("BNSD", 1, True, sparse_mode=4, pre_tokens=2, next_tokens=0, atten_mask=COMPRESSED),
    *(infers_prefix(*arguments) for arguments in (("BSH", None), ("BNSD", 3))),
    *(infers_packed(layout) for layout in ("TND", "NTD", "TND_NTD", "NTD_TND")),
    infers("npu_fused_infer_attention_score_v2", 3, causal, True, NEW, return_softmax_lse=True, **CAUSAL),
    *(
        infers(f"{name}.out", 3, causal, True, of, tuple(f"_{name}_{more}" for more in GRAPH), **CAUSAL, **INTO)
        for name, of in (("npu_fused_infer_attention_score", OLD), ("npu_fused_infer_attention_score_v2", NEW))
    ),
    infers(
        "npu_fused_infer_attention_score_v2",
        3,
        causal,
        None,
        NEW,
        return_softmax_lse=True,
        learnable_sink=SINK,
        **CAUSAL,
    ),
    *(infers_codes(mode) for mode in SCALES),
    *(infers_codes(mode, "both") for mode in (0, 1)),
    infers_codes(3, "new"),
    infers_codes(0, "nz"),
    infers("npu_prompt_flash_attention", 3, causal, None, PROMPT, **CAUSAL),
    infers("npu_incre_flash_attention", 1, all_seen, True, INCRE),
]
