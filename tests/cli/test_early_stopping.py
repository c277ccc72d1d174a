"""Early stopping from the file: what it needs is set or asked for before step 1, and the plan says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .commands import SMALL, call, done, small

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]

BARE = "\n".join(line for line in SMALL.splitlines() if not line.strip().startswith(("eval_strategy", "eval_steps")))


def test_a_run_without_improvement_stops_and_is_finished(tmp_path: Path) -> None:
    # A rate of almost nothing leaves the loss as it is, so that no evaluation is better by a tenth.
    path = small(
        tmp_path, SMALL.replace("max_steps: 8", "max_steps: 40").replace("learning_rate: 1e-2", "learning_rate: 1e-8")
    )
    words = ("--early_stopping_patience", "2", "--early_stopping_threshold", "0.1")
    shown = " ".join(done("train", str(path), *words).split())
    assert "stops after 2 evaluations without a better metric (set for it: save_strategy=steps" in shown
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 12
    assert state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 2}
    run = str(tmp_path / "run")
    cure = f"trainwright resume {run} --set training.early_stopping_patience=N (more than it had, or null)"
    told = " ".join(done("resume", run).split())
    assert "nothing was written" in told
    assert cure in told
    refused = call("extend", run, "--steps", "4")
    assert refused.exit_code == 2
    assert cure in " ".join(refused.output.split())
    done("resume", run, "--set", "training.early_stopping_patience=3")
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 16


def test_what_follows_is_set_and_shown_in_the_plan(tmp_path: Path) -> None:
    shown = " ".join(done("train", str(small(tmp_path, BARE)), "--early_stopping_patience", "3", "--dry-run").split())
    made = "eval_strategy=steps, eval_steps=4, save_strategy=steps, load_best_model_at_end=True"
    assert (
        f"stops after 3 evaluations without a better metric (set for it: {made}, metric_for_best_model=loss)" in shown
    )


def test_a_resume_reads_it_from_the_directory_of_the_run(tmp_path: Path) -> None:
    done("train", str(small(tmp_path)), "--early_stopping_patience", "3")
    assert "early_stopping_patience: 3" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert "stops" in done("resume", str(tmp_path / "run"), "--set", "training.max_steps=12")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--early_stopping_patience", "0"), "early_stopping_patience: 0 is not a whole number of at least 1"),
        (("--early_stopping_threshold", "0.1"), "early_stopping_threshold has no effect without early_stopping_pat"),
        (("--early_stopping_patience", "2", "--eval_strategy", "no"), "counts evaluations, and there are none"),
        (("--early_stopping_patience", "2", "--early_stopping_threshold", "x"), "'x' is not a number of at least 0"),
        (("--patience", "2"), "Did you mean training.early_stopping_patience?"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_read(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = call("train", str(small(tmp_path)), *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()
