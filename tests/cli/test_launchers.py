"""The command line under launchers: several processes train one run, and one of them speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import free_port, run
from .commands import ROOT, SMALL, call, small, start

pytestmark = pytest.mark.timeout(300)

HERE = Path("trainwright")  # after the launcher's -m
TORCHRUN = "torchrun --nproc-per-node 2 -m trainwright train config.yaml"
ACCELERATE = "accelerate launch --num_processes 2 -m trainwright train config.yaml"


def test_the_page_has_these_commands() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert f"$ {TORCHRUN}\n" in page
    assert f"$ {ACCELERATE}\n" in page


def test_processes_are_started_with_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, list[str]]] = []
    monkeypatch.setattr("trainwright.cli.launch.launch", lambda number, words: started.append((number, words)) or 3)
    config = str(small(tmp_path))
    assert call("train", config, "-m", "2", "--set", "training.seed=1", "--max_steps", "4").exit_code == 3
    (tmp_path / "launch.yaml").write_text(SMALL + "launch: {processes: 3}\n")
    assert call("train", "launch.yaml").exit_code == 3
    assert started == [
        (2, ["train", config, "--set", "training.seed=1", "launch.processes=2", "--max_steps", "4"]),
        (3, ["train", "launch.yaml"]),
    ]
    assert call("train", config, "-m", "2", "--max_stepz", "4").exit_code == 2  # found before anything is started
    assert len(started) == 2


@pytest.mark.process
@pytest.mark.slow  # starts a launcher and two processes
def test_the_command_starts_two_processes_and_so_does_its_resume(tmp_path: Path) -> None:
    small(tmp_path)
    for words in (["train", "config.yaml", "-m", "2", "--max_steps=4"], ["resume", "run", "--max_steps", "8"]):
        process = start(*words, folder=tmp_path)
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert "x 2 processes = 8 samples a step" in out
        assert out.count("result    loss") == 1
    assert (tmp_path / "run" / "checkpoint-8" / "manifest.json").is_file()


def launchers() -> dict[str, tuple[str, ...]]:
    port = str(free_port())
    return {
        "torchrun": (
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-addr",
            "localhost",
            "--master-port",
            port,
            "-m",
        ),
        "accelerate": (
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes=2",
            "--num_machines=1",
            "--mixed_precision=no",
            "--dynamo_backend=no",
            f"--main_process_port={port}",
            "-m",
        ),
    }


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_one_run(launcher: str, tmp_path: Path) -> None:
    config = small(tmp_path, SMALL.replace("max_steps: 8", "max_steps: 4\n  overwrite_output_dir: true"))
    done = run(HERE, "train", str(config), folder=tmp_path, launcher=launchers()[launcher], timeout_s=250)
    assert "x 2 processes = 8 samples a step" in done.out
    assert done.out.count("model     BertForSequenceClassification") == 1
    assert done.out.count("result    loss") == 1
    assert (tmp_path / "run" / "checkpoint-4" / "manifest.json").is_file()
    assert (tmp_path / "run" / "model.safetensors").is_file()
