"""What a new user stumbles over: each is answered with what would do, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from trainwright.cli.tasks.applied import guess_task

from .commands import SMALL, call, done, small
from .proved import TUNED, make_base, tune

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished")
    done("train", str(small(folder)))
    return folder / "run"


def flat(text: str) -> str:
    return " ".join(text.split())


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "words",
    [
        ("--metric_for_best_model", "nix", "--load_best_model_at_end", "true"),
        ("--set", "data.columns.text=nope"),
        ("--set", "model.config.hidden_size=15"),
        ("--resume_from_checkpoint", "nope"),
    ],
)
def test_a_refused_run_leaves_no_directory(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = small(tmp_path)
    for command in ("check", "train"):
        result = call(command, str(path), "--output_dir", "runs/new", *words)
        assert result.exit_code == 2 or command == "check"
        assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "new").mkdir(parents=True)
    call("train", str(path), "--output_dir", "runs/new", *words)
    assert (tmp_path / "runs" / "new").is_dir()


def test_a_check_leaves_no_directory(tmp_path: Path) -> None:
    done("check", str(small(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_rows_to_evaluate_on_are_not_called_training_rows(run: Path, tmp_path: Path) -> None:
    for text, said in {
        "a good film,\n": "data.columns.label: 1 of the eval rows has no label: new.csv:2 'a good film'.",
        "a good film,maybe\n": "the eval rows have labels that are not listed: maybe, in new.csv:2.",
        "": "no row is left to evaluate on.",
    }.items():
        (tmp_path / "new.csv").write_text(f"text,label\n{text}")
        result = call("eval", str(run), "--data", str(tmp_path / "new.csv"))
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
        assert "train" not in result.output.replace("trainwright", "").replace("not trained", "")


def test_rows_to_evaluate_on_need_no_label_that_is_left_out(tmp_path: Path) -> None:
    path = small(tmp_path, SMALL.replace("  max_length: 16", '  labels: {"N/A": null}\n  max_length: 16'))
    with (tmp_path / "table.csv").open("a") as table:
        table.write("an odd film,N/A\n")
    done("train", str(path), "--max_steps", "1")
    (tmp_path / "new.csv").write_text("text,label\na good film,yes\n")
    assert "1 sample:" in done("eval", str(tmp_path / "run"), "--data", str(tmp_path / "new.csv"))


def test_labels_that_leave_out_all_rows_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text,label\na good film,N/A\na bad film,N/A\n")
    words = ("--set", 'data.labels={"N/A": null}')
    shown = " ".join(call("eval", str(run), "--data", str(tmp_path / "new.csv"), *words).output.split())
    assert "each of the 2 rows of eval has a label that data.labels leaves out (null: N/A), so that none is" in shown
    path = small(tmp_path)
    with (tmp_path / "table.csv").open("a") as table:
        table.write("an odd film,N/A\n")
    for part in ("train", "eval"):
        changed = (*words, "--set", f"data.{part}={tmp_path / 'new.csv'}")
        shown = " ".join(call("check", str(path), *changed).output.split())
        assert f"each of the 2 rows of {part} has a label that data.labels leaves out" in shown


def test_a_finished_run_is_not_resumed_and_names_the_command_that_goes_on(run: Path) -> None:
    before = contents(run)
    shown = done("resume", str(run))
    assert f"at step 8; nothing was written. Go on with: trainwright extend {run} --steps N" in shown
    said = json.loads(done("resume", str(run), "--json"))
    assert said["step"] == 8
    assert said["checkpoint"] == str(run / "checkpoint-8")
    assert "eval_accuracy" in said["eval"]
    assert contents(run) == before


def test_a_run_without_its_final_model_is_not_finished(tmp_path: Path) -> None:
    done("train", str(small(tmp_path)))
    (tmp_path / "run" / "trainer_state.json").unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    done("resume", str(tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "finished" not in done("resume", str(tmp_path / "run"), "--set", "training.max_steps=9")


def test_a_run_without_a_checkpoint_begins_again_and_says_so(run: Path, tmp_path: Path) -> None:
    """As one that was killed before its first save."""
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "recipe.yaml").write_bytes((run / "recipe.yaml").read_bytes())
    assert "killed has no checkpoint yet, so the run begins again" in flat(done("resume", str(killed)))
    assert "begins again" not in done("resume", str(killed), "--max_steps", "9")


def test_fewer_steps_than_the_run_has_is_an_error(run: Path) -> None:
    before = contents(run)
    result = call("resume", str(run), "--max_steps", "4")
    assert result.exit_code == 2
    assert "4 is below step 8, which the run has reached" in result.output.replace("\n", " ")
    assert contents(run) == before


@pytest.mark.parametrize("name", ["name", "id"])
def test_the_entry_for_a_model_is_its_path(name: str, tmp_path: Path) -> None:
    text = SMALL.replace("learn_tokenizer:", f"{name}: qwen\n  learn_tokenizer:")
    said = f"model.{name} is not known. Did you mean model.path?"
    assert said in call("check", str(small(tmp_path, text))).output
    assert said in call("check", str(small(tmp_path)), "--set", f"model.{name}=qwen").output


def test_a_file_of_almost_that_name_is_meant(run: Path, tmp_path: Path) -> None:
    path = small(tmp_path)
    (tmp_path / "table.csv").rename(tmp_path / "tickets.csv")
    path.write_text(SMALL.replace("table.csv", "ticket.csv"))
    assert "Did you mean tickets.csv? In " in call("train", str(path)).output
    assert "Did you mean tickets.csv?" in call("predict", str(run), "--data", str(tmp_path / "ticket.csv")).output


def test_a_configuration_file_of_almost_that_name_is_meant(run: Path, tmp_path: Path) -> None:
    path = small(tmp_path)
    for command in ("check", "train"):
        result = call(command, str(path.with_name("confg.yaml")))
        assert result.exit_code == 2
        assert "confg.yaml. Did you mean config.yaml? `trainwright init TASK` writes one." in flat(result.output)
    result = call("train", str(run))
    assert result.exit_code == 2
    assert f"{run} is a directory. Name its configuration file; `trainwright resume {run}` continues a run" in flat(
        result.output
    )


def test_a_partial_mapping_of_labels_keeps_the_numbers_of_the_model(tmp_path: Path) -> None:
    path = small(tmp_path, SMALL.replace("  max_length: 16", '  labels: {"YES": yes}\n  max_length: 16'))
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace(",yes", ",YES", 3))
    done("train", str(path), "--max_steps", "1")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["id2label"] == {"0": "yes", "1": "no"}
    (tmp_path / "new.csv").write_text("text,label\na good film,no\na bad film,no\n")
    found = json.loads(done("eval", str(tmp_path / "run"), "--data", str(tmp_path / "new.csv"), "--json"))
    assert found["labels"] == ["yes", "no"]
    (tmp_path / "new.csv").write_text("text,label\na good film,maybe\n")
    shown = call("eval", str(tmp_path / "run"), "--data", str(tmp_path / "new.csv")).output
    assert "labels that are not listed: maybe" in flat(shown)


def test_an_evaluation_without_labels_names_predict(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text\na good film\n")
    result = call("eval", str(run), "--data", str(tmp_path / "new.csv"))
    assert result.exit_code == 2
    assert "there is no column 'label'" in result.output
    assert "`trainwright predict` needs none" in result.output


@pytest.mark.parametrize("labels", ['{"N/A": null}', '{"N/A": null, "yes": good, "no": bad}'])
def test_a_label_that_is_mapped_to_null_leaves_its_rows_out(labels: str, tmp_path: Path) -> None:
    path = small(tmp_path, SMALL.replace("  max_length: 16", f"  labels: {labels}\n  max_length: 16"))
    with (tmp_path / "table.csv").open("a") as table:
        table.write("an odd film,N/A\nanother odd film,N/A\n")
    shown = done("train", str(path))
    assert "2 rows of train with the label N/A are left out, as data.labels says (null)." in " ".join(shown.split())
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert sorted(config["label2id"]) == (["no", "yes"] if "good" not in labels else ["bad", "good"])
    (tmp_path / "new.csv").write_text("text,label\na good film,yes\n")
    done("eval", str(tmp_path / "run"), "--data", str(tmp_path / "new.csv"))  # rows without some of the labels


def test_a_run_without_a_journal_says_so_and_names_none(tmp_path: Path) -> None:
    path = small(tmp_path, SMALL)
    assert "(model, results, checkpoints)" in done("train", str(path), "--set", "training.journal=false")
    run = tmp_path / "run"
    for words in (("report", str(run)), ("compare", str(run), str(run))):
        said = " ".join(call(*words).output.split())
        assert "the run was trained with journal=False" in said
        assert "is not a run" not in said


def test_a_run_that_ended_before_its_first_save_has_no_weights(run: Path, tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    shutil.copyfile(run / "recipe.yaml", tmp_path / "early" / "recipe.yaml")
    result = call("eval", str(tmp_path / "early"), "--data", str(run.parent / "table.csv"))
    assert result.exit_code == 1
    assert "early has no weights: neither model.safetensors nor" in " ".join(result.output.split())


def test_a_label_that_is_left_out_and_does_not_occur_is_named(tmp_path: Path) -> None:
    path = small(tmp_path, SMALL.replace("max_length: 16", 'max_length: 16\n  labels: {"yess": null}'))
    assert "no row has the label 'yess', which data.labels leaves out (null). Did you mean 'yes'?" in call(
        "check", str(path)
    ).output.replace("\n", " ")


def test_a_language_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path, steps=2)
    weights = load_file(base / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "tuned.yaml").write_text(TUNED)
    shown = call("train", str(tmp_path / "tuned.yaml"))
    assert shown.exit_code == 2
    assert "model.path: the weights lack lm_head.weight, which would be random" in shown.output


def test_an_adapter_that_names_no_task_is_that_of_its_base(tmp_path: Path) -> None:
    base = make_base(tmp_path, steps=2)
    tune(tmp_path)
    described = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert guess_task(tmp_path / "tuned") == "chat"
    described |= {"task_type": None, "base_model_name_or_path": str(base)}
    (tmp_path / "tuned" / "adapter_config.json").write_text(json.dumps(described))
    assert guess_task(tmp_path / "tuned") == "chat"


def test_an_empty_part_is_not_taken_for_its_defaults(tmp_path: Path) -> None:
    assert "lora is empty. Write `lora: {}` for its defaults" in call(
        "check", str(small(tmp_path)), "--set", "lora=null"
    ).output.replace("\n", " ")
