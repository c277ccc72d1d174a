"""prove(): laws that hold, laws that fail and what cures them, and a trainer that is left as it was."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Trainer
from trainwright.errors import ModelError
from trainwright.preflight import prove
from trainwright.preflight.prove import Proof, ProofReport, gap, without_dropout

from .._support.small import Augmented, data, differing, make_trainer, models, weights
from .._support.subprocesses import run_python
from . import provable


def attempt(law: Any, trainer: Any) -> tuple[bool, str, str]:
    """One law alone; the two processes take most of the time."""
    with prove.quietly(trainer):
        holds, evidence, cure = law(trainer, 4)
    return holds, evidence, cure


def of(kind: Any, folder: Path, **how: Any) -> Any:
    return make_trainer(folder, model=models.seeded(kind), train_dataset=provable.ragged(), **how)


PARTS: dict[str, Any] = {
    "dropout": dict,
    "augmented": lambda: {"train_dataset": Augmented(data.vectors(26))},
    "llama": lambda: {"model": models.seeded(lambda: models.llama(0.1)), "train_dataset": data.sequences(12)},
    "statistics": lambda: {"model": models.seeded(provable.Normed), "train_dataset": provable.ragged()},
    "warmed up": lambda: {"warmup_steps": 5, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_resume_equals_an_uninterrupted_run(name: str, tmp_path: Path) -> None:
    holds, evidence, _ = attempt(prove.resume, make_trainer(tmp_path, **PARTS[name]()))
    assert holds, evidence


def test_state_that_no_checkpoint_has_is_found(tmp_path: Path) -> None:
    holds, evidence, cure = attempt(prove.resume, of(provable.OwnGenerator, tmp_path))
    assert not holds
    assert "2 weights differ" in evidence
    assert "state_dict()" in cure


def test_accumulation_is_exact_for_a_model_of_transformers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=models.seeded(lambda: models.llama(0.1)), train_dataset=data.sequences(12))
    holds, evidence, _ = attempt(prove.accumulation, trainer)
    assert holds, evidence


def test_a_mean_over_labels_fails_and_its_cure_was_tried(tmp_path: Path) -> None:
    holds, _, cure = attempt(prove.accumulation, of(provable.MeanOfLabels, tmp_path))
    assert not holds
    assert cure.startswith("With loss_weighting='items', they")
    holds, evidence, _ = attempt(prove.accumulation, of(provable.MeanOfLabels, tmp_path, loss_weighting="items"))
    assert holds, evidence


def test_batch_normalisation_is_named(tmp_path: Path) -> None:
    holds, _, cure = attempt(prove.accumulation, of(provable.Normed, tmp_path, loss_weighting="items"))
    assert not holds
    assert "Batch normalisation" in cure


def test_the_evaluation_loss_of_a_mean_holds_and_of_a_sum_fails(tmp_path: Path) -> None:
    assert attempt(prove.evaluation, of(provable.MeanOfLabels, tmp_path))[0]
    holds, evidence, cure = attempt(prove.evaluation, of(provable.SumOfLabels, tmp_path))
    assert not holds
    assert "batches of 3" in evidence
    assert "sums in the loss" in cure


def test_what_cannot_be_tried_says_why(tmp_path: Path) -> None:
    short = make_trainer(tmp_path, train_dataset=data.vectors(5))
    proof = prove._tried(short, 4, "accumulation", "a law", prove.accumulation)
    assert proof.holds is None
    assert "no 8 samples" in proof.evidence


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"data_collator": lambda rows: rows}, "data_collator cannot be sent to another process ("),
        ({"cls": type("Local", (Trainer,), {})}, "the class of the trainer cannot be sent to another process ("),
    ],
)
def test_what_cannot_be_pickled_is_named_before_a_process_starts(
    parts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, **parts)
    with pytest.raises(ModelError, match=re.escape(said)) as caught:
        attempt(prove.processes, trainer)
    assert "define them at the top level of a module" in str(caught.value)


@pytest.mark.slow
def test_all_four_hold_and_the_trainer_is_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "proved", train_dataset=data.sequences(12), model=models.seeded(models.llama))
    before = weights(trainer.model)
    names = dict(vars(trainer))
    draws = torch.get_rng_state()
    report = trainer.prove()
    assert [proof.holds for proof in report.proofs] == [True] * 4, str(report)
    assert report.holds
    assert differing(weights(trainer.model), before) == {}
    assert all(vars(trainer)[name] is value for name, value in names.items())
    assert torch.equal(torch.get_rng_state(), draws)
    trainer.train()
    other = make_trainer(tmp_path / "other", train_dataset=data.sequences(12), model=models.seeded(models.llama))
    other.train()
    assert differing(weights(trainer.model), weights(other.model)) == {}


@pytest.mark.slow
def test_two_processes_with_a_mean_over_labels_differ_from_one(tmp_path: Path) -> None:
    holds, _, cure = attempt(prove.processes, of(provable.MeanOfLabels, tmp_path))
    assert not holds
    assert "loss_weighting='items'" in cure
    holds, evidence, _ = attempt(prove.processes, of(provable.MeanOfLabels, tmp_path, loss_weighting="items"))
    assert holds, evidence


SCRIPT = """
    import sys, torch
    from trainwright import Trainer, TrainingArguments
    from trainwright.preflight import prove

    print("the script begins")

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
        def forward(self, x, labels=None):
            return {"loss": (self.layer(x).squeeze(-1) - labels).pow(2).mean()}

    args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to="none", disable_tqdm=True)
    items = [{"x": torch.tensor([i / 8, 1.0]), "labels": float(i)} for i in range(16)]
    trainer = Trainer(model=Mine(), args=args, train_dataset=items)
    print(prove._tried(trainer, 4, "processes", "two equal one", prove.processes).evidence)
"""


@pytest.mark.process
@pytest.mark.slow
def test_what_the_script_itself_defines_is_said_and_the_script_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = run_python(str(script), str(tmp_path / "run"))
    assert done.stdout.count("the script begins") == 1
    assert "Mine" in done.stdout
    assert "not in the script itself" in done.stdout


def test_a_gap_is_a_share_of_the_largest_value() -> None:
    one = {"a": torch.tensor([4.0, 1.0])}
    other = {"a": torch.tensor([4.0, 2.0])}
    assert gap(one, other) == 0.25
    assert gap(one, {"b": torch.zeros(2)}) == float("inf")
    assert gap(one, one) == 0.0


def test_dropout_is_off_in_modules_and_in_attention() -> None:
    model = without_dropout(models.seeded(lambda: models.llama(0.3)))
    assert all(layer.self_attn.attention_dropout == 0.0 for layer in model.model.layers)
    assert without_dropout(nn.Sequential(nn.Dropout(0.5)))[0].p == 0.0


def test_a_report_reads_as_sentences() -> None:
    good = Proof(name="a", law="one equals one", holds=True, evidence="0 apart")
    bad = Proof(name="b", law="one equals two", holds=False, evidence="1 apart", cure="Set x.")
    open_ = Proof(name="c", law="two equals two", holds=None, evidence="no data")
    report = ProofReport((good, bad, open_))
    assert not report.holds
    assert ProofReport((good, open_)).holds
    assert report.of("b").cure == "Set x."
    assert "FAILS     one equals two: 1 apart" in str(report)
    assert report.to_dict()["proofs"][2]["holds"] is None
