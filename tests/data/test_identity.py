"""Names of rows: as the user knows them, and right when the data changes."""

from __future__ import annotations

import datetime
import itertools
import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset

from trainwright.capabilities.mixture.dataset import MixtureDataset
from trainwright.capabilities.mixture.stream import MixtureStream
from trainwright.data.identity import SampleId, Seen, as_hex, fingerprint, follow, parse_hex
from trainwright.data.row_names import IndexedRows, OriginRows, RowNames, RowOrigin, row_names
from trainwright.errors import DataError

# -- names -----------------------------------------------------------------------------------------------------------


def test_a_name_is_what_the_user_would_look_for() -> None:
    assert str(SampleId("train", 130, "reviews.csv", is_line=True)) == "reviews.csv:130"
    assert str(SampleId("train", 7, "table.parquet")) == "table.parquet[7]"
    assert str(SampleId("chat", 17)) == "chat[17]"
    assert str(SampleId("chat", 17, key="doc-3")) == "doc-3"
    assert str(SampleId("train", 12, "book.txt", is_line=True, part=3)) == "book.txt:12#3"


@pytest.mark.parametrize(
    "name",
    [
        SampleId("train", 3, "a.csv", is_line=True),
        SampleId("train", 3, "a.parquet", part=2),
        SampleId("chat", 0),
        SampleId("w", 4, key="x"),
        SampleId("w", 4, key=7),
    ],
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
        {"source": "a", "line": 1},
        {"source": "a", "row": 1, "part": -1},
        {"source": "a", "row": 1, "file": 2},
    ],
)
def test_values_that_no_run_writes_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not name a row"):
        SampleId.from_dict(values)


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
    content = fingerprint(forms)
    assert parse_hex(as_hex(content)) == content


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


def state(rows: Rows, *, is_read: bool = True) -> RowNames:
    """Names of sources by index; without `is_read` their content cannot be read."""
    sources = [Contents(name, contents, is_read=is_read) for name, contents in rows.items()]
    return RowNames(sources)


class Contents(IndexedRows):
    def __init__(self, name: str, contents: list[str], *, is_read: bool) -> None:
        super().__init__(name, contents)
        self.is_read = is_read

    def read_content(self, place: int) -> int | None:
        return super().read_content(place) if self.is_read else None


def kept(names: RowNames) -> dict[SampleId, Seen]:
    return {
        names.find_name(number): Seen(content, names.find_size(names.find_name(number)))
        for number, content in names.contents()
    }


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
    recorded = kept(state(before))
    names = state(now)
    found = follow(recorded, names)
    there = {names.read_fingerprint(number): name for number, name in enumerate(names)}
    for name, seen in recorded.items():
        if seen.content in there:
            assert [names.find_name(number) for number in found.numbers[name]] == [there[seen.content]]
            assert found.moved.get(name, name) == there[seen.content]
        elif names.find_numbers(name):
            assert name in found.changed
        else:
            assert name in found.gone
    assert len(found.numbers) + len(found.changed) + len(found.gone) == len(recorded)
    taken = [number for numbers in found.numbers.values() for number in numbers]
    assert len(set(taken)) == len(taken), "no row is taken twice"


@given(changes())
@settings(max_examples=200)
def test_a_name_alone_is_not_trusted_in_a_source_of_another_length(both: tuple[Rows, Rows]) -> None:
    before, now = both
    recorded = {name: Seen(None, seen.num_rows) for name, seen in kept(state(before)).items()}
    found = follow(recorded, state(now, is_read=False))
    for name in recorded:
        is_same_size = len(before[name.source]) == len(now.get(name.source, ()))
        assert (name in found.numbers) == is_same_size
        assert (name in found.unmatched) != is_same_size


def test_name_alone_is_not_trusted_where_another_row_of_source_was_lost() -> None:
    recorded = kept(state({"a": ["x", "y"], "b": ["z"]}))
    x, y, z = recorded
    recorded[y] = recorded[z] = Seen(None, 2)
    recorded[z] = Seen(None, 1)
    found = follow(recorded, state({"a": ["new", "x"], "b": ["other"]}))
    assert found.unmatched == [y]
    assert found.numbers == {x: [1], z: [2]}


def test_equal_rows_are_followed_once_each_and_one_that_is_there_stays() -> None:
    recorded = kept(state({"a": ["x", "same", "same", "y"]}))
    found = follow(recorded, state({"b": ["same"], "a": ["new", "x", "same", "same"]}))
    assert [found.numbers[name] for name in list(recorded)[:3]] == [[2], [4], [3]]
    assert found.changed == [SampleId("a", 3)]


def test_a_row_that_a_column_names_is_itself_wherever_it_is() -> None:
    def named(**sources: list[str]) -> RowNames:
        rows = {name: [{"id": key, "text": f"{name} {key}"} for key in keys] for name, keys in sources.items()}
        return row_names(MixtureDataset(rows), id_column="id")

    found = follow(kept(named(a=["doc-1", "doc-2"])), named(new=["doc-9"], a=["doc-2"]))
    assert found.numbers == {SampleId("a", 1, key="doc-2"): [1]}
    assert found.gone == [SampleId("a", 0, key="doc-1")]


