"""No command writes over what it reads, whatever the file is called, nor over a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.cli.written import check_output
from trainwright.errors import ArgumentError

from .commands import call

SPELLINGS = [
    "rows.csv",
    "./rows.csv",
    "inner/../rows.csv",
    "link.csv",
    "hard.csv",
    "linked/rows.csv",
    "{folder}/rows.csv",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rows, by several names, and a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\na,b\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "link.csv").symlink_to("rows.csv")
    os.link("rows.csv", "hard.csv")
    (tmp_path / "linked").symlink_to(".")
    run = tmp_path / "run"
    (run / "checkpoint-4").mkdir(parents=True)
    (run / "checkpoint-4" / "model.safetensors").write_text("weights")
    (run / "journal.jsonl").write_text('{"kind": "start", "run": "a", "step": 0}\n')
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("out", SPELLINGS)
@pytest.mark.parametrize("data", SPELLINGS)
def test_the_rows_are_never_the_output(data: str, out: str, place: Path) -> None:
    with pytest.raises(ArgumentError, match="would replace what the command reads"):
        check_output(Path(out.format(folder=place)), [Path(data.format(folder=place))], option="--out")


COMMANDS = [
    ("predict", "run", "--data", "rows.csv", "--out", "link.csv"),
    ("predict", "run", "--data", "rows.csv", "--out", "run/checkpoint-4/model.safetensors"),
    ("predict", "run/checkpoint-4", "--data", "rows.csv", "--out", "linked/run/checkpoint-4/model.safetensors"),
    ("eval", "run", "--data", "rows.csv", "--output", "hard.csv"),
    ("report", "run", "--output", "run/journal.jsonl"),
    ("report", "run/journal.jsonl", "--output", "linked/run/journal.jsonl"),
    ("compare", "run", "linked/run", "--output", "run/journal.jsonl"),
]
SPECIAL = [
    ("predict", "run", "--data", "rows.csv", "--out", "pipe"),
    ("eval", "run", "--data", "rows.csv", "--output", "pipe"),
    ("report", "run", "--output", "pipe"),
    ("compare", "run", "run", "--output", "pipe"),
    ("schema", "--output", "pipe"),
    ("init", "regression", "pipe", "--force"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_leaves_what_it_reads(words: tuple[str, ...], place: Path) -> None:
    before = content(place)
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert "would replace what the command reads" in result.output
    assert content(place) == before


@pytest.mark.parametrize("words", SPECIAL, ids=" ".join)
def test_a_pipe_or_a_device_is_not_replaced(words: tuple[str, ...], place: Path) -> None:
    os.mkfifo(place / "pipe")
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert "is not a regular file" in result.output
    assert (place / "pipe").is_fifo()


def test_an_earlier_result_may_be_replaced(place: Path) -> None:
    (place / "run" / "report.html").write_text("earlier")
    (place / "run" / "predictions.jsonl").write_text("earlier")
    check_output(place / "run" / "report.html", [place / "run"], option="--output")
    check_output(place / "run" / "predictions.jsonl", [place / "rows.csv", place / "run"], option="--out")
    check_output(place / "new.csv", [place / "rows.csv", "s3://bucket/run"], option="--out")
