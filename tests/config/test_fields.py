"""Facts about fields are at the fields: what a declaration needs, and that every table is derived from them."""

import dataclasses
import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import transformers

from trainwright import TrainingArguments
from trainwright.config.arguments import Seq2SeqTrainingArguments
from trainwright.config.fields import SETTINGS, OlderFields, OurFields, get_value
from trainwright.config.protocol import Arguments
from trainwright.config.setting import BY_RULES, HERE, ORDER, PER_START, FieldGroup, setting
from trainwright.config.summary import diff_args

FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}


def group_of(annotation, value):
    return type("Group", (FieldGroup,), {"__annotations__": {"patience": annotation}, "patience": value})


def test_a_whole_declaration_makes_a_field():
    kind = dataclass(group_of("int", setting(3, "Waits.", on_resume=HERE, searchable=True, limits=BY_RULES)))
    assert kind().patience == 3
    assert dict(dataclasses.fields(kind)[0].metadata) == {"help": "Waits."}
    assert kind.settings["patience"].searchable


@pytest.mark.parametrize("missing", ["help", "on_resume", "searchable"])
def test_a_field_without_a_mandatory_fact_does_not_import(missing):
    facts = {"help": "Waits.", "on_resume": HERE, "searchable": True}
    with pytest.raises(TypeError, match=missing):
        setting(3, **{name: value for name, value in facts.items() if name != missing})


def test_neither_does_number_without_limits_nor_plain_field_nor_an_unknown_fact():
    facts = {"on_resume": HERE, "searchable": True}
    with pytest.raises(TypeError, match=r"Group\.patience is a number without limits"):
        group_of("int | None", setting(3, "Waits.", **facts))
    with pytest.raises(TypeError, match=r"Group\.patience is not declared by setting"):
        group_of("int", 3)
    with pytest.raises(TypeError, match="hepl"):
        setting(3, "Waits.", hepl="me", **facts)


def test_a_subclass_of_the_arguments_declares_fields_as_it_likes():
    @dataclass
    class Theirs(TrainingArguments):
        patience: int = 3

    assert Theirs(patience=4).patience == 4
    assert [one.name for one in diff_args({"patience": 3}, {"patience": 4})] == ["patience"]


def test_every_field_has_its_facts_and_every_fact_a_field():
    assert set(SETTINGS) == set(FIELDS)
    for one in SETTINGS.values():
        assert one.on_resume is PER_START or len(one.on_resume) > 10
        assert one.alias_of is None or one.alias_of in SETTINGS
        assert one.enum is None or one.enum(one.default) is not None
        assert not one.choices or one.default in one.allowed


def test_metadata_is_what_any_argument_parser_understands():
    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        for field in dataclasses.fields(kind):
            assert set(field.metadata) <= {"help", "choices", "nargs", "const", "aliases"}


@pytest.mark.framework
def test_the_protocol_has_what_both_kinds_of_arguments_have():
    shared = {name for name in SETTINGS if name not in {**OlderFields.settings, **OurFields.settings}}
    shared &= {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    declared = {name for kind in Arguments.__mro__ for name in vars(kind).get("settings", ())}
    assert declared == shared
    for args in (TrainingArguments(use_cpu=True), transformers.TrainingArguments(use_cpu=True)):
        assert all(hasattr(args, name) for name in declared | set(inspect.get_annotations(Arguments)))


def test_a_field_that_arguments_lack_has_its_default():
    args = transformers.TrainingArguments(use_cpu=True)
    assert {get_value(args, name) for name in ("save_every", "profile", "packing")} == {None}
    assert (get_value(args, "past_index"), get_value(args, "save_failure")) == (-1, "stop")
    assert get_value(SimpleNamespace(hang_timeout=5), "hang_timeout") == 5
    assert get_value(TrainingArguments(save_failure="continue"), "save_failure") == "continue"


def test_a_subclass_may_give_one_of_our_fields_another_default():
    @dataclass
    class Patient(TrainingArguments):
        def __post_init__(self) -> None:
            self.hang_timeout = self.hang_timeout or 60.0
            super().__post_init__()

    assert get_value(Patient(), "hang_timeout") == 60.0
    assert get_value(Patient(hang_timeout=5.0), "hang_timeout") == 5.0


@pytest.mark.parametrize("name", ["train_sampling_strategy", "shuffle_method", "length_column_name"])
def test_a_resume_says_what_another_order_does_to_the_epoch_under_way(name):
    (said,) = map(str, diff_args({name: "one"}, {name: "another"}))
    assert said == f"{name} 'one' -> 'another': {ORDER}"
    assert "epoch" in ORDER
