"""The helpers that others import: order and deletions as in transformers, but for directories that are no steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer_utils as theirs

from trainwright import rotate_checkpoints, sort_checkpoints

pytestmark = pytest.mark.framework

TIMES = {100: 5.0, 9: 50.0, 20: 20.0, 3: 30.0}


def made(root: Path) -> str:
    for step, when in TIMES.items():
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
        os.utime(folder, (1e9 + when, 1e9 + when))
    (root / "checkpoint-file").write_text("x")
    return str(root)


def left(root: str) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir())


@pytest.mark.parametrize("use_mtime", [False, True])
@pytest.mark.parametrize("best", [None, 3, 20, 100, 7])
def test_the_order_is_that_of_transformers(best: int | None, use_mtime: bool, tmp_path: Path) -> None:
    root = made(tmp_path / "run")
    how: dict[str, Any] = {"use_mtime": use_mtime}
    how["best_model_checkpoint"] = None if best is None else f"{root}/checkpoint-{best}"
    assert sort_checkpoints(root, **how) == theirs.sort_checkpoints(root, **how)
    assert sort_checkpoints(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize("best", [None, 3, 20, 100])
def test_so_is_what_is_deleted(best: int | None, limit: int | None, tmp_path: Path) -> None:
    ours = made(tmp_path / "ours")
    original = made(tmp_path / "theirs")
    for root, rotate in ((ours, rotate_checkpoints), (original, theirs.rotate_checkpoints)):
        rotate(root, limit, None if best is None else f"{root}/checkpoint-{best}")
    assert left(ours) == left(original)


def test_directories_without_a_step_stay(tmp_path: Path) -> None:
    root = made(tmp_path / "run")
    for name in ("checkpoint-5-keep", "checkpoint-my-keeper", "my-checkpoint-1"):
        (tmp_path / "run" / name).mkdir()
    rotate_checkpoints(root, 1)
    assert left(root) == [
        "checkpoint-100",
        "checkpoint-5-keep",
        "checkpoint-file",
        "checkpoint-my-keeper",
        "my-checkpoint-1",
    ]
