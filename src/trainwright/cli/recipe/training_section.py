"""The part `training` of a configuration file: fields of TrainingArguments, checked by it; and the files of `init`."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trainwright._types import JSONObject
from trainwright.cli.recipe.schema import TASKS
from trainwright.cli.recipe.yaml_tree import parse, scalar
from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.config.cli_options import FALSE_WORDS, TRUE_WORDS
from trainwright.config.deprecated import OLD_NAMES
from trainwright.config.fields import names_with
from trainwright.config.summary import grouped, plain
from trainwright.errors import ArgumentError

PATHS, MAYBE_PATHS = names_with("path"), names_with("maybe_path")
WORDS = {**dict.fromkeys((*TRUE_WORDS, "on"), True), **dict.fromkeys((*FALSE_WORDS, "off"), False)}


def arguments_class(*, generates: bool) -> type[TrainingArguments]:
    """Returns the class of arguments for a task that `generates`, or does not."""
    return Seq2SeqTrainingArguments if generates else TrainingArguments


def training_names(*, generates: bool) -> list[str]:
    """Returns the names of the fields, and their older names."""
    fields = [one.name for one in dataclasses.fields(arguments_class(generates=generates)) if one.init]
    return [*fields, *OLD_NAMES]


def resolved_training(training: Mapping[str, object], base: Path, task: str) -> JSONObject:
    """Resolves the values: absolute paths, words such as `yes`, and an output directory."""
    kinds = get_type_hints(Seq2SeqTrainingArguments)
    result = dict(training)
    result.setdefault("output_dir", f"runs/{task}")
    for name, value in result.items():
        kind = kinds.get(name)
        if isinstance(value, str) and (kind is bool or set(get_args(kind)) == {bool, type(None)}):
            result[name] = WORDS.get(value.lower(), value)
        if isinstance(value, str) and (name in PATHS or (name in MAYBE_PATHS and (base / value).exists())):
            result[name] = str((base / Path(value).expanduser()).absolute())
    return result


def make_arguments(training: Mapping[str, Any], *, generates: bool) -> TrainingArguments:
    """Makes the arguments of a run, with `generates` those of a Seq2SeqTrainer; ArgumentError lists all problems."""
    return arguments_class(generates=generates)(**training)


def problems_of_training(training: Mapping[str, object], *, generates: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the problems that TrainingArguments has with the values, each at the entry that it names first."""
    kinds = get_type_hints(Seq2SeqTrainingArguments)
    wrong = [name for name, value in training.items() if kinds.get(name) is bool and not isinstance(value, bool)]
    for name in wrong:
        yield ("training", name), f"training.{name}: {training[name]!r} is neither true nor false."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older name is warned about when training starts
            make_arguments({name: value for name, value in training.items() if name not in wrong}, generates=generates)
    except (ArgumentError, TypeError) as error:
        for problem in getattr(error, "problems", None) or (str(error),):
            named = [word for word in re.findall(r"\w+", problem) if word in training]
            yield ("training", *named[:1]), f"training: {problem}"


WIDTH = 118


def template(task: str, *, with_everything: bool = False) -> str:
    """Returns a file for a task, ready to train; `with_everything` adds all settings as comments."""
    text = files("trainwright.cli.recipe").joinpath("templates").joinpath(f"{task}.yaml").read_text(encoding="utf-8")
    if not with_everything:
        return text
    there = set(parse(text, task).value["training"])
    return text + "\n".join(_rest(task, there)) + "\n"


def _rest(task: str, there: set[str]) -> Iterator[str]:
    for title, fields in grouped(arguments_class(generates=TASKS[task].generates)).items():
        missing = [one for one in fields if one.name not in there]
        if missing:
            yield f"\n  # -- {title}"
        for one in missing:
            help = textwrap.wrap(one.metadata.get("help", ""), WIDTH - 8)
            yield "\n".join([f"  # {one.name}: {_shown(one)}", *(f"  #     {line}" for line in help)])


def _shown(one: dataclasses.Field[Any]) -> str:
    default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
    value = plain(default)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and scalar(value or "null") != value else str(value)
