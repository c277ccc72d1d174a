"""The record of a run: there and back, in the form that transformers reads and writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from trainwright import EarlyStoppingCallback, TrainerControl, TrainerState

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
LOGS = st.lists(st.dictionaries(st.text(min_size=1), NUMBERS | st.integers(), max_size=3), max_size=4)

FILLED: dict[str, Any] = {
    "epoch": 1.5, "global_step": 12, "max_steps": 40, "logging_steps": 5, "eval_steps": 10, "save_steps": 20,
    "train_batch_size": 8, "num_train_epochs": 3, "num_input_tokens_seen": 999, "total_flos": 1e15,
    "log_history": [{"loss": 0.5, "step": 5}], "best_metric": 0.9, "best_global_step": 10,
    "best_model_checkpoint": "run/checkpoint-10", "is_local_process_zero": False, "is_world_process_zero": False,
    "is_hyper_param_search": True, "trial_name": "t", "trial_params": {"learning_rate": 1e-3},
    "stateful_callbacks": {"TrainerControl": {"args": {"should_log": True}, "attributes": {}}},
}  # fmt: skip


def test_every_field_is_tried() -> None:
    assert FILLED.keys() == {field.name for field in dataclasses.fields(TrainerState)}


@pytest.mark.parametrize("values", [{}, FILLED], ids=["fresh", "filled"])
def test_there_and_back(values: dict[str, Any], tmp_path: Path) -> None:
    state = TrainerState(**values)
    state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(str(tmp_path / "state.json")) == state


@given(history=LOGS, epoch=NUMBERS)
def test_any_history(history: list[dict[str, Any]], epoch: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "state.json"
    TrainerState(log_history=history, epoch=epoch).save_to_json(path)
    read = TrainerState.load_from_json(path)
    assert (read.log_history, read.epoch) == (history, epoch)


@pytest.mark.parametrize("values", [{}, FILLED], ids=["fresh", "filled"])
def test_transformers_reads_ours_and_ours_reads_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = TrainerState(**values), transformers.TrainerState(**values)
    ours.save_to_json(tmp_path / "ours.json")
    theirs.save_to_json(str(tmp_path / "theirs.json"))
    assert json.loads((tmp_path / "ours.json").read_text()) == json.loads((tmp_path / "theirs.json").read_text())
    read = transformers.TrainerState.load_from_json(str(tmp_path / "ours.json"))
    assert dataclasses.asdict(read) == dataclasses.asdict(theirs)
    assert TrainerState.load_from_json(tmp_path / "theirs.json") == ours


def test_a_field_of_a_later_version_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"global_step": 3, "moon_phase": "full"}')
    assert TrainerState.load_from_json(tmp_path / "state.json") == TrainerState(global_step=3)


STEPS = [(10, 10), (0.25, 10), (0.24, 10), (0.001, 1), (1, 1), (0.999, 40), (7.0, 7.0)]


@pytest.mark.parametrize(("interval", "expected"), STEPS)
@pytest.mark.parametrize("kind", ["logging", "eval", "save"])
def test_an_interval_below_one_is_a_share_of_all_steps(kind: str, interval: float, expected: float) -> None:
    args = SimpleNamespace(**{"logging_steps": 500, "eval_steps": None, "save_steps": 500, f"{kind}_steps": interval})
    ours, theirs = TrainerState(), transformers.TrainerState()
    ours.compute_steps(args, 40)
    theirs.compute_steps(args, 40)
    assert getattr(ours, f"{kind}_steps") == expected
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)


# -- what travels with it --------------------------------------------------------------------------------------------


def test_states_of_callbacks_are_collected_by_class() -> None:
    one, two = EarlyStoppingCallback(3, 0.5), EarlyStoppingCallback(4)
    one.early_stopping_patience_counter = 2
    states = TrainerState(stateful_callbacks=[one, TrainerControl(should_save=True), two]).stateful_callbacks
    assert states["TrainerControl"]["args"]["should_save"] is True
    assert [s["args"]["early_stopping_patience"] for s in states["EarlyStoppingCallback"]] == [3, 4]
    again = EarlyStoppingCallback.from_state(states["EarlyStoppingCallback"][0])
    assert vars(again) == vars(one)


def test_the_same_states_as_transformers_collects() -> None:
    ours = TrainerState(stateful_callbacks=[EarlyStoppingCallback(3, 0.5), TrainerControl()]).stateful_callbacks
    theirs = transformers.TrainerState(
        stateful_callbacks=[transformers.EarlyStoppingCallback(3, 0.5), transformers.TrainerControl()]
    ).stateful_callbacks
    assert ours == theirs


def test_a_callback_without_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state\(\)"):
        TrainerState(stateful_callbacks=[object()])
