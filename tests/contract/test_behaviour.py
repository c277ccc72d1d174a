"""The record of corrections: each is asked for by name, and docs/migrate.md says of each what is written beside it."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import transformers

import trainwright
from trainwright.config.behaviour import ORIGINAL, OURS, Behaviour, differences, get_behaviour

SOURCE = Path(trainwright.__file__).parent
RECORD = SOURCE / "config" / "behaviour.py"
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
START = "<!-- written by tests/contract/test_behaviour.py -->\n"
END = "<!-- end -->\n"
NAMES = [one.name for one in fields(Behaviour)]


# Beginnings of the rows that people meet, besides those with a title: the page begins with them.
COMMON = (
    "BERT, RoBERTa, T5",
    "an overridden `compute_loss`, a",
    "a changed learning rate",
    "a step with NaN",
)


def table(*, is_common: bool) -> str:
    """The rows of the differences that people meet, or of all others."""
    lines = ["| transformers | Trainwright |", "|---|---|"]
    for one in differences():
        if (bool(one.title) or one.original.startswith(COMMON)) == is_common:
            original = f"**{one.title}** {one.original}" if one.title else one.original
            lines.append(f"| {original} | {one.ours} |")
    return "\n" + "\n".join(lines) + "\n\n"


def test_eight_differences_come_first() -> None:
    assert table(is_common=True).count("\n| ") == 1 + 8


def test_the_page_says_what_the_record_says() -> None:
    """With WRITE_DOCS=1 it is written."""
    before, common, others = PAGE.read_text(encoding="utf-8").split(START)
    written = []
    generated = [table(is_common=True), table(is_common=False)]
    for part in (common, others):
        said, _, after = part.partition(END)
        written.append((said, after))
    if os.environ.get("WRITE_DOCS"):
        written = [(text, after) for text, (_, after) in zip(generated, written, strict=True)]
        PAGE.write_text(before + "".join(START + said + END + after for said, after in written), encoding="utf-8")
    assert [said for said, _ in written] == generated


def test_a_run_of_ours_makes_all_corrections_and_the_originals_none() -> None:
    assert set(asdict(OURS).values()) == {True}
    assert set(asdict(ORIGINAL).values()) == {False}
    assert all(one.metadata["differences"] for one in fields(Behaviour))


def test_the_arguments_choose_the_behaviour() -> None:
    for kind in (trainwright.TrainingArguments, trainwright.Seq2SeqTrainingArguments):
        assert get_behaviour(kind(output_dir="x", use_cpu=True)) is OURS
        assert get_behaviour(kind(output_dir="x", use_cpu=True, reproduce="transformers")) is ORIGINAL
    assert get_behaviour(transformers.TrainingArguments(output_dir="x", use_cpu=True)) is OURS  # it has no such field


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path != RECORD}


@pytest.mark.parametrize("name", NAMES)
def test_a_correction_is_asked_for_by_name(name: str, sources: dict[Path, str]) -> None:
    assert any(re.search(rf"\.{name}\b", text) for text in sources.values())


def test_no_code_asks_whether_the_original_is_reproduced(sources: dict[Path, str]) -> None:
    asks = re.compile(r"\breproduces\b|\.reproduce\b|get_value\(\w+, \"reproduce\"\)|\bORIGINAL\b")
    assert [str(path) for path, text in sources.items() if asks.search(text)] == []
