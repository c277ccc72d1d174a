"""Rows of others: deep, endless, half of a character, pipes, and a small file that unpacks to gigabytes."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.cli.recipe.schema import DataPart
from trainwright.cli.tasks import source
from trainwright.cli.tasks.applied import rows_at
from trainwright.cli.tasks.source import read_rows
from trainwright.cli.tasks.task_builders import opened
from trainwright.errors import DataError

DEEP = "[" * 100_000
TEXTS = {
    "deep.jsonl": ('{"text": ' + DEEP, "nested too deeply"),
    "deep.json": ('[{"text": ' + DEEP, "nested too deeply"),
    "deeper.jsonl": ('{"text": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
    "half.jsonl": ('{"text": "a \\ud83d"}', "half of a character"),
    "half.json": ('[{"text": "a \\udc00"}]', "half of a character"),
    "name.jsonl": ('{"\\ud83d": "a"}', "half of a character"),
    "digits.jsonl": ('{"text": ' + "9" * 5000 + "}", "5000 digits"),
    "quote.csv": ('text,label\n"' + "x" * 3000, "field larger than field limit"),
    "line.csv": ("text,label\n" + "x" * 3000, "2048 characters or more"),
    "line.tsv": ("text\tlabel\n" + "x" * 3000, "2048 characters or more"),
    "line.jsonl": ('{"text": "' + "x" * 3000 + '"}', "2048 characters or more"),
    "line.conll": ("x" * 3000 + " O", "2048 characters or more"),
    "whole.json": ('[{"text": "' + "x" * 9000 + '"}]', "8192 characters or more"),
    "whole.txt": ("x" * 9000, "8192 characters or more"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of this test: kilobytes in place of gigabytes."""
    monkeypatch.setattr(source, "MAX_CELL", 2048)
    monkeypatch.setattr(source, "MAX_WHOLE", 8192)
    monkeypatch.setattr(source, "MAX_UNPACKED", 1 << 20)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_a_row_that_cannot_be_held_is_an_error_of_its_file(
    name: str, packed: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text, message = TEXTS[name]
    if name.startswith(("line", "whole", "quote")):
        request.getfixturevalue("small")
    if name == "quote.csv":
        text = text.replace("x" * 3000, "x\n" * 1500)  # no line is long
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(path, DataPart()))
    assert str(path) in str(caught.value)


@pytest.mark.costly
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "txt", "conll"])
def test_a_small_file_does_not_unpack_without_limit(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}.gz"
    line = {"jsonl": b'{"text": "a", "label": "b"}\n', "tsv": b"a\tb\n"}.get(suffix, b"a b\n")
    path.write_bytes(gzip.compress(line * (1 << 20)))
    with pytest.raises(DataError, match=r"100 times its size|characters or more"):
        list(read_rows(path, DataPart()))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "txt", "conll", "parquet", "csv.gz"])
def test_a_pipe_is_refused_and_not_waited_for(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file"):
        list(read_rows(path, DataPart()))


@pytest.mark.timeout(30)
def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "1.png")
    assert list(read_rows(tmp_path, DataPart())) == []
    with pytest.raises(DataError, match="is not a regular file"):
        opened("cat/1.png", tmp_path)


@pytest.mark.parametrize("make", [lambda text: text.encode(), lambda text: b"\xef\xbb\xbf" + text.encode()])
def test_standard_input_is_read_as_bytes(
    make: Callable[[str], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").write_bytes(make('{"text": "ä"}\n'))
    with (tmp_path / "given").open() as given:
        monkeypatch.setattr("sys.stdin", given)
        with rows_at(Path("-")) as path:
            assert [row["text"] for row in read_rows(path, DataPart())] == ["ä"]
    (tmp_path / "given").write_bytes(b'{"text": "\xff"}\n')
    with (tmp_path / "given").open(errors="surrogateescape") as given:
        monkeypatch.setattr("sys.stdin", given)
        with rows_at(Path("-")) as path, pytest.raises(DataError, match="is not text in UTF-8"):
            list(read_rows(path, DataPart()))
