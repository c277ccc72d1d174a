"""Files become rows: every format gives the same table, and a file that is not what it says is named with its line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.recipe.schema import DataPart
from trainwright.cli.tasks.source import read_rows
from trainwright.errors import DataError

TABLE = [
    {"text": "a, b", "label": "1"},
    {"text": 'say "c"', "label": "0"},
    {"text": "naïve", "label": "1"},
]


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(TABLE)


def write_gz(path: Path) -> None:
    write_csv(path.with_suffix(""))
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))


def write_tsv(path: Path) -> None:
    path.write_text("\n".join(["text\tlabel", *(f"{row['text']}\t{row['label']}" for row in TABLE)]) + "\n")


def write_json(path: Path) -> None:
    path.write_text(json.dumps({"version": "1", "data": TABLE}))


def write_jsonl(path: Path) -> None:
    path.write_text("\n\n".join(map(json.dumps, TABLE)))


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(TABLE), path)


WRITERS = {
    "a.csv": write_csv,
    "a.csv.gz": write_gz,
    "a.tsv": write_tsv,
    "a.json": write_json,
    "a.jsonl": write_jsonl,
    "a.parquet": write_parquet,
}


def rows(path: Path, **settings: Any) -> list[dict[str, Any]]:
    return list(read_rows(path, DataPart(**settings)))


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert rows(tmp_path / name) == TABLE


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_what_divides_columns_is_found_or_set(sign: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'text{sign}label\n"one{sign} two, three; four"{sign}x\n')
    expected = [{"text": f"one{sign} two, three; four", "label": "x"}]
    assert rows(tmp_path / "a.csv") == rows(tmp_path / "a.csv", delimiter=sign) == expected
    (tmp_path / "b.csv").write_text("text\nhello; you\n")
    assert rows(tmp_path / "b.csv") == [{"text": "hello; you"}]


def test_a_table_without_a_header_has_numbered_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,1\ny,2\n")
    assert rows(tmp_path / "a.csv", header=False) == [{"0": "x", "1": "1"}, {"0": "y", "1": "2"}]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"sample_by": "line"}, ["one", "two", "three"]),
        ({"sample_by": "paragraph"}, ["one\ntwo", "three"]),
        ({"sample_by": "document"}, ["one\ntwo\n\nthree"]),
    ],
)
def test_text_is_divided_as_asked(how: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    assert [row["text"] for row in rows(tmp_path / "a.txt", **how)] == expected


def test_a_pattern_makes_columns_and_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.dict").write_text("aa AA1 # note\nb(2) B\ncd K D\n")
    pattern = "^(?P<source>[a-z]+) (?P<target>[^#]+)"
    found = rows(tmp_path / "a.dict", format="text", pattern=pattern)
    assert found == [{"source": "aa", "target": "AA1 "}, {"source": "cd", "target": "K D"}]


@pytest.mark.parametrize("blank", ["\n", "\t\n", "  \n"])
def test_sentences_of_words_and_tags(blank: str, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text(f"# sentence 1\nJim\tNNP\tB-PER\nruns\tVB\tO\n{blank}Home\tNN\tO\n")
    first, second = rows(tmp_path / "a.conll")
    assert (first["words"], first["tags"], first["1"]) == (["Jim", "runs"], ["B-PER", "O"], ["NNP", "VB"])
    assert second["words"] == ["Home"]


def test_a_directory_for_each_label_is_a_table_of_images(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/2.JPG", "dog/readme.txt"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).touch()
    assert [(Path(row["image"]).name, row["label"]) for row in rows(tmp_path / "images")] == [
        ("1.png", "cat"),
        ("2.JPG", "dog"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "text,label\na,b,c\n", "a.csv:2: this line has 3 columns, but earlier lines have 2"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2: this is not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: each line must be an object"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', "data.format: jsonl"),
        ("a.json", "3", "does not contain a list of objects"),
        ("a.conll", "a\tb\nc\td\te\n", "a.conll:2: this line has 3 columns, but the previous line has 2"),
        ("a.xyz", "?", "Set the format with data.format"),
    ],
)
def test_a_file_that_is_something_else_is_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        rows(tmp_path / name)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt is not text in UTF-8"):
        rows(tmp_path / "a.txt")
