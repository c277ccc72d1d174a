"""A run of the command line: makes the trainer, trains or resumes, evaluates and saves.

Writes the file for a resume.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright._types import PREFIX_CHECKPOINT_DIR, RECIPE_NAME, TRAINER_STATE_NAME, JSONObject, counted, write_text
from trainwright.checkpoint.store import CheckpointStore
from trainwright.cli.recipe.recipe_reader import OPTIONAL, checked, read_tree
from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.recipe.yaml_tree import Tree, dump
from trainwright.cli.tasks import findings, pair_trainers
from trainwright.cli.tasks.adapter import (
    NEEDS_PEFT,
    described,
    find_quantization_problem,
    save_base_config,
    with_adapter,
)
from trainwright.cli.tasks.class_weights import WeightedLoss, describe_weights
from trainwright.cli.tasks.models import FOLDER as TOKENIZER_FOLDER
from trainwright.cli.tasks.models import remove_learned
from trainwright.cli.tasks.pair_trainers import find_form
from trainwright.cli.tasks.source import TaskSource, digest_rows, load
from trainwright.cli.tasks.task_trainer import (
    make_arguments,
    make_named_pair_trainer,
    make_objects,
    make_task_trainer,
)
from trainwright.cli.user_code import allow_functions, digest_source, remember_functions
from trainwright.config.arguments import TrainingArguments
from trainwright.errors import ArgumentError, CheckpointError, RecipeError, TrainwrightError
from trainwright.hub.access import model_problem, without_retries
from trainwright.journal.forms import last_start
from trainwright.journal.record import JOURNAL_NAME, read, read_findings
from trainwright.run.checks import make_output_dir
from trainwright.state.trainer_state import TrainerState
from trainwright.support.door import OwnFolder, read_json, read_settings
from trainwright.support.metric_order import order_metrics
from trainwright.support.units import count_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from trainwright.support.findings import Finding
    from trainwright.trainer import Trainer


HEAD = "# What this run was started with; `trainwright resume` reads it. Paths are absolute, tokens are left out.\n"
LOGS = 20  # logs of a short run
CONTINUES = ("overwrite_output_dir", "resume_from_checkpoint", "branch_from")  # each says what becomes of checkpoints
# What is in the directory of a run before it begins.
WRITTEN_FIRST = {RECIPE_NAME, "config.json", "generation_config.json", TOKENIZER_FOLDER}
NOT_SHOWN = ("_runtime", "_per_second", "epoch")

Say = Callable[[str, str], None]  # (topic, line)


def make_trainer(recipe: Recipe, tree: Tree, say: Say, *, found: list[Finding] | None = None) -> Trainer:
    """Builds a trainer from a recipe's data and model.

    Args:
        recipe: the recipe.
        tree: tree with the places of its entries.
        say: shows a line about a topic.
        found: receives the findings in the rows, instead of `say`.

    Raises:
        RecipeError: data and model do not fit the settings; nothing was trained.
    """
    from trainwright.data.seeding import set_seed
    from trainwright.run.internals import Internals

    # Where the original's numbers are asked for, the task changes none.
    of_task = {} if "reproduce" in recipe.training else recipe.spec.training
    _refuse_what_cannot_be_installed(recipe, tree)
    args = make_arguments(recipe, {**of_task, **recipe.training})
    _refuse_what_cannot_be_downloaded(recipe, tree)
    try:
        make_output_dir(str(args.output_dir))  # before data are read and a tokenizer is learned into it
    except OSError as error:
        tree.refuse([(("training", "output_dir"), f"training.{error}")])
    set_seed(args.seed)  # a new head is initialized at random
    material = load(recipe, tree, found)
    if not len(material.eval) and args.eval_strategy != "no":
        tree.refuse(
            [
                (
                    ("training", "eval_strategy"),
                    "training.eval_strategy: there are no rows to evaluate on. "
                    "Set data.eval, or data.eval_share above 0.",
                )
            ]
        )
    with without_retries():
        parts = make_objects(material, args)
    for note in material.notes if found is None else ():
        say("note", note)
    held = "" if parts.eval is None else f", {len(parts.eval)} to evaluate on"
    say("data", f"{counted(len(parts.train), 'sample')} to train on{held}, {parts.about}")
    weights = "from scratch"
    if recipe.model.path is not None and not recipe.model.from_scratch:
        weights = f"from {_as_written(tree, recipe.model.path)}"
    num = sum(parameter.numel() for parameter in parts.model.parameters())
    log_often_enough(args, recipe, len(parts.train))
    model = parts.model
    say("model", f"{type(model).__name__} of {count_text(num)} parameters, {weights}")
    if recipe.lora is not None and not recipe.spec.is_paired:
        model = with_adapter(parts.model, material)
    if recipe.spec.is_paired:
        trainer = make_named_pair_trainer(material, args, parts)
        model = trainer.model
    else:
        trainer = make_task_trainer(
            recipe, args, parts, model=model, train_dataset=parts.train, eval_dataset=parts.eval
        )
    if recipe.lora is not None:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        say("lora", f"{count_text(trained)} parameters are trained: {described(recipe.lora)}")
    if recipe.early_stopping is not None:
        from trainwright.callbacks.flow import EarlyStoppingCallback

        stopping = recipe.early_stopping
        say("stops", stopping.described())
        trainer.add_callback(EarlyStoppingCallback(stopping.patience, stopping.threshold))
    journal = Internals(trainer).services.journal
    journal.recipe = summarize(recipe, material)
    note_changed_map(recipe, journal.recipe, say)
    if parts.compute_loss is not None:
        journal.recipe["class_weights"] = describe_weights(parts.compute_loss.named)
        say("weights", f"in the training loss: {journal.recipe['class_weights']}")
    journal.known_before = [
        {"text": f"{one.check}: {findings.described(one)}", "source": findings.__name__, "check": one.check}
        for one in material.found
        if one.severity != "note"
    ]
    return trainer


def summarize(recipe: Recipe, material: TaskSource) -> JSONObject:
    """Returns what distinguishes a run: task, model, data, adapter, and digests of its code and its evaluation rows."""
    data = recipe.data
    named = [source["path"] for source in data.sources or ()] or data.train or data.dataset
    summary = {
        "task": recipe.task,
        "model": _near(recipe.model.path) if recipe.model.path else recipe.model.config.get("model_type"),
        "data": ", ".join(map(_near, named)) if isinstance(named, list) else _near(named),
        "map": None if data.map is None else f"{_near_function(data.map)} (sha256 {digest_source(data.map)})",
        "adapter": None if recipe.lora is None else described(recipe.lora),
        "eval_rows": digest_rows(material.eval) if len(material.eval) else None,
    }
    return {name: str(value) for name, value in summary.items() if value is not None}


def _near_function(text: str) -> str:
    place, _, name = text.rpartition(":")
    return f"{_near(place)}:{name}"


def note_changed_map(recipe: Recipe, now: JSONObject, say: Say) -> None:
    """Shows that a resumed run maps its rows in another way than the run before, as its journal says."""
    folder = Path(recipe.training["output_dir"])
    if not recipe.training.get("resume_from_checkpoint") or not (folder / JOURNAL_NAME).is_file():
        return
    then = last_start(read(folder)).get("recipe", {})
    if then and then.get("map") != now.get("map"):
        changed = f"{then.get('map', 'none')} -> {now.get('map', 'none')}"
        say("changed", f"data.map {changed}: the rows may be others than those trained on so far")


def _near(name: object) -> str:
    """Returns a path below the working directory as it is seen from there; other names as they are."""
    near = os.path.relpath(str(name)) if os.path.isabs(str(name)) else str(name)
    return str(name) if near.startswith("..") else near


def _as_written(tree: Tree, path: str) -> str:
    """Returns the path of the model as the file has it; from the working directory if it came another way."""
    part = tree.value.get("model")
    written = part.get("path") if isinstance(part, dict) else None
    return written if isinstance(written, str) and not os.path.isabs(written) else _near(path)


def _refuse_what_cannot_be_downloaded(recipe: Recipe, tree: Tree) -> None:
    """Refuses Hub names of models if the Hub is unreachable, before data are read and the client retries."""
    model = recipe.model
    named = {"path": model.path, "tokenizer": model.tokenizer}
    problems = {entry: model_problem(name, model.revision) for entry, name in named.items() if name is not None}
    tree.refuse([(("model", entry), f"model.{entry}: {text}") for entry, text in problems.items() if text])


def _refuse_what_cannot_be_installed(recipe: Recipe, tree: Tree) -> None:
    """Refuses what needs a package, or a device, that is not here, before data are read and a model is loaded."""
    problems: list[tuple[tuple[str, ...], str]] = []
    bits = recipe.model.quantization
    if bits is not None and (problem := find_quantization_problem(bits)) is not None:
        problems.append((("model", "quantization"), f"model.quantization: {problem}"))
    if (missing := pair_trainers.find_problem(recipe)) is not None:
        problems.append((("task",), missing))
    if recipe.lora is not None and find_spec("peft") is None:
        problems.append((("lora",), NEEDS_PEFT))
    tree.refuse(problems)


def log_often_enough(args: TrainingArguments, recipe: Recipe, num_samples: int) -> None:
    """Makes a short run log about twenty times, unless the recipe sets the interval."""
    if {"logging_steps", "logging_strategy"} & recipe.training.keys():
        return
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else num_samples / max(per_step, 1) * args.num_train_epochs
    if steps < LOGS * args.logging_steps:
        args.logging_steps = 1 / LOGS


def rehearse(recipe: Recipe, tree: Tree, say: Say) -> None:
    """Reads data and model, and shows the plan of the run; trains nothing and writes nothing.

    Raises the errors that training would raise before step 1.
    """
    from trainwright.config.summary import run_summary
    from trainwright.run import build, checks, console
    from trainwright.run.internals import Internals
    from trainwright.run.train import check_evaluation

    with tempfile.TemporaryDirectory() as scratch:
        recipe = dataclasses.replace(recipe, training={**recipe.training, "output_dir": scratch})
        trainer = make_trainer(recipe, tree, say)
        args = trainer.args
        checks.check_has_samples(trainer.train_dataset)
        loader = trainer.get_train_dataloader()
        checks.check_has_batches(loader, args)
        plan = build.step_plan(args, trainer.set_initial_training_values(args, loader))
        console.check_run(args, build.rule_facts(plan, trainer, args.device))
        checks.check_trainable(trainer.model, args.mixed_precision)
        check_evaluation(trainer)
        trainer.state.compute_steps(args, plan.max_steps)
        lines = run_summary(args, plan, trainer.state, device=args.device, num_replicas=args.world_size)
        lines += console.source_lines(args, loader, plan, Internals(trainer).engine)
    for line in lines:
        word, _, rest = line.partition(" ")
        say(word, rest.strip())
    say("dry run", "nothing was trained")


@contextmanager
def removes_unused_directory(folder: Path) -> Iterator[None]:
    """Removes, at the end of the context, an output directory that the command made, unless a run began in it.

    Of a refused run it has at most the recipe, a learned tokenizer, and the settings of an adapter's base model.
    """
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        yield
    except BaseException:
        if folder in missing and folder.is_dir() and not folder.is_symlink():
            own = OwnFolder(folder)
            names = own.names()
            if {str(name) for name in names} <= WRITTEN_FIRST:
                for name in names:
                    own.remove(name)
        raise
    finally:
        for one in missing:
            # An error if it is not empty, or was not made.
            with suppress(OSError):
                one.rmdir()


@contextmanager
def names_the_resume(folder: Path, say: Say) -> Iterator[None]:
    """Shows how to continue a run that a signal ended, if it has a checkpoint."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if CheckpointStore(folder).steps():
            say("stopped", f"continue with: trainwright resume {_near(folder.absolute())}")
        raise


