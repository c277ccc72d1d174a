"""Functions of the user: metrics and rows by `module:function` or a file, where their code may come from, and ROUGE."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from pathlib import Path

import datasets
import pytest

from trainwright.cli import user_code
from trainwright.cli.mcp_server import run_command
from trainwright.cli.tasks.mapped_rows import map_dataset
from trainwright.errors import DataError

from .commands import call, done, small

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]

CODE = """\
def score(prediction):
    return {"yes_share": (prediction.predictions.argmax(-1) == 1).mean()}


def words(prediction):
    return "good"


def clean(row):
    if "long" in row["text"]:
        return None
    return {**row, "text": row["text"].upper()}


def keeps(row):
    return row


def fail(row):
    return row["title"]


def nothing(row):
    return 3


def forgets(row):
    row["text"] = row["text"].upper()


def same(row):
    return {"text": "a film", "label": row["label"]}


def null(row):
    return {**row, "text": None}


def exits(prediction):
    raise SystemExit(3)


def loss(prediction):
    return {"loss": 0.0}


def accuracy(prediction):
    return {"accuracy": 7.0}


def huge(prediction):
    return {"x": 10**400}
"""
WORDS = ("--metrics", "code.py:score", "--set", "data.map=code.py:clean")
LIMIT_S = 100


@pytest.fixture(autouse=True)
def _own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of functions is the test's own, and none was named before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(user_code, "_named", set())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file, in the working directory, with functions beside it."""
    monkeypatch.chdir(tmp_path)
    path = small(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "neighbour.py").write_text("import helper\n")
    return path


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_file_beside_the_recipe_gives_a_metric_and_rows(file: Path) -> None:
    found = json.loads(done("train", str(file), *WORDS, "--json"))
    assert 0 <= found["eval"]["eval_yes_share"] <= 1
    assert "eval_accuracy" in found["eval"]
    run = file.parent / "run"
    kept = (run / "recipe.yaml").read_text()
    assert f"{file.parent}/code.py:score" in kept
    again = json.loads(done("eval", str(run), "--data", str(file.parent / "table.csv"), "--json"))
    assert again["num_samples"] == 22
    assert "yes_share" in again["metrics"]
    lines = [
        json.loads(line)
        for line in done("predict", str(run), "--data", str(file.parent / "table.csv"), "--json").splitlines()
    ]
    assert [line["row"] for line in lines] == list(range(1, 65, 3))
    shown = flat(done("resume", str(run), "--set", "training.max_steps=10"))
    assert "rows of train left out by" in shown


def test_a_module_of_the_installation_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = file.parent / "installed"
    installed.mkdir()
    shutil.move(file.parent / "code.py", installed / "my_film_metrics.py")
    monkeypatch.syspath_prepend(str(installed))
    found = json.loads(done("train", str(file), "--metrics", "my_film_metrics:score", "--json"))
    assert "eval_yes_share" in found["eval"]


def test_a_module_of_the_working_directory_is_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.move(file.parent / "code.py", file.parent / "my_other_metrics.py")
    monkeypatch.chdir(file.parent)
    monkeypatch.syspath_prepend("")
    shown = flat(call("train", str(file), "--metrics", "my_other_metrics:score").output)
    assert "metrics: no module my_other_metrics is installed. For a file beside" in shown
    assert "write my_other_metrics.py:FUNCTION" in shown


def test_no_code_is_run_from_the_directory_of_a_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("train", str(file))
    run = file.parent / "run"
    shutil.copy(file.parent / "code.py", run / "code.py")
    recipe = run / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(f"{text}metrics: {run}/code.py:score\n")
    data = ("--data", str(file.parent / "table.csv"))
    assert "with which you have not trained on this machine" in flat(call("eval", str(run), *data).output)
    words = ("--set", f"metrics={run}/code.py:score")
    assert "is in a directory of a model or a run" in flat(call("eval", str(run), *data, *words).output)
    recipe.write_text(f"{text}metrics: ../code.py:score\n")
    assert "write ../code.py:score as an absolute path" in flat(call("eval", str(run), *data).output)
    recipe.write_text(f"{text}metrics: code.py:score\n")
    monkeypatch.setattr(user_code, "_named", set())
    assert "with which you have not trained" in flat(call("resume", str(run), "--max_steps", "12").output)
    monkeypatch.chdir(run)
    words = ("--set", "metrics=code.py:score")
    assert "is in a directory of a model or a run" in flat(call("resume", str(run), "--max_steps", "12", *words).output)


@pytest.mark.parametrize("sign", ["pytorch_model.bin", "recipe.yaml", "journal.jsonl", "checkpoint-8", "x.safetensors"])
def test_no_code_beside_what_a_run_or_a_model_has(sign: str, file: Path) -> None:
    (file.parent / sign).mkdir() if sign.startswith("checkpoint") else (file.parent / sign).write_text("")
    shown = flat(call("train", str(file), *WORDS).output)
    assert f"has {sign}), from which no code is run" in shown


