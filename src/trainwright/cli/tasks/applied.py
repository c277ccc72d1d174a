"""A trained model in the recipe of its run, with other data, for `trainwright eval` and `predict`."""

from __future__ import annotations

import codecs
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainwright._types import RECIPE_NAME, JSONObject
from trainwright.checkpoint.weights import export_model, weight_files
from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.recipe.schema import TASKS, Recipe
from trainwright.cli.recipe.yaml_tree import Tree
from trainwright.cli.tasks.export import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    TEMPLATE_NAME,
    chosen,
    chosen_checkpoint,
    export_average,
    has_adapter,
    merge,
)
from trainwright.cli.tasks.source import SUFFIXES
from trainwright.cli.user_code import SUFFIX, allow_functions, find_functions
from trainwright.config.arguments import TrainingArguments
from trainwright.engine import sharded_state
from trainwright.errors import ArgumentError, CheckpointNotFoundError, DataError, did_you_mean
from trainwright.support.door import read_json

# Settings of a run that still apply to a finished model.
KEPT_SETTINGS = (
    "bf16",
    "bf16_full_eval",
    "fp16",
    "fp16_full_eval",
    "generation_max_length",
    "generation_num_beams",
    "id_column",
    "include_for_metrics",
    "per_device_eval_batch_size",
    "predict_with_generate",
    "seed",
    "use_cpu",
)
OF_TRAINING_DATA = (
    "sources",
    "eval",
    "dataset",
    "subset",
    "max_train_rows",
    "max_eval_rows",
    "chat_template",
    "class_weights",
)
WITH_LABELS = ("label", "tags")


@dataclass(frozen=True, slots=True)
class Applied:
    """A model and the data to apply it to.

    Attributes:
        recipe: recipe of the run, with the new data and the trained model.
        tree: tree of the recipe, with the places of its entries.
        place: directory with whole weights, tokenizer and configuration.
        note: which checkpoint of a run was chosen, and why; "" if there was no choice.
    """

    recipe: Recipe
    tree: Tree
    place: Path
    note: str


@contextmanager
def applied(
    model: Path,
    data: Path,
    *,
    task: str | None,
    overrides: Sequence[str] = (),
    weights: str = "trained",
    run: Path | None = None,
) -> Iterator[Applied]:
    """Opens a model for other data; within the context, its weights are complete and no adapter is separate.

    Args:
        model: directory of a run of `trainwright train`, one of its checkpoints, or a directory with a model.
        data: file with rows, or a directory of images.
        task: task of a model without a recipe; with a recipe, the same task or None.
        overrides: overrides of the recipe, as given after `--set`.
        weights: "trained" or "average".
        run: directory with the recipe; default `model`, or the directory that it is in.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        ArgumentError: there is no recipe and no task.
        RecipeError: the recipe does not fit.
    """
    if not model.is_dir():
        raise CheckpointNotFoundError(f"There is no directory {model}.")
    if weights not in ("trained", "average"):
        raise ArgumentError(f"--weights {weights}: write trained or average.")
    source, why = chosen(model) if weights == "trained" else chosen_checkpoint(model)
    note = f"{source}: {why}" if why else ""
    with tempfile.TemporaryDirectory() as scratch:
        place = _whole(source, Path(scratch) / "model", weights=weights)
        where = model if run is None else run
        recipe, tree = recipe_at(place, data, run=where, task=task, overrides=overrides, scratch=Path(scratch))
        yield Applied(recipe, tree, place, note)


def recipe_at(
    place: Path, data: Path, *, run: Path, task: str | None, scratch: Path, overrides: Sequence[str] = ()
) -> tuple[Recipe, Tree]:
    """Returns the recipe of a run, or of a task, pointed at a model and at other data.

    Args:
        place: directory with the model, its tokenizer and its configuration.
        data: file with rows, or a directory of images.
        run: directory with the recipe, or of one of its checkpoints.
        task: task of a model without a recipe; with a recipe, the same task or None.
        scratch: directory for temporary files.
        overrides: overrides of the recipe, as given after `--set`.

    Raises:
        ArgumentError: there is no recipe and no task.
        RecipeError: the recipe does not fit.
    """
    tree = _tree(run, task, overrides, scratch=scratch)
    _check_code(tree)
    allow_functions(tree, Path.cwd(), typed_only=True)
    _point(tree, data, place, output_dir=scratch / "out")
    return checked(tree, Path.cwd()), tree


def _check_code(tree: Tree) -> None:
    """Refuses functions in files that are named from where the recipe is: beside a model, which may be a stranger's."""
    tree.refuse(
        (path, f"{'.'.join(path)}: write {one} as an absolute path. A run's recipe has it so.")
        for path, one in find_functions(tree.value)
        if f"{SUFFIX}:" in one and not Path(one).is_absolute() and not tree.is_typed(path)
    )


def recipe_file(run: Path) -> Path | None:
    """Returns the recipe of a run, or of the run that a checkpoint is of; None if it has none."""
    places = (run / RECIPE_NAME, run.absolute().parent / RECIPE_NAME)
    return next((one for one in places if one.is_file()), None)


