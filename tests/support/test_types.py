"""Shared helpers: values as JSON, files that are replaced at once, suggestions for a name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright._types import json_value, replacing, write_text
from trainwright.errors import did_you_mean


def test_any_value_becomes_strict_json() -> None:
    value = {
        1: (np.float32(0.5), np.int64(3), torch.tensor(2), np.array([4])),
        "not finite": [math.inf, float("nan"), np.float64("-inf")],
        "others": {"path": Path("a/b"), "many": torch.zeros(2).tolist(), "none": None, "yes": True},
    }
    expected = {
        "1": [0.5, 3, 2, 4],
        "not finite": ["inf", "nan", "-inf"],
        "others": {"path": str(Path("a/b")), "many": [0.0, 0.0], "none": None, "yes": True},
    }
    assert json.loads(json.dumps(json_value(value), allow_nan=False)) == expected
    assert json_value({"b"}) == ["b"]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def half(file: Path) -> None:
        file.write_text("half")
        assert path.read_text() == "old"
        raise InterruptedError

    with pytest.raises(InterruptedError), replacing(path) as partial:
        half(partial)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    with replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "quoted", "expected"),
    [
        ("learning_rat", False, " Did you mean learning_rate?"),
        ("learning_rat", True, " Did you mean 'learning_rate'?"),
        ("seed", False, ""),
        (3, False, ""),
    ],
)
def test_the_nearest_name_is_suggested(name: object, quoted: bool, expected: str) -> None:
    assert did_you_mean(name, ["learning_rate", "weight_decay"], quoted=quoted) == expected
