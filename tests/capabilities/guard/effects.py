"""Checks of the fields that say what happens with a bad step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright.errors import CheckpointNotFoundError, NonFiniteError, SpikeError

from ...effects.bench import Bench, samples, weights
from ...effects.table import shows


def poisoned(*indices: int) -> list[dict[str, Any]]:
    rows = samples()
    for index in indices:
        rows[index]["x"] = torch.full((4,), torch.nan)
    return rows


@shows("on_nonfinite")
def a_step_that_is_not_finite_is_skipped_by_default(bench: Bench) -> None:
    data = poisoned(5)

    def are_finite(**settings: Any) -> bool:
        trainer = bench.train(train_dataset=data, **settings)
        return all(bool(value.isfinite().all()) for value in weights(trainer.model).values())

    assert are_finite()
    assert not are_finite(on_nonfinite="warn")
    assert not are_finite(on_nonfinite="ignore")
    with pytest.raises(NonFiniteError, match="training stops before the update"):
        bench.train(train_dataset=data, on_nonfinite="stop")
    assert not bench.changes_weights({"on_nonfinite": "ignore"})


@shows("incidents")
def a_bundle_of_a_bad_step_is_written(bench: Bench) -> None:
    def written(**settings: Any) -> list[str]:
        trainer = bench.train(train_dataset=poisoned(5), **settings)
        return [path.name for path in Path(trainer.args.output_dir).glob("incidents/*")]

    (name,) = written()
    assert name.endswith("-nonfinite")
    assert written(incidents=False) == []
    assert not bench.changes_weights({"incidents": False})


@shows("max_skipped_steps")
def too_many_skipped_steps_end_training(bench: Bench) -> None:
    data = poisoned(*range(12))
    bench.train(train_dataset=data, max_skipped_steps=0)
    with pytest.raises(NonFiniteError, match="2 steps in a row were skipped"):
        bench.train(train_dataset=data, max_skipped_steps=2)


@shows("max_skipped_share")
def too_large_a_share_of_skipped_steps_ends_training(bench: Bench) -> None:
    settings = {"max_steps": 12, "train_dataset": poisoned(0, 1, 2, 3), "max_skipped_steps": 0}
    bench.train(**settings, max_skipped_share=0.9)
    with pytest.raises(NonFiniteError, match="of the last 100 steps were skipped"):
        bench.train(**settings, max_skipped_share=0.01)


def spiky() -> list[dict[str, Any]]:
    rows = samples()
    rows[9]["x"] = rows[9]["x"] * 1e4
    return rows


def skipped(bench: Bench, **settings: Any) -> int:
    shared = {"train_sampling_strategy": "sequential", "spike_warmup": 3, "logging_steps": 6}
    trainer = bench.train(train_dataset=spiky(), **{**shared, "on_spike": "skip", **settings})
    return int(trainer.state.log_history[0].get("guard/skipped_steps", 0))


@shows("on_spike")
def a_spike_is_skipped_where_that_is_asked_for(bench: Bench) -> None:
    assert skipped(bench, on_spike="skip") == 1
    assert skipped(bench, on_spike="off") == 0
    with pytest.raises(SpikeError, match="robust deviations"):
        skipped(bench, on_spike="stop")


@shows("spike_threshold")
def a_higher_threshold_lets_more_through(bench: Bench) -> None:
    assert skipped(bench) == 1
    assert skipped(bench, spike_threshold=1e9) == 0


@shows("spike_warmup")
def no_step_is_a_spike_before_so_many(bench: Bench) -> None:
    assert skipped(bench, spike_warmup=4) == 1
    assert skipped(bench, spike_warmup=5) == 0


@shows("spike_window")
def a_spike_is_compared_with_so_many_steps(bench: Bench) -> None:
    """A window of one step knows no spread, so that each rise is a spike."""
    assert skipped(bench, spike_warmup=1, spike_window=1) > skipped(bench, spike_window=12)


def rolled_back(bench: Bench, *bad: int, **settings: Any) -> tuple[list[str], int]:
    """What is said of the incidents, and how many steps were skipped; one sample is a step."""
    texts: list[str] = []

    class Hears(trainwright.TrainerCallback):
        def on_incident(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            texts.append(kwargs["incident"].text)

    one_by_one = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1, "logging_steps": 6}
    shared = {**one_by_one, "max_steps": 12, "on_nonfinite": "rollback", "rollback_every": 4}
    trainer = bench.train(train_dataset=poisoned(*bad), callbacks=[Hears()], **{**shared, **settings})
    return texts, int(trainer.state.log_history[1].get("guard/skipped_steps", 0))


@shows("rollback_every")
def a_snapshot_is_taken_every_so_many_steps(bench: Bench) -> None:
    for every, step in {4: 4, 3: 6}.items():
        ((text,), _) = rolled_back(bench, 6, rollback_every=every)
        assert f"are back at step {step};" in text
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .* yet"):
        rolled_back(bench, 6, rollback_every=0)


@shows("max_rollbacks")
def too_many_rollbacks_to_one_snapshot_end_training(bench: Bench) -> None:
    assert len(rolled_back(bench, 5, 6, max_rollbacks=2)[0]) == 2
    assert len(rolled_back(bench, 5, 6, 9, max_rollbacks=2)[0]) == 3
    with pytest.raises(NonFiniteError, match="after 1 rollbacks to step 4"):
        rolled_back(bench, 5, 6, max_rollbacks=1)


@shows("rollback_skip_samples")
def samples_after_a_rollback_are_left_out(bench: Bench) -> None:
    assert rolled_back(bench, 6)[1] == 0
    assert rolled_back(bench, 6, 7, 8, rollback_skip_samples=3)[1] == 3
