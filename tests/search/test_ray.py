"""Ray Tune on a cluster that the test starts: trials in processes of their own, ASHA, population based training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import ArgumentError

from .._support.subprocesses import environment
from .small import MODEL, scale, searcher

SCRIPT = Path(__file__).with_name("on_ray.py")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


def searched(case: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), case],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=folder,
        start_new_session=True,
    )
    try:
        out = process.communicate(timeout=350)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out[-6000:]
    return json.loads((folder / "told.json").read_text()), json.loads((folder / "s" / "search.json").read_text())[
        "trials"
    ]


@pytest.mark.process
@pytest.mark.parametrize("model", ["module", "minilm"])  # one case stands for searches with a pretrained model
def test_trials_run_beside_each_other_and_best_one_equals_run_by_hand(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODEL, model)
    told, trials = searched("plain", tmp_path)
    assert sorted(trial["state"] for trial in trials) == ["failed", "finished", "finished", "finished"]
    assert [trial["params"]["learning_rate"] for trial in trials if trial["state"] == "failed"] == [1e-3 * scale()]
    finished = [trial for trial in trials if trial["state"] == "finished"]
    assert told["best"][1] == min(trial["values"][0] for trial in finished) == told["loaded"]
    assert told["summary"] == 4
    assert told["same"] is True
    assert told["untouched"] is True
    assert all([step for step, _ in trial["curve"]] == [2, 4, 6, 8] for trial in finished)
    assert all((tmp_path / "s" / f"run-{trial['id']}" / "checkpoint-8").is_dir() for trial in finished)


@pytest.mark.process
def test_a_scheduler_ends_trials_that_do_worse(tmp_path: Path) -> None:
    told, trials = searched("asha", tmp_path)
    states = [trial["state"] for trial in trials]
    assert "pruned" in states
    assert "finished" in states
    finished = [trial for trial in trials if trial["state"] == "finished"]
    assert told["best"][0] in [trial["id"] for trial in finished]


@pytest.mark.process
def test_a_population_exchanges_checkpoints_of_ours(tmp_path: Path) -> None:
    told, trials = searched("pbt", tmp_path)
    assert told["perturbed"] > 0
    assert [trial["state"] for trial in trials] == ["finished", "finished"]
    first, second = told["rates"]  # the one that began at 1e-5, and the one that began at 0.03
    assert second == pytest.approx([0.03 * scale() * (8 - step) / 8 for step in range(8)])
    assert first[:6] == second[:6]  # it took over weights, optimizer, position and history of the better one,
    own = first[6] * 8 / 2  # and goes on there at a rate of its own
    assert any(own == pytest.approx(rate * scale()) for rate in (1e-3, 1e-2))
    assert first[7] == pytest.approx(own / 8)


def test_what_ray_cannot_do_is_said_before_a_cluster_is_asked_for(tmp_path: Path) -> None:
    import ray.tune
    from ray.tune.schedulers import ASHAScheduler

    def rates(trial: Any) -> dict[str, Any]:
        return {"learning_rate": ray.tune.loguniform(1e-4, 1e-2)}

    cases: list[tuple[dict[str, Any], str]] = [
        ({"hp_space": lambda _: {"learning_rat": ray.tune.uniform(0, 1)}}, "Did you mean learning_rate"),
        ({"hp_space": lambda _: {"bf16": ray.tune.choice([True, "yes"])}}, "bf16='yes' is of type str"),
        ({"hp_space": lambda _: {"learning_rate": ray.tune.grid_search([0.1, "x"])}}, "learning_rate='x'"),
        ({"direction": ["minimize", "minimize"], "compute_objective": lambda m: [1, 2]}, "has no several objectives"),
        ({"schedular": None}, "Did you mean scheduler"),
    ]
    for settings, said in cases:
        with pytest.raises(ArgumentError, match=said):
            searcher(tmp_path).hyperparameter_search(**{"hp_space": rates, "backend": "ray", **settings})
    with pytest.raises(ArgumentError, match="eval_strategy='no'"):
        searcher(tmp_path, eval_strategy="no").hyperparameter_search(rates, backend="ray", scheduler=ASHAScheduler())
    assert not ray.is_initialized()
