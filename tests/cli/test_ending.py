"""How commands end: exit codes, a kill at any moment, and the resume after it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from trainwright.cli.tasks.recipe_run import names_the_resume

from .._support import forked
from .commands import SMALL, call, done, small, start

pytestmark = pytest.mark.filterwarnings("default")

LONG = SMALL
for _short, _long in {
    "max_steps: 8": "max_steps: 500",
    "save_steps: 4": "save_steps: 50\n  save_total_limit: 2",
    "eval_steps: 4": "eval_steps: 250",
}.items():
    LONG = LONG.replace(_short, _long)


def wait_for(path: Path, process: forked.Process) -> None:
    until = time.monotonic() + 90
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            pytest.fail(f"{path} never came:\n{process.communicate()[1]}")
        time.sleep(0.02)


def end(process: forked.Process, number: signal.Signals) -> int:
    process.send_signal(number)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.wait()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_that_was_killed_and_stopped_goes_on_to_the_same_weights(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        small(tmp_path / name, LONG)
    run = tmp_path / "broken" / "run"

    process = start("train", "config.yaml", folder=tmp_path / "broken")
    wait_for(run / "checkpoint-50", process)
    assert end(process, signal.SIGKILL) == -signal.SIGKILL
    assert "killed" in done("runs", str(tmp_path))

    last = max(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*"))
    process = start("resume", "run", folder=tmp_path / "broken")
    wait_for(run / f"checkpoint-{last + 50}", process)
    assert end(process, number) == code
    assert "intact" in done("verify", str(run))
    assert "stopped" in done("runs", str(tmp_path))

    done("resume", str(run))
    done("train", str(tmp_path / "whole" / "config.yaml"))
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole/run/model.safetensors").read_bytes()
    shown = done("runs", str(tmp_path))
    assert shown.count("finished") == 2
    assert shown.count("500/500") == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),  # help, as for any command line that says nothing
        (("trian", "config.yaml"), 2),
        (("train",), 2),
        (("train", "nowhere.yaml"), 2),
        (("train", "config.yaml", "--set", "training.learning_rate=fast"), 2),
        (("train", "config.yaml", "--set", "data.train=nowhere.csv"), 2),
        (("train", "config.yaml", "--set", "training.metric_for_best_model=acuracy"), 2),
        (("resume", "nowhere"), 2),
        (("verify", "nowhere"), 2),
        (("export", "nowhere", "there"), 2),
        (("report", "nowhere"), 1),
        (("check", "config.yaml", "--set", "data.columns.label=lable"), 2),
        (("init", "poetry"), 2),
    ],
)
def test_exit_codes(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    small(tmp_path)
    result = call(*words)
    assert result.exit_code == code, result.output
    assert not (tmp_path / "run" / "checkpoint-4").exists()


def test_a_second_run_does_not_mix_with_the_first(tmp_path: Path) -> None:
    path = small(tmp_path)
    done("train", str(path))
    again = call("train", str(path))
    assert again.exit_code == 2
    assert "already has a run, saved at step 8" in again.output
    assert "`trainwright resume run`" in " ".join(again.output.split())
    assert "config.yaml:10" in again.output
    done("train", str(path), "--set", "training.overwrite_output_dir=true", "--set", "training.max_steps=4")
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-4"]


def test_a_resume_takes_new_settings_and_a_directory_that_was_moved(tmp_path: Path) -> None:
    done("train", str(small(tmp_path)))
    (tmp_path / "run").rename(tmp_path / "moved")
    shown = done("resume", "moved", "--set", "training.max_steps=12")
    assert "resumes   " in shown
    assert (tmp_path / "moved" / "checkpoint-12").is_dir()
    assert not (tmp_path / "run").exists()
    done("resume", "moved/checkpoint-4", "--set", "training.max_steps=6")


def test_settings_of_a_refused_resume_are_not_inherited(tmp_path: Path) -> None:
    done("train", str(small(tmp_path)))
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    refused = call("resume", "run", "--optim", "sgd", "--max_steps", "12")
    assert refused.exit_code != 0
    assert "cannot be resumed from with these arguments" in refused.output
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before
    shown = done("resume", "run", "--max_steps", "12")
    assert "resume_from_checkpoint" not in shown, "the line that names the checkpoint is enough"


def test_a_learned_tokenizer_is_kept_once_and_found_by_a_resume(tmp_path: Path) -> None:
    done("train", str(small(tmp_path)))
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert not (tmp_path / "run" / "tokenizer").exists()
    done("resume", "run", "--set", "training.max_steps=12")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == tokenizer
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    text = SMALL.replace("  logging_steps: 2\n", "")
    shown = done("train", str(small(tmp_path, text)), "--dry-run", "--max_steps", "60")
    assert "length    60 steps" in shown
    assert "logs every 3 steps" in shown  # about twenty times
    assert "nothing was trained" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("metric_for_best_model=acuracy", "acuracy"),
        ("output_dir=used", "already has a run"),
    ],
)
def test_a_dry_run_refuses_what_a_training_refuses(setting: str, said: str, tmp_path: Path) -> None:
    path = small(tmp_path)
    (tmp_path / "used" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "used" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    words = ("train", str(path), "--set", f"training.{setting}")
    real = call(*words)
    dry = call(*words, "--dry-run")
    assert (real.exit_code, dry.exit_code) == (2, 2), dry.output
    assert said in real.output
    assert said in dry.output


def test_what_a_signal_ends_names_the_command_that_continues(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    with pytest.raises(KeyboardInterrupt), names_the_resume(tmp_path / "run", lambda *words: said.append(words)):
        raise KeyboardInterrupt  # before the first checkpoint
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(SystemExit), names_the_resume(tmp_path / "run", lambda *words: said.append(words)):
        raise SystemExit(143)
    assert said == [("stopped", "continue with: trainwright resume run")]


def test_a_token_is_not_written_down(tmp_path: Path) -> None:
    done("train", str(small(tmp_path)), "--set", "training.hub_token=hf_secret", "--set", "training.max_steps=4")
    found = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    assert found == []