def guess_task(place: Path) -> str | None:
    """Returns the task of a model without a recipe, if it writes text: chat with a chat template, else causal-lm."""
    config = place / CONFIG_NAME
    adapter = place / ADAPTER_CONFIG_NAME
    kinds = read_json(config, max_bytes=1 << 24).get("architectures") if config.is_file() else None
    writes = any(str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds or ())
    if not writes and adapter.is_file():
        described = read_json(adapter, max_bytes=1 << 20)
        base = described.get("base_model_name_or_path")
        writes = described.get("task_type") == "CAUSAL_LM"
        if not writes and described.get("task_type") is None and isinstance(base, str) and Path(base).is_dir():
            return guess_task(Path(base)) and ("chat" if _has_template(place) else "causal-lm")
    if not writes:
        return None
    return "chat" if _has_template(place) else "causal-lm"


def _has_template(place: Path) -> bool:
    settings = place / "tokenizer_config.json"
    is_inside = settings.is_file() and read_json(settings, max_bytes=1 << 24).get("chat_template")
    return bool(is_inside) or (place / TEMPLATE_NAME).is_file()


@contextmanager
def rows_at(data: Path) -> Iterator[Path]:
    """Opens a file of rows; "-" copies standard input to a file, with a suffix for JSON lines or for lines of text.

    Raises:
        DataError: there is no such file, or standard input is empty.
    """
    if str(data) != "-":
        if not data.exists():
            there = [one.name for one in data.parent.iterdir()] if data.parent.is_dir() else []
            raise DataError(f"There is no file {data}.{did_you_mean(data.name, there)}")
        yield data
        return
    content = sys.stdin.buffer.read()  # not as text: a byte that is none is an error of the row that has it
    if not content.strip():
        raise DataError("Standard input is empty. Write a row on each line, or name a file with --data.")
    suffix = "jsonl" if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") else "txt"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"stdin.{suffix}"
        path.write_bytes(content)
        yield path


def _whole(source: Path, folder: Path, *, weights: str) -> Path:
    """Returns a directory with complete weights: the source itself if it has them."""
    if weights == "average":
        export_average(source, folder)
        source = folder
        folder = folder.with_name("merged")
    if has_adapter(source):
        merge(source, folder)
        return folder
    if not weight_files(source):  # in parts, or there are none, which is refused
        export_model(source, folder, parts=sharded_state)
        return folder
    return source


def _tree(model: Path, task: str | None, overrides: Sequence[str], *, scratch: Path) -> Tree:
    """Reads the recipe of a run or of a checkpoint's run; without one, the default recipe of the task."""
    path = recipe_file(model)
    if path is None:
        if task is None:
            raise ArgumentError(
                f"{model} has no {RECIPE_NAME}, so its task is unknown. Set it with --task: {', '.join(TASKS)}."
            )
        path = scratch / RECIPE_NAME
        path.write_text(f"task: {task}\n", encoding="utf-8")
    tree = read_tree(path, overrides)
    if task is not None and tree.value.get("task") != task:
        raise ArgumentError(f"--task {task}, but {path} is for {tree.value.get('task')}. Omit --task.")
    return tree


def _point(tree: Tree, data: Path, place: Path, *, output_dir: Path) -> None:
    """Points a recipe at a trained model and at other data; entries that only apply to training are removed."""
    value = tree.value
    rows: JSONObject = dict(value["data"]) if isinstance(value.get("data"), dict) else {}
    training: JSONObject = dict(value.get("training") or {})
    value["data"] = {name: entry for name, entry in rows.items() if name not in OF_TRAINING_DATA}
    if any(suffix in SUFFIXES for suffix in data.suffixes) or data.is_dir():
        value["data"].pop("format", None)
    value["training"] = {name: entry for name, entry in training.items() if name in KEPT_SETTINGS}
    if value["task"] == "preference":
        part: JSONObject = dict(value.get("preference") or {})
        trained = value.get("model") or {}
        before = None if trained.get("from_scratch") else trained.get("path")
        value["preference"] = {"reference": before, **part}
    value["model"] = {}
    for name in ("lora", "launch"):
        value.pop(name, None)
    labels = _labels(place)
    has_labels = any(role in WITH_LABELS for role in TASKS[value["task"]].needs) and value["task"] != "regression"
    given = value["data"].get("labels")
    if has_labels and labels and given is None:
        tree.set(("data", "labels"), labels, origin=str(place / CONFIG_NAME))
    elif has_labels and labels and isinstance(given, dict):
        # The others are those of the model, in its order, not those that these rows happen to have.
        named = {label: label for label in labels} | given
        tree.set(("data", "labels"), named, origin=str(place / CONFIG_NAME))
    tree.set(("data", "train"), [str(data.absolute())], origin="--data")
    tree.set(("data", "eval_share"), 0, origin="--data")
    tree.set(("model", "path"), str(place.absolute()), origin=str(place))
    for name, setting in {"output_dir": str(output_dir), "report_to": "none", "disable_tqdm": True}.items():
        tree.set(("training", name), setting, origin="--data")


def _labels(place: Path) -> list[str]:
    """Returns the names of a model's labels, in the order of their numbers; empty if it has none."""
    config = place / CONFIG_NAME
    named = read_json(config, max_bytes=1 << 24).get("id2label") if config.is_file() else None
    return [str(named[number]) for number in sorted(named, key=int)] if isinstance(named, dict) else []


def make_eval_arguments(one: Applied) -> TrainingArguments:
    """Returns the arguments of an evaluation."""
    from trainwright.cli.tasks.task_trainer import make_arguments

    return make_arguments(one.recipe, one.recipe.training)
