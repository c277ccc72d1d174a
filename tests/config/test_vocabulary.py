"""The words that people type for arguments: each leads to a name that exists, wherever it is typed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from trainwright import Trainer, TrainingArguments
from trainwright.cli.recipe.recipe_reader import known_paths, read_tree
from trainwright.cli.recipe.schema import TASKS
from trainwright.config import vocabulary
from trainwright.config.deprecated import OLD_NAMES
from trainwright.config.enums import OptimizerNames, SaveStrategy, SchedulerType
from trainwright.config.fields import SETTINGS
from trainwright.config.vocabulary import ELSEWHERE, FIELDS, KEYWORDS, NOTES, TASK_NAMES, VALUES
from trainwright.errors import RecipeError, UnknownArgumentError

FILE = "task: text-classification\nmodel: {path: model}\ndata: {train: a.csv}\ntraining:\n  max_steps: 1\n"
TYPED = (
    "lr",
    "batch_size",
    "epochs",
    "steps",
    "precision",
    "gpus",
    "warmup",
    "wd",
    "grad_accum",
    "seq_len",
    "scheduler",
    "optimizer",
    "sft",
    "dpo",
    "early_stopping",
)


def test_every_word_leads_to_an_existing_name_and_is_not_name_itself() -> None:
    arguments = {*SETTINGS, *OLD_NAMES}
    parameters = inspect.signature(Trainer).parameters
    values = {member.value for kind in (OptimizerNames, SchedulerType, SaveStrategy) for member in kind}
    assert set(FIELDS.values()) | set(NOTES) <= set(SETTINGS)
    assert set(KEYWORDS.values()) <= set(parameters)
    assert set(TASK_NAMES.values()) <= set(TASKS)
    assert set(VALUES.values()) <= values
    assert not {*FIELDS, *ELSEWHERE} & arguments
    assert not set(KEYWORDS) & set(parameters)
    assert not set(TASK_NAMES) & set(TASKS)
    assert not set(VALUES) & values
    assert not set(FIELDS) & set(ELSEWHERE), "a word has one meaning"


@pytest.mark.parametrize("word", TYPED)
def test_a_word_is_understood_in_a_script_a_file_and_a_command(word: str, tmp_path: Path) -> None:
    meant = FIELDS.get(word)
    in_script = ELSEWHERE[word].script if meant is None else f"Did you mean {meant}?"
    in_file = ELSEWHERE[word].file if meant is None else f"Did you mean training.{meant}?"
    with pytest.raises(UnknownArgumentError) as caught:
        TrainingArguments(**{word: 1})
    assert in_script in str(caught.value)
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    with pytest.raises(RecipeError) as typed:
        read_tree(path, typed=[f"--{word.replace('_', '-')}", "1"])
    assert in_file in str(typed.value)


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("train_data", "Did you mean train_dataset?"),
        ("val_dataset", "Did you mean eval_dataset?"),
        ("optimizer", "optimizers=(optimizer, lr_scheduler)"),
        ("learning_rate", "args=TrainingArguments(learning_rate=...)"),
        ("lr", "args=TrainingArguments(learning_rate=...)"),
        ("gpus", "torchrun"),
        ("compute_metric", "Did you mean compute_metrics?"),
    ],
)
def test_an_unknown_keyword_of_trainer_is_type_error_that_names_the_parameter(keyword: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        Trainer(**{keyword: None})
    assert str(caught.value).startswith(f"{keyword} is not an argument of Trainer.")
    assert said in str(caught.value)


def test_the_signature_of_trainer_lists_its_parameters() -> None:
    assert [*inspect.signature(Trainer).parameters][:4] == ["model", "args", "data_collator", "train_dataset"]


@pytest.mark.parametrize("name", ["xyzzy", "colour", "temperature", "gradients", "steps_of_an_epoch"])
def test_a_word_that_is_far_from_all_gets_no_suggestion(name: str) -> None:
    assert vocabulary.hint_for_argument(name, [*SETTINGS]) == ""


@pytest.mark.parametrize("name", ["learning_rat", "weigth_decay", "num_train_epoch", "max_step", "wramup_steps"])
def test_a_misspelt_name_is_still_recognised(name: str) -> None:
    assert "Did you mean" in vocabulary.hint_for_argument(name, [*SETTINGS])
    assert "Did you mean training." in vocabulary.hint_for_entry(f"training.{name}", known_paths())


@pytest.mark.parametrize(("task", "meant"), [("sft", "chat"), ("NER", "token-classification"), ("sentiment", "text-c")])
def test_the_usual_names_of_tasks_are_understood(task: str, meant: str) -> None:
    assert f"Did you mean {meant}" in vocabulary.hint_for_task(task, TASKS)
    assert "TRL" in vocabulary.hint_for_task("dpo", TASKS)


def test_values_are_understood_by_their_usual_names() -> None:
    with pytest.raises(ValueError, match="Did you mean 'adamw_torch'"):
        TrainingArguments(optim="adam")
