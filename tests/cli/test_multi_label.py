"""Rows with several labels: lists, JSON in a table, or columns of 0 and 1; F1 is that of scikit-learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from trainwright.cli.tasks.task_metrics import score_label_sets
from trainwright.evaluation.outputs import EvalPrediction

from .commands import SMALL, call, done, small

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]

ROWS: list[dict[str, Any]] = [
    {
        "text": f"a {('bad', 'good')[number % 2]} {('short', 'long', 'long')[number % 3]} film {'ha ' * (number % 8)}",
        "label": (["good"] if number % 2 else []) + (["long"] if number % 3 else []),
    }
    for number in range(64)
]
LINES = SMALL
for _old, _new in {
    "table.csv": "rows.jsonl",
    "max_steps: 8": "max_steps: 150",
    "save_steps: 4": "save_steps: 150",
    "eval_share: 0.25": "eval: rows.jsonl",
    "per_device_train_batch_size: 4": "per_device_train_batch_size: 16",
}.items():
    LINES = LINES.replace(_old, _new)


def write(folder: Path, form: str) -> Path:
    """Writes the rows in a form, and a file that trains on them."""
    if form == "lists":
        path = small(folder, LINES)
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        return path
    text = LINES.replace("rows.jsonl", "table.csv")
    names = "label"
    cells = [json.dumps(row["label"]).replace('"', '""') for row in ROWS]
    if form == "columns":
        text = text.replace("  max_length: 16", "  max_length: 16\n  columns: {label: [good, long]}")
        names = "good,long"
        rows = [f"{row['text']},{int('good' in row['label'])},{int('long' in row['label'])}" for row in ROWS]
    else:
        rows = [f'{row["text"]},"{cell}"' for row, cell in zip(ROWS, cells, strict=True)]
    path = small(folder, text)
    (folder / "table.csv").write_text("\n".join([f"text,{names}", *rows]) + "\n")
    return path


@pytest.mark.parametrize("form", ["lists", "json", "columns"])
def test_labels_of_each_form_are_learned_and_predicted_as_lists(form: str, tmp_path: Path) -> None:
    shown = json.loads(done("train", str(write(tmp_path, form)), "--json"))
    assert shown["eval"]["eval_f1_micro"] > 0.7
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert sorted(config["label2id"]) == ["good", "long"]
    data = tmp_path / ("rows.jsonl" if form == "lists" else "table.csv")
    words = ("--data", str(data), "--json")
    found = [json.loads(line) for line in done("predict", str(tmp_path / "run"), *words).splitlines()]
    # The model is too small for both labels; it learns one of them.
    right = [("long" in line["labels"]) == ("long" in row["label"]) for line, row in zip(found, ROWS, strict=True)]
    assert sum(right) == 64
    assert set(found[0]["scores"]) == {"good", "long"}
    evaluated = json.loads(done("eval", str(tmp_path / "run"), *words, "--output", str(tmp_path / "page.html")))
    assert {"f1_micro", "f1_macro", "subset_accuracy", "loss"} <= evaluated["metrics"].keys()
    assert evaluated["confusion"] == []
    assert len(evaluated["hardest"]) == 10


def test_the_check_up_has_nothing_against_them(tmp_path: Path) -> None:
    assert json.loads(done("check", str(write(tmp_path, "lists")), "--json"))["worst"] != "error"


def test_the_scores_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(40, 5))
    labels = (generator.random((40, 5)) > 0.6).astype(np.float32)
    labels[:, 4] = 0
    logits[:, 4] = -1
    found = score_label_sets(EvalPrediction(logits, labels))
    for average in ("micro", "macro"):
        wanted = f1_score(labels, logits > 0, average=average, zero_division=0)
        assert found[f"f1_{average}"] == pytest.approx(wanted)
    rows_right = np.all((logits > 0) == (labels > 0), axis=1)
    assert found["subset_accuracy"] == pytest.approx(rows_right.mean())


@pytest.mark.parametrize(
    ("form", "words", "said"),
    [
        ("columns", ("--set", "data.columns={label: [good, lang]}"), "there is no column 'lang'. Did you mean long?"),
        ("columns", ("--set", "data.columns={label: [good, text]}"), "in the column 'text' is neither 0 nor 1"),
        (
            "columns",
            ("--set", "data.columns={text: [good, text]}"),
            "only the label of a classification may have several",
        ),
        ("lists", ("--set", "data.class_weights=balanced"), "weights are for rows with one label each"),
        ("lists", ("--set", "data.labels=[good]"), "labels that are not listed: long"),
    ],
)
def test_what_cannot_be_is_said(form: str, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = call("train", str(write(tmp_path, form)), *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_row_without_a_list_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "lists")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"text": "a film", "label": "good"}) + "\n")
    shown = " ".join(call("train", str(path)).output.split())
    assert "'good' is not a list of labels, and other rows have lists. Write [] for no label." in shown


@pytest.mark.parametrize("form", ["lists", "columns"])
def test_an_export_is_proved(form: str, tmp_path: Path) -> None:
    done("train", str(write(tmp_path, form)), "--max_steps", "2")
    shown = done("export", str(tmp_path / "run"), str(tmp_path / "out"), "--prove")
    assert "largest difference 0" in shown
    assert "f1_micro" in shown


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ([None, "good"], "None is not a label"),
        ([["good"]], "['good'] is not a label"),
        ([1, 2.0, True], "2.0 is not a label"),
        ([True], "True is not a label"),
        (None, "None is not a list of labels"),
        (["good", ""], "'' is not a label"),
    ],
)
@pytest.mark.parametrize("is_json", [False, True])
def test_a_list_with_something_else_is_named(cell: Any, said: str, is_json: bool, tmp_path: Path) -> None:
    path = write(tmp_path, "lists")
    rows = [dict(row) for row in ROWS]
    rows[3]["label"] = cell
    if is_json:
        rows = [{**row, "label": json.dumps(row["label"])} for row in rows]
        said = said.replace("None is not a list", "'null' is not a list")
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = call("train", str(path))
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert said in shown
    assert "rows.jsonl:4" in shown


def test_whole_numbers_are_labels(tmp_path: Path) -> None:
    path = write(tmp_path, "lists")
    rows = [{**row, "label": [2, 5] if number % 2 else [5]} for number, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done("train", str(path), "--max_steps", "2")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert sorted(config["label2id"]) == ["2", "5"]


def test_an_empty_cell_of_a_column_of_0_and_1_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "columns")
    table = tmp_path / "table.csv"
    lines = table.read_text().splitlines()
    lines[6] = f"{lines[6].split(',')[0]},,1"
    table.write_text("\n".join(lines) + "\n")
    result = call("train", str(path))
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert "the cell of the column 'good' is empty" in shown
    assert "table.csv:7" in shown


def test_rows_that_are_not_used_may_lack_labels(tmp_path: Path) -> None:
    path = write(tmp_path, "columns")
    table = tmp_path / "table.csv"
    lines = [f"{line},{number % 8 == 6}" for number, line in enumerate(table.read_text().splitlines())]
    lines[0] = lines[0].replace("False", "left_out")
    lines[6] = f"{lines[6].split(',')[0]},,1,True"
    table.write_text("\n".join(lines) + "\n")
    done("train", str(path), "--max_steps", "2", "--set", "data.where={left_out: 'False'}")
