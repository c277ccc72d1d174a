"""Kinds of models to evaluate, each with data and metrics, for both sides and any number of processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
)

from ..parity import data, models
from ..parity.sides import Side

NUM = 23  # a prime: no number of processes and no batch size divides it
BATCH_SIZES = (1, 3, 7, 16)
IGNORED = -100


def _bert(**more: Any) -> BertConfig:
    return BertConfig(
        vocab_size=models.VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        **more,
    )


def _classifier(**more: Any) -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert(**more))


def tagged(size: int) -> list[dict[str, Any]]:
    """Ragged, many labels ignored, one row without a single label."""
    items = data.ragged_texts(size)
    for i, item in enumerate(items):
        ids = (item["input_ids"] * 3)[: 2 + i * 3 % 7]
        labels = [IGNORED if (i == 3 or (i + j) % (1 + i % 4)) else j % 3 for j in range(len(ids))]
        item.update(input_ids=ids, attention_mask=[1] * len(ids), labels=labels)
    return items


def prompted(size: int) -> list[dict[str, Any]]:
    """0 to 7 of 9 labels ignored."""
    items = data.sequences(size)
    for i, item in enumerate(items):
        item["labels"] = [IGNORED] * (i % 8) + item["input_ids"][i % 8 :]
    return items


def relabelled(label: Callable[[int], dict[str, Any]]) -> Callable[[int], list[dict[str, Any]]]:
    def items(size: int) -> list[dict[str, Any]]:
        return [{"input_ids": item["input_ids"], **label(i)} for i, item in enumerate(data.texts(size))]

    return items


def several(size: int) -> list[dict[str, Any]]:
    items = relabelled(lambda i: {"labels": torch.tensor([i % 2, i % 3 == 0, 1], dtype=torch.float)})(size)
    return [{"input_ids": torch.tensor(item["input_ids"]), "labels": item["labels"]} for item in items]


def collator(kind: str) -> dict[str, Any]:
    return {"data_collator": DataCollatorForTokenClassification(data.tokenizer())} if kind == "tokens" else {}


def scored(prediction: Any) -> dict[str, float]:
    """A number that depends on every prediction and its label, whatever their shapes."""
    total = 0.0
    both = []
    for part in (prediction.predictions, prediction.label_ids):
        both.append(part if isinstance(part, tuple) else (part,))
    for one, other in zip(*both, strict=False):
        rows = np.arange(1, len(one) + 1)
        total += float((one.reshape(len(one), -1).astype(np.float64).sum(-1) * rows).sum())
        total += float((other.reshape(len(other), -1).astype(np.float64).sum(-1) * rows).sum())
    return {"score": round(total, 3)}


Kind = tuple[Callable[[], nn.Module], Callable[[int], list[dict[str, Any]]]]
KINDS: dict[str, Kind] = {
    "classification": (models.bert, data.texts),
    "tokens": (lambda: BertForTokenClassification(_bert(num_labels=models.CLASSES)), tagged),
    "causal": (models.llama, prompted),
    "several labels": (lambda: _classifier(num_labels=3, problem_type="multi_label_classification"), several),
    "regression": (
        lambda: _classifier(num_labels=1, problem_type="regression"),
        relabelled(lambda i: {"labels": float(i)}),
    ),
    "spans": (
        lambda: BertForQuestionAnswering(_bert()),
        relabelled(lambda i: {"start_positions": i % 7, "end_positions": (i + 2) % 7}),
    ),
    "module": (models.ReturnsDict, data.vectors),
}


def trainer_of(kind: str, side: Side, folder: Path, **settings: Any) -> Any:
    build, items = KINDS[kind]
    parts: dict[str, Any] = {"compute_metrics": scored, "eval_dataset": items(NUM), **collator(kind)}
    names = ("compute_metrics", "preprocess_logits_for_metrics")
    parts |= {name: settings.pop(name) for name in names if name in settings}
    model = models.seeded(build)
    return side.make(model, folder / side.name, {"seed": 5} | settings, **parts)


def _row_sums(part: Any, labels: Any) -> Any:
    """What a model says of padding depends on how much of it there is: only positions with a label count."""
    if part.shape[:2] == labels.shape and part.ndim == 3:
        part = np.where((labels != IGNORED)[..., None], part, 0.0)
    return part.reshape(len(part), -1).sum(-1)


def digest(found: Any) -> dict[str, Any]:
    """Predictions in short: shapes, the rounded sum of each row, the labels, the metrics of the task."""
    parts = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    labels = found.label_ids if isinstance(found.label_ids, tuple) else (found.label_ids,)
    sums = [_row_sums(part, labels[0]) for part in parts]
    bytes_of_labels = b"".join(np.ascontiguousarray(label).tobytes() for label in labels)
    return {
        "shapes": [list(part.shape) for part in parts],
        "rows": [[round(float(value), 4) for value in part] for part in sums],
        "labels": hashlib.sha256(bytes_of_labels).hexdigest(),
        "score": found.metrics["test_score"],
        "test_loss": found.metrics["test_loss"],
    }
