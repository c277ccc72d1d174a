"""Which rows are held out: equal rows and groups on one side, values with their share, else the first rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.tasks import hold_out
from trainwright.errors import RecipeError

from .test_task_source import material

SEEDS = range(60)


def drawn(seed: int) -> tuple[float, int, list[list[int | None]]]:
    generator = random.Random(seed)
    number = generator.randrange(0, 80)
    kinds = [generator.choice([2, 5, 30, 300]) for _ in range(generator.randrange(0, 3))]
    keys = [[None if generator.random() < 0.2 else generator.randrange(kind) for _ in range(number)] for kind in kinds]
    return generator.choice([0.0, 0.1, 0.25, 0.5, 0.9]), number, keys


@pytest.mark.parametrize("seed", SEEDS)
def test_no_key_is_on_both_sides_and_no_share_is_exceeded(seed: int) -> None:
    share, number, keys = drawn(seed)
    held = set(hold_out.choose(share, number, *keys))
    assert len(held) <= int(number * share)
    for key in keys:
        inside = {key[place] for place in held} - {None}
        outside = {key[place] for place in range(number) if place not in held} - {None}
        assert inside & outside == set()
    if not any(any(one is not None for one in key) for key in keys):
        assert sorted(held) == list(range(int(number * share)))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_value_has_its_share(seed: int) -> None:
    generator = random.Random(seed)
    number = generator.randrange(1, 200)
    strata = [generator.choice("aaaab" + "c" * (seed % 2)) for _ in range(number)]
    held = hold_out.choose(0.2, number, strata=strata)
    assert len(held) == int(number * 0.2)
    sizes = Counter(strata)
    found = Counter(strata[place] for place in held)
    for value, size in sizes.items():
        assert abs(found[value] - 0.2 * size) < 1


def test_the_example_of_the_module() -> None:
    by = [1, 2, 2, 3, 1, 4, 5, 6, 7, 8]
    texts = ["a", "b", "c", "d", "c", "f", "g", "h", "i", "j"]
    assert hold_out.choose(0.2, 10, texts, by) == [3, 5]


# -- by the file -------------------------------------------------------------------------------------------------------


def rows(*, copies: int = 1, users: int = 10) -> list[dict[str, Any]]:
    return [
        {"text": f"text {i // copies}", "label": "aaab"[i % 4], "user": f"user {i % users}", "n": i} for i in range(80)
    ]


def test_copies_of_a_text_are_on_one_side_whatever_their_labels(tmp_path: Path) -> None:
    found = material(tmp_path, rows(copies=4), eval_share=0.25)
    assert len(found.eval) == 20
    assert {row["text"] for row in found.eval} & {row["text"] for row in found.train} == set()
    assert [one for one in found.found if one.check == "held_out"] == []


def test_rows_of_a_user_are_on_one_side(tmp_path: Path) -> None:
    found = material(tmp_path, rows(), eval_share=0.25, split_by="user")
    assert len(found.eval) == 16  # two users of ten
    assert {row["user"] for row in found.eval} & {row["user"] for row in found.train} == set()


def test_each_label_has_its_share(tmp_path: Path) -> None:
    found = material(tmp_path, rows(), eval_share=0.25, stratify="label")
    assert Counter(row["label"] for row in found.eval) == {"a": 15, "b": 5}


def test_groups_that_are_too_large_are_said_and_held_out_by_nobody(tmp_path: Path) -> None:
    found = material(tmp_path, rows(users=2), eval_share=0.25, split_by="user")
    assert len(found.eval) == 0
    (note,) = [one for one in found.found if one.check == "hold_out"]
    assert "0 rows of 80 are held out instead of 20: rows with the same 'user'" in note.evidence
    assert "Raise data.eval_share" in note.cure


@pytest.mark.parametrize("entry", ["split_by", "stratify"])
def test_a_column_that_is_not_there_is_named(entry: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"data\.{entry}: there is no column 'usr'\. Did you mean user\?"):
        material(tmp_path, rows(), **{entry: "usr"})


def test_a_dataset_is_held_out_by_the_same_rule(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(copies=4))})
    saved.save_to_disk(tmp_path / "saved")
    found = material(tmp_path, dataset="saved", train="train", eval_share=0.25, split_by="user")
    assert set(found.eval["user"]) & set(found.train["user"]) == set()
    assert set(found.eval["text"]) & set(found.train["text"]) == set()


def test_cells_that_are_missing_belong_to_no_group(tmp_path: Path) -> None:
    """Also where the first row has no such column, and where pandas wrote NaN."""
    table = [{**row, "user": math.nan if row["n"] % 2 else f"user {row['n'] % 10}"} for row in rows()]
    del table[0]["user"]
    found = material(tmp_path, table, eval_share=0.25, split_by="user")
    assert len(found.eval) == 20
