"""TaskObjects: the objects that a task passes to the trainer; rows encoded into samples, a thousand at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from trainwright._types import DatasetLike
from trainwright.cli.tasks import findings
from trainwright.cli.tasks.class_weights import WeightedLoss
from trainwright.cli.tasks.models import load_config, load_model, load_tokenizer, max_length
from trainwright.cli.tasks.source import ModelConfig, Row, Rows, TaskSource, texts
from trainwright.config.arguments import TrainingArguments
from trainwright.data.identity import fingerprint
from trainwright.data.row_names import RowOrigin
from trainwright.data.sources import adapt_data

Dataset: TypeAlias = Any  # our own rows, a list, or a datasets.Dataset
Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor"
Columns = dict[str, list[Any]]  # Any: cells of a table, then inputs of a model

BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class TaskObjects:
    """Objects for a Trainer's constructor, and a short text about them."""

    model: nn.Module
    train: Dataset
    eval: Dataset | None  # None if nothing is held out
    processing_class: Processor | None
    data_collator: Callable[..., object] | None = None
    compute_metrics: Callable[..., dict[str, float]] | None = None
    preprocess_logits: Callable[..., object] | None = None
    compute_loss: WeightedLoss | None = None  # in place of the model's own
    pairs: str | None = None  # form of pairs: text or messages
    reference: nn.Module | None = None  # of the task preference; None for the model before training
    about: str = ""  # short text for the console


def shown(names: list[str], most: int = 8) -> str:
    """Joins at most `most` labels for one line."""
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")


class Samples(list[Row]):
    """Samples of a task, and their origin."""

    def __init__(self, samples: Iterable[Row], origin: RowOrigin) -> None:
        super().__init__(samples)
        self.origin = origin


# Column in a tokenizer's output: the row of each sample, if their numbers differ.
ROW_OF_SAMPLE = "overflow_to_sample_mapping"


def encoded(material: TaskSource, rows: Rows, encode: Callable[[Columns], Columns]) -> Dataset:
    """Encodes rows, a thousand at a time (columns to columns), into samples that know their origin.

    `encode` returns the row of each sample as a column `overflow_to_sample_mapping`, unless each row is one sample.
    """
    if hasattr(rows, "column_names"):
        return _encoded_dataset(material, rows, encode)
    samples: list[Row] = []
    row_of: list[int] = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        columns = encode({name: [row.get(name) for row in part] for name in part[0]})
        row_of += [start + row for row in columns.pop(ROW_OF_SAMPLE, range(len(part)))]
        samples += [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return Samples(samples, make_origin(material, rows, row_of))


def _encoded_dataset(material: TaskSource, rows: Rows, encode: Callable[[Columns], Columns]) -> Dataset:
    """Encodes the rows of a `datasets.Dataset`."""

    def with_rows(columns: Columns, indices: list[int]) -> Columns:
        found = encode(columns)
        row_of = found.get(ROW_OF_SAMPLE, range(len(indices)))
        return {**found, ROW_OF_SAMPLE: [indices[row] for row in row_of]}

    samples = rows.map(with_rows, batched=True, batch_size=BATCH, with_indices=True, remove_columns=rows.column_names)
    origin = make_origin(material, rows, samples[ROW_OF_SAMPLE][:])
    samples = samples.remove_columns(ROW_OF_SAMPLE)
    samples.origin = origin
    return samples


def make_origin(material: TaskSource, rows: Rows, row_of: Sequence[int] | None = None) -> RowOrigin:
    """Returns the origin of samples.

    Args:
        material: provides the names of the rows.
        rows: the rows that the samples are made from.
        row_of: row of each sample; None if each row is one sample. Samples cut from one row get part numbers.
    """
    names = material.names(rows)
    if hasattr(rows, "column_names"):
        tables = rows.with_format("arrow").iter(BATCH)
        contents = [fingerprint(row) for table in tables for row in table.to_pylist()]
    else:
        contents = [fingerprint(row) for row in rows]
    if row_of is not None:
        num_parts = Counter(row_of)
        parts: Counter[int] = Counter()
        found = []
        for row in row_of:
            found.append(replace(names[row], part=parts[row]) if num_parts[row] > 1 else names[row])
            parts[row] += 1
        names = found
        contents = [contents[row] for row in row_of]
    return RowOrigin(names, np.asarray(contents, dtype=np.uint64))


def pieces(ids: list[int], length: int, *, least: int = 2) -> list[list[int]]:
    """Splits a row of ids into rows of at most `length`; a rest shorter than `least` is dropped."""
    return [ids[start : start + length] for start in range(0, len(ids), length) if len(ids) - start >= least]


def text_parts(
    material: TaskSource, args: TrainingArguments, roles: Sequence[str], *, begins: bool = True, **settings: object
) -> tuple[PreTrainedTokenizerBase, ModelConfig, int]:
    """Returns tokenizer, configuration of the model, and the maximum number of tokens of a text."""

    def corpus() -> Iterator[str]:
        cells = (cell for role in roles for cell in material.column(material.train, role))
        return iter(texts(" ".join(map(str, cell)) if isinstance(cell, (list, tuple)) else cell for cell in cells))

    tokenizer = load_tokenizer(material, args, corpus, begins=begins)
    config = load_config(material, tokenizer, **settings)
    return tokenizer, config, max_length(material, tokenizer, config)


def note_cut_texts(material: TaskSource, role: str, length: int, *, setting: str = "max_length") -> None:
    """Notes the rows of which less than half is read.

    Args:
        material: the rows; receives the findings.
        role: role of the column that is cut.
        length: number of tokens that are read.
        setting: entry of `data` that sets this length.
    """
    is_wanted = (getattr(material.recipe.data, setting) or material.recipe.data.max_length) is not None
    for part, rows in material.parts:
        table = material.table(part, rows)
        column = material.recipe.column(role)
        material.found += findings.cut_texts(table, column, length=length, is_wanted=is_wanted)


def _mixed(material: TaskSource, encode: Callable[[Columns], Columns]) -> DatasetLike:
    """Encodes the rows of each source, and returns them as one dataset."""
    return adapt_data({name: encoded(material, rows, encode) for name, rows in material.by_source().items()})


def text_objects(
    material: TaskSource,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[[Columns], Columns],
    **others: Any,  # fields of TaskObjects
) -> TaskObjects:
    """Encodes the rows, loads the model, and makes the objects of a text task."""
    has_sources = material.recipe.data.sources
    train: Any = _mixed(material, encode) if has_sources else encoded(material, material.train, encode)
    if len(train) == 0:
        material.wrong("no text with two or more tokens is left.", "data", "train")
    return TaskObjects(
        model=load_model(material, config),
        train=train,
        eval=encoded(material, material.eval, encode) if len(material.eval) else None,
        processing_class=tokenizer,
        **others,
    )
