"""A subclass of the arguments owns the names that it declares: ours of that name is off, whatever the value is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from trainwright import Trainer, TrainingArguments
from trainwright.config.fields import SETTINGS, OurFields, get_value, redeclared_fields
from trainwright.config.fields.own_fields import OlderFields

from .._support.small import data, module

# Values that ours of the name would refuse, or act on.
STRANGE: list[Any] = [0.3, "teacher/model", {"a": 1}, ["x", "y"], True, None]
QUIET: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 2}


def subclass_with(name: str, default: Any) -> type[TrainingArguments]:
    declared = field(default_factory=lambda: default) if isinstance(default, (dict, list)) else field(default=default)
    return make_dataclass("MyArguments", [(name, Any, declared)], bases=(TrainingArguments,))


@pytest.mark.costly
@pytest.mark.parametrize("name", OurFields.settings)
def test_any_of_our_names_may_be_declared(name: str, tmp_path: Path) -> None:
    for strange in STRANGE:
        for args in (
            subclass_with(name, strange)(str(tmp_path), **QUIET),
            subclass_with(name, "another")(str(tmp_path), **QUIET, **{name: strange}),
        ):
            assert getattr(args, name) == strange
            assert get_value(args, name) == SETTINGS[name].default
            assert args.to_dict()[name] == strange


@pytest.mark.parametrize("name", OurFields.settings)
def test_a_property_or_a_value_of_the_class_stays(name: str, tmp_path: Path) -> None:
    plain: Any = type("MyArguments", (TrainingArguments,), {name: 0.3})
    computed: Any = type("MyArguments", (TrainingArguments,), {name: property(lambda self: 0.3)})
    decorated: Any = dataclass(type("MyArguments", (TrainingArguments,), {name: property(lambda self: 0.3)}))
    for kind in (plain, computed, decorated):
        args = kind(str(tmp_path), **QUIET)
        assert getattr(args, name) == 0.3
        assert get_value(args, name) == SETTINGS[name].default


@pytest.mark.costly
def test_a_run_trains_as_without_them_and_the_plan_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in OurFields.settings if name != "reproduce"]
    fields = [(name, Any, field(default=0.3)) for name in names]
    kind = make_dataclass("MyArguments", fields, bases=(TrainingArguments,))
    args = kind(str(tmp_path), **QUIET | {"disable_tqdm": False, "logging_steps": 1})
    with caplog.at_level(logging.INFO, "trainwright"):
        trainer = Trainer(module(), args, train_dataset=data.vectors(8), eval_dataset=data.vectors(8))
        trainer.train()
        assert trainer.check().worst != "error"
        assert trainer.prove(num_steps=2).holds
    assert {getattr(args, name) for name in names} == {0.3}
    said = capsys.readouterr()
    assert "as MyArguments declares it" in said.out + said.err + caplog.text


def test_fields_that_are_only_inherited_are_ours(tmp_path: Path) -> None:
    @dataclass
    class More(TrainingArguments):
        teacher: str = "x"

    assert redeclared_fields(More) == redeclared_fields(TrainingArguments) == ()
    assert {*OlderFields.settings} & {*OurFields.settings} == set()


@pytest.mark.parametrize("name", ["world", "mixed_precision"])
def test_computed_names_may_be_fields_too(name: str, tmp_path: Path) -> None:
    args = subclass_with(name, "bf16")(str(tmp_path), **QUIET)
    trainer = Trainer(module(), args, train_dataset=data.vectors(8))
    trainer.train()
    assert args.bf16 is False
    assert args.mixed_precision == "no", "as the original sets it"


@pytest.mark.parametrize("name", ["mixed_precision", "deepspeed_plugin", "hf_deepspeed_config", "fsdp_plugin_args"])
def test_computed_names_may_be_assigned(name: str, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), **QUIET)
    before = getattr(args, name)
    setattr(args, name, "bf16")
    assert getattr(args, name) == "bf16"
    assert getattr(TrainingArguments(str(tmp_path), **QUIET), name) == before
