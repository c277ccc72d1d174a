"""`trainwright eval` and `predict` for every task: the numbers of the run's own evaluation, answers of its model."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from trainwright.capabilities.averages.saved import read_average
from trainwright.cli.main import app
from trainwright.cli.recipe.schema import TASKS
from trainwright.cli.recipe.yaml_tree import dump
from trainwright.cli.tasks.evaluate import compute_sample_losses

from .commands import call, done

pytestmark = pytest.mark.costly
ROWS = 24
WORDS = ["red", "green", "blue", "one", "two", "three"]
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
LLAMA = {**BERT, "model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64}
BART = {
    "model_type": "bart",
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
VIT = {**BERT, "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 3}
LEARNT = {"learn_tokenizer": {"kind": "words", "vocab_size": 64}}


def sentence(number: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=3 + number % 3))


def image(number: int, folder: Path) -> str:
    path = folder / f"{number}.png"
    Image.new("RGB", (8, 8), (number * 10, 255 - number * 10, 99)).save(path)
    return path.name


def messages(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": sentence(number)},
        {"role": "assistant", "content": sentence(number + 1)},
    ]


@dataclass(frozen=True)
class Case:
    """A task: its model, a row, what of a row an unlabelled file lacks, and the keys of a prediction."""

    model: dict[str, Any]
    row: Callable[[int, Path], dict[str, Any]]
    label: str | None
    keys: set[str]
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


def colour(number: int) -> str:
    return "even" if number % 2 else "odd"


CASES = {
    "text-classification": Case(
        {"config": BERT, **LEARNT},
        lambda n, _: {"text": sentence(n), "label": colour(n)},
        "label",
        {"label", "score", "scores"},
    ),
    "token-classification": Case(
        {"config": BERT, **LEARNT},
        lambda n, _: {
            "words": sentence(n).split(),
            "tags": ["B-X" if "e" in one else "O" for one in sentence(n).split()],
        },
        "tags",
        {"tags", "scores"},
    ),
    "causal-lm": Case({"config": LLAMA, **LEARNT}, lambda n, _: {"text": sentence(n)}, None, {"text"}),
    "masked-lm": Case(
        {"config": BERT, **LEARNT}, lambda n, _: {"text": sentence(n)}, None, {"text", "guesses"}, {"mask_share": 0.5}
    ),
    "seq2seq": Case(
        {"config": BART, **LEARNT},
        lambda n, _: {"source": sentence(n), "target": sentence(n + 1)},
        "target",
        {"text"},
        {},
        {"predict_with_generate": True, "generation_max_length": 8},
    ),
    "chat": Case({"config": LLAMA, **LEARNT}, lambda n, _: {"messages": messages(n)}, None, {"answer"}),
    "image-classification": Case(
        {"config": VIT},
        lambda n, at: {"image": image(n, at), "label": colour(n)},
        "label",
        {"label", "score", "scores"},
    ),
    "regression": Case(
        {"config": BERT, **LEARNT}, lambda n, _: {"text": sentence(n), "label": n / ROWS}, "label", {"value"}
    ),
}
by_task = pytest.mark.parametrize("task", CASES)


def test_every_task_has_a_case() -> None:
    # Those of pairs need TRL, and are in test_pairs.py.
    assert CASES.keys() == {task for task, spec in TASKS.items() if not spec.is_paired}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def trained(task: str, folder: Path, **training: Any) -> Path:
    """Trains a tiny model for two steps in a directory, evaluated on `eval.jsonl` there; returns the run."""
    case = CASES[task]
    rows = [case.row(number, folder) for number in range(ROWS)]
    write(folder / "train.jsonl", rows)
    write(folder / "eval.jsonl", rows[: ROWS // 2])
    settings = {
        "output_dir": "run",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 0.01,
        "use_cpu": True,
        **case.training,
        **training,
    }
    data = {"train": "train.jsonl", "eval": "eval.jsonl", **case.data}
    if task != "image-classification":
        data["max_length"] = 16
    recipe = {"task": task, "model": case.model, "data": data, "training": settings}
    (folder / "config.yaml").write_text(dump(recipe))
    done("train", str(folder / "config.yaml"))
    return folder / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def run(task: str) -> Path:
        if task not in made:
            made[task] = trained(task, tmp_path_factory.mktemp(task))
        return made[task]

    return run


def test_an_empty_prompt_is_continued_beside_others(runs: Callable[[str], Path], tmp_path: Path) -> None:
    for rows in ([{"text": ""}], [{"text": "red"}, {"text": ""}]):
        lines = done("predict", str(runs("causal-lm")), "--data", str(write(tmp_path / "new.jsonl", rows)), "--json")
        assert len(lines.splitlines()) == len(rows)


@by_task
def test_eval_gives_the_numbers_of_the_runs_own_evaluation(
    task: str, runs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs(task)
    monkeypatch.chdir(tmp_path)
    found = json.loads(done("eval", str(run), "--data", str(run.parent / "eval.jsonl"), "--json"))
    own = json.loads((run / "eval_results.json").read_text())
    compared = [name for name in found["metrics"] if "second" not in name and "runtime" not in name]
    assert "loss" in compared
    if task == "masked-lm":  # a run hides other words at each evaluation
        own = json.loads(done("eval", str(run), "--data", str(run.parent / "eval.jsonl"), "--json"))["metrics"]
        own = {f"eval_{name}": value for name, value in own.items()}
    assert {name: found["metrics"][name] for name in compared} == {name: own[f"eval_{name}"] for name in compared}
    assert len(found["hardest"]) == 10
    losses = [row["loss"] for row in found["hardest"]]
    assert losses == sorted(losses, reverse=True)
    if task in ("text-classification", "image-classification", "regression"):  # each row has one label
        words = ("--data", str(run.parent / "eval.jsonl"), "--json", "--hardest", "99")
        every = json.loads(done("eval", str(run), *words))["hardest"]
        mean = sum(row["loss"] for row in every) / len(every)
        assert mean == pytest.approx(found["metrics"]["loss"], rel=1e-4)
    if found["labels"]:
        matrix = torch.tensor(found["confusion"])
        assert matrix.diagonal().sum() / matrix.sum() == pytest.approx(found["metrics"]["accuracy"])


@by_task
def test_predict_answers_each_row_in_order(task: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    """Without labels; the same in batches of another size, and what the run's metrics say."""
    run = runs(task)
    case = CASES[task]
    rows = [json.loads(line) for line in (run.parent / "eval.jsonl").read_text().splitlines()]
    if case.label is not None:
        rows = [{name: value for name, value in row.items() if name != case.label} for row in rows]
    if task == "masked-lm":
        mark = AutoTokenizer.from_pretrained(run).mask_token
        rows = [{"text": " ".join([mark, *row["text"].split()[1:]])} for row in rows]
    file = write(run.parent / "unlabelled.jsonl", rows)
    shown = done(
        "predict", str(run), "--data", str(file), "--out", str(tmp_path / "out.jsonl"), "--max-new-tokens", "5"
    )
    assert f"Written: {tmp_path}/out.jsonl, {len(rows)} rows" in shown
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["row"] for row in found] == list(range(1, len(rows) + 1))
    assert {frozenset(row) for row in found} == {frozenset({"row", *case.keys})}
    words = ("--max-new-tokens", "5", "--batch-size", "1")
    again = [json.loads(line) for line in done("predict", str(run), "--data", str(file), *words).splitlines()]
    for one, other in zip(found, again, strict=True):
        for name in case.keys & {"label", "tags", "text", "answer"}:
            assert one[name] == other[name]
        for name in case.keys & {"score", "value"}:
            assert one[name] == pytest.approx(other[name], abs=1e-5)
    own = json.loads((run / "eval_results.json").read_text())
    labelled = [json.loads(line) for line in (run.parent / "eval.jsonl").read_text().splitlines()]
    if case.keys & {"label", "tags"}:
        pairs = [
            (one[name], row[name])
            for one, row in zip(found, labelled, strict=True)
            for name in ("label", "tags")
            if name in one
        ]
        flat = [(a, b) for x, y in pairs for a, b in (zip(x, y, strict=True) if isinstance(x, list) else [(x, y)])]
        assert sum(a == b for a, b in flat) / len(flat) == pytest.approx(own["eval_accuracy"])
    if task == "regression":
        errors = [abs(one["value"] - row["label"]) for one, row in zip(found, labelled, strict=True)]
        assert sum(errors) / len(errors) == pytest.approx(own["eval_mae"], rel=1e-4)


