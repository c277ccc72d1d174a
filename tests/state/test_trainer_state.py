"""The record of a run: there and back, in the form that transformers reads and writes."""

from __future__ import annotations

import copy
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
    "epoch": 1.5,
    "global_step": 12,
    "max_steps": 40,
    "logging_steps": 5,
    "eval_steps": 10,
    "save_steps": 20,
    "train_batch_size": 8,
    "num_train_epochs": 3,
    "num_input_tokens_seen": 999,
    "total_flos": 1e15,
    "log_history": [{"loss": 0.5, "step": 5}],
    "best_metric": 0.9,
    "best_global_step": 10,
    "best_model_checkpoint": "run/checkpoint-10",
    "is_local_process_zero": False,
    "is_world_process_zero": False,
    "is_hyper_param_search": True,
    "trial_name": "t",
    "trial_params": {"learning_rate": 1e-3},
    "stateful_callbacks": {"TrainerControl": {"args": {"should_log": True}, "attributes": {}}},
}


def test_every_field_is_tried() -> None:
    assert FILLED.keys() == {field.name for field in dataclasses.fields(TrainerState)}


@pytest.mark.parametrize("values", [{}, FILLED], ids=["fresh", "filled"])
def test_there_and_back(values: dict[str, Any], tmp_path: Path) -> None:
    state = TrainerState(**values)
    state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(str(tmp_path / "state.json")) == state


@given(history=LOGS, epoch=NUMBERS.map(abs))  # a negative one is refused
def test_any_history(history: list[dict[str, Any]], epoch: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "state.json"
    TrainerState(log_history=history, epoch=epoch).save_to_json(path)
    read = TrainerState.load_from_json(path)
    assert (read.log_history, read.epoch) == (history, epoch)


@pytest.mark.parametrize("values", [{}, FILLED], ids=["fresh", "filled"])
def test_transformers_reads_ours_and_ours_reads_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    ours = TrainerState(**values)
    theirs = transformers.TrainerState(**values)
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
    ours = TrainerState()
    theirs = transformers.TrainerState()
    ours.compute_steps(args, 40)
    theirs.compute_steps(args, 40)
    assert getattr(ours, f"{kind}_steps") == expected
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)


# -- what travels with it --------------------------------------------------------------------------------------------


def test_states_of_callbacks_are_collected_by_class() -> None:
    one = EarlyStoppingCallback(3, 0.5)
    two = EarlyStoppingCallback(4)
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


# -- the history is serialised once ----------------------------------------------------------------------------------


def as_saved(state: TrainerState, path: Path) -> list[dict[str, Any]]:
    state.save_to_json(path)
    return json.loads(path.read_text())["log_history"]


def with_history(size: int) -> TrainerState:
    return TrainerState(log_history=[{"loss": i / 7, "step": i} for i in range(size)])


def appended(history: list[dict[str, Any]]) -> None:
    history.append({"loss": 0.5, "step": -1})


CHANGES: dict[str, Any] = {
    "appended": appended,
    "newest-changed": lambda history: history[-1].update(loss=9.0),
    "newest-removed": lambda history: history.pop(),
    "old-removed": lambda history: history.pop(3),
    "old-replaced": lambda history: history.__setitem__(3, {"loss": 9.0, "step": 3}),
    "old-given-more": lambda history: history[3].update(more=1),
    "old-given-less": lambda history: history[3].pop("loss"),
    "inserted": lambda history: history.insert(0, {"step": 0}),
    "reversed": lambda history: history.reverse(),
    "cut": lambda history: history.__delitem__(slice(5, None)),
    "cleared": lambda history: history.clear(),
    "nothing": lambda history: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("size", [50, 350])
def test_what_callbacks_do_to_the_history_is_saved(change: Any, size: int, tmp_path: Path) -> None:
    state = with_history(size)
    for _ in range(3):
        assert as_saved(state, tmp_path / "s.json") == state.log_history
        appended(state.log_history)
    change(state.log_history)
    assert as_saved(state, tmp_path / "s.json") == state.log_history


def test_another_list_in_its_place_is_saved(tmp_path: Path) -> None:
    state = with_history(300)
    as_saved(state, tmp_path / "s.json")
    state.log_history = [{"step": 1}]
    assert as_saved(state, tmp_path / "s.json") == [{"step": 1}]


def test_a_save_serialises_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same few entries at each save, however long the history is."""
    state = with_history(5000)
    counts = []
    dumps = json.dumps
    for _ in range(3):
        calls: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", lambda value, _calls=calls, **how: (_calls.append(1), dumps(value, **how))[1])
            state.save_to_json(tmp_path / "s.json")
        counts.append(len(calls))
        appended(state.log_history)
    assert counts[0] > 5000
    assert counts[1] == counts[2] < 150


def test_a_callback_with_a_history_of_its_own(tmp_path: Path) -> None:
    """Its empty list must not be taken for the record's."""
    state = with_history(2)
    state.stateful_callbacks = {"A": {"attributes": {"log_history": []}}}
    state.trial_params = {"log_history": []}
    state.save_to_json(tmp_path / "s.json")
    assert TrainerState.load_from_json(tmp_path / "s.json") == state


def test_a_copy_of_a_record_is_saved_by_itself(tmp_path: Path) -> None:
    state = with_history(300)
    as_saved(state, tmp_path / "s.json")
    twin = copy.deepcopy(state)
    twin.log_history[2] = {"step": 77}
    appended(twin.log_history)
    assert as_saved(twin, tmp_path / "t.json") == twin.log_history
    assert as_saved(state, tmp_path / "s.json") == state.log_history


def test_an_entry_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"log_history": [{"step": 1}, 5]}')
    with pytest.raises(ValueError, match="log_history has an entry"):
        TrainerState.load_from_json(tmp_path / "s.json")
