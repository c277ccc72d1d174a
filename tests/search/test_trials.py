"""What a trial is: a run of its own from the arguments as given, whatever became of the trials before it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch

from trainwright import EarlyStoppingCallback, Trainer, TrainerCallback, default_compute_objective
from trainwright.errors import SearchError

from .._support.small import REFERENCE, data, differing, make_trainer, module, train, weights
from .small import SAVES, SETTINGS, drawn, make_module, parts_of, rates, saved, searcher, space, tree

pytestmark = pytest.mark.costly

optuna.logging.set_verbosity(optuna.logging.ERROR)


def recorded(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "search.json").read_text())["trials"]  # type: ignore[no-any-return]


def test_every_trial_equals_run_by_hand_with_its_parameters_bit_for_bit(tmp_path: Path) -> None:
    searcher(tmp_path / "search", **SAVES).hyperparameter_search(space, n_trials=3, sampler=drawn())
    for trial in recorded(tmp_path / "search"):
        alone = make_trainer(
            tmp_path / trial["id"], model_init=make_module, eval_dataset=data.vectors(8), **SETTINGS | trial["params"]
        )
        train(alone)
        ours = saved(tmp_path / "search" / f"run-{trial['id']}" / "checkpoint-6")
        assert differing(dict(sorted(weights(alone.model).items())), dict(sorted(ours.items()))) == {}
        assert alone.state.log_history[-2]["eval_loss"] == trial["values"][0]


@pytest.mark.framework
def test_a_search_finds_what_transformers_finds(tmp_path: Path) -> None:
    def wide(trial: Any) -> dict[str, Any]:
        size = trial.suggest_categorical("per_device_train_batch_size", [2, 4])
        return {
            **rates(trial),
            "per_device_train_batch_size": size,
            "warmup_steps": trial.suggest_int("warmup_steps", 0, 3),
        }

    found = []
    for side in (None, REFERENCE):
        trainer = searcher(tmp_path / str(side), *([side] if side else []), dropout=0.0, **SAVES)
        best = trainer.hyperparameter_search(wide, n_trials=4, direction="minimize", sampler=drawn())
        found.append((best, tree(tmp_path / str(side))))
    (ours, ours_in), (theirs, theirs_in) = found
    assert tuple(ours) == tuple(theirs)
    assert set(theirs_in) <= set(ours_in)


def test_what_is_found_in_the_data_is_said_in_one_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    searcher(tmp_path, log_level="warning", **SAVES).hyperparameter_search(space, n_trials=2, sampler=drawn())
    (said,) = (one.getMessage() for one in caplog.records if one.name.startswith("trainwright"))
    assert said.startswith("held_out: 7 of 8 evaluation rows")


def test_the_default_objective_is_that_of_transformers() -> None:
    from transformers.trainer_utils import default_compute_objective as theirs

    speeds = {"eval_runtime": 1.0, "eval_samples_per_second": 2.0, "epoch": 3.0}
    for metrics in ({"eval_loss": 0.5, **speeds}, {"eval_loss": 0.5, "eval_f1": 0.25, "eval_accuracy": 0.5, **speeds}):
        assert default_compute_objective(metrics) == theirs(metrics)
    assert default_compute_objective({"eval_loss": 0.5, "eval_mem_cpu_alloc_delta": 4096.0, **speeds}) == 0.5


def test_a_trial_knows_nothing_of_the_arguments_of_the_one_before(tmp_path: Path) -> None:
    seen = []

    class Notes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(
                (args.weight_decay, args.label_smoothing_factor, kwargs["optimizer"].param_groups[0]["weight_decay"])
            )

    def conditional(trial: Any) -> dict[str, Any]:
        return {"weight_decay": 0.5, "label_smoothing_factor": 0.1} if trial.number == 0 else {"learning_rate": 1e-3}

    trainer = searcher(tmp_path, callbacks=[Notes])
    before = dict(vars(trainer.args))
    given = trainer.args
    trainer.hyperparameter_search(conditional, n_trials=2)
    assert seen == [(0.5, 0.1, 0.5), (0.0, 0.0, 0.0)]
    assert trainer.args is given
    assert vars(trainer.args) == before
    assert trainer.callback_handler.args is given
    assert trainer.label_smoother is None


def test_label_smoothing_takes_effect_in_its_trial_alone(tmp_path: Path) -> None:
    losses = []
    for factors in ([0.0, 0.5], [0.5, 0.0]):
        folder = tmp_path / str(factors[0])
        searcher(folder).hyperparameter_search(
            lambda trial, factors=factors: {"label_smoothing_factor": factors[trial.number]}, n_trials=2
        )
        losses.append([trial["values"][0] for trial in recorded(folder)])
    assert losses[0] == losses[1][::-1]
    assert losses[0][0] != losses[0][1]


class Remembers(torch.nn.Module):
    """Returns a memory, and keeps what it was given of the one before; its config has a cache to switch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)
        self.config = SimpleNamespace(use_cache=None)
        self.given: list[bool] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mems: Any = None) -> tuple[Any, ...]:
        if self.training:
            self.given.append(mems is not None)
        logits = self.layer(x)
        return torch.nn.functional.cross_entropy(logits, labels.clamp(max=1)), logits, logits.detach()  # type: ignore[union-attr]


