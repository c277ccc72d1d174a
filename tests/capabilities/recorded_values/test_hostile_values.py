"""Recorded values of others: `trainwright diff` names the line with a wrong value, and waits for no pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright._types import json_value
from trainwright.capabilities.recorded_values.fingerprint import fingerprint
from trainwright.capabilities.recorded_values.value_comparison import compare_values, read_values
from trainwright.errors import ArgumentError, DataError

from ...cli.commands import call

TENSOR = fingerprint(torch.ones(2, 3), with_place=True)
RECORDS: list[dict[str, Any]] = [
    {"step": 1, "micro_batch": 0, "phase": "run", "name": "", "facts": {"settings": {"seed": 1}, "num_processes": 1}},
    {"step": 1, "micro_batch": 0, "phase": "begin", "name": "", "facts": {"torch": "abc"}},
    {
        "step": 1,
        "micro_batch": 0,
        "phase": "data",
        "name": "",
        "values": {"x": TENSOR},
        "facts": {"samples": ["a", "b"], "rows": ["c", "d"]},
    },
    {"step": 1, "micro_batch": 0, "phase": "weight", "name": "w", "values": {"": TENSOR}},
    {
        "step": 1,
        "micro_batch": 0,
        "phase": "forward",
        "name": "m",
        "kind": "Linear",
        "call": 1,
        "given": {"x": TENSOR},
        "values": {"": TENSOR},
    },
    {"step": 1, "micro_batch": 0, "phase": "backward", "name": "m", "part": "0", "values": {"": TENSOR}},
]
VALUES: list[Any] = ["text", -1, 2**70, 1e308, True, None, [], [[1]], {}, {"a": {"b": "c"}}, "\ud83d"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: dict[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        items = dict(enumerate(value))
    for key, inner in items.items():
        yield (*path, key)
        yield from places(inner, (*path, key))


def write(folder: Path, records: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "values-rank0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.mark.parametrize("number", range(len(RECORDS)), ids=lambda number: RECORDS[number]["phase"])
def test_a_wrong_value_in_any_place_is_an_error_or_a_difference(number: int, tmp_path: Path) -> None:
    write(tmp_path / "good", RECORDS)
    good = read_values(tmp_path / "good")
    for path in places(RECORDS[number]):
        for value in VALUES:
            records = json.loads(json.dumps(RECORDS))
            place = records[number]
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            write(tmp_path / "bad", records)
            for tolerance in (None, 0.1):
                with suppress(ArgumentError, DataError):
                    bad = read_values(tmp_path / "bad")
                    for pair in ((good, bad), (bad, good)):
                        found = compare_values(*pair, tolerance=tolerance)
                        json.dumps(json_value(found.to_dict()), ensure_ascii=False).encode()
                        str(found).encode()


LINES = {
    "deep": b"[" * 100_000 + b"\n",
    "not text": b"\xff\xfe\n",
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "a list": b"[1]\n",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_none_is_named(line: str, tmp_path: Path) -> None:
    write(tmp_path / "good", RECORDS)
    write(tmp_path / "bad", RECORDS)
    with (tmp_path / "bad" / "values-rank0.jsonl").open("ab") as file:
        file.write(LINES[line])
    result = call("diff", str(tmp_path / "good"), str(tmp_path / "bad"))
    assert result.exit_code == 2
    assert f"values-rank0.jsonl:{len(RECORDS) + 1} is not a line of recorded values" in result.output


@pytest.mark.timeout(30)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "values-rank0.jsonl")
    assert "is not a regular file" in call("diff", str(tmp_path), str(tmp_path)).output


@pytest.mark.timeout(60)
def test_many_records_of_one_place_take_no_quadratic_time(tmp_path: Path) -> None:
    write(tmp_path, [*RECORDS, *[RECORDS[-1]] * 50_000])
    assert call("diff", str(tmp_path), str(tmp_path)).exit_code == 0
