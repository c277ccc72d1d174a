"""examples/demo.py, which `make demo` runs: its lines, and the weights behind the hashes that it shows."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from .._support.subprocesses import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "demo.py"
LOSS = re.compile(r"   step +(\d+) of (\d+)   loss (\d\.\d{3})$", re.MULTILINE)

pytestmark = [pytest.mark.examples, pytest.mark.process]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a demo with a small model."""
    folder = tmp_path_factory.mktemp("demo")
    from examples._common import minilm

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    BertModel(config).save_pretrained(folder / "model")
    return folder / "runs", run_demo(folder / "runs", f"--model={folder / 'model'}", "--rows=960")


def run_demo(output_dir: Path, *arguments: str, timeout_s: float = 250) -> str:
    command = ["-W", "ignore", str(SCRIPT), f"--output_dir={output_dir}", *arguments]
    done = run_python(*command, cwd=output_dir.parent, timeout_s=timeout_s)
    # A package that only developers install prints a line when it is imported.
    return "\n".join(line for line in done.stdout.splitlines() if "get_accelerator" not in line)


@pytest.mark.smoke
def test_a_killed_run_ends_with_the_hash_that_is_shown_twice(small_run: tuple[Path, str]) -> None:
    folder, output = small_run
    first, second = re.findall(r"^   ([0-9a-f]{64})$", output, re.MULTILINE)
    weights = (folder / "killed" / "model.safetensors").read_bytes()
    assert first == second == hashlib.sha256(weights).hexdigest()
    assert "killed (exit code -9); resumed from" in output
    assert "They are equal to the bit." in output


def test_losses_after_the_resume_are_those_of_the_run_that_was_not_killed(small_run: tuple[Path, str]) -> None:
    _, output = small_run
    first, second = output.split("2. The same run")
    undisturbed = {step: loss for step, _, loss in LOSS.findall(first)}
    assert list(undisturbed) == ["10", "20", "30", "40", "50", "60"]
    _, resumed = second.split("resumed from")
    again = {step: loss for step, _, loss in LOSS.findall(resumed)}
    assert again
    assert again.items() <= undisturbed.items()
    assert "10" not in again


def test_the_broken_row_is_named_and_three_sentences_are_predicted(small_run: tuple[Path, str]) -> None:
    folder, output = small_run
    text = " ".join(output.split())
    assert "train[37] (micro-batch 0, item " in text
    assert "trainer.quarantine(['train[37]']) excludes it." in text
    assert "all weights are finite: True" in text
    assert len(re.findall(r"^   (?:positive|negative) 0\.\d\d   \w", output, re.MULTILINE)) == 3
    assert output.endswith(f"5. The run as a page: {folder / 'undisturbed' / 'report.html'}")
    assert (folder / "undisturbed" / "report.html").is_file()


def test_it_is_forty_lines_that_fit_a_terminal(small_run: tuple[Path, str]) -> None:
    folder, output = small_run
    lines = output.replace(str(folder), "runs/demo").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_a_directory_that_cannot_be_made_is_named_in_a_sentence(tmp_path: Path) -> None:
    place = "a_file/runs"
    (tmp_path / "a_file").touch()
    command = [sys.executable, "-W", "ignore", str(SCRIPT), f"--output_dir={tmp_path / place}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"--output_dir {tmp_path / place} cannot be made: Not a directory. Choose another." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_ctrl_c_ends_it_and_the_run_that_is_killed_with_a_sentence(small_run: tuple[Path, str], tmp_path: Path) -> None:
    model = small_run[0].parent / "model"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), f"--output_dir={tmp_path}", f"--model={model}"]
    command.append("--rows=960")
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        assert any("2. The same run" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 130
    shown = errors.read_text()
    assert "Traceback" not in shown
    assert "Stopped by Ctrl-C. The next `make demo` begins again." in shown


def test_ctrl_c_while_it_imports_is_a_sentence_too(tmp_path: Path) -> None:
    """The signal comes as torch is looked for: by a module of that name that comes first, and waits to be killed."""
    (tmp_path / "torch.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), f"--output_dir={tmp_path / 'runs'}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        os.killpg(process.pid, signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown == "Stopped by Ctrl-C. The next `make demo` begins again.\n"


def test_make_demo_runs_it() -> None:
    # Also below another make, which hands its own options down and names the directories that it enters and leaves.
    command = ["make", "--no-print-directory", "-n", "demo"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    planned = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60, check=True)
    assert planned.stdout.splitlines()[-1].endswith("python examples/demo.py ")


@pytest.mark.slow  # trains MiniLM twice
@pytest.mark.timeout(1800)
def test_the_demo_learns(tmp_path: Path) -> None:
    output = run_demo(tmp_path / "runs", timeout_s=1500)
    before, after = map(float, *re.findall(r"accuracy (\S+) before, (\S+) after", output))
    assert before < 0.6
    assert after > 0.7
    losses = [float(loss) for _, _, loss in LOSS.findall(output)]
    assert losses[5] < losses[0] - 0.1
    answers = re.findall(r"^   (positive|negative) ", output, re.MULTILINE)
    assert answers == ["positive", "negative", "positive"]