def test_fields_of_a_trial_take_effect_in_that_trial_alone(tmp_path: Path) -> None:
    seen: list[tuple[Any, bool]] = []

    class Notes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
            seen.append((model.config.use_cache, any(model.given)))

    def second_differs(trial: Any) -> dict[str, Any]:
        return {"profile": "2-3", "past_index": 2, "use_cache": True} if trial.number == 1 else {"learning_rate": 1e-3}

    trainer = searcher(tmp_path, model_init=Remembers, callbacks=[Notes])
    callbacks = [type(one) for one in trainer.callback_handler.callbacks]
    trainer.hyperparameter_search(second_differs, n_trials=3)
    assert [trial["state"] for trial in recorded(tmp_path)] == 3 * ["finished"]
    assert seen == [(False, False), (True, True), (False, False)]
    assert [path.parent.parent.name for path in tmp_path.rglob("profile/*.json.gz")] == ["run-1"]
    assert [type(one) for one in trainer.callback_handler.callbacks] == callbacks


def test_the_patience_of_early_stopping_begins_anew_in_every_trial(tmp_path: Path) -> None:
    stopper = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)
    trainer = searcher(
        tmp_path,
        callbacks=[stopper],
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        max_steps=20,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.hyperparameter_search(space, n_trials=2)
    assert [[step for step, _ in trial["curve"]] for trial in recorded(tmp_path)] == 2 * [[2, 4, 6]]
    assert stopper.early_stopping_patience_counter == 0


def test_the_record_of_a_run_names_its_trial(tmp_path: Path) -> None:
    trainer = searcher(tmp_path, **SAVES)
    best = trainer.hyperparameter_search(space, n_trials=2, hp_name=lambda trial: f"try {trial.number}")
    assert {"try 0", "try 1", "search.json"} <= set(tree(tmp_path))
    state = json.loads((tmp_path / f"try {best.run_id}" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["is_hyper_param_search"] is True
    assert state["trial_name"] == f"try {best.run_id}"
    assert state["trial_params"] == best.hyperparameters


def test_model_init_sees_the_trial_and_may_draw_too(tmp_path: Path) -> None:
    def make(trial: Any) -> torch.nn.Module:
        return module(0.0 if trial is None else trial.suggest_float("dropout", 0.1, 0.5))

    best = searcher(tmp_path, model_init=make).hyperparameter_search(rates, n_trials=2)
    assert set(best.hyperparameters) == {"learning_rate", "dropout"}
    assert recorded(tmp_path)[0]["params"].keys() == {"learning_rate", "dropout"}


def test_without_an_evaluation_in_training_there_is_one_at_its_end(tmp_path: Path) -> None:
    trainer = searcher(tmp_path, eval_strategy="no")
    trainer.hyperparameter_search(space, n_trials=2)
    assert [[step for step, _ in trial["curve"]] for trial in recorded(tmp_path)] == 2 * [[6]]


def test_after_a_search_the_trainer_is_as_it_was_made(tmp_path: Path) -> None:
    trainer = searcher(tmp_path / "a", **SAVES)
    fresh = searcher(tmp_path / "b")
    trainer.hyperparameter_search(space, n_trials=2)
    assert (trainer.hp_search_backend, trainer.hp_name) == (None, None)
    train(trainer)
    train(fresh)
    assert differing(weights(trainer.model), weights(fresh.model)) == {}
    assert (tmp_path / "a" / "checkpoint-6").is_dir()


def test_the_best_trial_is_shown_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = searcher(tmp_path, disable_tqdm=False, log_level="warning")
    best = trainer.hyperparameter_search(space, n_trials=4, sampler=drawn(), load_best_trial=True)
    shown = capsys.readouterr().out
    assert "best trial\n" in shown
    assert f"  learning_rate         {best.hyperparameters['learning_rate']:.6g}\n" in shown
    assert trainer.evaluate()["eval_loss"] == best.objective == min(t["values"][0] for t in recorded(tmp_path))
    kept = [trial["id"] for trial in recorded(tmp_path) if (tmp_path / f"run-{trial['id']}" / "model").is_dir()]
    assert kept == [best.run_id]


class Fails(Trainer):
    """Fails in a way of each trial's own."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        number = -1 if self._trial is None else self._trial.number
        if self.state.global_step == 3 and number == 0:
            raise ZeroDivisionError("a step went wrong")
        if self.state.global_step == 3 and number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")
        loss = super().training_step(*args, **kwargs)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        return (
            {**metrics, "eval_loss": float("nan")} if self._trial is not None and self._trial.number == 2 else metrics
        )


def test_trials_that_fail_are_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    best = searcher(tmp_path / "all", cls=Fails, **SAVES).hyperparameter_search(space, n_trials=4, sampler=drawn())
    assert [trial["state"] for trial in recorded(tmp_path / "all")] == ["failed", "failed", "failed", "finished"]
    errors = [trial["error"] for trial in recorded(tmp_path / "all")]
    assert errors[0] == "ZeroDivisionError: a step went wrong"
    assert "out of memory" in errors[1]
    assert errors[2] == "the objective is nan"
    assert best.run_id == "3"
    train(
        make_trainer(
            alone, model_init=make_module, eval_dataset=data.vectors(8), **SETTINGS | SAVES | best.hyperparameters
        )
    )
    written = [saved(folder / "checkpoint-6") for folder in (alone, tmp_path / "all" / "run-3")]
    assert differing(*written) == {}


class BadStep(Trainer):
    """Step 4 of the first trial has a loss that is not finite."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        is_bad = self._trial is not None and self._trial.number == 0 and self.state.global_step == 3
        return loss * torch.nan if is_bad and not isinstance(loss, tuple) else loss


def test_a_trial_that_a_guard_ends_has_failed_for_its_reason(tmp_path: Path) -> None:
    trainer = searcher(tmp_path, cls=BadStep, on_nonfinite="stop", incidents=False)
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=drawn())
    assert [trial["state"] for trial in recorded(tmp_path)] == ["failed", "finished"]
    assert recorded(tmp_path)[0]["error"].startswith("NonFiniteError: Step 4: loss or gradient is not finite")
    assert best.run_id == "1"


def test_a_failing_trial_ends_the_study_if_that_is_asked_for(tmp_path: Path) -> None:
    trainer = searcher(tmp_path, cls=Fails)
    with pytest.raises(ZeroDivisionError, match="a step went wrong"):
        trainer.hyperparameter_search(space, n_trials=4, failed_trials="stop")
    assert [trial["state"] for trial in recorded(tmp_path)] == ["failed"]
    assert trainer.args.learning_rate == 1e-2
    train(trainer)  # it is as it was made


def test_a_study_in_which_all_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"None of 2 trials(.|\n)*trial 0: ZeroDivisionError: a step went wrong"):
        searcher(tmp_path, cls=Fails).hyperparameter_search(space, n_trials=2)


class Third(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def prune(self, study: optuna.Study, trial: Any) -> bool:
        return trial.number == 1 and trial.last_step == 4


@pytest.mark.parametrize(
    ("setting", "steps"), [({}, [3]), ({"pruned_checkpoints": "save"}, [3, 4]), ({"pruned_checkpoints": "delete"}, [])]
)
@pytest.mark.one_in(3)
def test_a_pruned_trial_ends_cleanly_with_its_checkpoints_by_setting(
    setting: dict[str, str], steps: list[int], tmp_path: Path
) -> None:
    ends = []

    class Notes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(state.global_step)

        def on_exception(self, *args: Any, **kwargs: Any) -> None:
            ends.append(-1)

    trainer = searcher(tmp_path, callbacks=[Notes], save_strategy="steps", save_steps=3)
    trainer.hyperparameter_search(space, n_trials=3, pruner=Third(), **setting)
    assert ends == [6, 4, 6]
    assert [trial["state"] for trial in recorded(tmp_path)] == ["finished", "pruned", "finished"]
    assert [step for step, _ in recorded(tmp_path)[1]["curve"]] == [2, 4]
    found = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "run-1").glob("checkpoint-*"))
    assert found == steps


