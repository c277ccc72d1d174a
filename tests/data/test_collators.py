"""The collator for users who bring none."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers import DataCollatorWithPadding, default_data_collator

import trainwright
from trainwright.data import columns

from .._support.small import data, make_trainer


def test_a_tokenizer_pads() -> None:
    collate = columns.default_collator(data.tokenizer())
    assert isinstance(collate, DataCollatorWithPadding)
    batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]


def test_a_feature_extractor_pads() -> None:
    extractor = transformers.SequenceFeatureExtractor(feature_size=1, sampling_rate=8000, padding_value=0.0)
    assert isinstance(columns.default_collator(extractor), DataCollatorWithPadding)


@pytest.mark.parametrize("processing_class", [None, object()])
def test_without_either_equal_shapes_are_stacked(processing_class: object) -> None:
    assert columns.default_collator(processing_class) is default_data_collator


def test_a_trainer_uses_it(tmp_path: Path) -> None:
    assert isinstance(make_trainer(tmp_path, processing_class=data.tokenizer()).data_collator, DataCollatorWithPadding)
    assert make_trainer(tmp_path).data_collator is default_data_collator


@pytest.mark.parametrize("name", ["default_data_collator", "DataCollatorForSeq2Seq", "DefaultDataCollator"])
def test_transformers_own_under_their_names(name: str) -> None:
    assert getattr(trainwright, name) is getattr(transformers, name)