def run(recipe: Recipe, tree: Tree, say: Say) -> JSONObject:
    """Trains as the recipe says, and returns what came of it, for `--json`. A refused run leaves no new directory.

    Returns:
        `output_dir`; `step`, the last one; `class_weights`, if there are any; `train`, metrics of the training;
        `eval`, of the last evaluation, empty
        without one; `findings` about data, model and settings, each with the name of its check and its text;
        `best_checkpoint` and `checkpoint`, the newest, each None if there is none.
    """
    with removes_unused_directory(Path(recipe.training["output_dir"])):
        return _train(recipe, tree, say)


def _train(recipe: Recipe, tree: Tree, say: Say) -> JSONObject:
    trainer = make_trainer(recipe, tree, say)
    args = trainer.args
    if recipe.spec.is_paired:
        # Later commands have other rows to read, or none.
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, pairs=find_form(trainer)))
    kept = Path(args.output_dir) / RECIPE_NAME
    before = read_settings(kept) if args.should_save and kept.is_file() else None
    saved = CheckpointStore(args.output_dir).steps()
    if args.should_save:
        write_text(kept, HEAD + dump(plain(recipe)))
        remember_functions(plain(recipe))
        save_base_config(trainer.model, Path(args.output_dir))
    with names_the_resume(Path(args.output_dir), say):
        try:
            result = trainer.train()
        except (ArgumentError, CheckpointError):
            if (
                before is not None and CheckpointStore(args.output_dir).steps() == saved
            ):  # refused: no resume inherits it
                write_text(kept, before)
            raise
    # Before the last evaluation, which may fail.
    trainer.save_model(_internal_call=True)
    trainer.save_metrics("train", result.metrics)
    found = [{"check": one["check"], "text": one["text"]} for one in read_findings(str(args.output_dir))]
    scores: dict[str, float] = {}
    if trainer.eval_dataset is not None:
        scores = _last_evaluation(trainer) or trainer.evaluate()
        trainer.save_metrics("eval", scores)
        say("result", readable(scores))
        if found:
            names = ", ".join(dict.fromkeys(one["check"] for one in found))
            say("findings", f"{names} (shown above, and kept in {JOURNAL_NAME})")
    trainer.save_state()
    if args.should_save and recipe.model.learn_tokenizer is not None:
        remove_learned(Path(args.output_dir))
    journal = ", journal" if (Path(args.output_dir) / JOURNAL_NAME).is_file() else ""
    say("written", f"{_near(args.output_dir)} (model, results, checkpoints{journal})")
    if args.push_to_hub:
        upload(trainer)
    store = CheckpointStore(args.output_dir)
    newest = store.steps()[-1:]
    loss = trainer.compute_loss_func
    weights = {"class_weights": loss.named} if isinstance(loss, WeightedLoss) else {}
    return {
        "output_dir": str(args.output_dir),
        "step": trainer.state.global_step,
        **weights,
        "train": result.metrics,
        "eval": scores,
        "findings": found,
        "best_checkpoint": trainer.state.best_model_checkpoint,
        "checkpoint": str(store.path(newest[0])) if newest else None,
    }


