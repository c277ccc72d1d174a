"""Weights of classes from the file: in the loss of a step, not in that of an evaluation, and written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from trainwright.cli.tasks.class_weights import WeightedLoss

from .commands import SMALL, call, done, small

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]


def rare(folder: Path, text: str = SMALL) -> Path:
    """Writes a table in which one of four rows is `yes`, and a file that trains on all of it."""
    path = small(folder, text.replace("eval_share: 0.25", "eval: table.csv"))
    rows = [f"film {n} was {'good' if n % 4 == 0 else 'bad'},{'yes' if n % 4 == 0 else 'no'}" for n in range(64)]
    (folder / "table.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return path


def with_weights(weights: str) -> str:
    return SMALL.replace("  max_length: 16", f"  max_length: 16\n  class_weights: {weights}")


def test_balanced_weights_are_written_into_journal_and_result(tmp_path: Path) -> None:
    path = rare(tmp_path, with_weights("balanced"))
    result = json.loads(done("train", str(path), "--json"))
    assert result["class_weights"] == pytest.approx({"no": 2 / 3, "yes": 2.0})
    assert '"class_weights": "no 0.6667, yes 2"' in (tmp_path / "run" / "journal.jsonl").read_text()
    found = json.loads(done("eval", str(tmp_path / "run"), "--data", str(tmp_path / "table.csv"), "--json"))
    assert found["metrics"]["loss"] == pytest.approx(result["eval"]["eval_loss"], rel=1e-6)


def test_a_step_is_that_of_weighted_cross_entropy_and_accumulates(tmp_path: Path) -> None:
    without_dropout = "intermediate_size: 32, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0"
    text = with_weights("{yes: 3}").replace("intermediate_size: 32", without_dropout)
    done("train", str(rare(tmp_path, text)), "--max_steps", "4", "--output_dir", "one")
    halves = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2")
    done("train", str(tmp_path / "config.yaml"), "--max_steps", "4", "--output_dir", "two", *halves)
    losses = [
        [
            entry["loss"]
            for entry in json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
            if "loss" in entry
        ]
        for name in ("one", "two")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    text = text.replace("{yes: 3}", "null")
    done("train", str(rare(tmp_path, text)), "--max_steps", "4", "--output_dir", "plain")
    plain = json.loads((tmp_path / "plain" / "trainer_state.json").read_text())["log_history"][0]["loss"]
    assert plain != pytest.approx(losses[0][0], rel=1e-3)


def test_the_loss_is_that_of_torch() -> None:
    logits = torch.randn(6, 2, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 0, 1, 0])
    loss = WeightedLoss({"no": 0.5, "yes": 3.0})
    wanted = functional.cross_entropy(logits, labels, weight=torch.tensor([0.5, 3.0]))
    torch.testing.assert_close(loss({"logits": logits}, labels).loss, wanted)
    with torch.no_grad():
        torch.testing.assert_close(loss({"logits": logits}, labels).loss, functional.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("even", "'even' is neither `balanced` nor label -> weight"),
        ("{yes: -1}", "-1 for yes must be a number above 0"),
        ("{yess: 2}", "there is no label 'yess'. Did you mean yes? Labels: no, yes."),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: str, said: str, tmp_path: Path) -> None:
    result = call("train", str(rare(tmp_path, with_weights(weights))))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_weights_belong_to_tasks_with_one_label(tmp_path: Path) -> None:
    text = with_weights("balanced").replace("text-classification", "regression")
    assert "data.class_weights has no effect in regression" in call("train", str(rare(tmp_path, text))).output