def test_a_pruned_trial_can_be_gone_on_with(tmp_path: Path) -> None:
    trainer = searcher(tmp_path / "s")
    trainer.hyperparameter_search(space, n_trials=3, pruner=Third(), sampler=drawn(), pruned_checkpoints="save")
    params = recorded(tmp_path / "s")[1]["params"]
    whole = make_trainer(tmp_path / "w", model_init=make_module, eval_dataset=data.vectors(8), **SETTINGS | params)
    rest = make_trainer(tmp_path / "r", model_init=make_module, eval_dataset=data.vectors(8), **SETTINGS | params)
    train(whole)
    train(rest, resume_from_checkpoint=str(tmp_path / "s" / "run-1" / "checkpoint-4"))
    assert differing(weights(rest.model), weights(whole.model)) == {}


def test_several_objectives_give_the_trials_that_none_is_better_than(tmp_path: Path) -> None:
    def both(metrics: dict[str, float]) -> list[float]:
        return [metrics["eval_loss"], rate["now"]]

    rate: dict[str, float] = {}

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rate["now"] = args.learning_rate

    trainer = searcher(tmp_path, callbacks=[Notes])
    best = trainer.hyperparameter_search(
        rates, both, n_trials=4, direction=["minimize", "maximize"], sampler=drawn(), load_best_trial=True
    )
    assert isinstance(best, list)
    assert all(len(one.objective) == 2 for one in best)
    points = [tuple(trial["values"]) for trial in recorded(tmp_path)]
    front = [p for p in points if not any(q[0] <= p[0] and q[1] >= p[1] and q != p for q in points)]
    assert sorted(tuple(one.objective) for one in best) == sorted(front)
    assert trainer.evaluate()["eval_loss"] == best[0].objective[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pretrained_model_is_searched_with_a_real_pruner_and_two_objectives(tmp_path: Path) -> None:
    def rates_of_minilm(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-7, 1e-3, log=True)}

    trainer = searcher(tmp_path / "pruned", **parts_of("minilm"))
    best = trainer.hyperparameter_search(
        rates_of_minilm, n_trials=6, pruner=optuna.pruners.MedianPruner(n_startup_trials=2), sampler=drawn()
    )
    states = [trial["state"] for trial in recorded(tmp_path / "pruned")]
    assert {"finished", "pruned"} == set(states)
    alone = make_trainer(tmp_path / "alone", **parts_of("minilm"), **SETTINGS | best.hyperparameters)
    train(alone)
    assert alone.state.log_history[-2]["eval_loss"] == best.objective

    trainer = searcher(tmp_path / "both", **parts_of("minilm"))
    front = trainer.hyperparameter_search(
        rates_of_minilm,
        lambda metrics: [metrics["eval_loss"], trainer.state.trial_params["learning_rate"]],
        n_trials=4,
        direction=["minimize", "minimize"],
        sampler=drawn(),
    )
    points = [tuple(trial["values"]) for trial in recorded(tmp_path / "both")]
    assert len(points) == 4
    assert sorted(tuple(one.objective) for one in front) == sorted(
        p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
    )