def test_standard_input_is_lines_of_text_or_of_json(runs: Callable[[str], Path]) -> None:
    run = str(runs("text-classification"))
    answers = []
    for given in ("red one\nblue two\n", '{"text": "red one"}\n{"text": "blue two"}\n'):
        answers.append(CliRunner().invoke(app, ["predict", run], input=given).stdout)
    assert answers[0] == answers[1]
    assert len(answers[0].splitlines()) == 2
    assert "Standard input is empty" in call("predict", run).output


def test_a_line_of_text_is_the_users_message_for_a_chat(runs: Callable[[str], Path], tmp_path: Path) -> None:
    run = str(runs("chat"))
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ("red one", "blue two")]
    expected = done("predict", run, "--data", str(write(tmp_path / "rows.jsonl", asked)), "--max-new-tokens", "5")
    words = ["predict", run, "--max-new-tokens", "5"]
    assert CliRunner().invoke(app, words, input="red one\nblue two\n").stdout == expected
    named = [*words, "--set", "data.columns.instruction=q", "--set", "data.columns.output=a"]
    assert CliRunner().invoke(app, named, input="red one\nblue two\n").stdout == expected


def test_a_table_of_predictions_has_the_columns_of_the_rows(runs: Callable[[str], Path], tmp_path: Path) -> None:
    run = runs("text-classification")
    rows = [{"id": 7, "text": "red, one", "label": "even"}, {"id": 8, "text": 'a "b"\nc', "more": [1, "x"]}]
    file = str(write(tmp_path / "rows.jsonl", rows))
    said = done("predict", str(run), "--data", file, "--out", str(tmp_path / "out.csv"))
    assert f"Written: {tmp_path}/out.csv, 2 rows" in said
    with (tmp_path / "out.csv").open(newline="") as table:
        found = list(csv.DictReader(table))
    assert list(found[0]) == ["id", "text", "label", "more", "predicted_label", "predicted_score", "predicted_scores"]
    assert [row["text"] for row in found] == ["red, one", 'a "b"\nc']
    assert [row["label"] for row in found] == ["even", ""]
    assert found[1]["more"] == '[1, "x"]'
    lines = [json.loads(line) for line in done("predict", str(run), "--data", file).splitlines()]
    assert [row["predicted_label"] for row in found] == [one["label"] for one in lines]
    assert json.loads(found[0]["predicted_scores"]) == lines[0]["scores"]