def test_a_strangers_run_names_no_code(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the path is that of a file of the user, as through the working directory."""
    done("train", str(file), *WORDS)
    run = file.parent / "run"
    data = ("--data", str(file.parent / "table.csv"))
    done("predict", str(run), *data)
    monkeypatch.setattr(user_code, "_named", set())
    # As on another machine.
    shutil.rmtree(file.parent / "cache")
    monkeypatch.chdir(file.parent)
    for words in (("predict", str(run), *data), ("eval", str(run), *data), ("resume", str(run), "--max_steps", "12")):
        assert "with which you have not trained on this machine" in flat(call(*words).output)
    function = f"{file.parent}/code.py:clean"
    done("predict", str(run), *data, "--set", f"data.map={function}")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(function, "/proc/self/cwd/code.py:clean"))
    shown = flat(call("predict", str(run), *data, "--set", "data.map=/proc/self/cwd/code.py:clean").output)
    assert "is another place in each process" in shown


def test_a_path_that_is_typed_begins_where_it_is_typed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a configuration file it begins at the file."""
    here = file.parent / "here"
    here.mkdir()
    (file.parent / "code.py").rename(here / "mine.py")
    (file.parent / "table.csv").rename(here / "mine.csv")
    monkeypatch.chdir(here)
    words = ("--set", "data.map=mine.py:clean", "--set", "data.train=mine.csv", "--metrics", "mine.py:score")
    done("train", "../config.yaml", *words, "--output_dir", "made", "--max_steps", "1")
    assert ".." not in (here / "made" / "recipe.yaml").read_text()  # it does not need the directory of typing
    again = ("--set", "data.map=mine.py:keeps", "--max_steps", "2")
    assert "mine.py:keeps" in flat(done("resume", "made", *again))
    done("predict", "made", "--data", "mine.csv", "--set", "data.map=mine.py:clean", "--out", "found.csv")
    monkeypatch.chdir(file.parent)
    shown = flat(call("resume", "here/made", "--set", "data.map=mine.py:keeps", "--max_steps", "3").output)
    assert f"there is no file {file.parent}/mine.py" in shown


def test_a_changed_function_of_rows_is_said_at_a_resume(file: Path) -> None:
    done("train", str(file), "--set", "data.map=code.py:clean", "--set", "training.max_steps=4")
    run = str(file.parent / "run")
    assert "may be others" not in done("resume", run, "--set", "training.max_steps=5")
    code = file.parent / "code.py"
    code.write_text(CODE.replace("upper()", "lower()"))
    shown = flat(done("resume", run, "--set", "training.max_steps=6"))
    then, now = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in (CODE, code.read_text()))
    assert f"code.py:clean (sha256 {then}) -> " in shown
    assert f"code.py:clean (sha256 {now}): the rows may be others" in shown
    shown = flat(done("resume", run, "--set", "training.max_steps=7", "--set", f"data.map={code}:keeps"))
    assert f"(sha256 {now}) -> " in shown
    assert f"code.py:keeps (sha256 {now}): the rows may be others" in shown


def test_rows_that_were_equal_before_the_function_are_no_mistake_of_it(file: Path) -> None:
    twins = file.parent / "twins.csv"
    twins.write_text("text,label\n" + "a good film,yes\n" * 2)
    words = ("--set", "data.map=code.py:keeps", "--set", "data.eval=twins.csv", "--set", "data.eval_share=null")
    done("train", str(file), *words)
    done("eval", str(file.parent / "run"), "--data", str(twins))
    (file.parent / "table.csv").write_text("text,label\n" + "a good film,yes\na good film,no\n" * 8)
    done("check", str(file), *words)


