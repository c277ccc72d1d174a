"""Every command answers programs: `--json` prints one JSON document on standard output, also where it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from trainwright.cli.launch import rebuild_command
from trainwright.cli.main import app

from .commands import call, small

pytestmark = pytest.mark.filterwarnings("default")

COMMANDS: dict[str, Any] = {command.name: command for command in typer.main.get_command(app).commands.values()}  # type: ignore[attr-defined]


def parsed(*words: str, code: int = 0) -> Any:
    result = call(*words, "--json")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a run, and what `train --json` said of it."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, parsed("train", str(small(folder)))


@pytest.fixture
def place(trained: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of the run and its table."""
    shutil.copytree(trained[0], tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"mcp"}))  # which speaks JSON only
def test_every_command_has_the_option(name: str) -> None:
    assert "--json" in [option for parameter in COMMANDS[name].params for option in parameter.opts]


def test_a_training_says_what_ci_reads(trained: tuple[Path, Any]) -> None:
    folder, said = trained
    assert said["step"] == 8
    assert said["output_dir"] == str(folder / "run")
    assert said["checkpoint"] == str(folder / "run" / "checkpoint-8")
    assert said["best_checkpoint"] is None
    assert {"eval_loss", "eval_accuracy"} <= set(said["eval"])
    assert said["train"]["train_loss"] > 0


def test_commands_that_train_and_write_say_so(place: Path) -> None:
    again = parsed("extend", "run", "--steps", "2")
    assert (again["step"], again["checkpoint"]) == (10, str(place / "run" / "checkpoint-10"))
    branched = parsed("branch", "run", "--at", "8", "--cooldown", "2", "--out", "other")
    assert (branched["step"], branched["output_dir"]) == (10, str(place / "other"))
    assert parsed("resume", "other")["step"] == 10
    assert parsed("train", "config.yaml", "--dry-run", "--set", "training.output_dir=new")["plan"]["model"]
    for words in (
        ("report", "run"),
        ("export", "run", "exported"),
        ("init", "causal-lm", "new.yaml"),
        ("schema", "--output", "schema.json"),
        ("predict", "run", "--data", "table.csv", "--out", "out.jsonl"),
    ):
        said = parsed(*words)
        assert said["written"], words
        for written in said["written"]:
            assert Path(written).exists(), words
    assert said["rows"] == len(Path("out.jsonl").read_text().splitlines())
    assert parsed("push", "run") == {"uploads": []}
    assert "properties" in parsed("schema")


# A function of the user whose metrics are no finite numbers.
CODE = "def score(prediction):\n    return {'nothing': float('nan'), 'beyond': -float('inf')}\n"
# A call of every command on a run with such metrics, and a model whose weights are none either.
CALLS: dict[str, tuple[str, ...]] = {
    "branch": ("branch", "run", "--at", "4", "--out", "other", "--steps", "1"),
    "chat": ("chat", "run", "--once", "a"),
    "check": ("check", "config.yaml", "--output_dir", "new"),
    "compare": ("compare", "run", "again"),
    "ctl": ("ctl", "run", "status"),
    "diff": ("diff", "run", "again"),
    "env": ("env",),
    "eval": ("eval", "broken", "--data", "table.csv"),
    "export": ("export", "run", "exported"),
    "extend": ("extend", "again", "--steps", "1"),
    "init": ("init", "chat", "new.yaml"),
    "ledger": ("ledger", "run", "hardest"),
    "predict": ("predict", "broken", "--data", "table.csv"),
    "push": ("push", "run"),
    "replay": ("replay", "run"),
    "report": ("report", "run"),
    "resume": ("resume", "run"),
    "runs": ("runs", "."),
    "schema": ("schema",),
    "train": ("train", "config.yaml", "--output_dir", "new", "--max_steps", "1"),
    "verify": ("verify", "run"),
}


def parse_strictly(text: str) -> list[Any]:
    """The documents that are one after the other in a text."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    decoder = json.JSONDecoder(parse_constant=refuse)
    found = []
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


@pytest.fixture(scope="module")
def unnumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run whose metrics are NaN and infinite, a copy of it, and one of a model of NaN."""
    folder = tmp_path_factory.mktemp("unnumbered")
    path = small(folder)
    (folder / "code.py").write_text(CODE)
    path.write_text(path.read_text() + "metrics: code.py:score\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        call("train", str(path))
    shutil.copytree(folder / "run", folder / "again")
    shutil.copytree(folder / "run", folder / "broken")
    weights = load_file(folder / "broken" / "model.safetensors")
    filled = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()}
    save_file(filled, folder / "broken" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.more
def test_no_command_writes_json_that_only_python_reads(
    unnumbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CALLS.keys() == COMMANDS.keys() - {"mcp"}
    shutil.copytree(unnumbered, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "place" / "cache"))
    texts = {}
    for name, words in CALLS.items():
        texts[name] = call(*words, "--json").stdout
        assert parse_strictly(texts[name]), name
    for name in ("eval", "predict", "train", "resume", "runs", "extend"):
        assert '"nan"' in texts[name], name
    for path in Path("run").glob("*_results.json"):
        parse_strictly(path.read_text())
    assert '"-inf"' in Path("run/all_results.json").read_text()


def test_errors_are_json_with_a_stable_exit_code(place: Path) -> None:
    for code, kind, words in (
        (2, "RecipeError", ("train", "config.yaml", "--set", "training.learning_rat=1")),
        (2, "RecipeError", ("train", "config.yaml")),  # there is a run already
        (2, "CheckpointNotFoundError", ("branch", "run", "--at", "5", "--out", "other")),
        (2, "ArgumentError", ("extend", "run")),
        (2, "ArgumentError", ("compare", "run")),
        (1, "FileNotFoundError", ("report", "nowhere")),
        (2, "CheckpointNotFoundError", ("export", "nowhere", "new")),
        (2, "CheckpointNotFoundError", ("verify", "nowhere")),
        (1, "BundleError", ("replay", "nowhere")),
    ):
        error = parsed(*words, code=code)["error"]
        assert error["type"] == kind, words
        assert error["problems"], words
        assert error["message"], words


def test_each_process_of_a_launch_gets_the_command_as_it_was_typed() -> None:
    for words in (
        ["branch", "run", "--at", "8", "--out", "other", "--cooldown", "10%", "--json"],
        ["extend", "run", "--to", "12", "--set", "training.seed=1", "--set", "training.bf16=true"],
        ["train", __file__, "--dry-run"],
        ["resume", "run"],
    ):
        context = COMMANDS[words[0]].make_context(words[0], [*words[1:], "--processes", "2"])
        repeated = rebuild_command(context)
        assert repeated[-1] == "launch.processes=2"
        again = COMMANDS[words[0]].make_context(words[0], repeated[1:-1])
        assert {**again.params, "processes": 2} == context.params
