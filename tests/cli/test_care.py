"""Commands that look after runs and checkpoints: runs, verify, export, env, check."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from .commands import call, done, small

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run; tests copy what they change."""
    folder = tmp_path_factory.mktemp("trained")
    done("train", str(small(folder)))
    return folder


def test_runs_shows_state_best_metric_steps_and_time(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "deep" / "one")
    lines = (tmp_path / "deep/one/journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    losses = [entry["values"]["eval_loss"] for entry in entries if entry["kind"] == "evaluation"]
    (tmp_path / "failed").mkdir()
    cut = [entry for entry in entries if entry["kind"] not in ("end", "time")]
    failed = {"kind": "failed", "run": entries[0]["run"], "time": cut[-1]["time"], "step": 8, "error": "DataError"}
    (tmp_path / "failed/journal.jsonl").write_text("\n".join(map(json.dumps, [*cut, failed])))
    (tmp_path / "killed").mkdir()
    cut[0]["process"]["began"] -= 100  # its number belongs to another process by now
    (tmp_path / "killed/journal.jsonl").write_text("\n".join(map(json.dumps, cut)))
    shown = done("runs", str(tmp_path))
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert "finished" in rows["deep/one"]
    assert "8/8" in rows["deep/one"]
    assert f"loss {min(losses):.4g}" in rows["deep/one"]
    assert "failed: DataError" in rows["failed"]
    assert "killed" in rows["killed"]


def test_runs_tells_one_that_is_running(trained: Path, tmp_path: Path) -> None:
    lines = (trained / "run" / "journal.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] not in ("end", "time")]
    (tmp_path / "journal.jsonl").write_text("\n".join(kept))  # written by this very process
    assert "running" in done("runs", str(tmp_path))


def test_runs_reports_that_there_are_none(tmp_path: Path) -> None:
    assert "No run is below" in done("runs", str(tmp_path))


def test_verify_tells_every_file_that_is_damaged(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    assert done("verify", "run").count("intact, step") == 2
    with (tmp_path / "run/checkpoint-8/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    (tmp_path / "run/checkpoint-8/optimizer.pt").unlink()
    result = call("verify", "run")
    assert result.exit_code == 1
    assert "checkpoint-4: intact" in result.output
    assert "checkpoint-8: damaged" in result.output
    assert "model.safetensors was altered" in result.output
    assert "optimizer.pt is missing" in result.output


def test_an_export_has_the_model_and_nothing_of_the_training(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    checkpoint = trained / "run" / "checkpoint-8"
    done("export", str(checkpoint), "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"optimizer.pt", "scheduler.pt", "trainer_state.json", "manifest.json", "training_args.bin"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    own = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), own.state_dict().values(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("good film")["input_ids"]
    assert model.config.id2label == {0: "no", 1: "yes"}
    again = call("export", str(checkpoint), "model")
    assert again.exit_code == 1
    assert "not empty" in again.output


def test_an_export_of_a_killed_run_takes_a_checkpoint_and_says_which(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "newest")
    changes = ("output_dir=best", "metric_for_best_model=loss")  # which is lower at step 4
    done("train", str(small(tmp_path)), *(word for one in changes for word in ("--set", f"training.{one}")))
    for run, step in (("newest", 8), ("best", 4)):
        (tmp_path / run / "model.safetensors").unlink()
        shown = done("export", run, f"{run}-model")
        assert f"From {run}/checkpoint-{step}: the {run} checkpoint" in shown
        assert "itself has no model" in shown
        weights = (tmp_path / run / f"checkpoint-{step}" / "model.safetensors").read_bytes()
        assert (tmp_path / f"{run}-model" / "model.safetensors").read_bytes() == weights


def test_an_export_merges_shards(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(trained / "run")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    done("export", "sharded", "whole")
    assert [path.name for path in (tmp_path / "whole").glob("*.safetensors*")] == ["model.safetensors"]
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


def test_an_export_puts_the_parts_of_several_processes_together(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from trainwright.checkpoint.deferred_io import IMMEDIATE
    from trainwright.engine import sharded_state

    model = AutoModelForSequenceClassification.from_pretrained(trained / "run")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):  # as one of one process
        sharded_state.save(tmp_path / "parts", model, None, put=IMMEDIATE.put, group=None)
    model.config.save_pretrained(tmp_path / "parts")
    done("export", "parts", "whole")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


def test_a_damaged_checkpoint_is_not_exported(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run" / "checkpoint-8", tmp_path / "bad")
    (tmp_path / "bad/config.json").write_text("{}")
    result = call("export", "bad", "model")
    assert result.exit_code == 1
    assert "config.json has 2 bytes instead of" in result.output
    assert not (tmp_path / "model").exists()


def test_env_shows_versions_and_hardware() -> None:
    shown = done("env")
    for said in ("torch", torch.__version__.split("+")[0], "transformers", "python", "device", "cpu", "memory"):
        assert said in shown


def test_commands_print_json_for_programs(trained: Path, tmp_path: Path) -> None:
    def parsed(*words: str) -> Any:
        return json.loads(done(*words, "--json"))

    shutil.copytree(trained / "run", tmp_path / "one")
    shutil.copytree(trained / "run", tmp_path / "two")
    journal = tmp_path / "two" / "journal.jsonl"
    journal.write_text(re.sub(r'("loss": )0', r"\g<1>9", journal.read_text()))
    assert [(run["state"], run["steps"]) for run in parsed("runs", ".")] == [("finished", "8/8")] * 2
    found = parsed("compare", "one", "two")
    assert (found["runs"], found["parts_at_step"]) == (["one", "two"], 2)
    assert [one["problems"] for one in parsed("verify", "one")] == [[], []]
    (tmp_path / "one/checkpoint-4/optimizer.pt").unlink()
    damaged = call("verify", "one", "--json")
    assert damaged.exit_code == 1
    assert [len(one["problems"]) for one in json.loads(damaged.output)] == [1, 0]
    assert torch.__version__.startswith(parsed("env")["packages"]["torch"])  # one may name the build too: +cu128
    report = parsed("check", str(small(tmp_path)))
    assert report["worst"] in ("note", "warning", None)
    assert report["data"][0].startswith("48 samples to train on")
    assert {"severity", "evidence", "cure", "check", "rows", "entry", "ends_run"} == set(report["findings"][0])


def test_a_command_about_runs_says_which_one_is_missing(trained: Path) -> None:
    one = str(trained / "run")
    nowhere = str(trained / "nowhere")
    for said, words in (
        (f"compare takes two runs or more, and {one} is one", ("compare", one)),
        (f"There is no {nowhere}", ("compare", one, nowhere)),
        (f"There is no {trained / 'journal.jsonl'}", ("report", str(trained))),
        (f"There is no {nowhere}/recipe.yaml", ("resume", nowhere)),
    ):
        result = call(*words)
        assert result.exit_code != 0
        assert said in result.output
        assert "trainwright runs" in result.output


def test_a_push_without_uploads_says_so(trained: Path) -> None:
    assert "Nothing waits in" in done("push", str(trained / "run"))


def test_check_finds_no_error_in_a_good_file_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    shown = done("check", str(small(tmp_path)))
    assert "fine " in shown
    assert "effective_batch" in shown
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_an_output_directory_that_cannot_be_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    result = call("train", str(small(tmp_path)))
    assert result.exit_code == 2
    assert "config.yaml:10: training.output_dir='" in result.output
    assert "cannot be made: it is a file. Choose another directory." in result.output


def test_check_plans_the_memory_on_request(tmp_path: Path) -> None:
    shown = done("check", str(small(tmp_path)), "--memory", "--budget", "1GB")
    assert "memory of a step" in shown
    assert "it fits" in shown


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_check_proves_on_request_and_ends_with_1_where_something_fails(tmp_path: Path) -> None:
    result = call("check", str(small(tmp_path)), "--prove")
    assert "holds     a resumed run equals an uninterrupted one" in result.output
    assert result.exit_code == (1 if "FAILS" in result.output else 0)


def test_check_ends_with_1_where_the_run_cannot_work(tmp_path: Path) -> None:
    result = call("check", str(small(tmp_path)), "--set", "model.config.initializer_range=1e30")
    assert result.exit_code == 1, result.output
    assert "finite_loss" in result.output
