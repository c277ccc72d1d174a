"""Helpers that other code imports from the original's trainer modules do here what they do there."""

from __future__ import annotations

import importlib

import pytest
from transformers import trainer

import trainwright
from trainwright.compat.helpers import OF_TRANSFORMERS

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in OF_TRANSFORMERS.items() for name in names])
def test_helpers_that_nothing_here_calls_are_those_of_transformers(module: str, name: str) -> None:
    assert getattr(trainwright, name) is getattr(importlib.import_module(f"transformers.{module}"), name)


def test_names_have_the_values_of_transformers() -> None:
    assert trainwright.FSDP_MODEL_NAME == trainer.FSDP_MODEL_NAME
    assert [c.__name__ for c in trainwright.DEFAULT_CALLBACKS] == [c.__name__ for c in trainer.DEFAULT_CALLBACKS]
    assert trainwright.DEFAULT_PROGRESS_CALLBACK is trainwright.ProgressCallback
