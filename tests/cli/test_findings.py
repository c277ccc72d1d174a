"""Findings in the rows of files, with the line of each: a table of files, in `check`, `check --json` and `train`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.tasks.source import load
from trainwright.errors import RecipeError
from trainwright.hub.model_card import CardContent, body
from trainwright.journal.record import read, read_findings
from trainwright.report.run_page import write_report
from trainwright.support.findings import Finding

from .commands import SMALL, call, done, small

pytestmark = pytest.mark.filterwarnings("default")

CLASSES = "text-classification"
NUMBERS = "regression"


def yes_or_no(line: int) -> str:
    return "yes" if line % 2 else "no"


def opinions(line: int) -> str:
    return "positive" if line % 2 else "negative"


def table(*changed: tuple[int, str], labels: Callable[[int], str] = yes_or_no, header: str = "text,label") -> str:
    """A table of 60 rows after its header; single lines of it, from 1, may be changed."""
    lines = [header, *(f"film {line},{labels(line)}" for line in range(2, 62))]
    for line, content in changed:
        lines[line - 1] = content
    return "\n".join(lines) + "\n"


def numbers(*changed: tuple[int, str]) -> str:
    """A table of numbers, with semicolons between the cells."""
    lines = ["text;label", *(f"film {line};{line}.5" for line in range(2, 22))]
    for line, content in changed:
        lines[line - 1] = content
    return "\n".join(lines) + "\n"


class Case(NamedTuple):
    text: str  # of the file
    check: str | None = None
    severity: str = "warning"
    rows: tuple[str, ...] = ()
    says: str = ""
    task: str = CLASSES


CASES = {
    "healthy": Case(table()),
    "a blank after a label": Case(
        table((31, "film 31,yes ")),
        "label_forms",
        rows=("table.csv:31",),
        says='\'yes \' (table.csv:31). To make them one, put into data: `labels: {"yes ": "yes"}`.',
    ),
    "another case": Case(
        table((31, "film 31,Yes")),
        "label_forms",
        rows=("table.csv:31",),
        says="'Yes' (table.csv:31)",
    ),
    "a letter too few": Case(
        table((40, "film,negtive"), labels=opinions),
        "label_forms",
        rows=("table.csv:40",),
        says="only by one letter: 'negative' (",
    ),
    "two letters swapped": Case(
        table((41, "film,postiive"), labels=opinions),
        "label_forms",
        rows=("table.csv:41",),
    ),
    "a number in two forms": Case(
        table((33, "film,1.0"), labels=lambda line: str(line % 2)),
        "label_forms",
        rows=("table.csv:33",),
        says="'1.0' (table.csv:33)",
    ),
    "words that are near": Case(table(labels=lambda line: "male" if line % 2 else "female")),
    "tags that are near": Case(table(labels=lambda line: "B-LOC" if line > 4 else "I-LOC")),
    "numbered labels": Case(table(labels=lambda line: "day 1" if line > 4 else "day 2")),
    "the header again": Case(
        table((31, "text,label")),
        "repeated_header",
        "error",
        ("table.csv:31",),
        "1 row of it repeats the names of the columns in train: table.csv:31 ('text', 'label'). It adds 'label' to the",
    ),
    "a word that is the name of its column": Case(table((31, "text,yes"))),
    "a column twice": Case(
        table(labels=lambda line: f"a film,{yes_or_no(line)}", header="text,label,label"),
        "column_twice",
        "error",
        says="the first line of table.csv has the column 'label' twice, and only the last is read.",
    ),
    "a column twice that is not used": Case(
        table(labels=lambda line: f"{yes_or_no(line)},1,2", header="text,label,n,n"),
        "column_twice",
        says="has the column 'n' twice",
    ),
    "a decimal comma": Case(
        numbers((7, "film;3,5"), (9, "film;-12,25")),
        "decimal_commas",
        "error",
        ("table.csv:7", "table.csv:9"),
        "2 rows have decimal commas in the column 'label' of train: table.csv:7 '3,5', table.csv:9 '-12,25'.",
        NUMBERS,
    ),
    "decimal points": Case(numbers(), task=NUMBERS),
    "a text of several lines": Case(
        table((5, '"a film\nof two lines",yes'), (31, "film,yes ")),
        "label_forms",
        rows=("table.csv:32",),
    ),
    "no text": Case(
        table((31, "  ,yes")),
        "texts",
        rows=("table.csv:31",),
        says="1 row has no text in train: table.csv:31 '  '.",
    ),
    "no label": Case(
        table((31, "  a film,")),
        "missing_labels",
        "error",
        ("table.csv:31",),
        "1 of the train rows has no label: table.csv:31 '  a film'.",
    ),
}


def found_in(folder: Path, case: Case) -> list[Finding]:
    (folder / "table.csv").write_text(case.text)
    (folder / "model").mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(json.dumps({"task": case.task, "model": {"path": "model"}, "data": {"train": "table.csv"}}))
    tree = read_tree(path)
    found: list[Finding] = []
    refuses = pytest.raises(RecipeError) if case.severity == "error" else nullcontext()
    with refuses as caught:
        load(checked(tree, folder), tree, found)
    if caught is not None:
        assert case.says in str(caught.value)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_this_finding_and_no_other(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = [one for one in found_in(tmp_path, case) if one.check != "single_labels"]
    expected = [] if case.check is None else [(case.check, case.severity, case.rows)]
    assert [(one.check, one.severity, one.rows) for one in found] == expected
    assert case.says in "".join(f"{one.evidence} {one.cure}" for one in found)
    assert all(one.cure and one.entry.startswith("data") for one in found)


BROKEN: dict[str, Callable[[str], str]] = {
    "warned": lambda text: text.replace("film and a long one ,yes", "film and a long one ,yes ", 1),
    "refused": lambda text: text.replace("\n", "\ntext,label\n", 1),
}


def with_held_rows(folder: Path) -> Path:
    """The small table, and an evaluation file with 16 of its rows."""
    path = small(folder, SMALL.replace("eval_share: 0.25", "eval: held.csv"))
    lines = (folder / "table.csv").read_text().splitlines()
    (folder / "held.csv").write_text("\n".join([lines[0], *lines[1:17]]) + "\n")
    return path


def report_of(folder: Path, kind: str) -> tuple[int, dict[str, Any]]:
    path = with_held_rows(folder)
    table = folder / "table.csv"
    table.write_text(BROKEN[kind](table.read_text()))
    result = call("check", str(path), "--json")
    return result.exit_code, json.loads(result.stdout)


def test_check_lists_what_is_in_the_files_with_what_the_trainer_finds(tmp_path: Path) -> None:
    code, report = report_of(tmp_path, "warned")
    assert (code, report["worst"]) == (0, "warning")
    checks = [one["check"] for one in report["findings"]]
    assert {"label_forms", "held_out", "effective_batch"} <= set(checks)
    assert "note" not in report
    (form,) = (one for one in report["findings"] if one["check"] == "label_forms")
    assert form["rows"] == ["table.csv:3"]
    (held,) = (one for one in report["findings"] if one["check"] == "held_out")
    assert all(row.startswith("held.csv:") for row in held["rows"])
    assert "'it was a " in held["evidence"]
    assert not {"label_forms", "repeated_header", "decimal_commas"} & {name for name, _ in report["not_done"]}


def test_rows_that_cannot_be_trained_fail_check_and_train(tmp_path: Path) -> None:
    code, report = report_of(tmp_path, "refused")
    assert (code, report["worst"]) == (1, "error")
    assert [one["rows"] for one in report["findings"] if one["check"] == "repeated_header"] == [["table.csv:2"]]
    shown = call("check", "config.yaml")
    assert shown.exit_code == 1
    assert "error   repeated_header   1 row of it repeats" in shown.output
    assert "no model was loaded" in shown.output
    refused = call("train", "config.yaml")
    assert refused.exit_code == 2
    assert "data.columns.label: 1 row of it repeats the names of the columns in train: table.csv:2" in refused.output
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.parametrize(("setting", "severity"), [("  max_length: 16\n", "note"), ("", "warning")])
def test_rows_far_longer_than_what_is_read_are_named(setting: str, severity: str, tmp_path: Path) -> None:
    limit = SMALL.replace("intermediate_size: 32}", "intermediate_size: 32, max_position_embeddings: 16}")
    path = small(tmp_path, limit.replace("  max_length: 16\n", setting))
    table = tmp_path / "table.csv"
    table.write_text(table.read_text() + f"begin {'word ' * 40} end,yes\n")
    report = json.loads(done("check", str(path), "--json"))
    (cut,) = (one for one in report["findings"] if one["check"] == "cut_texts")
    assert (cut["severity"], cut["rows"], cut["entry"]) == (severity, ["table.csv:66"], "data.max_length")
    assert "more than 32 words, up to 42: table.csv:66 'begin word word" in cut["evidence"]
    assert "word  end'" in cut["evidence"]


def test_training_says_once_that_rows_are_held_out_and_trained(tmp_path: Path) -> None:
    shown = done("train", str(with_held_rows(tmp_path)))
    assert shown.count("are in the training data too") == 1
    assert "note      data.eval: 16 of 16 eval rows are in the training data too, 100.0%: held.csv:" in shown


def test_a_tokenizer_for_tags_learns_the_words(tmp_path: Path) -> None:
    """It learnt the text of Python's lists, so that all sentences were alike, which the check-up found."""
    lines = [f"word{number} O\nis O\nParis B-LOC\n" for number in range(40)]
    (tmp_path / "tags.conll").write_text("\n".join(lines))
    text = SMALL.replace(CLASSES, "token-classification").replace("table.csv", "tags.conll")
    (tmp_path / "config.yaml").write_text(text.replace("vocab_size: 64", "vocab_size: 1000"))
    report = json.loads(done("check", "config.yaml", "--json"))
    assert "held_out" not in [one["check"] for one in report["findings"]]
    (tmp_path / "held.conll").write_text("\n".join(lines[:9]))
    (tmp_path / "config.yaml").write_text(text.replace("eval_share: 0.25", "eval: held.conll"))
    report = json.loads(done("check", "config.yaml", "--json"))
    (held,) = (one for one in report["findings"] if one["check"] == "held_out")
    assert "['word" in held["evidence"]