def upload(trainer: Trainer) -> None:
    """Uploads the model of a run; TrainwrightError gives the reason if that fails."""
    from trainwright.hub.uploader import in_a_line

    folder = trainer.args.output_dir
    try:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    except Exception as error:  # from the Hub or its HTTP client, which varies between versions
        why = in_a_line(error)
        then = f"Send it with `trainwright push {folder}`"
        raise TrainwrightError(f"The model is in {folder}, but was not uploaded: {why}. {then}.") from error


def _last_evaluation(trainer: Trainer) -> dict[str, float]:
    if trainer.args.load_best_model_at_end:
        return {}
    logged = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
    found = [entry for entry in logged if "eval_loss" in entry]
    return {name: value for name, value in found[-1].items() if name != "step"} if found else {}


def refuse_a_second_run(recipe: Recipe, tree: Tree) -> None:
    """Refuses a directory with checkpoints of another run, since the two would be mixed."""
    training = recipe.training
    steps = CheckpointStore(training["output_dir"]).steps()
    if steps and not any(training.get(name) for name in CONTINUES):
        folder = _near(training["output_dir"])
        problem = (
            f"training.output_dir: {folder} already has a run, saved at step {steps[-1]}. Continue it with "
            f"`trainwright resume {folder}`, delete its checkpoints with --set training.overwrite_output_dir=true, "
            "or choose another directory."
        )
        tree.refuse([(("training", "output_dir"), problem)])


