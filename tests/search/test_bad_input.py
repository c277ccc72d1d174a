"""What cannot work is said before the first trial, with what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.errors import ArgumentError, DataError, MissingModelError, MissingPackageError, SearchSpaceError
from trainwright.search import base

from .._support.small import data, make_trainer, module
from .small import SETTINGS, make_module, searcher, space

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": (
        {"hp_space": lambda t: {"learning_rat": 1e-3}},
        "learning_rat is not an argument. Did you mean learning_rate",
    ),
    "text for a number": (
        {"hp_space": lambda t: {"learning_rate": "fast"}},
        "learning_rate='fast' is of type str, and learning_rate takes float",
    ),
    "a number for a switch": ({"hp_space": lambda t: {"bf16": 3}}, "bf16=3 is of type int, and bf16 takes bool"),
    "a switch for a number": ({"hp_space": lambda t: {"seed": True}}, "seed=True is of type bool, and seed takes int"),
    "one wrong choice": (
        {"hp_space": lambda t: {"weight_decay": t.suggest_categorical("weight_decay", [0.1, 0.2, "none"])}},
        "weight_decay='none' is of type str",
    ),
    "no numbers of trials": ({"n_trials": 0}, "n_trials=0 is not a number of trials"),
    "no dict": ({"hp_space": lambda t: [1e-3]}, "hp_space returned list; it must return a dict"),
    "no function": ({"hp_space": {"learning_rate": 1e-3}}, "cannot be called; pass a function"),
    "an unknown direction": ({"direction": "min"}, "use 'minimize' or 'maximize'"),
    "two directions and one objective": ({"direction": ["minimize", "maximize"]}, "default objective is one number"),
    "an unknown keyword": ({"sampelr": None}, "backend='optuna' does not know. Did you mean sampler"),
    "an unknown way to fail": ({"failed_trials": "ignore"}, "Allowed: 'continue', 'stop'"),
    "threads": ({"n_jobs": 2}, "trials in threads would share one trainer"),
    "nothing to resume from": ({"resume_search": True}, "resume_search=True needs a storage"),
    "an unknown backend": ({"backend": "hyperopt"}, "'hyperopt' is not a backend of a search"),
    "a service that is gone": ({"backend": "sigopt"}, "SigOpt's service was shut down"),
}


def test_fields_that_are_settled_are_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read when a trainer is made, or of the arguments of the search alone; transformers trains with them too."""
    settled = {"output_dir": "elsewhere", "hub_revision": 3, "do_train": None, "log_on_each_node": False}
    trainer = searcher(tmp_path, log_level="warning")
    best = trainer.hyperparameter_search(lambda trial: settled | space(trial), backend="optuna", n_trials=2)
    assert best.hyperparameters is not None
    said = [record.getMessage() for record in caplog.records if "cannot differ" in record.getMessage()]
    assert [message.split(" cannot")[0] for message in said] == [", ".join(settled)]
    assert trainer.args.output_dir != "elsewhere"


@pytest.mark.parametrize("case", BAD)
def test_it_is_refused_before_the_first_trial(case: str, tmp_path: Path) -> None:
    settings, said = BAD[case]
    trainer = searcher(tmp_path)
    model = trainer.model
    with pytest.raises(ArgumentError, match=said):
        trainer.hyperparameter_search(**{"hp_space": space, "n_trials": 2, "backend": "optuna", **settings})
    assert not list(tmp_path.glob("*"))
    assert trainer.model is model
    assert trainer.hp_search_backend is None


def test_a_trainer_with_one_model_cannot_search(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=module(), eval_dataset=data.vectors(8))
    with pytest.raises(MissingModelError, match="Pass model_init"):
        trainer.hyperparameter_search(space)


def test_without_an_evaluation_set_trials_cannot_be_judged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model_init=make_module)
    with pytest.raises(DataError, match="there is no eval_dataset"):
        trainer.hyperparameter_search(space)


def test_an_optimizer_of_one_model_serves_no_other(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="optimizer_cls_and_kwargs"):
        searcher(tmp_path, optimizers=(torch.optim.SGD(module().parameters(), lr=0.1), None))


def test_objective_that_is_not_as_many_numbers_as_directions_ends_the_study(tmp_path: Path) -> None:
    trainer = searcher(tmp_path)
    with pytest.raises(SearchSpaceError, match="direction asks for 1 number"):
        trainer.hyperparameter_search(space, lambda metrics: [1.0, 2.0], n_trials=3)
    assert trainer.args.max_steps == SETTINGS["max_steps"]


def test_values_out_of_range_fail_their_trial_alone(tmp_path: Path) -> None:
    trainer = searcher(tmp_path)
    best = trainer.hyperparameter_search(
        lambda trial: {"gradient_accumulation_steps": trial.number}, n_trials=2, failed_trials="continue"
    )
    assert best.run_id == "1"


def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: ("no_such_package", *row[1:]) for name, row in base.BACKENDS.items()}
    monkeypatch.setattr(base, "BACKENDS", rows)
    with pytest.raises(MissingPackageError, match="pip install optuna, pip install 'ray"):
        searcher(tmp_path).hyperparameter_search(space)
    with pytest.raises(MissingPackageError, match="pip install wandb"):
        searcher(tmp_path).hyperparameter_search(space, backend="wandb")
