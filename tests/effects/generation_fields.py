"""Checks of the five fields of Seq2SeqTrainingArguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from trainwright import PredictionOutput, Seq2SeqTrainer, Seq2SeqTrainingArguments

from .bench import Bench, Toy, samples, seeded
from .table import shows

LENGTH = 6
VOCAB = 48


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes))
    model.generation_config.suppress_tokens = [0, 1]  # neither padding nor an end: as long as it may be
    return model


def pairs(size: int = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(8)
    rows = [torch.randint(5, VOCAB, (6,), generator=generator).tolist() for _ in range(size)]
    return [{"input_ids": row, "labels": row[::-1]} for row in rows]


def trainer(bench: Bench, **settings: Any) -> Seq2SeqTrainer:
    args = bench.args(Seq2SeqTrainingArguments, **{"generation_max_length": LENGTH, **settings})
    model = seeded(t5)
    rows = pairs()
    return Seq2SeqTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)


def written(bench: Bench, **settings: Any) -> PredictionOutput:
    return trainer(bench, predict_with_generate=True, **settings).predict(pairs())


def width(rows: np.ndarray) -> int:
    """The tokens of the longest row, without what fills it up: T5 begins with its padding token, so from the right."""
    return int(max(np.flatnonzero(row)[-1] for row in rows)) + 1


@shows("predict_with_generate")
def predictions_are_token_ids(bench: Bench) -> None:
    logits, _ = trainer(bench).predict(pairs()).predictions
    assert logits.shape == (8, 6, VOCAB)
    tokens = written(bench).predictions
    assert tokens.shape[0] == 8
    assert tokens.ndim == 2
    assert tokens.dtype == np.int64
    args = bench.args(Seq2SeqTrainingArguments, predict_with_generate=True)
    cannot = Seq2SeqTrainer(model=seeded(Toy), args=args, train_dataset=samples())
    with pytest.raises(ValueError, match=r"Toy cannot generate.*predict_with_generate=False"):
        cannot.predict(samples())


@shows("generation_max_length")
def so_many_tokens_are_generated(bench: Bench) -> None:
    assert [width(written(bench, generation_max_length=n).predictions) for n in (4, 9)] == [4, 9]


@shows("generation_num_beams")
def so_many_beams_are_searched(bench: Bench) -> None:
    greedy, beams = (written(bench, generation_num_beams=n).predictions for n in (1, 4))
    assert not np.array_equal(greedy, beams)
    again = trainer(bench, predict_with_generate=True).predict(pairs(), num_beams=4).predictions
    assert np.array_equal(again, beams)


@shows("generation_config")
def generation_follows_this_configuration(bench: Bench) -> None:
    config = GenerationConfig(max_length=8, suppress_tokens=[0, 1], decoder_start_token_id=0, pad_token_id=0)
    config.save_pretrained(bench.folder / "config")
    saved = bench.folder / "config"
    for form in (config, str(saved), saved, saved / "generation_config.json"):
        rows = written(bench, generation_config=form, generation_max_length=None)
        assert width(rows.predictions) == 8
    with pytest.raises(ValueError, match=r"generation_config='.*nowhere' could not be loaded.*a directory"):
        trainer(bench, generation_config=str(bench.folder / "nowhere"))
    with pytest.raises(ValueError, match=r"generation_config is not valid"):
        trainer(bench, generation_config=GenerationConfig(do_sample=False, temperature=0.5))
    assert Path(bench.folder / "config").is_dir()


@shows("sortish_sampler")
def samples_of_similar_length_are_trained_together(bench: Bench) -> None:
    rows = [{"input_ids": [5] * (1 + i * 7 % 24), "labels": [6, 7]} for i in range(24)]

    def lengths(**settings: Any) -> list[list[int]]:
        made = trainer(bench, **settings)
        made.train_dataset = rows
        made.data_collator = lambda batch: {"lengths": [len(row["input_ids"]) for row in batch]}
        return [batch["lengths"] for batch in made.get_train_dataloader()]

    sorted_ones = lengths(sortish_sampler=True, per_device_train_batch_size=4)
    assert sorted_ones[0][0] == max(max(batch) for batch in sorted_ones)
    spread = [sum(max(b) - min(b) for b in some) for some in (sorted_ones, lengths(per_device_train_batch_size=4))]
    assert spread[0] < spread[1]
    assert sorted(length for batch in sorted_ones for length in batch) == list(range(1, 25))
