"""Two steps of trl's GRPOTrainer on a tiny Qwen3: completions and rewards of all ranks, equal weights on each."""

from __future__ import annotations

import client
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

dist.init_process_group(client.BACKEND)
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w2"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SMALL))
before = {name: each.clone() for name, each in model.named_parameters()}
given = []


def variety(completions: list[str], **_more: object) -> list[float]:
    given.append([len(set(each.split())) for each in completions])
    return list(map(float, given[-1]))


options = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 6, "max_steps": 2}
quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
trainer = GRPOTrainer(
    model=model,
    reward_funcs=variety,
    args=GRPOConfig(
        output_dir=str(client.FOLDER / "trl"), use_cpu=True, bf16=False, learning_rate=1e-2, **options, **quiet
    ),
    train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(3, 11)]),
    processing_class=tokenizer,
)
trainer.train()
weights = dict(model.named_parameters())
assert any(not torch.equal(weights[name], each) for name, each in before.items())
for each in weights.values():
    parts = [torch.empty_like(each) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, each.detach())
    assert all(torch.equal(part, parts[0]) for part in parts)
told = [{name: value for name, value in each.items() if name != "step_time"} for each in trainer.state.log_history[:-1]]
client.keep([{name: each.detach() for name, each in weights.items()}, given, told])
