"""Models of known sizes with random weights, made on the device, and rows for them; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainwright.distributed.device import accelerator

DEVICE = torch.device(accelerator() or "cpu")
PADDING = 0
FIRST_TOKEN = 3  # those before it are special


@dataclass(frozen=True)
class Shape:
    config: str  # class of transformers
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool = True

    def arguments(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.is_tied,
        }


SHAPES = {
    "Llama 20M": Shape("LlamaConfig", 384, 1536, 7, 6, 6, 64, 8192),
    "Llama 124M": Shape("LlamaConfig", 768, 3072, 12, 12, 12, 64, 16384),
    "Qwen3-0.6B": Shape("Qwen3Config", 1024, 3072, 28, 16, 8, 128, 151936),
    "Qwen3-4B": Shape("Qwen3Config", 2560, 9728, 36, 32, 8, 128, 151936),
    "Llama-3.1-8B": Shape("LlamaConfig", 4096, 14336, 32, 32, 8, 128, 128256, is_tied=False),
}
TINY = Shape("LlamaConfig", 32, 64, 2, 2, 1, 16, 512)


def model_of(
    shape: Shape, length: int, *, attention: str = "sdpa", is_lora: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A causal model with the same weights at every call; with adapters of rank 16 on all linear layers."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(
        max_position_embeddings=length, pad_token_id=PADDING, bos_token_id=1, eos_token_id=2, **shape.arguments()
    )
    with DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.config.use_cache = False
    if not is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()  # recomputed activations need it, and the loop by hand has nobody to do it
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows(shape: Shape, length: int, num: int, *, is_ragged: bool = False) -> list[dict[str, Any]]:
    """Token ids that are their own labels; ragged: most are short, as in a set of chats."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(num):
        share = float(torch.rand(1, generator=draw)) ** 3 if is_ragged else 1.0
        ids = torch.randint(FIRST_TOKEN, shape.vocabulary, (max(8, int(length * share)),), generator=draw)
        values: Any = ids.tolist() if is_ragged else ids
        made.append({"input_ids": values, "labels": values})
    return made


def collate_padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest row."""
    ids = [torch.as_tensor(item["input_ids"]) for item in items]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PADDING)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}
