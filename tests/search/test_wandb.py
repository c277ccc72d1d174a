"""W&B sweeps, up to the client: its runs are real and offline; the service that draws the trials is played."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import ArgumentError, SearchError

from .._support.small import data, make_trainer, train
from .small import SETTINGS, make_module, searcher

pytestmark = pytest.mark.framework
RATES = [3e-3, 1e-2, 1e-3]


class Service:
    """Plays the service: keeps the sweep that is made, and gives an agent one rate after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sweeps: list[dict[str, Any]] = []
        self.runs: list[str] = []

    def sweep(self, sweep: dict[str, Any], **where: Any) -> str:
        self.sweeps.append({**sweep, **where})
        return "sweep-1"

    def agent(self, sweep_id: str, function: Callable[[], Any], count: int, **where: Any) -> None:
        import wandb

        assert sweep_id == "sweep-1"
        for rate in RATES[:count]:
            run = wandb.init(config={"learning_rate": rate}, mode="offline", dir=str(self.folder), project="p")
            self.runs.append(run.id)
            function()
            wandb.finish()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    wandb = pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    wandb.teardown()  # it reads its environment once in a process
    one = Service(tmp_path)
    monkeypatch.setattr(wandb, "sweep", one.sweep)
    monkeypatch.setattr(wandb, "agent", one.agent)
    yield one
    wandb.teardown()


def space(trial: Any) -> dict[str, Any]:
    return {"method": "random", "metric": {}, "parameters": {"learning_rate": {"values": RATES}}}


@pytest.mark.filterwarnings("default")
def test_a_sweep_trains_what_its_service_draws(service: Service, tmp_path: Path) -> None:
    trainer = searcher(tmp_path / "s")
    callbacks = list(trainer.callback_handler.callbacks)
    best = trainer.hyperparameter_search(
        space, n_trials=3, backend="wandb", project="p", name="n", direction="maximize"
    )
    (sweep,) = service.sweeps
    assert sweep["metric"] == {"goal": "maximize", "name": "eval/loss"}
    assert (sweep["name"], sweep["project"]) == ("n", "p")
    trials = json.loads((tmp_path / "s" / "search.json").read_text())["trials"]
    assert [trial["id"] for trial in trials] == service.runs
    assert [trial["params"] for trial in trials] == [{"learning_rate": rate} for rate in RATES]
    for trial in trials:
        alone = make_trainer(
            tmp_path / trial["id"], model_init=make_module, eval_dataset=data.vectors(8), **SETTINGS | trial["params"]
        )
        train(alone)
        assert alone.state.log_history[-2]["eval_loss"] == trial["values"][0]
    assert best.objective == max(trial["values"][0] for trial in trials)
    assert best.run_summary == "sweep-1"
    assert trainer.callback_handler.callbacks == callbacks
    assert trainer.args.learning_rate == 1e-2


@pytest.mark.filterwarnings("default")
def test_trials_that_fail_are_recorded_or_end_the_sweep(service: Service, tmp_path: Path) -> None:
    def never(trial: Any = None) -> Any:
        if trial is not None:
            raise ZeroDivisionError("no model today")
        return make_module()

    with pytest.raises(SearchError, match="None of 2 trials"):
        searcher(tmp_path / "a", model_init=never).hyperparameter_search(space, n_trials=2, backend="wandb")
    with pytest.raises(ZeroDivisionError, match="no model today"):
        searcher(tmp_path / "b", model_init=never).hyperparameter_search(
            space, n_trials=2, backend="wandb", failed_trials="stop"
        )
    assert len(json.loads((tmp_path / "b" / "search.json").read_text())["trials"]) == 1


def test_what_cannot_work_is_said_before_a_sweep_is_made(service: Service, tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({"parameters": {"learning_rat": {"values": [1]}}}, "Did you mean learning_rate"),
        ({"parameters": {"learning_rate": {"values": ["x"]}}}, "learning_rate='x'"),
        ({"parameters": {"seed": {"min": "a", "max": 9}}}, "seed='a'"),
        ({"method": "random"}, "must return a sweep's configuration"),
    ]
    for sweep, said in cases:
        with pytest.raises(ArgumentError, match=said):
            searcher(tmp_path).hyperparameter_search(lambda _, sweep=sweep: sweep, backend="wandb")
    with pytest.raises(ArgumentError, match="no several objectives"):
        searcher(tmp_path).hyperparameter_search(
            space, lambda metrics: [1, 2], backend="wandb", direction=["minimize", "minimize"]
        )
    assert service.sweeps == []
