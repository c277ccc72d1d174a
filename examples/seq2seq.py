"""Train a small BART from scratch to say how English words are pronounced: letters in, phonemes out, by generation.

The score is the share of words whose phonemes are all right, stress included.

    python examples/seq2seq.py --generation_num_beams 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from _common import held_out, pronunciations, train_and_evaluate
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from trainwright import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

DEMO_SETTINGS = {
    "output_dir": "runs/seq2seq",
    "max_steps": 400,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 250,
    "learning_rate": 1e-3,
    "warmup_steps": 40,
    "logging_steps": 100,
    "save_steps": 200,
    "save_total_limit": 1,
    "predict_with_generate": True,
    "generation_max_length": 24,
}
PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
Pair = tuple[str, list[str]]


@dataclass
class ModelArguments:
    d_model: int = field(default=64, metadata={"help": "Width of the model."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the encoder, and of the decoder."})
    num_eval_samples: int = field(default=500, metadata={"help": "Words to hold out."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, Seq2SeqTrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    rows = pronunciations()
    train_rows, eval_rows = held_out(rows, num_train=len(rows), num_eval=model_args.num_eval_samples)
    tokenizer = letters_and_phonemes(rows)
    model = small_bart(tokenizer, model_args)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=encode(train_rows, tokenizer),
        eval_dataset=encode(eval_rows, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=partial(exact_match, tokenizer=tokenizer),
    )
    train_and_evaluate(trainer, "exact_match", "loss")
    if trainer.is_world_process_zero():
        for word in ("trainwright", "wheelhouse"):  # words that no dictionary has
            ids = tokenizer(" ".join(word), return_tensors="pt").to(model.device)
            tokens = model.generate(ids["input_ids"], attention_mask=ids["attention_mask"], max_length=24, num_beams=4)
            print(f"{word}: {tokenizer.decode(tokens[0], skip_special_tokens=True)}")


def letters_and_phonemes(rows: Sequence[Pair]) -> PreTrainedTokenizerFast:
    """One token for each letter and for each phoneme, divided by spaces; phonemes are in capitals."""
    symbols = {letter for word, _ in rows for letter in word} | {sound for _, sounds in rows for sound in sounds}
    vocabulary = {symbol: i for i, symbol in enumerate([PAD, BOS, EOS, *sorted(symbols)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, vocabulary[EOS])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def small_bart(tokenizer: PreTrainedTokenizerFast, args: ModelArguments) -> BartForConditionalGeneration:
    layers = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", args.num_layers), ("attention_heads", 4), ("ffn_dim", 2 * args.d_model))
    }
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=args.d_model,
        max_position_embeddings=64,
        init_std=0.08,  # BART's own 0.02 suits a width of 1024; one of 64 does not learn from it
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        forced_eos_token_id=None,
        **layers,
    )
    return BartForConditionalGeneration(config)


def encode(rows: Sequence[Pair], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, list[int]]]:
    inputs = tokenizer([" ".join(word) for word, _ in rows])
    labels = tokenizer([" ".join(sounds) for _, sounds in rows])["input_ids"]
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": answer}
        for ids, mask, answer in zip(inputs["input_ids"], inputs["attention_mask"], labels, strict=True)
    ]


def exact_match(prediction: EvalPrediction, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """The share of words that were pronounced without a mistake."""
    generated, true = (
        tokenizer.batch_decode(np.where(ids == -100, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        for ids in (prediction.predictions, prediction.label_ids)
    )
    return {"exact_match": float(np.mean([one == other for one, other in zip(generated, true, strict=True)]))}


if __name__ == "__main__":
    main()
