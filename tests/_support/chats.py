"""A tokenizer with a chat template, and conversations of a few words, for language models that learn in a second."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "<|im_start|>", "<|im_end|>")
WORDS = ("user", "assistant", "system", "first", "second", "question", "answer", *(f"w{i}" for i in range(30)))
VOCAB = 48
TURN = "<|im_start|> {{ m['role'] }} {WORDS} <|im_end|> "
PLAIN = TURN.replace("{WORDS}", "{{ m['content'] }}")
ANSWER = TURN.replace("{WORDS} <|im_end|>", "{% generation %}{{ m['content'] }} <|im_end|>{% endgeneration %}")
PROMPT = "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
TEMPLATE = f"{{% for m in messages %}}{PLAIN}{{% endfor %}}{PROMPT}"
MARKED = (
    f"{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{ANSWER}{{% else %}}{PLAIN}{{% endif %}}"
    f"{{% endfor %}}{PROMPT}"
)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    found.chat_template = template
    return found


def conversation(number: int) -> list[dict[str, str]]:
    words = [f"w{(number + i) % 30}" for i in range(8)]
    return [
        {"role": "user", "content": " ".join(words[:5])},
        {"role": "assistant", "content": " ".join(words[5:])},
    ]


def encoded(number: int, *, trains: str = "assistant", template: str = MARKED) -> dict[str, list[int]]:
    """A conversation as tokens; `trains`: which labels count, "assistant", "all", "user" or "none"."""
    found: Any = tokenizer(template).apply_chat_template(
        conversation(number), return_dict=True, return_assistant_tokens_mask=True
    )
    ids = list(found["input_ids"])
    answers = list(found["assistant_masks"])
    counts = {
        "assistant": answers,
        "all": [1] * len(ids),
        "user": [1 - one for one in answers],
        "none": [0] * len(ids),
    }[trains]
    labels = [token if one else -100 for token, one in zip(ids, counts, strict=True)]
    return {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 2} | changes))


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 3,
}