def read_run_tree(folder: Path, overrides: Sequence[str], typed: Sequence[str] = (), *, cure: str) -> Tree:
    """Reads the recipe in the directory of a run; RecipeError, with a `cure`, if there is none."""
    path = folder / RECIPE_NAME
    if not path.is_file():
        raise RecipeError(f"There is no {path}, so `trainwright train` did not start a run in that directory. {cure}")
    tree = read_tree(path, overrides, typed)
    allow_functions(tree, folder, typed_only=True)
    return tree


def read_run(folder: Path, overrides: Sequence[str], typed: Sequence[str] = ()) -> tuple[Recipe, Tree]:
    """Reads the recipe of a run, or of a checkpoint's run, set to resume; RecipeError if there is none."""
    is_checkpoint = folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    run_folder = folder.parent if is_checkpoint else folder
    cure = "`trainwright runs DIR` lists runs; resume the run of a script in the script."
    tree = read_run_tree(run_folder, overrides, typed, cure=cure)
    where = str(folder) if is_checkpoint else "auto"
    tree.set(("training", "resume_from_checkpoint"), where, origin="trainwright resume")
    tree.set(("training", "output_dir"), str(run_folder), origin="trainwright resume")  # it may have been moved
    recipe = checked(tree, run_folder)
    steps = CheckpointStore(run_folder).steps()
    reached = int(folder.name.rpartition("-")[2]) if is_checkpoint else (steps or [0])[-1]
    asked = recipe.training.get("max_steps", -1)
    if 0 < asked < reached:
        problem = (
            f"training.max_steps: {asked} is below step {reached}, which the run has reached. Set a larger one, or "
            f"branch from an earlier step: trainwright branch {_near(run_folder)} --at STEP --out DIR."
        )
        tree.refuse([(("training", "max_steps"), problem)])
    return recipe, tree


