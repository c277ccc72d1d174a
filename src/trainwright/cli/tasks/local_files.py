"""Local files as rows: one dict of columns each. Which columns a task wants is not its business."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from trainwright.cli.recipe.schema import DataPart
from trainwright.errors import DataError, needs_package

Row = dict[str, Any]  # Any: a cell of a table

SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text",
            ".md": "text", ".parquet": "parquet", ".pq": "parquet", ".conll": "conll", ".conllu": "conll",
            ".bio": "conll"}  # fmt: skip
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
MAX_CELL = 1 << 30  # characters: a text may be a whole book


def read_rows(path: Path, data: DataPart) -> Iterator[Row]:
    """The rows of a file, or the images of a directory; DataError: it is not what its suffix (or `format`) says."""
    kind = format_of(path, data.format)
    try:
        yield from READERS[kind](path, data)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}.") from None


def format_of(path: Path, given: str | None) -> str:
    """Raises DataError where neither the suffix nor the user says it."""
    if given is not None:
        return given
    if path.is_dir():
        return "images"
    found = next((SUFFIXES[suffix] for suffix in reversed(path.suffixes) if suffix in SUFFIXES), None)
    if found is None:
        raise DataError(
            f"{path}: nothing is known by this suffix. Say what it is with data.format: {', '.join(READERS)}."
        )
    return found


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _csv(path: Path, data: DataPart) -> Iterator[Row]:
    csv.field_size_limit(MAX_CELL)
    with _open(path) as file:
        yield from _table(csv.reader(file), path, has_header=data.header)


def _tsv(path: Path, data: DataPart) -> Iterator[Row]:
    with _open(path) as file:
        cells = (line.rstrip("\r\n").split("\t") for line in file if line.strip())
        yield from _table(cells, path, has_header=data.header)


def _table(lines: Iterator[list[str]], path: Path, *, has_header: bool) -> Iterator[Row]:
    names: list[str] | None = None
    for number, cells in enumerate(lines, start=1):
        if not cells:
            continue
        if names is None:
            names = cells if has_header else [str(i) for i in range(len(cells))]
            if has_header:
                continue
        if len(cells) != len(names):
            raise DataError(f"{path}:{number}: it has {len(cells)} columns; the lines before it have {len(names)}.")
        yield dict(zip(names, cells, strict=True))


def _json(path: Path, data: DataPart) -> Iterator[Row]:
    with _open(path) as file:
        try:
            value = json.load(file)
        except ValueError as error:
            raise DataError(f"{path} is no JSON: {error}. If each line is an object, say data.format: jsonl.") from None
    if isinstance(value, dict):  # one list among other things, as {"version": ..., "data": [...]}
        value = next((inner for inner in value.values() if isinstance(inner, list)), None)
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError(f"{path} holds no list of objects.")
    yield from value


def _jsonl(path: Path, data: DataPart) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}:{number}: this is no JSON: {error}.") from None
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: an object belongs on each line, and this is none.")
                yield row


def _parquet(path: Path, data: DataPart) -> Iterator[Row]:
    with needs_package("Parquet needs the package pyarrow: pip install 'trainwright[datasets]'"):
        from pyarrow import parquet
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _text(path: Path, data: DataPart) -> Iterator[Row]:
    with _open(path) as file:
        whole = file.read()
    if data.sample_by == "document":
        parts = [whole]
    elif data.sample_by == "paragraph":
        parts = re.split(r"\r?\n[ \t]*\r?\n", whole)
    else:
        parts = whole.splitlines()
    if data.pattern is None:
        yield from ({"text": part.strip()} for part in parts if part.strip())
        return
    pattern = re.compile(data.pattern, re.DOTALL if data.sample_by != "line" else 0)
    yield from (match.groupdict() for part in parts if (match := pattern.search(part)) is not None)


def _conll(path: Path, data: DataPart) -> Iterator[Row]:
    """A word a line with what is said of it, blank lines between sentences, as CoNLL's tasks have them."""
    with _open(path) as file:
        words: list[list[str]] = []
        for number, line in enumerate(file, start=1):
            cells = line.split("\t") if "\t" in line else line.split()
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                if words:
                    yield _sentence(words)
                words = []
            elif not line.startswith(("# ", "-DOCSTART-")):  # a hashtag is a word, and "#<tab>O" is one too
                if words and len(cells) != len(words[0]):
                    raise DataError(f"{path}:{number}: it has {len(cells)} columns; the line before {len(words[0])}.")
                words.append(cells)
        if words:
            yield _sentence(words)


def _sentence(words: list[list[str]]) -> Row:
    columns = [list(column) for column in zip(*words, strict=True)]
    return {"words": columns[0], "tags": columns[-1], **{str(i): column for i, column in enumerate(columns)}}


def _images(path: Path, data: DataPart) -> Iterator[Row]:
    """A directory for each label."""
    for image in sorted(path.rglob("*")):
        if image.suffix.lower() in IMAGES:
            yield {"image": str(image), "label": image.parent.name}


READERS: dict[str, Callable[[Path, DataPart], Iterator[Row]]] = {
    "csv": _csv, "tsv": _tsv, "json": _json, "jsonl": _jsonl, "parquet": _parquet, "text": _text, "conll": _conll,
    "images": _images,
}  # fmt: skip
