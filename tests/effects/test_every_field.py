"""Every field of the arguments has an effect that is seen here, or says that it has none. A new field needs a check."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest

from trainwright import Seq2SeqTrainingArguments, TrainingArguments

from . import (  # noqa: F401 -- they fill the table
    data_fields,
    distributed_fields,
    evaluation_fields,
    generation_fields,
    hub_fields,
    length_fields,
    logging_fields,
    older_fields,
    optimizer_fields,
    order_fields,
    our_fields,
    precision_fields,
    preflight_fields,
    rescue_fields,
    run_fields,
    saving_fields,
)
from .bench import Bench
from .table import CHECKS, COMPANIONS, MARKS

for _path in sorted(Path(__file__).parents[1].glob("capabilities/*/effects.py")):
    importlib.import_module(f"tests.capabilities.{_path.parent.name}.effects")


def test_the_table_is_complete() -> None:
    fields = {
        field.name for kind in (TrainingArguments, Seq2SeqTrainingArguments) for field in dataclasses.fields(kind)
    }
    assert set(CHECKS) == fields
    assert set(COMPANIONS) <= fields
    assert all(COMPANIONS.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[getattr(pytest.mark, mark) for mark in MARKS[name]]) for name in CHECKS]
)
def test_the_field_has_an_effect(name: str, bench: Bench) -> None:
    CHECKS[name](bench)
