"""Helpers that other code imports from the original's trainer modules do here what they do there."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import trainer
from transformers.integrations import neftune as their_neftune

import trainwright
from trainwright.compat.helpers import OF_TRANSFORMERS

from ..parity import models

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in OF_TRANSFORMERS.items() for name in names])
def test_helpers_that_nothing_here_calls_are_those_of_transformers(module: str, name: str) -> None:
    assert getattr(trainwright, name) is getattr(importlib.import_module(f"transformers.{module}"), name)


def test_names_have_the_values_of_transformers() -> None:
    assert trainwright.FSDP_MODEL_NAME == trainer.FSDP_MODEL_NAME
    assert [c.__name__ for c in trainwright.DEFAULT_CALLBACKS] == [c.__name__ for c in trainer.DEFAULT_CALLBACKS]
    assert trainwright.DEFAULT_PROGRESS_CALLBACK is trainwright.ProgressCallback


def test_neftune_adds_the_noise_of_transformers_until_its_handle_is_removed() -> None:
    outputs = []
    ids = torch.arange(6).reshape(1, 6)
    for activate in (trainwright.activate_neftune, their_neftune.activate_neftune):
        model = models.seeded(lambda: models.bert(0.0))
        handle = activate(model, 5.0)
        torch.manual_seed(0)
        noisy = model.train()(input_ids=ids).logits
        handle.remove()
        outputs.append((noisy, model(input_ids=ids).logits))
    (ours, ours_after), (theirs, theirs_after) = outputs
    assert torch.equal(ours, theirs)
    assert torch.equal(ours_after, theirs_after)
    assert not torch.equal(ours, ours_after)
