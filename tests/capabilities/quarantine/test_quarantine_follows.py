"""The quarantine excludes the rows that were meant, whatever has become of the data since."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from trainwright.capabilities.quarantine.file import QUARANTINE_NAME, add_to_quarantine
from trainwright.errors import DataError

from ..guard.poisoned import samples
from .test_quarantine import seeing

ROWS = [{**row, "number": number} for number, row in enumerate(samples(16))]
Data = Any  # a list of rows, a dataset, or a dict of them


def trained_numbers(
    folder: Path, data: Data, *, before: Callable[[Any], None] | None = None, **settings: Any
) -> set[int]:
    """Numbers of the rows that one epoch trains."""
    one, sees = seeing(folder, **{"max_steps": -1, "num_train_epochs": 1, "logging_steps": 100, **settings})
    one.train_dataset = data
    if before is not None:
        before(one)
    one.train()
    return {number for batch in sees.seen for number in batch}


def quarantined(folder: Path, data: Data, ids: list[Any], **options: Any) -> None:
    one, _ = seeing(folder)
    one.train_dataset = data
    one.quarantine(ids, **options)


def as_table(rows: list[Any]) -> Data:
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("make", [list, as_table], ids=["list", "datasets"])
def test_rows_that_were_removed_before_it_move_no_row_into_quarantine(
    make: Callable[[list[Any]], Data], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quarantined(tmp_path, make(ROWS), [3, 9, 12])
    left = [row for number, row in enumerate(ROWS) if number not in (1, 5, 6, 12)]
    with caplog.at_level(logging.WARNING):
        trained = trained_numbers(tmp_path, make(left))
    assert trained == set(range(16)) - {1, 5, 6, 12} - {3, 9}
    assert "Rows in quarantine have moved: train[3] is train[2], train[9] is train[6]." in caplog.text
    assert "no longer in the training data: train[12]." in caplog.text


def test_a_row_that_was_edited_is_trained_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quarantined(tmp_path, ROWS, ["train[3]", 4])
    edited = [{**row, "number": 99} if row["number"] == 3 else row for row in ROWS]
    with caplog.at_level(logging.WARNING):
        trained = trained_numbers(tmp_path, edited)
    assert trained == set(range(16)) - {3, 4} | {99}
    assert "Rows in quarantine have changed, so they are trained on again: train[3]." in caplog.text


def test_a_source_in_front_of_a_mixture_moves_no_row(tmp_path: Path) -> None:
    code = ROWS[:4]
    chat = ROWS[4:10]
    new = ROWS[10:]
    quarantined(tmp_path, {"code": code, "chat": chat}, ["chat[2]", 1])
    assert trained_numbers(tmp_path, {"new": new, "chat": chat, "code": code}) == set(range(16)) - {6, 1}
    assert trained_numbers(tmp_path, {"new": new, "chat": chat}) == set(range(4, 16)) - {6}


def test_a_split_of_another_size_excludes_the_same_row(tmp_path: Path) -> None:
    table = as_table(ROWS)
    train = table.train_test_split(4, seed=1)["train"]
    bad = train[5]["number"]
    quarantined(tmp_path, train, [5])
    (line,) = (tmp_path / QUARANTINE_NAME).read_text().splitlines()
    assert json.loads(line)["name"] == f"train[{bad}]"
    assert bad not in trained_numbers(tmp_path, table)
    for seed in range(4):
        assert bad not in trained_numbers(tmp_path, table.train_test_split(4, seed=seed)["train"])


@pytest.mark.parametrize("make", [list, as_table], ids=["list", "datasets"])
def test_a_column_names_rows_of_a_dataset_with_a_length(make: Callable[[list[Any]], Data], tmp_path: Path) -> None:
    quarantined(tmp_path, make(ROWS), [3, 9], column="number")
    assert trained_numbers(tmp_path, make(ROWS[5:] + ROWS[:5])) == set(range(16)) - {3, 9}
    with pytest.raises(DataError, match="id_column='nr' is not"):
        quarantined(tmp_path, make(ROWS), [3], column="nr")


def test_id_column_names_rows_by_their_values(tmp_path: Path) -> None:
    keyed = [{**row, "id": f"doc-{row['number']}"} for row in ROWS]

    def exclude(one: Any) -> None:
        one.args.id_column = "id"
        one.quarantine([2, "doc-7"])

    assert trained_numbers(tmp_path, as_table(keyed), before=exclude) == set(range(16)) - {2, 7}
    lines = [json.loads(line) for line in (tmp_path / QUARANTINE_NAME).read_text().splitlines()]
    assert lines == [{"column": "id", "sample": "doc-2"}, {"column": "id", "sample": "doc-7"}]
    edited = [{**row, "labels": 1 - row["labels"]} for row in reversed(keyed)]
    assert trained_numbers(tmp_path, as_table(edited)) == set(range(16)) - {2, 7}


# -- numbers, as `trainwright ledger never --quarantine` writes them --------------------------------------------------


def test_numbers_hold_for_their_first_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_to_quarantine(tmp_path, [3, 9])
    with caplog.at_level(logging.WARNING):
        assert trained_numbers(tmp_path, ROWS) == set(range(16)) - {3, 9}
        assert trained_numbers(tmp_path, ROWS) == set(range(16)) - {3, 9}
    assert caplog.text.count("has sample numbers.") == 1
    with pytest.raises(DataError, match=r"for 'train' with 16 rows\. The training data now has 'train' with 15 rows"):
        trained_numbers(tmp_path, ROWS[1:])
    with pytest.raises(DataError, match="now has 'a' with 8 rows, 'train' with 8 rows"):
        trained_numbers(tmp_path, {"a": ROWS[:8], "train": ROWS[8:]})


def test_numbers_are_compared_with_the_newest_checkpoint(tmp_path: Path) -> None:
    trained_numbers(tmp_path, ROWS, save_strategy="epoch")
    add_to_quarantine(tmp_path, [3, 9])
    with pytest.raises(DataError, match="data had 16 rows in checkpoint-8, but now has 15"):
        trained_numbers(tmp_path, ROWS[1:])
    assert trained_numbers(tmp_path, ROWS) == set(range(16)) - {3, 9}


def test_rows_without_content_are_refused_where_the_number_of_rows_differs(tmp_path: Path) -> None:
    class Changing:
        """Rows that are new each time they are read: their content says nothing."""

        def __init__(self, rows: list[Any]) -> None:
            self.rows = rows
            self.reads = 0.0

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return {**self.rows[index], "noise": self.reads}

    quarantined(tmp_path, Changing(ROWS), [3])
    with pytest.raises(
        DataError, match=r"names train\[3\] without the content of the row, but the rows of the data have changed"
    ):
        trained_numbers(tmp_path, Changing(ROWS[1:]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (list, "id_column='nr' is not in row 0 of the source 'train'"),
        (as_table, "id_column='nr' is not a column of the source 'train', which has"),
        (lambda rows: {"a": rows, "b": [{**row, "nr": 0.5} for row in rows]}, "is not in row 0 of the source 'a'"),
        (lambda rows: [{**row, "nr": 0.5} for row in rows], "holds 0.5 in row 0"),
        (lambda rows: iter_stream(rows), "the training data is a stream"),
    ],
    ids=["list", "datasets", "mixture", "fraction", "stream"],
)
def test_id_column_that_names_no_rows_is_error_before_the_first_step(
    make: Callable[[list[Any]], Data], said: str, tmp_path: Path
) -> None:
    def name_rows(one: Any) -> None:
        one.args.id_column = "nr"

    with pytest.raises(DataError, match=said):
        trained_numbers(tmp_path, make(ROWS), before=name_rows, max_steps=2, num_train_epochs=1)


def iter_stream(rows: list[Any]) -> Data:
    return as_table(rows).to_iterable_dataset()
