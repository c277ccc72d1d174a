"""Evaluation by generation: the same tokens, labels, metrics and losses as transformers.Seq2SeqTrainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, DataCollatorForSeq2Seq, GenerationConfig

import trainwright

from . import data, models
from .golden import MARKS, Golden
from .sides import Outcome, Side, are_equal, differing, without_clock

OURS = Side("trainwright", trainwright.Seq2SeqTrainer, trainwright.Seq2SeqTrainingArguments)
REFERENCE = Side("transformers", transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments)
EOS = 2

# The warning is one of the original's.
pytestmark = [
    *MARKS,
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning"),
]


def bart() -> nn.Module:
    config = BartConfig(
        vocab_size=models.VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        forced_eos_token_id=EOS,
        init_std=0.3,
        dropout=0.0,
    )
    return BartForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"bart": bart, "t5": models.t5}


def pairs(size: int) -> list[dict[str, Any]]:
    """Ragged, in input and output: the answer is the input backwards."""
    g = torch.Generator().manual_seed(13)
    rows = []
    for i in range(size):
        ids = torch.randint(5, models.VOCAB, (3 + i * 5 % 7,), generator=g).tolist()
        rows.append({"input_ids": [*ids, EOS], "attention_mask": [1] * (len(ids) + 1), "labels": [*ids[::-1], EOS]})
    return rows


def scores(prediction: Any) -> dict[str, float]:
    tokens, labels = prediction
    assert tokens.ndim == 2, "these are no logits"
    firsts = labels[:, 0].repeat(len(tokens) // len(labels))  # several rows of a sample are beside each other
    return {"length": float((tokens > 0).sum(axis=1).mean()), "first": float((tokens[:, 1] == firsts).mean())}


def make(name: str, side: Side, folder: Path, collate: bool = True, **settings: Any) -> Any:
    model = models.seeded(MODELS[name])
    base = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "predict_with_generate": True,
        "seed": 3,
    }
    collator = DataCollatorForSeq2Seq(data.tokenizer(), model=model if collate else None)
    return side.make(
        model,
        folder / side.name,
        base | settings,
        train_dataset=pairs(12),
        eval_dataset=pairs(22)[12:],
        data_collator=collator,
        processing_class=data.tokenizer(),
        compute_metrics=scores,
    )


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Without times."""
    return {
        name: value for name, value in without_clock([metrics])[0].items() if not name.endswith("_preparation_time")
    }


def assert_same_metrics(mine: dict[str, float], other: dict[str, float]) -> None:
    assert list(mine) == list(other)
    for name, value in other.items():
        # theirs is a mean over batches, ours over label tokens: the batches here differ in tokens
        assert mine[name] == (pytest.approx(value, rel=2e-2) if name.endswith("_loss") else value), name


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"generation_num_beams": 3},
    "short": {"generation_max_length": 6},
    "long": {"generation_max_length": 30},
    "config": {
        "generation_config": GenerationConfig(
            max_length=9, num_beams=2, bos_token_id=1, eos_token_id=EOS, pad_token_id=0, decoder_start_token_id=EOS
        )
    },
    "new-tokens": {
        "generation_config": GenerationConfig(
            max_new_tokens=30, eos_token_id=EOS, pad_token_id=0, bos_token_id=1, decoder_start_token_id=EOS
        )
    },
    "inputs-of-labels-left-to-the-model": {"collate": False},
    "label-smoothing": {"label_smoothing_factor": 0.1},
}


def generated(side: Side, name: str, setting: str) -> dict[str, Any]:
    settings = SETTINGS[setting]
    with TemporaryDirectory() as folder:
        trainer = make(name, side, Path(folder), **settings)
        if side is REFERENCE and not {"generation_max_length", "generation_config"} & set(settings):
            trainer.evaluate()  # without a length theirs writes 21 tokens for its first batch, 20 for all that follow
        return values(trainer.predict(pairs(22)[12:]))


def values(found: Any) -> dict[str, Any]:
    return {"predictions": found.predictions, "label_ids": found.label_ids, "metrics": comparable(found.metrics)}


GENERATED = Golden(
    "generated",
    {f"{name}-{setting}": partial(generated, REFERENCE, name, setting) for name, setting in product(MODELS, SETTINGS)},
)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_predictions_and_metrics_are_equal(name: str, setting: str) -> None:
    ours = generated(OURS, name, setting)

    def compare(theirs: dict[str, Any]) -> None:
        assert are_equal(ours["predictions"], theirs["predictions"])
        assert are_equal(ours["label_ids"], theirs["label_ids"])
        assert_same_metrics(ours["metrics"], theirs["metrics"])

    GENERATED.check(f"{name}-{setting}", compare)


CALLS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 7},
    "beams": {"num_beams": 4, "length_penalty": 2.0},
    "new-tokens": {"max_new_tokens": 5},
    "nothing-is-none": {"max_length": None, "num_beams": None},
    "several": {"num_beams": 4, "num_return_sequences": 3, "max_length": 9},
    "penalties": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "early_stopping": True, "num_beams": 2},
    "constrained": {"forced_bos_token_id": 9, "min_length": 6, "max_length": 12},
}


def called(side: Side, call: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        trainer = make("bart", side, Path(folder), generation_max_length=11)
        found = values(trainer.predict(pairs(22)[12:], **CALLS[call]))
        return found | {"evaluated": comparable(trainer.evaluate(metric_key_prefix="dev", **CALLS[call]))}


CALLED = Golden("called", {call: partial(called, REFERENCE, call) for call in CALLS})


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_its_own_settings(call: str) -> None:
    ours = called(OURS, call)

    def compare(theirs: dict[str, Any]) -> None:
        assert are_equal(ours["predictions"], theirs["predictions"])
        assert_same_metrics(ours["evaluated"], theirs["evaluated"])
        assert "dev_length" in ours["evaluated"]

    CALLED.check(call, compare)


def loss_of_one_batch(side: Side, name: str) -> float:
    with TemporaryDirectory() as folder:
        return make(name, side, Path(folder), per_device_eval_batch_size=10).evaluate()["eval_loss"]


LOSSES = Golden("generation_losses", {name: partial(loss_of_one_batch, REFERENCE, name) for name in MODELS})


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_equal_where_batches_have_equally_many_tokens(name: str) -> None:
    ours = loss_of_one_batch(OURS, name)

    def compare(theirs: float) -> None:
        # Ours is a sum over tokens, divided: its rounding depends on the bits of the loss, and these on the CPU.
        assert ours == pytest.approx(theirs, rel=1e-6)

    LOSSES.check(name, compare)


def run_with_evaluations(side: Side) -> Outcome:
    with TemporaryDirectory() as folder:
        settings = {"eval_strategy": "epoch", "num_train_epochs": 2, "generation_max_length": 9}
        return side.train(make("bart", side, Path(folder), **settings))


RUN = Golden("generation_run", {"bart": partial(run_with_evaluations, REFERENCE)})


def test_a_run_with_evaluations_logs_and_learns_the_same() -> None:
    ours = run_with_evaluations(OURS)

    def compare(theirs: Outcome) -> None:
        assert differing(ours.weights, theirs.weights) == {}
        assert [list(entry) for entry in ours.log] == [list(entry) for entry in theirs.log]
        judged = [[entry["eval_length"] for entry in one.log if "eval_length" in entry] for one in (ours, theirs)]
        assert judged[0] == judged[1]
        assert len(judged[0]) == 2

    RUN.check("bart", compare)
