"""Names of rows: as the user knows them, and right when the data changes."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainwright.data.identity import RowNames, SampleId, SourceRows, fingerprint, follow
from trainwright.errors import DataError

# -- names -----------------------------------------------------------------------------------------------------------


def test_a_name_is_what_the_user_would_look_for() -> None:
    kept = np.array([2, 4, 130])
    names = RowNames(
        [
            SourceRows("data/reviews.csv", kept, is_file=True),
            SourceRows("chat", range(20)),
            SourceRows("wiki", range(2), keys=["doc-3", "doc-9"]),
        ]
    )
    assert [str(names.name_of(number)) for number in (2, 3 + 17, 23)] == ["reviews.csv:130", "chat[17]", "doc-3"]
    assert len(names) == len(list(names)) == 25
    assert [names.number_of(name) for name in names] == [*range(25)]
    assert names.number_of(SampleId("chat", 20)) is None
    for number in (-1, 25):
        with pytest.raises(IndexError):
            names.name_of(number)


@pytest.mark.parametrize(
    "name",
    [SampleId("a.csv", 3, is_line=True), SampleId("chat", 0), SampleId("w", 4, key="x"), SampleId("w", 4, key=7)],
)
def test_a_name_is_read_as_it_was_written(name: SampleId) -> None:
    assert SampleId.from_dict(name.to_dict()) == name


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"source": "a"},
        {"source": 1, "row": 2},
        {"source": "a", "row": -1},
        {"source": "a", "row": 1.5},
        {"source": "a", "row": 1, "key": [2]},
    ],
)
def test_what_no_run_writes_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not name a row"):
        SampleId.from_dict(values)


def test_two_rows_with_one_name_are_refused() -> None:
    with pytest.raises(DataError, match=r"Two sources of the training data are called 'a.csv'"):
        RowNames([SourceRows("x/a.csv", [2], is_file=True), SourceRows("y/a.csv", [2], is_file=True)])
    with pytest.raises(DataError, match="Two rows of the training data are called doc-3"):
        RowNames([SourceRows("a", range(2), keys=["doc-3", "doc-3"])]).number_of(SampleId("a", 0, key="doc-3"))


# -- fingerprints ----------------------------------------------------------------------------------------------------

SAME: list[list[Any]] = [
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), torch.tensor([1, 2, 3])],
    [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)],
    [[0.5, 2.0], np.array([0.5, 2.0], np.float32), torch.tensor([0.5, 2.0], dtype=torch.bfloat16)],
    [[], (), np.array([]), torch.tensor([], dtype=torch.int64)],
    [7, np.int64(7), torch.tensor(7)],
    ["text", np.str_("text")],
    [{"a": 1, "b": None}, {"b": None, "a": 1}],
]
OTHERS: list[Any] = [
    None,
    "",
    b"",
    0,
    0.0,
    False,
    "0",
    [0],
    [[0]],
    [0, 0],
    [[0, 0]],
    [[0], [0]],
    ["a", "b"],
    ["ab"],
    ["a", "b", ""],
    {"a": 1},
    {"b": 1},
    {"a": "1"},
    {"a": [1]},
    {},
    2**70,
    -(2**70),
    [2**70],
    "\ud800",
    [1, 2.0],
    [[1], [1, 2]],
    datetime.date(2026, 11, 23),
    datetime.datetime(2026, 11, 23),
    np.array([1 + 2j]).real,
    b"0",
    Image.new("L", (2, 3)),
    Image.new("L", (3, 2)),
    Image.new("RGB", (1, 2)),
]


@pytest.mark.parametrize("forms", SAME, ids=lambda forms: str(forms[0]))
def test_the_same_content_in_another_form(forms: list[Any]) -> None:
    assert len({fingerprint({"x": form}) for form in forms}) == 1


def test_other_content() -> None:
    found = [fingerprint({"x": value}) for value in OTHERS]
    twice = [(OTHERS[i], OTHERS[j]) for i, j in itertools.combinations(range(len(found)), 2) if found[i] == found[j]]
    assert twice == []
    assert [fingerprint({"x": value}) for value in OTHERS] == found


def test_what_has_no_content_is_refused() -> None:
    with pytest.raises(DataError, match="A row has a function"):
        fingerprint({"x": fingerprint})


# -- another state of the data ---------------------------------------------------------------------------------------

CHANGES = ["add", "remove", "move", "edit", "shuffle", "add source", "remove source", "sort"]
Rows = dict[str, list[str]]  # source -> contents of its rows


def state(rows: Rows) -> tuple[RowNames, list[str]]:
    names = RowNames([SourceRows(name, range(len(contents))) for name, contents in rows.items()])
    return names, [fingerprint(content) for contents in rows.values() for content in contents]


@st.composite
def changes(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Contents that differ, and the same after rows were added, removed, moved and edited, and sources too."""
    numbers = itertools.count()
    sizes = draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 6), min_size=1))
    before = {name: [f"row {next(numbers)}" for _ in range(size)] for name, size in sizes.items()}
    now = {name: list(contents) for name, contents in before.items()}
    for _ in range(draw(st.integers(0, 8))):
        name = draw(st.sampled_from(sorted(now)))
        what = draw(
            st.sampled_from(["add", "remove", "move", "edit", "shuffle", "add source", "remove source", "sort"])
        )
        place = draw(st.integers(0, len(now[name])))
        if what == "add":
            now[name].insert(place, f"row {next(numbers)}")
        elif what in ("remove", "move") and place < len(now[name]):
            content = now[name].pop(place)
            other = now[draw(st.sampled_from(sorted(now)))]
            if what == "move":
                other.insert(draw(st.integers(0, len(other))), content)
        elif what == "edit" and place < len(now[name]):
            now[name][place] = f"row {next(numbers)}"
        elif what == "shuffle":
            now[name] = draw(st.permutations(now[name]))
        elif what == "add source":
            now = {f"new {next(numbers)}": [f"row {next(numbers)}"], **now}
        elif what == "remove source" and len(now) > 1:
            del now[name]
        elif what == "sort":
            now = dict(reversed(now.items()))
    return before, now


