"""The snippets about a search on docs/after_first_result.md run, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import optuna
import pytest

from .._support.small import data
from .small import make_module

PAGE = Path(__file__).resolve().parents[2] / "docs" / "after_first_result.md"
SNIPPETS = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_guide_runs(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    known = {"make_model": make_module, "train_set": data.vectors(16), "eval_set": data.vectors(8)}
    run = [text for text in SNIPPETS if "ray" not in text]
    assert len(run) == 1
    for text in run:
        exec(compile(text, str(PAGE), "exec"), known)
    assert known["best"].run_id is not None
    assert (tmp_path / "search" / "search.json").is_file()
    assert (tmp_path / "study.db").is_file()


def test_the_snippet_of_ray_is_python() -> None:
    (text,) = [text for text in SNIPPETS if "ray" in text]
    compile(text, str(PAGE), "exec")