def note_new_beginning(recipe: Recipe, say: Say) -> None:
    """Shows that a resumed run has no checkpoint, so that it begins again; not if there may be one in a store."""
    folder = Path(recipe.training["output_dir"])
    is_auto = recipe.training.get("resume_from_checkpoint") == "auto"
    if is_auto and not recipe.training.get("checkpoint_mirror") and not CheckpointStore(folder).steps():
        say("resumes", f"{_near(folder)} has no checkpoint yet, so the run begins again")


def find_result(recipe: Recipe) -> JSONObject | None:
    """Returns what `run` returned for a run that has finished as its recipe says; None if there is something to do.

    A run writes `trainer_state.json` into its directory after the model, so that it is the sign of its end.
    """
    folder = Path(recipe.training["output_dir"])
    if recipe.training.get("resume_from_checkpoint") != "auto" or not (folder / TRAINER_STATE_NAME).is_file():
        return None
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    steps = CheckpointStore(folder).steps()
    asked = recipe.training.get("max_steps", -1)
    if asked > 0:
        is_done = state.global_step >= asked
    else:
        is_done = state.global_step >= state.max_steps > 0
        is_done = is_done and recipe.training.get("num_train_epochs", 3) <= state.num_train_epochs
    is_done = is_done or has_stopped_early(recipe, state)
    if not is_done or (steps and steps[-1] != state.global_step):
        return None
    return {
        "output_dir": str(folder),
        "step": state.global_step,
        "stopped_early": has_stopped_early(recipe, state),
        "train": _read_results(folder, "train"),
        "eval": _read_results(folder, "eval"),
        "best_checkpoint": state.best_model_checkpoint,
        "checkpoint": str(CheckpointStore(folder).path(steps[-1])) if steps else None,
    }


def has_stopped_early(recipe: Recipe, state: TrainerState) -> bool:
    """Returns whether a run was ended by the early stopping of its recipe."""
    if recipe.early_stopping is None:
        return False
    kept: Any = state.stateful_callbacks.get("EarlyStoppingCallback", {})
    count = kept.get("attributes", {}).get("early_stopping_patience_counter", 0) if isinstance(kept, dict) else 0
    return bool(count >= recipe.early_stopping.patience)


def _read_results(folder: Path, name: str) -> JSONObject:
    path = folder / f"{name}_results.json"
    found: JSONObject = read_json(path, max_bytes=1 << 24) if path.is_file() else {}
    return found


def readable(scores: dict[str, float]) -> str:
    """Formats the scores of an evaluation without its times; with the perplexity if there is only a loss."""
    found = {name.removeprefix("eval_"): value for name, value in scores.items() if not name.endswith(NOT_SHOWN)}
    if set(found) == {"loss"} and found["loss"] < 50:
        found["perplexity"] = math.exp(found["loss"])
    return ", ".join(f"{name} {found[name]:.4g}" for name in order_metrics(found))


def plain(recipe: Recipe) -> JSONObject:
    """Returns the recipe for a file: values that differ from the defaults, without tokens."""
    training = {name: value for name, value in recipe.training.items() if not name.endswith("_token")}
    training.pop("resume_from_checkpoint", None)
    training |= recipe.early_stopping.to_entries() if recipe.early_stopping is not None else {}
    if any(one.get("share") is not None for one in recipe.data.sources or ()):
        del training["mixture"]  # made from these shares when the file is read
    others: JSONObject = {name: _set(part) for name in OPTIONAL if (part := getattr(recipe, name)) is not None}
    others |= {"metrics": list(recipe.metrics)} if recipe.metrics else {}
    return {"task": recipe.task, "model": _set(recipe.model), "data": _set(recipe.data), **others, "training": training}


def _set(part: DataclassInstance | type[DataclassInstance]) -> JSONObject:
    found: JSONObject = {}
    for one in dataclasses.fields(part):
        value = getattr(part, one.name)
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        if value != default:
            found[one.name] = _set(value) if dataclasses.is_dataclass(value) else value
    return found
