"""`trainwright branch` and `extend`: the recipe of a run, changed so that it begins elsewhere, or ends later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright._types import RECIPE_NAME, is_url, without_tokens
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.cli.recipe.recipe_reader import checked
from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.recipe.yaml_tree import Tree, make_absolute
from trainwright.cli.tasks.recipe_run import has_stopped_early, read_run_tree
from trainwright.errors import ArgumentError, CheckpointNotFoundError
from trainwright.optim.schedules import COOLDOWNS
from trainwright.support.door import MAX_STEP

DEFAULT_SHAPE = "linear"
LENGTH = ("training", "max_steps")
SHAPE = ("training", "cooldown")
REPOSITORY = ("training", "hub_model_id")
OF_A_SCRIPT = (
    "A script does it by itself: TrainingArguments(branch_from=CHECKPOINT, cooldown='linear', max_steps=...), or a "
    "larger max_steps with train(resume_from_checkpoint=True)."
)


def branched(
    run: Path | str,
    out: Path,
    *,
    at: int,
    cooldown: str | None = None,
    shape: str | None = None,
    overrides: Sequence[str] = (),
    typed: Sequence[str] = (),
) -> tuple[Recipe, Tree]:
    """Returns the recipe of a branch, for a first start and each later one.

    Args:
        run: output directory of a run of the command line.
        out: output directory of the branch.
        at: step of the checkpoint that it begins from.
        cooldown: length of a cooldown, as for `cooldown_length`; None: the schedule of the run.
        shape: one of `COOLDOWNS`; None: linear.
        overrides: entries in the place of the run's, `a.b=value`.
        typed: the same, as typed without --set.

    Raises:
        ArgumentError: the words contradict each other, or the run is at a URL.
        CheckpointNotFoundError: the run has no checkpoint of that step.
        RecipeError: the run has no recipe, or the changed recipe is wrong.
    """
    from trainwright.capabilities.branch.origins import checkpoint_at

    folder = _directory(run)
    begun = _begun_from(out, folder, at)
    tree = read_run_tree(folder if begun is None else out, overrides, typed, cure=OF_A_SCRIPT)
    if cooldown is not None:
        length = cooldown_length(cooldown, at)
        _set_length(tree, at + length, option=f"--cooldown {cooldown}")
        tree.set(SHAPE, _known(shape or DEFAULT_SHAPE), origin="--cooldown")
    elif shape is not None:
        raise ArgumentError(f"--shape {shape} is the shape of a cooldown: --cooldown 10% --shape {shape}.")
    training = tree.value.get("training", {})
    if training.get("push_to_hub") and isinstance(tree.places.get(REPOSITORY), int):
        problem = (
            "training.hub_model_id: the branch would replace the model of its origin on the Hub. Give it another "
            "repository: --set training.hub_model_id=NAME, or --set training.push_to_hub=false."
        )
        tree.refuse([(REPOSITORY, problem)])
    origin = begun or str(checkpoint_at(folder, at))
    command = "trainwright branch"
    tree.set(("training", "branch_from"), origin, origin=command)
    tree.set(("training", "output_dir"), str(out), origin=command)
    training.pop("overwrite_output_dir", None)  # with it, each start would begin again
    return checked(tree, folder), tree


def extended(
    run: Path | str,
    *,
    steps: int | None = None,
    to: int | None = None,
    shape: str | None = None,
    overrides: Sequence[str] = (),
    typed: Sequence[str] = (),
) -> tuple[Recipe, Tree]:
    """Returns the recipe of a run that ends later than before, set to resume.

    Args:
        run: output directory of a run of the command line.
        steps: steps to add to a run that has ended.
        to: step to end at, in place of `steps`.
        shape: one of `COOLDOWNS`, in which the rate falls to 0; None: the schedule of the run.
        overrides: entries in the place of the run's, `a.b=value`.
        typed: the same, as typed without --set.

    Raises:
        ArgumentError: the words contradict each other or the state of the run, or the run is at a URL.
        CheckpointNotFoundError: the run has no whole checkpoint.
        RecipeError: the run has no recipe, or the changed recipe is wrong.
    """
    folder = _directory(run)
    if (steps is None) == (to is None):
        raise ArgumentError(
            "extend takes the number of further steps, --steps 2000, or the step to end at, --to 12000."
        )
    tree = read_run_tree(folder, overrides, typed, cure=OF_A_SCRIPT)
    newest = CheckpointStore(folder).latest()
    if newest is None:
        raise CheckpointNotFoundError(f"{run} has no whole checkpoint, so it cannot be continued.")
    done = newest.state.global_step
    end = newest.state.max_steps
    if has_stopped_early(checked(tree, folder), newest.state):
        raise ArgumentError(
            f"{run} was ended at step {done} by its early stopping, which would end it again. Go on with: trainwright "
            f"resume {run} --set training.early_stopping_patience=N (more than it had, or null)."
        )
    if steps is not None and done < end:
        raise ArgumentError(
            f"{run} has not ended: its newest checkpoint is of step {done} of {end}. `trainwright resume {run}` "
            f"continues it; `trainwright extend {run} --to {end + steps}` makes it longer at once."
        )
    length = end + steps if steps is not None else to
    assert length is not None
    if length <= done or length < end:
        raise ArgumentError(f"{run} has {done} of {end} steps; --to {length} must be more.")
    _set_length(tree, length, option="--to" if steps is None else "--steps")
    command = "trainwright extend"
    if shape is not None:
        tree.set(SHAPE, _known(shape), origin=command)
    tree.set(("training", "resume_from_checkpoint"), "auto", origin=command)
    tree.set(("training", "output_dir"), str(folder), origin=command)
    return checked(tree, folder), tree


def cooldown_length(text: str, at: int) -> int:
    """Returns the steps of a cooldown that begins after a step.

    Args:
        text: a number of steps, or as "10%" a share of the length of the branch: of the steps before and after.
        at: the step.

    Raises:
        ArgumentError: it is neither.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        value = 0
    if rest or not 0 < value < (100 if percent else MAX_STEP):
        raise ArgumentError(
            f"--cooldown {text} is not a length. Write a number of steps, as 800, or a share of all steps of the "
            "branch, as 10%."
        )
    length = max(round(at / (1 - value / 100)) - at, 1) if percent else int(value)
    if at + length > MAX_STEP:
        raise ArgumentError(f"--cooldown {text} of a branch from step {at} is more steps than a run can have.")
    return length


