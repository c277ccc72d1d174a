"""The record of a search: what is best, what mattered, how it is shown."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from trainwright.cli.main import app
from trainwright.search.base import TrialResult, is_better
from trainwright.search.search_record import SearchRecord, TrialRecord, finished, importance, remove_model

from .small import drawn, searcher, space


def trials(*pairs: tuple[dict[str, object], float]) -> list[TrialRecord]:
    return [TrialRecord(str(i), "finished", dict(params), [value]) for i, (params, value) in enumerate(pairs)]


def test_the_parameter_that_decides_explains_all_and_the_other_little() -> None:
    found = importance(trials(*(({"rate": 10.0**-i, "seed": (7 * i) % 5}, float(i)) for i in range(10))))
    assert list(found) == ["rate", "seed"]
    assert found["rate"] == pytest.approx(1.0)
    assert found["seed"] < 0.3


def test_words_count_by_their_groups() -> None:
    found = importance(trials(*(({"optim": "ab"[i % 2], "fixed": 1}, float(i % 2)) for i in range(8))))
    assert found == {"optim": pytest.approx(1.0)}


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=12))
def test_a_share_is_between_0_and_1(pairs: list[tuple[float, float]]) -> None:
    for share in importance(trials(*(({"x": x}, y) for x, y in pairs))).values():
        assert -1e-9 <= share <= 1 + 1e-9


POINTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8)


@given(POINTS)
def test_none_is_better_than_the_best_and_every_other_has_better_one(points: list[tuple[int, int]]) -> None:
    directions = ["minimize", "maximize"]
    record = SearchRecord(directions)
    for i, point in enumerate(points):
        record.add(TrialRecord(str(i), "finished", values=list(map(float, point))))
    best = {trial.id for trial in record.best()}
    assert best
    for one in record.trials:
        has_better = any(is_better(other.values, one.values, directions) for other in record.trials)
        assert (one.id in best) != has_better


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    record = SearchRecord(["minimize"], "optuna", trials(({"a": 1, "b": "x", "c": 1e-5}, 0.5)))
    record.add(finished("9", {}, TrialResult(objective=math.nan, curve=[(2, 0.5), (4, math.nan)])))
    record.write(tmp_path)
    again = SearchRecord.read(tmp_path)
    assert again.trials[0] == record.trials[0]
    assert (again.trials[1].state, again.trials[1].values) == ("failed", ["nan"])


@pytest.mark.parametrize("text", ["{}", "[]", '{"trials": [{"id": 1, "evil": 2}], "directions": []}', "{"])
def test_a_file_that_is_not_a_record_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(text)
    with pytest.raises(ValueError, match=r"record|Expecting"):
        SearchRecord.read(tmp_path)


@pytest.mark.costly
@pytest.mark.filterwarnings("default")
def test_the_report_of_a_search_has_history_importance_and_every_trial(tmp_path: Path) -> None:
    folder = tmp_path / "a <search>"
    best = searcher(folder).hyperparameter_search(space, n_trials=4, sampler=drawn())
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    text = (folder / "report.html").read_text(encoding="utf-8")
    for said in ("History: objective", "best so far", "Importance", "learning_rate", "Trials", f"{best.objective:.6g}"):
        assert said in text
    own = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", own)
    assert "<search>" not in own


HOSTILE: list[dict[str, object]] = [
    {"id": 1},
    {"state": ["finished"]},
    {"params": 3},
    {"values": "ab"},
    {"values": [None], "state": "finished"},
    {"values": [1.0, 2.0], "state": "finished"},
    {"values": [10**39], "seconds": -1},
    {"folder": ["/"]},
    {"error": 7},
    {"seconds": "soon"},
    {"metrics": []},
    {"curve": 4},
]


@pytest.mark.parametrize("changed", HOSTILE, ids=str)
def test_a_record_with_a_wrong_value_is_an_error_and_no_report(changed: dict[str, object], tmp_path: Path) -> None:
    trial = {"id": "0", "state": "finished", "values": [0.5], **changed}
    (tmp_path / "search.json").write_text(json.dumps({"directions": ["minimize"], "trials": [trial]}))
    with pytest.raises(ValueError, match="not a record of a search"):
        SearchRecord.read(tmp_path)
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code in (1, 2)


@pytest.mark.parametrize(
    "spelling", ["{victim}", "{search}/../victim", "victim", "../victim", "{search}/link", "link", "", "."]
)
def test_the_record_of_others_removes_no_model_outside_of_the_search(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim" / "model" / "weights"
    search = tmp_path / "search"
    own = search / "run-1" / "model"
    for folder in (victim.parent, own):
        folder.mkdir(parents=True)
    victim.write_text("kept")
    (search / "link").symlink_to(tmp_path / "victim")
    monkeypatch.chdir(tmp_path)
    remove_model(str(search), spelling.format(victim=tmp_path / "victim", search=search))
    assert victim.read_text() == "kept"
    remove_model(str(search), str(search / "run-1"))
    remove_model("search", "search/run-1")
    assert not own.exists()
    assert own.parent.exists()