@given(changes())
@settings(max_examples=300)
def test_each_row_is_found_or_said_to_be_lost(both: tuple[Rows, Rows]) -> None:
    before, now = both
    names, contents = state(before)
    recorded = dict(zip(names, contents, strict=True))
    names_now, contents_now = state(now)
    found = follow(recorded, names_now, contents_now)
    there = dict(zip(contents_now, names_now, strict=True))
    for name, content in recorded.items():
        if content in there:
            assert names_now.name_of(found.numbers[name]) == there[content]
            assert found.moved.get(name, name) == there[content]
        elif names_now.number_of(name) is not None:
            assert name in found.changed
        else:
            assert name in found.gone
    assert len(found.numbers) + len(found.changed) + len(found.gone) == len(recorded)
    assert len(set(found.numbers.values())) == len(found.numbers), "no row is taken twice"


def test_of_rows_with_the_same_content_each_is_taken_once_and_one_that_is_still_there_stays() -> None:
    names, contents = state({"a": ["x", "same", "same", "y"]})
    recorded = dict(zip(names, contents, strict=True))
    found = follow(recorded, *state({"b": ["same"], "a": ["new", "x", "same", "same"]}))
    assert [found.numbers[name] for name in list(recorded)[:3]] == [2, 4, 3]
    assert found.changed == [SampleId("a", 3)]


def test_a_row_that_a_column_names_is_itself_wherever_it_is() -> None:
    then = RowNames([SourceRows("a", range(2), keys=["doc-1", "doc-2"])])
    now = RowNames([SourceRows("new", range(1), keys=["doc-9"]), SourceRows("a", range(1), keys=["doc-2"])])
    found = follow(dict(zip(then, "12", strict=True)), now, ["9", "other content"])
    assert found.numbers == {SampleId("a", 1, key="doc-2"): 1}
    assert found.gone == [SampleId("a", 0, key="doc-1")]


def test_the_lines_that_were_removed_from_a_file_move_no_name() -> None:
    """The story of a CSV of which 20 lines are removed after the ledger's list was read."""
    then = RowNames([SourceRows("reviews.csv", range(2, 202), is_file=True)])
    texts = [fingerprint({"text": f"review {line}"}) for line in range(2, 202)]
    bad = {then.name_of(number): texts[number] for number in (30, 128, 150)}
    now = RowNames([SourceRows("reviews.csv", range(2, 182), is_file=True)])
    found = follow(bad, now, texts[:40] + texts[60:])
    assert [str(name) for name in bad] == ["reviews.csv:32", "reviews.csv:130", "reviews.csv:152"]
    assert list(found.numbers.values()) == [30, 108, 130]
    assert {str(old): str(new) for old, new in found.moved.items()} == {
        "reviews.csv:130": "reviews.csv:110",
        "reviews.csv:152": "reviews.csv:132",
    }
