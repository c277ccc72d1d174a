"""A subclass of the trainer owns its names: whatever it calls its attributes and methods, ours works as it did.

The names of ours are those that a trainer has and the original's has not. Names of the original are its API, which a
subclass overrides on purpose.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import trainwright
from trainwright import Seq2SeqTrainer, Trainer

from .._support.small import Side, accuracy, data, differing, make_trainer, weights, without_clock

pytestmark = pytest.mark.framework  # the names are compared with the original's

# The one attribute that holds all of ours; objects to save, of which another dict is an error that says so; and what
# the original sets in an evaluation, or has published.
TAKEN = {
    "_trainwright",
    "checkpoint_items",
    "_gen_kwargs",
    "_activate_neftune",
    "_deactivate_neftune",
    "_eval_dataloaders",
    "_nested_gather",
    "compute_objective",
    "hp_space",
    "init_git_repo",
    "neftune_hook_handle",
    "num_tokens",
    "objective",
    "prediction_loop",
    "push_in_progress",
    "tokenizer",
}
# Words that a subclass may well use, and that a later version of ours might take.
WORDS = {"run", "loss", "teacher", "data", "step", "guard", "plan", "journal", "session", "store", "window", "engine"}
KINDS = [Trainer, Seq2SeqTrainer]
ARGUMENTS = {Trainer: "TrainingArguments", Seq2SeqTrainer: "Seq2SeqTrainingArguments"}
SAVING = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
MORE = {"eval_strategy": "steps", "eval_steps": 2, "neftune_noise_alpha": None}


def own_names(kind: type, folder: Path) -> list[str]:
    """Returns the names of ours, of the class and of an instance."""
    theirs: Any = getattr(transformers, kind.__name__)
    side = Side("original", theirs, getattr(transformers, ARGUMENTS[kind]))
    original = make_trainer(folder, side, max_steps=1)
    original.train()
    known = {*dir(theirs), *vars(original)}
    ours = {*dir(kind), *vars(make_trainer(folder, side_of(kind)))}
    return sorted({name for name in ours - known - TAKEN if not name.startswith("__")} | WORDS)


def side_of(cls: Any) -> Side:
    kind = next(one for one in KINDS[::-1] if issubclass(cls, one))
    return Side("ours", cls, getattr(trainwright, ARGUMENTS[kind]))


def results_of(cls: Any, folder: Path) -> tuple[Any, Any]:
    """Trains, evaluates, saves, resumes and predicts; returns the trainer that resumed, and all numbers."""
    parts = {"eval_dataset": data.vectors(6), "compute_metrics": accuracy, **SAVING, **MORE}
    whole = make_trainer(folder, side_of(cls), **parts)
    whole.train()
    resumed = make_trainer(folder, side_of(cls), **parts)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    logs = without_clock(whole.state.log_history)
    predictions = resumed.predict(data.vectors(6)).predictions.tolist()
    return resumed, (logs, predictions, [weights(one.model) for one in (whole, resumed)])


@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_of_any_name_stays_and_changes_nothing(kind: Any, tmp_path: Path) -> None:
    wanted = results_of(kind, tmp_path / "plain")[1]
    for name in own_names(kind, tmp_path / "names"):

        def __init__(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> None:
            kind.__init__(self, *args, **kwargs)
            setattr(self, _name, {"mine": 1})

        mine = type("Mine", (kind,), {"__init__": __init__})
        trainer, found = results_of(mine, tmp_path / name)
        assert getattr(trainer, name) == {"mine": 1}, name
        assert_equal(found, wanted, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_of_any_name_is_not_called(kind: Any, tmp_path: Path) -> None:
    wanted = results_of(kind, tmp_path / "plain")[1]
    for name in own_names(kind, tmp_path / "names"):

        def method(self: Any, one: int, two: int, three: int, *, four: int) -> None:
            raise AssertionError("it is the subclass's own")

        found = results_of(type("Mine", (kind,), {name: method}), tmp_path / name)[1]
        assert_equal(found, wanted, name)


def assert_equal(found: Any, wanted: Any, name: str) -> None:
    assert found[:2] == wanted[:2], name
    for one, other in zip(found[2], wanted[2], strict=True):
        assert not differing(one, other), name


def test_a_hook_is_recognised_by_its_parameters(tmp_path: Path) -> None:
    called: list[str] = []

    class Hooks(Trainer):
        columns = ("x", "labels")

        def prepare_window(self, batches: list[Any]) -> list[Any]:
            called.append("window")
            return batches

        def step_contexts(self) -> Any:
            called.append("contexts")
            return ()

    make_trainer(tmp_path, cls=Hooks, max_steps=1).train()
    assert called == ["window", "contexts"]