def test_a_leak_is_said_wherever_the_metric_is(tmp_path: Path) -> None:
    """A score on training rows says nothing, long after the line that said so has scrolled away."""
    small(tmp_path)
    rows = (tmp_path / "table.csv").read_text().splitlines()
    (tmp_path / "eval.csv").write_text("\n".join([*rows[:9], "a film of its own,yes"]) + "\n")
    config = tmp_path / "config.yaml"
    config.write_text(SMALL.replace("eval_share: 0.25", "eval: eval.csv"))
    result = json.loads(done("train", str(config), "--json"))
    (found,) = result["findings"]
    assert found["check"] == "held_out"
    assert "8 of 9 eval rows are in the training data too" in found["text"]
    assert found["text"].count(" is table.csv:") == 3
    said = done("resume", str(tmp_path / "run"), "--set", "training.max_steps=10")
    assert "findings  held_out (shown above" in said
    run = tmp_path / "run"
    assert [one["text"] for one in read(run).findings()] == [found["text"]], "the resumed run has found it again"
    (row,) = json.loads(done("runs", str(tmp_path), "--json"))
    assert row["findings"] == ["held_out"]
    assert "held_out" in done("runs", str(tmp_path))
    assert re.search(r"at step \d+, held_out", write_report(run).read_text(encoding="utf-8"))
    assert [one["text"] for one in read_findings(run)] == [found["text"]]
    assert "8 of 9 eval rows" in body(CardContent(model_name="m", findings=[found["text"]]), has_picture=False)


def test_compare_and_runs_know_what_was_trained_and_on_which_rows(tmp_path: Path) -> None:
    small(tmp_path)
    rows = (tmp_path / "table.csv").read_text().splitlines()
    (tmp_path / "other.csv").write_text("\n".join([rows[0], *rows[20:]]) + "\n")
    for name, table in (("a", "table"), ("b", "table"), ("c", "other")):
        text = SMALL.replace("output_dir: run", f"output_dir: runs/{name}").replace("table.csv", f"{table}.csv")
        (tmp_path / f"{name}.yaml").write_text(text.replace("max_steps: 8", "max_steps: 4\n  journal: true"))
        done("train", str(tmp_path / f"{name}.yaml"))
    same, other = (["compare", "runs/a", f"runs/{name}", "--output", "page.html"] for name in "bc")
    assert "not comparable" not in done(*same)
    shown = done(*other)
    assert "evaluated on different rows: the metrics are not comparable" in shown
    assert "data: table.csv | other.csv" in shown
    assert "evaluated on different rows" in Path("page.html").read_text(encoding="utf-8")
    assert json.loads(done(*other, "--json"))["comparable_metrics"] is False
    assert "data=other.csv" in done("runs", "runs")
