"""A model's cache of keys and values is no prediction, whatever the version of transformers calls it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, EncoderDecoderCache

from trainwright.evaluation.outputs import split_outputs

from .._support.small import data, make_trainer, models

LOGITS = torch.zeros(2, 3)
CACHES = [DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())]


@pytest.mark.parametrize("name", ["past_key_values", "cache", "memory"])
@pytest.mark.parametrize("ignored", [["past_key_values"], ["cache"], [], None])
@pytest.mark.parametrize("cache", CACHES, ids=lambda one: type(one).__name__)
def test_a_cache_is_left_out_under_any_name(name: str, ignored: Any, cache: Any) -> None:
    for config in (SimpleNamespace(), SimpleNamespace(keys_to_ignore_at_inference=ignored or [])):
        model: Any = SimpleNamespace(config=config)
        outputs = {"logits": LOGITS, name: cache}
        assert split_outputs(outputs, ignored, model=model, loss=None) is not None
        assert torch.equal(split_outputs(outputs, ignored, model=model, loss=None), LOGITS)


def test_a_tensor_of_that_name_stays_unless_it_is_ignored() -> None:
    model: Any = SimpleNamespace()
    outputs = {"logits": LOGITS, "cache": LOGITS + 1}
    assert len(split_outputs(outputs, None, model=model, loss=None)) == 2
    assert torch.equal(split_outputs(outputs, ["cache"], model=model, loss=None), LOGITS)


@pytest.mark.parametrize(
    ("make", "rows", "parts"), [(models.t5, data.pairs(4), 2), (models.llama, data.sequences(4), 1)]
)
@pytest.mark.parametrize("use_cache", [False, True])
def test_predictions_of_models_have_none(make: Any, rows: Any, parts: int, use_cache: bool, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=models.seeded(lambda: make(0.0)), train_dataset=rows, use_cache=use_cache)
    found = trainer.predict(rows).predictions
    assert len(found if isinstance(found, tuple) else (found,)) == parts


@pytest.mark.filterwarnings("ignore:.(is_gradient_checkpointing|past_key_values). is deprecated:FutureWarning")  # peft
def test_prefixes_are_given_as_a_cache_and_return_none(tmp_path: Path) -> None:
    config = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = models.seeded(lambda: get_peft_model(models.llama(0.0), config))
    rows = data.sequences(4)
    assert trainer_predictions(tmp_path, model, rows).shape[0] == 4


def trainer_predictions(folder: Path, model: Any, rows: Any) -> Any:
    return make_trainer(folder, model=model, train_dataset=rows, use_cache=True).predict(rows).predictions
