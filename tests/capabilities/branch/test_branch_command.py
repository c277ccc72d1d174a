"""`trainwright branch` and `extend`: the recipe of a run, changed; the run that is branched from stays as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from trainwright.cli.branch import cooldown_length
from trainwright.errors import ArgumentError
from trainwright.journal.record import read

from ...cli.commands import SMALL, call, done, small
from .test_branch_laws import content

STABLE = SMALL + "  lr_scheduler_type: constant\n  logging_strategy: steps\n"
RATE = 1e-2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of eight steps that saved after step 4 and 8."""
    folder = tmp_path_factory.mktemp("branch")
    done("train", str(small(folder, STABLE.replace("logging_steps: 2", "logging_steps: 1"))))
    return folder / "run"


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of the run, and of its data where the recipe names them."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rates(run: str) -> dict[int, float]:
    return dict(zip(*read(run).series("learning_rate"), strict=True))


@pytest.mark.parametrize(
    ("text", "at", "steps"),
    [("10%", 8000, 889), ("20%", 8000, 2000), ("800", 8000, 800), ("1%", 4, 1), ("2.5%", 39, 1)],
)
def test_the_length_of_a_cooldown(text: str, at: int, steps: int) -> None:
    assert cooldown_length(text, at) == steps


@pytest.mark.parametrize(
    "text", ["0", "-3", "ten", "100%", "0%", "10%%", "1.5", "", "nan%", "inf%", "-inf%", "nan", "9" * 40, "9" * 5000]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a length"):
        cooldown_length(text, 100)


def test_a_length_of_more_steps_than_a_run_can_have_is_refused() -> None:
    with pytest.raises(ArgumentError, match="more steps"):
        cooldown_length("99.99999999999999%", 1 << 40)


def test_a_refused_branch_leaves_no_directory(place: Path) -> None:
    words = ("--cooldown", "4", "--out", "new/cooled", "--set", "training.learning_rate=-1")
    assert call("branch", "run", "--at", "4", *words).exit_code == 2
    (place / "code.py").write_text("def forgets(row):\n    pass\n")
    words = ("--cooldown", "4", "--out", "new/cooled", "--set", "data.map=code.py:forgets")
    assert call("branch", "run", "--at", "4", *words).exit_code == 2
    assert not (place / "new").exists()


def test_cooldowns_of_one_run_have_directories_of_their_own(place: Path) -> None:
    before = content(place / "run")
    shown = done("branch", "run", "--at", "4", "--cooldown", "4", "--out", "cooled")
    assert "branches  " in shown
    assert "cooldown None -> 'linear': the rate falls from its present value to 0" in shown
    assert rates("cooled") == pytest.approx({5: RATE, 6: 0.75 * RATE, 7: 0.5 * RATE, 8: 0.25 * RATE})
    done("branch", "run", "--at", "8", "--cooldown", "20%", "--shape", "1-sqrt", "--output", "later", "--seed", "3")
    assert rates("later") == pytest.approx({9: RATE, 10: RATE * (1 - 0.5**0.5)})
    assert content(place / "run") == before
    recipe = yaml.safe_load((place / "later" / "recipe.yaml").read_text())["training"]
    assert recipe["branch_from"] == str(place / "run" / "checkpoint-8")
    assert (recipe["max_steps"], recipe["cooldown"], recipe["seed"]) == (10, "1-sqrt", 3)
    assert (place / "later" / "tokenizer.json").read_bytes() == (place / "run" / "tokenizer.json").read_bytes()
    assert not (place / "later" / "tokenizer").exists()
    shutil.rmtree(place / "run")
    assert "of run, step 8" in done("runs", ".")
    found = {one["name"]: one["origins"] for one in json.loads(done("runs", ".", "--json"))}
    assert [(one["step"], one["checkpoint"]) for one in found["cooled"]] == [(4, str(place / "run" / "checkpoint-4"))]
    assert "later is a branch of run, step 8" in done("compare", "cooled", "later", "--output", "both.html")
    origins = json.loads(done("compare", "cooled", "later", "--json"))["origins"]
    assert [one["step"] for one in origins["later"]] == [8]


def test_the_same_command_continues_a_branch_also_without_its_origin(place: Path) -> None:
    words = ("branch", "run", "--at", "4", "--cooldown", "8", "--out")
    done(*words, "whole")
    done(*words, "cut")
    for name in ("cut/checkpoint-12", "run"):
        shutil.rmtree(place / name)
    (place / "cut" / "model.safetensors").unlink()
    (place / "cut" / "tokenizer").mkdir()  # as a killed run leaves it
    for path in (place / "cut").glob("tokenizer*.json"):
        path.rename(place / "cut" / "tokenizer" / path.name)
    done(*words, "cut")
    whole, cut = ((place / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    assert {entry["step"] for entry in read("cut").of("resume")} == {8}
    assert "has 12 of 12 steps" in call("extend", "cut", "--to", "12").output.replace("\n", " ")
    done("extend", "cut", "--steps", "2")
    assert rates("cut")[13] == pytest.approx(rates("cut")[12])


def test_a_branch_without_changes_ends_as_its_origin(place: Path) -> None:
    done("branch", "run", "--at", "4", "--out", "same")
    assert (place / "same/model.safetensors").read_bytes() == (place / "run/model.safetensors").read_bytes()


def test_a_run_that_is_extended_twice_has_no_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("train", str(small(tmp_path, SMALL.replace("logging_steps: 2", "logging_steps: 1"))))  # linear
    shown = done("extend", "run", "--steps", "4")
    assert "length 8 -> 12 steps" in shown or "max_steps 8 -> 12 steps" in shown
    again = call("extend", "run", "--to", "12")
    assert again.exit_code == 2
    done("extend", "run", "--to", "14", "--shape", "cosine")
    found = rates("run")
    assert list(found) == list(range(1, 15))
    assert found[9] == pytest.approx(found[8], rel=1e-9)
    assert found[13] == pytest.approx(found[12], rel=1e-9)
    assert found[14] == pytest.approx(found[12] / 2, rel=1e-9)
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["training"]["max_steps"] == 14


REFUSED = [
    (("branch", "run", "--at", "5", "--out", "x"), "run has no checkpoint of step 5; it has step 4, 8"),
    (("branch", "nowhere", "--at", "4", "--out", "x"), "branch_from=CHECKPOINT"),
    (("branch", "s3://bucket/run", "--at", "4", "--out", "x"), "is a URL"),
    (("branch", "run", "--at", "4", "--out", "run"), "Give it another output_dir"),
    (("branch", "run", "--at", "4", "--out", "run/checkpoint-4"), "Give it another output_dir"),
    (("branch", "run", "--at", "4", "--out", "run/checkpoint-8"), "Give it another output_dir"),
    (("branch", "run", "--at", "4", "--out", "x/../run/checkpoint-4/inner"), "Give it another output_dir"),
    (("branch", "run", "--at", "4", "--out", "link/checkpoint-4"), "Give it another output_dir"),
    (("branch", "link", "--at", "4", "--out", "run/checkpoint-8"), "Give it another output_dir"),
    (("branch", "run", "--at", "4", "--out", "x", "--cooldown", "nan%"), "is not a length"),
    (("branch", "run", "--at", "4", "--out", "x", "--shape", "cosine"), "--cooldown 10% --shape cosine"),
    (("branch", "run", "--at", "4", "--out", "x", "--cooldown", "9", "--shape", "sqrt"), "linear, cosine, 1-sqrt"),
    (("branch", "run", "--at", "4", "--out", "x", "--cooldown", "9", "--max_steps", "9"), "Leave out one"),
    (("branch", "run", "--at", "4", "--out", "x", "--cooldown", "much"), "is not a length"),
    (("extend", "run"), "--steps 2000"),
    (("extend", "run", "--steps", "1", "--to", "9"), "--steps 2000"),
    (("extend", "run", "--to", "8"), "has 8 of 8 steps"),
    (("extend", "s3://bucket/run", "--steps", "4"), "is a URL"),
    (("extend", "nowhere", "--steps", "4"), "did not start a run"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda one: " ".join(one) if isinstance(one, tuple) else "")
def test_a_wrong_command_ends_with_2_and_writes_nothing(words: tuple[str, ...], message: str, place: Path) -> None:
    before = content(place)
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert content(place) == before


def test_a_run_that_has_not_ended_is_resumed_or_ends_later(place: Path) -> None:
    shutil.rmtree(place / "run" / "checkpoint-8")
    result = call("extend", "run", "--steps", "2")
    assert result.exit_code == 2
    assert "has not ended: its newest checkpoint is of step 4 of 8" in " ".join(result.output.split())
    done("extend", "run", "--to", "10")
    assert (place / "run" / "checkpoint-10").is_dir()


def test_a_repository_of_the_hub_is_not_shared(place: Path) -> None:
    path = place / "run" / "recipe.yaml"
    path.write_text(path.read_text() + "  push_to_hub: true\n  hub_model_id: me/model\n")
    result = call("branch", "run", "--at", "4", "--out", "x")
    assert result.exit_code == 2
    assert "would replace the model of its origin" in " ".join(result.output.split())