def test_an_evaluation_that_fails_at_the_end_loses_no_weights(file: Path) -> None:
    (file.parent / "code.py").write_text("def score(prediction):\n    return {'x': 1 // 0}\n")
    words = ("--set", "training.eval_strategy=no", "--set", "training.save_strategy=no")
    result = call("train", str(file), "--metrics", "code.py:score", *words)
    assert result.exit_code == 2
    assert "metrics: " in flat(result.output)
    assert "ZeroDivisionError: integer division or modulo by zero (code.py, line 2)" in flat(result.output)
    assert (file.parent / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--metrics", "rouge_"), "'rouge_' is neither one of rouge, nor module:function"),
        (("--metrics", "rouge"), "rouge belongs to seq2seq, not to text-classification"),
        (("--metrics", "code.py:scor"), "has no function 'scor'. Did you mean score?"),
        (("--metrics", "cod.py:score"), "Did you mean code.py?"),
        (("--metrics", "subprocess:call"), "subprocess is a module of Python itself"),
        (("--metrics", "code.py:words"), "it returned a str, and a dict of name -> number belongs there"),
        (("--set", "data.map=code.py:fail"), "failed at table.csv:"),
        (("--set", "data.map=code.py:nothing"), "returned a int for table.csv:"),
        (("--metrics", "code.py:exits"), "the function failed: SystemExit: 3 (code.py, line "),
        (("--metrics", "code.py:loss"), "it returned a score 'loss', which is a name of the trainer's"),
        (("--metrics", "code.py:accuracy"), "there are two scores accuracy"),
        (("--metrics", "code.py:huge"), "each value must be a number"),
        (("--metrics", "ends.py:f"), "cannot be imported: SystemExit: 0"),
        (("--metrics", "neighbour.py:f"), "No module named 'helper'. Modules beside it are not found"),
        (("--set", "data.map=code.py:forgets"), "returned None for each of the 64 rows of train, so that none is left"),
        (
            ("--set", "data.map=code.py:same"),
            "all 64 training rows are equal in the column text, so that a model cannot",
        ),
        (
            ("--set", "data.map=code.py:null"),
            "no row of train has a text: the column 'text' is empty. Look at the rows that",
        ),
        (("--set", "data.map=clean"), "'clean' is neither module:function nor file.py:function"),
    ],
)
def test_what_is_wrong_with_it_is_said(words: tuple[str, ...], said: str, file: Path) -> None:
    result = call("train", str(file), *words)
    assert result.exit_code != 0
    assert said in flat(result.output)
    assert not (file.parent / "run" / "model.safetensors").exists()


@pytest.mark.process
@pytest.mark.parametrize("words", [["--metrics", "code.py:score"], ["--set", "data.map=code.py:clean"]])
def test_a_server_runs_none_of_it(words: list[str], file: Path) -> None:
    asked = ["train", "config.yaml", "--dry-run", *words]
    output = asyncio.run(run_command(asked, file.parent, environment={}, limit_s=LIMIT_S))
    assert output.exit_code == 2
    assert "is the user's code, which this server does not run" in flat(output.text + output.messages)


def test_rows_of_a_dataset_keep_their_places() -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]})
    names = ["row 0", "row 1", "row 2"]
    found = map_dataset(lambda row: None if row["text"] == "b" else {"text": row["text"] * 2, "label": 7}, rows, names)
    assert found["text"][:] == ["aa", "cc"]
    assert found.column_names == ["text", "label"]
    assert found._indices.column(0).to_pylist() == [0, 2]
    with pytest.raises(DataError, match="the function returned a int for row 0"):
        map_dataset(lambda row: 3, rows, names)  # type: ignore[arg-type, return-value]


WRITES = """\
task: seq2seq
model:
  config: {model_type: bart, d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 2,
    decoder_attention_heads: 2, encoder_ffn_dim: 16, decoder_ffn_dim: 16, max_position_embeddings: 32}
  learn_tokenizer: {kind: words, vocab_size: 64}
data: {train: table.csv, eval_share: 0.25, columns: {source: text, target: label}, max_length: 16}
metrics: [rouge, "code.py:shortest"]
training: {output_dir: run, max_steps: 2, predict_with_generate: true, generation_max_length: 8, use_cpu: true}
"""


def test_texts_that_are_written_are_scored_by_rouge_and_a_function(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    path = small(tmp_path, WRITES)
    (tmp_path / "code.py").write_text(
        "def shortest(prediction):\n    return {'shortest': min(len(one) for one in prediction.label_ids)}\n"
    )
    found = json.loads(done("train", str(path), "--json"))["eval"]
    assert {"eval_rouge1", "eval_rouge2", "eval_rougeL", "eval_exact_match"} <= found.keys()
    assert found["eval_shortest"] == 2


def test_rouge_without_its_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    result = call("train", str(small(tmp_path, WRITES.replace(', "code.py:shortest"', ""))))
    assert result.exit_code != 0
    assert "metrics: rouge needs the package rouge-score: pip install rouge-score" in flat(result.output)


def test_metrics_of_texts_need_texts(tmp_path: Path) -> None:
    path = small(tmp_path, WRITES.replace("predict_with_generate: true, generation_max_length: 8, ", ""))
    assert "metrics compare texts that the model writes. Set training.predict_with_generate: true." in flat(
        call("train", str(path)).output
    )


def test_the_numbers_of_rouge_are_those_of_its_package() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    from trainwright.cli.tasks.task_metrics import find_rouge
    from trainwright.evaluation.outputs import EvalPrediction

    written = ["the cat sat", "dogs ran"]
    true = ["a cat sits here", "the dog ran"]
    found = find_rouge()(EvalPrediction(written, true))
    scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    wanted = [scorer.score(one, other)["rougeL"].fmeasure for one, other in zip(true, written, strict=True)]
    assert found["rougeL"] == pytest.approx(sum(wanted) / 2)
    assert set(found) == {"rouge1", "rouge2", "rougeL"}
