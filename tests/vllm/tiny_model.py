"""Tiny models of random weights: their greedy tokens by transformers, and by vLLM on emulated NPUs.

    python -m alltoallv run --emulate-npu -n 1 tiny_model.py make FOLDER qwen3
    python -m alltoallv run --emulate-npu -n 1 tiny_model.py serve FOLDER '{"dtype": "float32"}'

With -w8a8 after its kind a model has int8 weights in its layers, with scales, as vllm-ascend reads them; with -w4a8 its
experts have weights of four bits.
``make`` also writes FOLDER/reference.json. ``serve`` takes arguments of vllm.LLM and prints the prompts' numbers, their
tokens and the logarithms of their probabilities; with ``-n 2`` the ranks are data parallel.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS = ([5, 17, 301, 44], [100, 230, 8])
NEW = 8  # tokens per prompt
# By the number of ranks, for each rank's calls: the prompts' numbers, and the tokens of each. A rank that has ended its
# prompts takes part in the others' steps.
SHARES = {1: [[{0: NEW, 1: NEW}]], 2: [[{0: NEW, 1: 3}, {1: 1}, {0: 2}], [{1: 2}, {0: NEW}, {}]]}
CLEAR_TOKEN = 0.3  # how far from the next a choice is that rounding cannot turn over
CLEAR_EXPERT = {
    "": 0.1,
    "w8a8": 0.2,
    "w4a8": 0.2,
}  # for each layer, as rounding adds up: to bfloat16, and of rows to int8

_common = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_experts = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024, "num_experts": 8,
    "moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_latent = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1024,
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 128,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "moe_layer_freq": 1, "scoring_func": "softmax",
}  # fmt: skip
_state = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "full_attention_interval": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": _common, "qwen3_moe": _common | _experts, "deepseek_v2": _common | _latent, "qwen3_next": _common | _state,
}  # fmt: skip


class Reference(NamedTuple):
    """One prompt's tokens, their logarithms of probabilities, and how many come before the first close choice."""

    tokens: list[int]
    logprobs: list[float]
    clear: int


def _lead(scores: Any, chosen: int) -> Any:
    """Returns how far the last that is chosen is ahead of the first that is not."""
    best = scores.sort(dim=-1, descending=True).values
    return best[..., chosen - 1] - best[..., chosen]


def _greedy(model: Any, prompt: list[int], chosen: int, clear_expert: float) -> Reference:
    """Generates tokens, but none if the first is no clear choice."""
    import torch

    leads: list[Any] = []  # of the experts of each layer's rows
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda gate, given, made: leads.append(_lead(torch.nn.functional.linear(given[0], gate.weight), chosen))
        )
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    tokens, logprobs, clear = list(prompt), [], NEW
    for step in range(NEW):
        leads.clear()
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0, -1]
        leads[-1:] = [lead[-1] for lead in leads[-1:]]  # after the last layer no other row matters
        close = any(float(lead.min()) < clear_expert * layer for layer, lead in enumerate(leads, 1))
        if close or float(_lead(scores, 1)) < CLEAR_TOKEN:
            clear = min(clear, step)
            if not clear:
                break
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.log_softmax(-1)[tokens[-1]]))
    for hook in hooks:
        hook.remove()
    return Reference(tokens[len(prompt) :], logprobs, clear)


MOST = {"w8a8": 127, "w4a8": 7}  # the largest integer of a weight


def _by_rows(values: Any, most: int = 127) -> tuple[Any, Any]:
    """Returns the integers, from -most to most, and the scales of the rows."""
    scale = values.abs().amax(-1, keepdim=True) / most
    return (values / scale).round(), scale


def _quantized(values: Any, most: int = 127) -> Any:
    integers, scale = _by_rows(values, most)
    return integers * scale


def _quantize_weights(model: Any, form: str) -> None:
    for name, weight in model.named_parameters():
        if _is_quantized(name, form):
            weight.copy_(_quantized(weight, MOST[form]))


def _is_quantized(name: str, form: str) -> bool:
    return "layers" in name and "_proj" in name and (form == "w8a8" or "experts" in name)


