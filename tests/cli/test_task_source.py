"""Rows, labels and samples: what is held out, what is refused and with which line, and what a model is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.tasks import source, task_metrics
from trainwright.cli.tasks.source import TaskSource, find_labels, load
from trainwright.cli.tasks.task_objects import encoded, pieces
from trainwright.errors import RecipeError

from .commands import SMALL, call

ROWS = [{"text": f"text {i}", "label": "ab"[i % 2], "source": "one" if i < 15 else "two"} for i in range(20)]


def material(
    folder: Path, rows: list[dict[str, Any]] | None = None, *, task: str = "text-classification", **data: Any
) -> TaskSource:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS if rows is None else rows)))
    (folder / "model").mkdir(exist_ok=True)
    value = {"task": task, "model": {"path": "model"}, "data": {"train": "rows.jsonl", **data}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(value, indent=1))  # which is YAML too, an entry a line
    tree = read_tree(path)
    return load(checked(tree, folder), tree)


def test_what_is_held_out_is_drawn_once_and_never_trained_on(tmp_path: Path) -> None:
    one = material(tmp_path, eval_share=0.25)
    again = material(tmp_path, eval_share=0.25)
    assert (len(one.train), len(one.eval)) == (15, 5)
    assert one.eval == again.eval
    assert sorted(row["text"] for row in [*one.train, *one.eval]) == sorted(row["text"] for row in ROWS)
    assert one.eval != material(tmp_path, eval_share=0.25, split_seed=1).eval


def test_rows_are_chosen_and_cut(tmp_path: Path) -> None:
    found = material(tmp_path, where={"source": "one"}, max_train_rows=7, eval_share=0.2, max_eval_rows=2)
    assert (len(found.train), len(found.eval)) == (7, 2)
    assert {row["source"] for row in found.train} == {"one"}


@pytest.mark.parametrize("installed", [True, False])
def test_another_encoding_is_found_and_named(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    text = "text;label\n" + "".join(
        f"Das Geb\u00e4ude hat viele Fenster f\u00fcr {i} Leute;{i % 2}\n" for i in range(40)
    )
    (tmp_path / "rows.csv").write_bytes(text.encode("cp1252"))
    found = material(tmp_path, train="rows.csv")
    assert {row["text"][:11] for row in found.train} == {"Das Geb\u00e4ude"}
    assert "rows.csv is not UTF-8 and is read as cp125" in found.notes[0]
    given = material(tmp_path, train="rows.csv", encoding="cp1252", delimiter=";")
    assert (given.train, given.notes) == (found.train, [])
    with pytest.raises(RecipeError, match=r"rows\.csv is not text in ascii"):
        material(tmp_path, train="rows.csv", encoding="ascii")
    (tmp_path / "rows.csv").write_text(text, encoding="utf-16")
    assert material(tmp_path, train="rows.csv").train == found.train
    (tmp_path / "rows.csv").write_bytes(b"text;label\nabc\x81;1\n")
    if not installed:
        with pytest.raises(RecipeError, match=r"rows\.csv is not text in UTF-8"):
            material(tmp_path, train="rows.csv")


def test_a_dataset_of_the_package_gives_the_same_as_a_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    labels = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(20)]
    made = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made.select(range(4))}).save_to_disk(tmp_path / "saved")
    found = material(tmp_path, train=None, dataset="saved", where={"label": [0, 1]}, max_train_rows=8)
    assert (len(found.train), len(found.eval)) == (8, 4)
    assert find_labels(found, "label").names == ["no", "yes"]
    samples = encoded(found, found.train, lambda columns: {"length": [len(text) for text in columns["text"]]})
    assert samples.column_names == ["length"]
    with pytest.raises(RecipeError, match=r"config\.yaml:8: data.dataset: it has no split 'tets'. Did you mean test\?"):
        material(tmp_path, train=None, dataset="saved", eval="tets")


def test_where_hub_is_away_caches_of_the_package_are_asked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    switches = (datasets.config, huggingface_hub.constants)
    before = [one.HF_HUB_OFFLINE for one in switches]
    seen: list[bool] = []

    def load_dataset(name: str, subset: str | None, *, trust_remote_code: bool) -> None:
        assert not trust_remote_code
        seen.extend(one.HF_HUB_OFFLINE for one in switches)
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(source, "dataset_problem", lambda name: f"{name} is away.")
    with pytest.raises(RecipeError, match="me/absent is away"):
        material(tmp_path, train=None, dataset="me/absent")
    assert seen == [True, True]
    assert [one.HF_HUB_OFFLINE for one in switches] == before


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"columns": {"text": "txt"}}, "data.columns.text: there is no column 'txt'. Did you mean text?"),
        ({"where": {"sorce": "one"}}, "data.where.sorce: there is no column 'sorce'. Did you mean source?"),
        ({"where": {"source": "three"}}, "data.where: no row is left to train on."),
    ],
)
def test_columns_that_are_not_there_are_refused(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        material(tmp_path, **data)
    assert said in str(caught.value)
    assert "config.yaml:" in str(caught.value)


@pytest.mark.parametrize("size", [64 << 20, 1])
def test_mistakes_in_the_data_are_listed_with_those_of_the_settings(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "QUICK_BYTES", size)  # a file above is only read by a recipe without mistakes
    (tmp_path / "rows.csv").write_text("review;stars\na film;1\nanother;2\n")
    text = SMALL.replace("table.csv", "rows.csv").replace("max_steps: 8", "epochs: 2")
    (tmp_path / "config.yaml").write_text(text)
    found = call("train", str(tmp_path / "config.yaml"), "--lr", "1e-4").output
    assert found.count("training.num_train_epochs?") == found.count("training.learning_rate?") == 1
    for column in ("text", "label"):
        said = f"there is no column '{column}'. The columns are: review, stars. Set data.columns.{column} to yours."
        assert (said in " ".join(found.split())) == (size > 1), found


def test_labels_are_found_listed_or_renamed(tmp_path: Path) -> None:
    numbers = [{"text": "x", "label": str(i % 12)} for i in range(40)]
    assert find_labels(material(tmp_path, numbers), "label").names == [str(i) for i in range(12)]
    assert find_labels(material(tmp_path, labels=["b", "a"]), "label").find("a") == 1
    renamed = find_labels(material(tmp_path, labels={"a": "good", "b": "bad"}), "label")
    assert (renamed.names, renamed.find("b"), renamed.for_config["label2id"]) == (
        ["good", "bad"],
        1,
        {"good": 0, "bad": 1},
    )


def test_a_mapping_lists_what_changes(tmp_path: Path) -> None:
    rows = [{"text": f"x {i}", "label": label} for i, label in enumerate(["yes", "Yes", "no", "n", "yes", "no"])]
    labels = find_labels(material(tmp_path, rows, labels={"Yes": "yes", "n": None}), "label")
    assert (labels.names, labels.find("Yes"), labels.find("no")) == (["yes", "no"], 0, 1)


@pytest.mark.parametrize("named", ["Y", "yes", "Yes", None])
@pytest.mark.parametrize("others", [{}, {"No": "N"}])
def test_a_mapping_of_a_label_that_no_row_has_is_refused(
    named: str | None, others: dict[str, str], tmp_path: Path
) -> None:
    """Whatever it is mapped to: a class without rows would be added."""
    rows = [{"text": f"x {i}", "label": ["Yes", "No"][i % 2]} for i in range(8)]
    with pytest.raises(RecipeError, match=r"no row has the label 'yes', which .*\. Did you mean 'Yes'\?"):
        find_labels(material(tmp_path, rows, labels={**others, "yes": named}), "label")


def test_the_cure_for_labels_that_are_alike_is_one_block(tmp_path: Path) -> None:
    """With what is mapped already, and with each kind of likeness."""
    labels = ["positive"] * 22 + ["Positive", "positve", "1", "1.0", "n", "no", "no"]
    rows = [{"text": f"x {i}", "label": label} for i, label in enumerate(labels)]
    notes = [note for note in material(tmp_path, rows, labels={"n": "no"}).notes if "differ only" in note]
    block = '{"n": "no", "Positive": "positive", "1.0": "1", "positve": "positive"}'
    assert len(notes) == 3
    assert all(note.endswith(f"To make them one, put into data: `labels: {block}`.") for note in notes)
    cured = material(tmp_path, rows, labels=json.loads(block))
    assert [note for note in cured.notes if "differ only" in note] == []
    assert find_labels(cured, "label").names == ["no", "positive", "1"]


def test_rows_without_a_label_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "label": None if i < 3 else row["label"]} for i, row in enumerate(ROWS)]
    with pytest.raises(RecipeError, match=r"rows have no label: rows.jsonl:1 'text 0', rows.jsonl:2 .* Fill them in"):
        material(tmp_path, rows)


def test_what_is_odd_in_the_rows_is_noted_with_their_names(tmp_path: Path) -> None:
    labels = ["yes", "no", "yes ", "Yes", "no", "yes", "no", "maybe", "yes"]
    rows = [{"text": " " * i if i in (1, 7) else f"text {i}", "label": label} for i, label in enumerate(labels)]
    assert material(tmp_path, rows).notes == [
        "data.columns.text: 2 rows have no text in train: rows.jsonl:2 ' ', rows.jsonl:8 '       '. Remove them, or "
        "fill them in.",
        "data.columns.label: labels with a single row: 'yes ' (rows.jsonl:3), 'Yes' (rows.jsonl:4), 'maybe' "
        "(rows.jsonl:8). One row is trained or evaluated, never both. Add rows, or exclude them with data.where.",
        "data.labels: labels that differ only by case or blanks: 'yes' (rows.jsonl:1, rows.jsonl:6, rows.jsonl:9), "
        "'yes ' (rows.jsonl:3), 'Yes' (rows.jsonl:4). To make them one, put into data: "
        '`labels: {"yes ": "yes", "Yes": "yes"}`.',
    ]
    cured = {"yes ": "yes", "Yes": "yes"}
    found = material(tmp_path, rows, labels=cured, where={"label": ["yes", "yes ", "Yes", "no"]})
    assert [note for note in found.notes if "case or blanks" in note] == []
    assert find_labels(found, "label").names == ["yes", "no"]


@pytest.mark.parametrize(
    ("cell", "cure"),
    [
        (
            [{"role": "user", "content": "hi"}],
            "rows.jsonl:2 of train holds a list in the column 'text'. This looks like chat data: set task: chat.",
        ),
        (["a", "b"], "Name a column of text, or join it."),
    ],
)
def test_lists_are_not_texts(cell: object, cure: str, tmp_path: Path) -> None:
    rows = [{"text": "one", "label": "a"}, {"text": cell, "label": "b"}]
    with pytest.raises(RecipeError, match=r"config\.yaml:\d+: data\.columns\.text: rows\.jsonl:2") as caught:
        material(tmp_path, rows)
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"labels": ["a", "c"]}, "labels that are not listed: b, in rows.jsonl:2, rows.jsonl:"),
        ({"where": {"label": "a"}}, "data.columns.label: the column 'label' has only one label: a."),
    ],
)
def test_labels_that_cannot_be_are_refused(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        find_labels(material(tmp_path, **data), "label")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("length", "expected"), [(3, [[0, 1, 2], [3, 4, 5]]), (4, [[0, 1, 2, 3], [4, 5, 6]]), (9, [[0, 1, 2, 3, 4, 5, 6]])]
)
def test_a_long_text_is_several_samples(length: int, expected: list[list[int]]) -> None:
    assert pieces(list(range(7)), length) == expected


def prediction(predictions: Any, labels: Any) -> Any:
    return SimpleNamespace(predictions=np.asarray(predictions), label_ids=np.asarray(labels))


def test_scores_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    drawn = np.random.default_rng(0)
    logits = drawn.normal(size=(50, 4))
    labels = drawn.integers(0, 4, 50)
    found = task_metrics.accuracy_and_f1(prediction(logits, labels))
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, logits.argmax(-1)))
    assert found["f1"] == pytest.approx(sklearn.f1_score(labels, logits.argmax(-1), average="macro"))
    values = drawn.normal(size=(50, 1))
    truth = drawn.normal(size=50)
    found = task_metrics.score_numbers(prediction(values, truth))
    assert found["pearson"] == pytest.approx(np.corrcoef(values[:, 0], truth)[0, 1])
    assert found["rmse"] == pytest.approx(sklearn.mean_squared_error(truth, values[:, 0]) ** 0.5)
    assert task_metrics.score_numbers(prediction(np.zeros(5), np.arange(5)))["pearson"] == 0.0


def test_entities_count_whole_and_with_their_type() -> None:
    names = ["O", "B-a", "I-a", "B-b"]
    scores = task_metrics.span_scorer(names)(prediction([[1, 2, 0, 3, 9]], [[1, 2, 3, 3, -100]]))
    assert scores == {"f1": 0.8, "precision": 1.0, "recall": pytest.approx(2 / 3), "accuracy": 0.75}
    assert task_metrics.spans(["I-x", "I-x", "B-x", "O", "I-y"]) == {(0, 2, "x"), (2, 3, "x"), (4, 5, "y")}
    assert list(task_metrics.span_scorer(["NOUN", "VERB"])(prediction([[0, 1]], [[0, 0]]))) == ["accuracy"]