def test_a_table_keeps_no_column_in_silence_and_has_a_form_that_is_written(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    file = str(write(tmp_path / "rows.jsonl", [{"text": "red one", "predicted_label": "even"}]))
    words = ("predict", str(runs("text-classification")), "--data", file, "--output")
    taken = call(*words, str(tmp_path / "out.csv"))
    assert "already have the column 'predicted_label'" in taken.output.replace("\n", " ")
    assert not (tmp_path / "out.csv").exists()
    other = call(*words, str(tmp_path / "out.tsv"))
    assert (other.exit_code, "predictions are written as .jsonl or .csv" in other.output) == (2, True)


def test_lines_of_text_need_no_column_name_of_the_run(runs: Callable[[str], Path], tmp_path: Path) -> None:
    run = str(runs("text-classification"))
    (tmp_path / "new.txt").write_text("red one\nblue two\n")
    expected = done("predict", run, "--data", str(tmp_path / "new.txt"))
    assert done("predict", run, "--data", str(tmp_path / "new.txt"), "--set", "data.columns.text=review") == expected
    (tmp_path / "new.csv").write_text("text\nred one\n")
    refused = call("predict", run, "--data", str(tmp_path / "new.csv"), "--set", "data.columns.text=review")
    assert "There is no column 'review'" in refused.output


def test_the_page_has_the_matrix_and_the_hardest_rows(runs: Callable[[str], Path], tmp_path: Path) -> None:
    run = runs("text-classification")
    page = tmp_path / "page.html"
    shown = done("eval", str(run), "--data", str(run.parent / "eval.jsonl"), "--hardest", "3", "--output", str(page))
    assert "12 samples: loss" in shown
    assert len([line for line in shown.splitlines() if "eval.jsonl:" in line]) == 3
    text = page.read_text(encoding="utf-8")
    for said in ("Confusion matrix", "Hardest rows", "Accuracy", "even", "eval.jsonl:"):
        assert said in text


def test_a_checkpoint_its_average_and_a_model_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained("text-classification", tmp_path, average={"kind": "ema", "decay": 0.1, "warmup": False})
    words = ("--data", "eval.jsonl", "--json", "--hardest", "0")
    of_run = json.loads(done("eval", "run", *words))["metrics"]["loss"]
    assert json.loads(done("eval", "run/checkpoint-2", *words))["metrics"]["loss"] == of_run
    done("export", "run", "model")
    of_model = json.loads(done("eval", "model", "--task", "text-classification", *words))["metrics"]["loss"]
    assert of_model == pytest.approx(of_run, rel=1e-6), "in batches of another size"
    logged = json.loads((run / "trainer_state.json").read_text())["log_history"]
    average = next(entry["eval_average_loss"] for entry in logged if "eval_average_loss" in entry)
    shown = call("eval", "run", "--weights", "average", *words)
    assert json.loads(shown.output[shown.output.index("{") :])["metrics"]["loss"] == pytest.approx(average, rel=1e-6)
    assert average != pytest.approx(of_run, rel=1e-6)
    assert read_average(run / "checkpoint-2")
    model = AutoModelForSequenceClassification.from_pretrained("run")
    assert model.config.id2label == {0: "even", 1: "odd"}
    assert "its task is unknown. Set it with --task" in call("eval", "model", *words).output
    assert "is for text-classification" in call("eval", "run", "--task", "chat", *words).output
    assert "write trained or average" in call("predict", "run", "--data", "eval.jsonl", "--weights", "x").output


def test_a_run_at_a_url_whose_machine_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = (tmp_path / "store" / "first").as_uri()
    run = trained("text-classification", tmp_path, checkpoint_mirror=url)
    evaluated = ("--data", "eval.jsonl", "--json", "--hardest", "0")
    metrics = json.loads(done("eval", "run", *evaluated))["metrics"]
    answers = done("predict", "run", "--data", "eval.jsonl")
    shutil.rmtree(run)
    for place in (url, f"{url}/checkpoint-2"):
        found = call("eval", place, *evaluated).output
        assert json.loads(found[found.index("{") :])["metrics"]["loss"] == metrics["loss"]
        assert done("predict", place, "--data", "eval.jsonl").endswith(answers)
    assert "There is no checkpoint at file:" in call("eval", (tmp_path / "store").as_uri(), *evaluated).output


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # which peft reads
def test_an_adapter_is_merged_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    base = trained("text-classification", tmp_path / "base")
    rows = [CASES["text-classification"].row(number, tmp_path) for number in range(ROWS)]
    write(tmp_path / "rows.jsonl", rows)
    recipe = {
        "task": "text-classification",
        "model": {"path": str(base)},
        "lora": {"r": 2},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl", "max_length": 16},
        "training": {"output_dir": "tuned", "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "use_cpu": True},
    }
    (tmp_path / "lora.yaml").write_text(dump(recipe))
    done("train", "lora.yaml")
    found = json.loads(done("eval", "tuned", "--data", "rows.jsonl", "--json", "--hardest", "0"))
    own = json.loads((tmp_path / "tuned" / "eval_results.json").read_text())
    assert found["metrics"]["loss"] == pytest.approx(own["eval_loss"], rel=1e-5)


def test_what_does_not_fit_is_refused(runs: Callable[[str], Path], tmp_path: Path) -> None:
    run = str(runs("text-classification"))
    other = str(write(tmp_path / "other.jsonl", [{"txt": "red"}]))
    assert "There is no column 'text', which the model reads as text" in call("predict", run, "--data", other).output
    named = done("predict", run, "--data", other, "--set", "data.columns.text=txt")
    assert json.loads(named)["row"] == 1
    strange = str(write(tmp_path / "strange.jsonl", [{"text": "red", "label": "blue"}, {"text": "x", "label": "odd"}]))
    assert "labels that are not listed: blue" in call("eval", run, "--data", strange).output
    empty = str(write(tmp_path / "empty.jsonl", []))
    assert "no row" in call("predict", run, "--data", empty).output
    assert call("predict", str(tmp_path / "nothing"), "--data", other).exit_code == 2
    unmarked = call("predict", str(runs("masked-lm")), "--data", str(runs("masked-lm").parent / "eval.jsonl"))
    assert "has no masked word" in unmarked.output


def test_losses_of_samples_are_means_over_their_labels() -> None:
    logits = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2, -100], [1, -100, -100, -100]])
    plain = compute_sample_losses(logits, labels, shifts=False)
    assert plain[0] == pytest.approx(float(torch.nn.functional.cross_entropy(logits[0, :3], labels[0, :3])))
    shifted = compute_sample_losses(logits, labels, shifts=True)
    assert shifted[0] == pytest.approx(float(torch.nn.functional.cross_entropy(logits[0, :2], labels[0, 1:3])))
    assert shifted[1] == 0.0
    numbers = compute_sample_losses(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]), shifts=False)
    assert numbers.tolist() == [1.0, 4.0]