def _quantize_inputs(model: Any, form: str) -> None:
    """Rounds the rows that go into the products of the layers, or of the experts, to int8."""
    import torch

    def experts_of(experts: Any) -> Any:
        def forward(x: Any, chosen: Any, shares: Any) -> Any:
            total = torch.zeros_like(x)
            for row, place in itertools.product(range(len(x)), range(chosen.size(1))):
                expert = chosen[row, place]
                gate, up = (experts.gate_up_proj[expert] @ _quantized(x[row])).chunk(2)
                inner = _quantized(torch.nn.functional.silu(gate) * up)
                total[row] += shares[row, place] * (experts.down_proj[expert] @ inner)
            return total

        return forward

    for layer in model.model.layers:
        for name, part in layer.named_modules():
            if isinstance(part, torch.nn.Linear) and form == "w8a8":
                part.register_forward_pre_hook(lambda _, given: (_quantized(given[0]), *given[1:]))
            elif name == "mlp.experts":
                part.forward = experts_of(part)


def _store_quantized(folder: Path, form: str) -> None:
    """Makes int8 and scales of the projections' weights in the file of a model, and lists them for vllm-ascend.

    Two rows of four bits share a row of bytes, and there is a ``scale_bias``, as the device multiplies rows less 8.
    """
    import torch
    from safetensors.torch import load_file, save_file

    kept: dict[str, Any] = {}
    listed, dynamic = {}, f"{form.upper()}_DYNAMIC"
    for name, weight in load_file(folder / "model.safetensors").items():
        listed[name], kept[name] = "FLOAT", weight
        if _is_quantized(name, form):
            integers, scale = _by_rows(weight, MOST[form])
            made = {name: integers.to(torch.int8), f"{name}_scale": scale, f"{name}_offset": torch.zeros_like(scale)}
            if form == "w4a8":
                even, odd = integers.to(torch.int8).unflatten(0, (-1, 2)).unbind(1)
                sums = 8 * (integers * scale).sum(1, keepdim=True)
                wide = torch.nn.functional.pad(sums, (0, 15)) if "down_proj" in name else sums
                made |= {name: even & 15 | odd << 4, name.replace(".weight", ".scale_bias"): wide}
            kept |= made
            listed |= dict.fromkeys(made, dynamic)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    layout = {"version": "1.0.0", "group_size": 0} if form == "w4a8" else {}
    whole = listed | {"model_quant_type": dynamic} | layout
    (folder / "quant_model_description.json").write_text(json.dumps(whole))


def make(folder: Path, name: str) -> None:
    """Writes the first model whose first token of each prompt is a clear choice, in bfloat16, and its reference."""
    kind, _, quantized = name.partition("-")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(KINDS[kind]))
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if quantized:
        _quantize_inputs(model, quantized)
    for seed in itertools.count():
        made = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                values = torch.empty_like(weight)
                if weight.dim() < 2:
                    values.uniform_(0.5, 1.5, generator=made)
                else:
                    values.normal_(0, 1 if "embed" in name else 0.08, generator=made)
                weight.copy_(values.bfloat16())
            if quantized:
                _quantize_weights(model, quantized)
        chosen = KINDS[kind].get("num_experts_per_tok", 0)
        references = [_greedy(model, prompt, chosen, CLEAR_EXPERT[quantized]) for prompt in PROMPTS]
        if all(reference.clear for reference in references):
            break
    if quantized:
        model.save_pretrained(folder)
        _store_quantized(folder, quantized)
    else:
        model.bfloat16().save_pretrained(folder)
    (folder / "reference.json").write_text(json.dumps(references))
    print("SEED", seed, references)


def serve(folder: Path, options: str) -> None:
    # The engine in this process takes all prompts into its first step. Elsewhere, whether they meet depends on time;
    # for a few tokens alone vllm-ascend exchanges rows another way, and rounds them otherwise.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    room: dict[str, Any] = {
        "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.3,
    }  # fmt: skip
    if size > 1:  # the ranks are data parallel
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        job = {"SIZE": str(size), "RANK": str(rank), "MASTER_IP": host, "MASTER_PORT": port}
        os.environ |= {f"VLLM_DP_{name}": value for name, value in job.items()}
        room["async_scheduling"] = False  # in one process it steps without work at the end, where others exchange
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(folder), skip_tokenizer_init=True, seed=0, **room | json.loads(options))
    for share in SHARES[size][rank]:
        sampling = [
            SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
            for new in share.values()
        ]
        given = [{"prompt_token_ids": PROMPTS[number]} for number in share]
        for number, made in zip(share, llm.generate(given, sampling), strict=True):
            tokens = list(made.outputs[0].token_ids)
            logprobs = [at[token].logprob for token, at in zip(tokens, made.outputs[0].logprobs, strict=True)]
            print("SERVED", json.dumps([number, tokens, logprobs]), flush=True)


if __name__ == "__main__":
    {"make": make, "serve": serve}[sys.argv[1]](Path(sys.argv[2]).resolve(), sys.argv[3])
