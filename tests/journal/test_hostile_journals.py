"""A journal that others have written: one with a wrong value in any place ends no reader, and hides no other run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainwright.capabilities.control.extension import LiveControl
from trainwright.errors import ArgumentError
from trainwright.journal.entries import MAX_LINE, parse_entry
from trainwright.journal.record import read
from trainwright.report.comparison import comparison, partings
from trainwright.report.run_page import page, write_report
from trainwright.report.run_table import find_runs

from ..cli.commands import call, done

FACTS: dict[str, Any] = {
    "plan": {"max_steps": 4, "total_batch_size": 4},
    "arguments": {"metric_for_best_model": "loss", "greater_is_better": False, "seed": 1, "dict": {"a": 1}},
    "changed": {"seed": 1},
    "environment": {"packages": {"torch": "2"}, "device": "cpu", "memory_bytes": 5},
    "data": {"train": {"type": "list", "samples": 8}, "eval": {"one": {"type": "list", "samples": 8}}},
    "model": {"class": "Module", "parameters": 8, "trained_parameters": 4},
    "process": {"host": "here", "pid": 1, "began": 1.0},
    "branch": {"begins": True, "origins": [{"run": "b", "checkpoint": "/b/checkpoint-1", "step": 1}]},
    "levers": {"rows": [{"lever": "tf32", "settings": {"tf32": True}, "ratio": 1.1, "proof": "p", "result": "r"}]},
}
ENTRIES: list[dict[str, Any]] = [
    {"kind": "start", "run": "a", "time": 1700000000.0, "step": 0, "checkpoint": None, **FACTS},
    {"kind": "log", "run": "a", "time": 1700000001.0, "step": 1, "values": {"loss": 1.0, "num_input_tokens_seen": 9}},
    {"kind": "log", "run": "a", "time": 1700000002.0, "step": 2, "values": {"loss": 0.5, "num_input_tokens_seen": 18}},
    {
        "kind": "evaluation",
        "run": "a",
        "time": 1700000003.0,
        "step": 2,
        "values": {"eval_loss": 1.0, "eval_runtime": 0.5, "eval_one_accuracy": 0.5},
    },
    {"kind": "save", "run": "a", "time": 1700000004.0, "step": 2, "best": "checkpoint-2", "peak_memory_bytes": 7},
    {
        "kind": "command",
        "run": "a",
        "time": 1700000004.0,
        "step": 2,
        "name": "log",
        "value": 2,
        "text": "log",
        "by": "x",
    },
    {"kind": "incident", "run": "a", "time": 1700000004.0, "step": 2, "text": "bad"},
    {"kind": "warning", "run": "a", "time": 1700000004.0, "step": 2, "text": "warned"},
    {"kind": "resume", "run": "a", "time": 1700000005.0, "step": 2, "checkpoint": "checkpoint-2", **FACTS},
    {
        "kind": "processes",
        "run": "a",
        "step": 3,
        "milliseconds_a_step": [{"rank": 0, "host": "h", "device": "d", "x": 1}],
    },
    {"kind": "failed", "run": "a", "time": 1700000006.0, "step": 3, "error": "Error", "traceback": "a\nb"},
    {"kind": "time", "run": "a", "time": 1700000007.0, "time_by_phase": {"data": 1.0}, "peak_gpu_bytes": 7},
]
DEEP = "[" * 500 + "]" * 500
VALUES = [
    '"text"',
    "-1",
    "1e999",
    "9" * 39,
    "[]",
    "[[1]]",
    "{}",
    '{"a": {"b": "c"}}',
    "true",
    "null",
    '"\\ud83d"',
    DEEP,
]
LINES = {
    "deep": "[" * 100_000,
    "deep in an entry": '{"kind": "log", "run": "a", "step": 1, "values": ' + '{"a":' * 60_000 + "1" + "}" * 60_001,
    "digits": '{"kind": "log", "run": "a", "step": ' + "9" * 5000 + "}",
    "huge": '{"kind": "log", "run": "a", "step": 1, "values": {"loss": 1}, "x": "' + "x" * MAX_LINE + '"}',
    "not text": "\udcff\udcfe",
    "a list": "[1]",
    "a number": "7",
    "nothing": "",
    "no run": '{"kind": "start", "step": 0}',
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values within a value of JSON."""
    items: dict[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        items = dict(enumerate(value))
    for key, inner in items.items():
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(number: int, path: tuple[Any, ...], value: str) -> str:
    """Returns the lines of the journal with another value in one place."""
    entries: list[Any] = json.loads(json.dumps(ENTRIES))
    place = entries[number]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "@@@"
    return "".join(json.dumps(entry).replace('"@@@"', value) + "\n" for entry in entries)


def write(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_bytes(text.encode(errors="surrogateescape"))


WHOLE = "".join(json.dumps(entry) + "\n" for entry in ENTRIES)


def test_the_journal_of_these_tests_is_read_whole(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    assert len(read(tmp_path).entries) == len(ENTRIES)
    for text in ("log by", "warned", "bad", "tf32", "accuracy", "checkpoint-1"):
        assert text.removesuffix(" by") in page(read(tmp_path), title="run")


@pytest.mark.costly
@pytest.mark.parametrize("number", range(len(ENTRIES)), ids=lambda number: ENTRIES[number]["kind"])
def test_a_wrong_value_in_any_place_ends_no_reader(number: int, tmp_path: Path) -> None:
    write(tmp_path / "good", WHOLE)
    for path in places(ENTRIES[number]):
        for value in VALUES:
            write(tmp_path / "bad", changed(number, path, value))
            assert "good" in [run.name for run in find_runs(tmp_path)], (path, value)
            try:
                records = {name: read(tmp_path / name) for name in ("good", "bad")}
            except ValueError:
                continue  # without a beginning there is no run
            page(records["bad"], title="bad").encode()
            partings(records)
            if value in ("[]", "null"):
                comparison(records).encode()


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_is_left_out(line: str, tmp_path: Path) -> None:
    lines = WHOLE.splitlines()
    write(tmp_path / "bad", "\n".join([*lines[:3], LINES[line], *lines[3:]]) + "\n")
    write(tmp_path / "good", WHOLE)
    assert len(read(tmp_path / "bad").entries) == len(ENTRIES)
    write(tmp_path / "alone", LINES[line])
    assert "bad" in done("runs", str(tmp_path))
    done("report", str(tmp_path / "bad"))
    done("compare", str(tmp_path / "bad"), str(tmp_path / "good"), "--output", str(tmp_path / "c.html"))
    for words in (("report", str(tmp_path / "alone")), ("compare", str(tmp_path / "alone"), str(tmp_path / "good"))):
        result = call(*words)
        assert result.exit_code in (1, 2)
        assert isinstance(result.exception, SystemExit)
        assert "has no run in it" in result.output


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("field", ["step", "name", "value", "refused", "text", "by"])
def test_live_control_takes_or_refuses_a_journal_with_a_wrong_command(field: str, value: str, tmp_path: Path) -> None:
    write(tmp_path, changed(5, (field,), value))
    control = LiveControl.__new__(LiveControl)
    control._repeats = str(tmp_path)
    with suppress(ArgumentError):
        assert set(control._read_journal()) <= {2}


def test_a_journal_that_is_no_file_hides_no_other_run(tmp_path: Path) -> None:
    write(tmp_path / "good", WHOLE)
    for name in ("pipe", "folder", "link"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "journal.jsonl")
    (tmp_path / "folder" / "journal.jsonl").mkdir()
    (tmp_path / "link" / "journal.jsonl").symlink_to("journal.jsonl")
    assert "good" in done("runs", str(tmp_path))
    for name in ("pipe", "folder", "link"):
        assert isinstance(call("report", str(tmp_path / name)).exception, SystemExit)


def test_text_with_half_of_a_character_is_shown(tmp_path: Path) -> None:
    write(tmp_path, changed(6, ("text",), '"half \\ud83d of one"'))
    assert "half ? of one" in write_report(tmp_path).read_text()
    assert parse_entry(b'{"kind": "other", "run": "a", "step": 1}') is not None
