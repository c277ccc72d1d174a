"""`eval_sampling_strategy="by_length"`: less padding, and results in the order of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForTokenClassification, EvalPrediction

from trainwright import Trainer
from trainwright.errors import DataError

from .._support.small import data, make_trainer, models

NUM = 26


class Counts(Trainer):
    """Counts the tokens of evaluation batches, padding included."""

    tokens = 0

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.tokens += inputs["input_ids"].numel()
        return super().prediction_step(model, inputs, *args, **kwargs)


def trainer(folder: Path, **parts: Any) -> Any:
    settings: dict[str, Any] = {
        "model": models.seeded(models.bert),
        "eval_dataset": data.ragged_texts(NUM),
        "processing_class": data.tokenizer(),
        "per_device_eval_batch_size": 4,
        "cls": Counts,
    }
    return make_trainer(folder, **(settings | parts))


def test_results_are_those_of_the_order_of_the_data_with_less_padding(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"first": float(prediction.label_ids[0])}

    plain = trainer(tmp_path, compute_metrics=metrics, include_for_metrics=["inputs"])
    sorted_ = trainer(
        tmp_path, compute_metrics=metrics, include_for_metrics=["inputs"], eval_sampling_strategy="by_length"
    )
    before = plain.evaluate()
    after = sorted_.evaluate()
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-5)
    assert np.allclose(seen[0].predictions, seen[1].predictions, atol=1e-5)
    assert np.array_equal(seen[0].label_ids, seen[1].label_ids)
    for item, row in zip(data.ragged_texts(NUM), seen[1].inputs, strict=True):
        assert [token for token in row.tolist() if token > 0] == [token for token in item["input_ids"] if token > 0]
    assert sorted_.tokens < 0.85 * plain.tokens
    predicted = sorted_.predict(data.ragged_texts(NUM))
    assert np.allclose(predicted.predictions, seen[0].predictions, atol=1e-5)


def test_logits_of_tokens_and_several_outputs_keep_their_rows(tmp_path: Path) -> None:
    items = [{"input_ids": item["input_ids"], "labels": item["input_ids"]} for item in data.ragged_texts(NUM)]
    parts = {
        "model": models.seeded(models.bert_mlm),
        "eval_dataset": items,
        "data_collator": DataCollatorForTokenClassification(data.tokenizer()),
    }
    plain = trainer(tmp_path, **parts).predict(items)
    ours = trainer(tmp_path, eval_sampling_strategy="by_length", **parts).predict(items)
    assert np.array_equal(plain.label_ids, ours.label_ids)
    for item, before, after in zip(items, plain.predictions, ours.predictions, strict=True):
        length = len(item["input_ids"])
        assert np.allclose(before[:length], after[:length], atol=1e-5)


class OwnLoop(Counts):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluation_loop(*args, **kwargs)


@pytest.mark.parametrize(
    "parts",
    [{"eval_do_concat_batches": False}, {"include_for_metrics": ["loss"]}, {"cls": OwnLoop}],
    ids=str,
)
def test_where_results_cannot_be_put_back_the_order_stays(parts: dict[str, Any], tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_sampling_strategy="by_length", **parts)
    order = [index for batch in made.get_eval_dataloader().batch_sampler for index in batch]
    assert order == list(range(NUM))


def test_samples_without_a_length_are_named(tmp_path: Path) -> None:
    made = make_trainer(tmp_path, eval_dataset=data.vectors(8), eval_sampling_strategy="by_length")
    with pytest.raises(DataError, match="length of 'input_ids', but item 0 has labels, x"):
        made.evaluate()
    assert torch.is_grad_enabled()