def _directory(run: Path | str) -> Path:
    if is_url(run):
        raise ArgumentError(
            f"{without_tokens(str(run))} is a URL, and the run is needed in a directory: its recipe.yaml and the "
            "checkpoint. Copy them there first."
        )
    return make_absolute(Path(run))


def _begun_from(out: Path, folder: Path, at: int) -> str | None:
    """Returns the checkpoint that the branch in a directory began from, if it is of that run and step; else None."""
    from trainwright.capabilities.branch.origins import origins_in

    store = CheckpointStore(out)
    steps = store.steps()
    origins = origins_in(Checkpoint(store.path(steps[-1]))) if steps and (out / RECIPE_NAME).is_file() else []
    if not origins:
        return None
    checkpoint = str(origins[-1]["checkpoint"])
    is_same = origins[-1]["step"] == at and Path(checkpoint).parent == folder.resolve()
    return checkpoint if is_same else None


def _set_length(tree: Tree, length: int, *, option: str) -> None:
    given = tree.places.get(LENGTH)
    if isinstance(given, str):
        raise ArgumentError(f"{option} ends the run at step {length}, and {given} gives a length too. Leave out one.")
    tree.set(LENGTH, length, origin=option)


def _known(shape: str) -> str:
    if shape not in COOLDOWNS:
        raise ArgumentError(f"--shape {shape} is not one of {', '.join(COOLDOWNS)}.")
    return shape