def lines(texts: list[str], *, first: int = 2, cut_into: int = 1) -> RowNames:
    """Names of the samples of a file, each row in as many parts."""
    names = [
        SampleId("train", line, "reviews.csv", is_line=True, part=part if cut_into > 1 else None)
        for line in range(first, first + len(texts))
        for part in range(cut_into)
    ]
    contents = np.asarray([fingerprint(text) for text in texts for _ in range(cut_into)], np.uint64)
    return RowNames([OriginRows("train", RowOrigin(names, contents))])


def test_the_lines_that_were_removed_from_a_file_move_no_name() -> None:
    """The story of a CSV of which 20 lines are removed after the ledger's list was read."""
    texts = [f"review {line}" for line in range(2, 202)]
    then = lines(texts)
    bad = {then.find_name(number): Seen(then.read_fingerprint(number), 200) for number in (30, 128, 150)}
    found = follow(bad, lines(texts[:40] + texts[60:]))
    assert [str(name) for name in bad] == ["reviews.csv:32", "reviews.csv:130", "reviews.csv:152"]
    assert list(found.numbers.values()) == [[30], [108], [130]]
    assert {str(old): str(new) for old, new in found.moved.items()} == {
        "reviews.csv:130": "reviews.csv:110",
        "reviews.csv:152": "reviews.csv:132",
    }


def test_the_parts_of_row_that_was_cut_are_found_singly_and_together() -> None:
    texts = [f"review {line}" for line in range(5)]
    then = lines(texts, cut_into=3)
    assert then.find("reviews.csv:3#2") == [5]
    assert then.find("reviews.csv:3") == [3, 4, 5]
    whole = SampleId("train", 3, "reviews.csv", is_line=True)
    recorded = {then.find_name(8): Seen(then.read_fingerprint(8)), whole: Seen(then.read_fingerprint(3))}
    found = follow(recorded, lines(["new", *texts], cut_into=3))
    assert found.numbers == {then.find_name(8): [11], whole: [6, 7, 8]}
    assert str(found.moved[whole]) == "reviews.csv:4"


# -- names of datasets -----------------------------------------------------------------------------------------------


def test_a_dataset_with_held_out_rows_is_named_by_the_index_before() -> None:
    whole = [{"x": value} for value in range(10)]
    part = Subset(Subset(whole, [9, 7, 5, 3]), [3, 1])  # type: ignore[arg-type]
    names = row_names(part)
    assert [str(name) for name in names] == ["train[3]", "train[7]"]
    assert names.find("train[7]") == [1]
    assert names.read_fingerprint(1) == fingerprint({"x": 7})
    with pytest.raises(DataError, match=r"no sample 'train\[9\]'\. Sample names look like 'train\[3\]'"):
        names.find("train[9]")


def test_a_datasets_dataset_is_named_by_the_row_of_its_table() -> None:
    whole = datasets.Dataset.from_dict({"x": list(range(20)), "id": [f"doc-{one}" for one in range(20)]})
    part = whole.train_test_split(5, seed=3)["train"]
    names = row_names({"a": part}["a"])
    for number in range(len(part)):
        assert str(names.find_name(number)) == f"train[{part[number]['x']}]"
        assert names.find_numbers(names.find_name(number)) == [number]
    keyed = row_names(part, id_column="id")
    assert keyed.find(part[3]["id"]) == [3]
    with pytest.raises(DataError, match="id_column='nr' is not a column of the source 'train', which has x, id"):
        row_names(part, id_column="nr").find_name(0)


def test_a_row_that_comes_twice_has_two_samples() -> None:
    whole = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    names = row_names(whole.select([2, 0, 2]))
    assert names.find("train[2]") == [0, 2]


def test_a_fingerprint_ignores_random_augmentation_and_draws_no_random_numbers() -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return {"x": index + torch.rand(2), "y": np.random.rand(), "z": random.random()}

    states = random.getstate(), torch.get_rng_state()
    names = row_names(Noisy())
    first = list(names.contents())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    random.seed(99)
    torch.manual_seed(99)
    assert list(names.contents()) == first
    assert len(set(first)) == 4


def test_rows_that_are_never_the_same_have_no_fingerprint(caplog: pytest.LogCaptureFixture) -> None:
    count = itertools.count()

    class Counting(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return {"x": next(count)}

    assert list(row_names(Counting()).contents()) == [(0, None), (1, None)]
    assert "Rows of train differ each time they are read" in caplog.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_names_of_a_mixture(is_stream: bool) -> None:
    sources: dict[str, Any] = {"code": [1, 2], "chat": Stream([3, 4, 5]) if is_stream else [3, 4, 5]}
    mixture: Any = MixtureStream(sources) if is_stream else MixtureDataset(sources)
    names = row_names(mixture)
    numbers = [0, 2, 1, 3, 5] if is_stream else range(5)
    shown = [str(names.find_name(number)) for number in numbers]
    assert shown == ["code[0]", "code[1]", "chat[0]", "chat[1]", "chat[2]"]
    for number in numbers:
        name = names.find_name(number)
        assert names.find_numbers(name) == [number]
        assert (name.source, name.row) == mixture.find_source(number)
    assert (names.read_fingerprint(1) is None) == is_stream
    assert [number for number, _ in names.contents()] == ([0, 2] if is_stream else [*range(5)])
    for number in (-1, 4 if is_stream else 5):
        with pytest.raises(IndexError):
            names.find_name(number)


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)
