"""TaskObjects: the objects that a task passes to the trainer; rows encoded into samples, a thousand at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from trainwright.cli.tasks.models import load_config, load_model, load_tokenizer, max_length
from trainwright.cli.tasks.source import ModelConfig, Row, Rows, TaskSource, texts
from trainwright.config.arguments import TrainingArguments
from trainwright.data.mixture import MixtureDataset

Dataset: TypeAlias = Any  # rows of ours, a list, or a datasets.Dataset
Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor"
Columns = dict[str, list[Any]]  # Any: cells of a table, then inputs of a model

BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class TaskObjects:
    """Objects of a Trainer's constructor, and a text about them."""

    model: nn.Module
    train: Dataset
    eval: Dataset | None  # None if nothing is held out
    processing_class: Processor | None
    data_collator: Callable[..., object] | None = None
    compute_metrics: Callable[..., dict[str, float]] | None = None
    preprocess_logits: Callable[..., object] | None = None
    about: str = ""  # short text for the console


def shown(names: list[str], most: int = 8) -> str:
    """Joins at most `most` labels for one line."""
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")


def encoded(rows: Rows, encode: Callable[[Columns], Columns]) -> Dataset:
    """Encodes rows, a thousand at a time (columns to columns), into samples, of which there may be more or fewer."""
    if hasattr(rows, "column_names"):
        return rows.map(encode, batched=True, batch_size=BATCH, remove_columns=rows.column_names)
    samples: list[Row] = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        columns = encode({name: [row.get(name) for row in part] for name in part[0]})
        samples += [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return samples


def pieces(ids: list[int], length: int, *, least: int = 2) -> list[list[int]]:
    """Splits a row of ids into rows of at most `length`; a rest shorter than `least` is dropped."""
    return [ids[start : start + length] for start in range(0, len(ids), length) if len(ids) - start >= least]


def text_parts(
    material: TaskSource, args: TrainingArguments, roles: Sequence[str], *, begins: bool = True, **settings: object
) -> tuple[PreTrainedTokenizerBase, ModelConfig, int]:
    """Returns tokenizer, configuration of the model, and the largest number of tokens of a text."""

    def corpus() -> Iterator[str]:
        return (text for role in roles for text in texts(material.column(material.train, role)))

    tokenizer = load_tokenizer(material, args, corpus, begins=begins)
    config = load_config(material, tokenizer, **settings)
    return tokenizer, config, max_length(material, tokenizer, config)


def _mixed(material: TaskSource, encode: Callable[[Columns], Columns]) -> MixtureDataset:
    """Encodes the rows of each source."""
    return MixtureDataset({name: encoded(rows, encode) for name, rows in material.by_source().items()})


def text_objects(
    material: TaskSource,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[[Columns], Columns],
    **others: Any,  # fields of TaskObjects
) -> TaskObjects:
    """Encodes the rows, loads the model, and makes the objects of a task over text."""
    train: Any = encoded(material.train, encode) if not material.source_of else _mixed(material, encode)
    if len(train) == 0:
        material.wrong("no text is left that has two tokens or more.", "data", "train")
    return TaskObjects(
        model=load_model(material, config),
        train=train,
        eval=encoded(material.eval, encode) if len(material.eval) else None,
        processing_class=tokenizer,
        **others,
    )
