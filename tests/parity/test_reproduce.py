"""`reproduce="transformers"` takes each correction of docs/migrate.md back that changes numbers, bit for bit.

A row here is a case of the fuzz in which a correction matters: the original's results are those of the plain Trainer.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_callback import TrainerState

import trainwright
from trainwright.config.behaviour import differences

from .._support.small import StopAt
from ..data.test_epochs import Turns
from . import data, models
from .fuzz_sides import OURS, OURS_SEQ2SEQ, PLAIN, PLAIN_SEQ2SEQ, REPRODUCING, REPRODUCING_SEQ2SEQ, Facts, run
from .fuzz_table import BEST_EPOCH, EVERY_2, FIVE_TOKENS, Case, is_t5
from .golden import MARKS, Golden, from_text, to_text
from .rows import MLM
from .sides import Side, differing, weights

STEPS = {"save_strategy": "steps", "save_steps": 2}
EPOCHS = {"saving": {"save_strategy": "epoch"}, "resume": "first"}
# The beginning of a row of the page -> a case in which its correction changes a number.
CASES: dict[str, Case] = {
    "**Causal models without": {"model": "gpt2", "gradient_accumulation_steps": 2},
    "**`eval_loss`**": {"model": "llama", "ragged": True, "evaluation": EVERY_2, "per_device_eval_batch_size": 4},
    "**Evaluating draws": {"dropout": 0.2, "evaluation": EVERY_2},
    "**A loss that is not finite**": {"learning_rate": 1e30, "eval_data": "none"},
    "BERT, RoBERTa, T5": {"model": "bert", "gradient_accumulation_steps": 2},
    "a changed learning rate": {**EPOCHS, "resumed_with": {"learning_rate": 1e-3, "num_train_epochs": 3}},
    "a resumed run keeps the intervals": {
        "resume": "last",
        "longer": True,
        "evaluation": {"eval_strategy": "steps", "eval_steps": 0.5},
        "saving": {"save_strategy": "steps", "save_steps": 0.5},
    },
    "a resume of a run that has done": {**EPOCHS, "resume": "last", "length": {"max_steps": 7}},
    "a resumed run draws other": {"model": "mlm", "saving": STEPS, "resume": "first"},
    "a resumed stream that has had": {"data": "stream", "saving": STEPS, "resume": "last", "samples": 7},
    "without `restore_callback_states": {
        "evaluation": {},
        "best": BEST_EPOCH,
        "callback": "patience_2",
        "resume": "last",
        "learning_rate": 0.0,
        "length": {"num_train_epochs": 5},
        "samples": 3,
    },
    "`sortish_sampler=True`": {"model": "t5", "ragged": True, "more": {"sortish_sampler": True}},
    "if a stream ends": {
        "data": "stream",
        "gradient_accumulation_steps": 4,
        "samples": 26,
        "tail": True,
        "length": {"max_steps": 4},
    },
    "`dataloader_drop_last` drops": {
        "dataloader_drop_last": True,
        "per_device_eval_batch_size": 4,
        "metrics": "scores",
    },
    "with `predict_with_generate` and no length": {
        "model": "t5",
        "generation": {"predict_with_generate": True},
        "metrics": "scores",
        "per_device_eval_batch_size": 3,
        "length": {"max_steps": 1},
    },
    "with `group_by_length`, predictions": {
        "model": "bert",
        "ragged": True,
        "train_sampling_strategy": "group_by_length",
        "per_device_eval_batch_size": 2,
    },
    'with `include_for_metrics=["loss"]`': {
        "model": "t5",
        "metrics": "scores",
        "include_for_metrics": ["loss"],
        "per_device_eval_batch_size": 4,
    },
    "a step with NaN in loss or gradient": {"learning_rate": 1e30, "data": "torch", "evaluation": EVERY_2},
    "the column of `length_column_name`": {
        "model": "bert",
        "ragged": True,
        "data": "hf_with_numbers",
        "train_sampling_strategy": "group_by_length",
    },
    "`evaluate()` or `predict()` with `bf16_full_eval`": {
        "model": "bert",
        "before": "evaluate",
        "bf16_full_eval": True,
        "length": {"max_steps": 2},
    },
    "with `model_init`, `generation_config`": {
        "model": "t5",
        "model_init": True,
        "length": {"max_steps": 1},
        "more": {"generation_max_length": 7},
        "generation": {"predict_with_generate": True, "generation_config": FIVE_TOKENS},
    },
    "with `model_init`, the model that is trained": {"model": "gpt2", "dropout": 0.2, "model_init": True},
    "`fp16=True` has": {"fp16": True},
}
# Rows compared by the last tests of this file, test_prompts_are_kept.py, test_stream_epochs.py, test_own_objects.py and
# three by laws/test_loss_laws.py.
ALSO = (
    "an overridden `compute_loss`, a",
    "a `compute_loss_func` counts",
    "a module whose `forward` names",
    "`compute_metrics` is called by evaluations",
    "a pass that ends before the `len()`",
    "with `dataloader_persistent_workers`",
    "with `eval_on_start`, each resume",
    "early stopping ignores NaN",
    "random draws in a worker process",
    "workers that persist keep the epoch",
    "with a decoder-only model, predictions",
    "with `max_grad_norm=0`, one gradient",
    "with `predict_with_generate`, `eval_loss` is",
)
KEPT = (
    "log",
    "state",
    "weights",
    "evaluated before",
    "evaluated",
    "predicted",
    "resumed log",
    "resumed state",
    "resumed weights",
)


def facts(case: Case, side: Side, seq2seq: Side) -> dict[str, Any]:
    """Numbers of a case on a side, arrays as digests."""
    found: Facts = run(case, seq2seq if is_t5(case) else side, Counter())
    if "error" in found:
        raise found["error"]
    return {name: found[name] for name in KEPT if name in found}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    return from_text(to_text({"": found}))[""]


GOLDEN = Golden("reproduce", {row: partial(facts, case, PLAIN, PLAIN_SEQ2SEQ) for row, case in CASES.items()})


@pytest.mark.parametrize("row", CASES)
@pytest.mark.parametrize(
    "as_original", [pytest.param(True, marks=MARKS), pytest.param(False, marks=pytest.mark.slow)]
)  # False: that the case shows it
def test_the_numbers_are_those_of_the_original(row: str, as_original: bool) -> None:
    sides = (REPRODUCING, REPRODUCING_SEQ2SEQ) if as_original else (OURS, OURS_SEQ2SEQ)
    ours = plain(facts(CASES[row], *sides))

    def compare(theirs: dict[str, Any]) -> None:
        assert (ours == plain(theirs)) is as_original

    GOLDEN.check(row, compare)


def test_each_difference_that_is_restored_is_compared() -> None:
    """The page has these differences and no others as restored: tests/contract/test_behaviour.py."""
    compared = (*CASES, *ALSO)
    restored = [f"**{one.title}**" if one.title else one.original for one in differences()]
    assert all(sum(text.startswith(name) for name in compared) == 1 for text in restored)
    assert len(restored) == len(compared)


@pytest.mark.framework
@pytest.mark.parametrize("as_original", [True, False])
def test_a_resume_evaluates_at_its_start_as_with_the_original(as_original: bool, tmp_path: Path) -> None:
    """That evaluation counts for early stopping: with it, the resumed run ends two steps earlier."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 12,
        "eval_on_start": True,
        "learning_rate": 0.0,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    restored = {"restore_callback_states_from_checkpoint": True}
    ends = {}
    for side in (PLAIN, REPRODUCING if as_original else OURS):
        kind = {"transformers": transformers, "trainwright": trainwright}[side.name]
        for part in ("cut", "cut again"):
            arguments = side.arguments(output_dir=str(tmp_path / side.name), **settings, **restored)
            stops = [kind.EarlyStoppingCallback(4)] + [StopAt(4)] * (part == "cut")
            model = models.seeded(models.ReturnsDict)
            parts = {"train_dataset": data.vectors(12), "eval_dataset": data.vectors(4), "callbacks": stops}
            trainer = kind.Trainer(model=model, args=arguments, **parts)
            trainer.train(resume_from_checkpoint=True if part == "cut again" else None)
        ends[side.name] = trainer.state.global_step
    assert ends == {"transformers": 8, "trainwright": 8 if as_original else 10}


@pytest.mark.process
@pytest.mark.framework
@pytest.mark.parametrize("as_original", [True, pytest.param(False, marks=pytest.mark.slow)])  # that it shows them
def test_draws_of_workers_and_their_evaluations_are_those_of_the_original(as_original: bool, tmp_path: Path) -> None:
    """Rows on what a collator draws in a worker, and on an evaluation of another dataset with workers that persist."""
    given = {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "max_steps": 2,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    found = []
    for side in (PLAIN, REPRODUCING if as_original else OURS):
        arguments = side.arguments(output_dir=str(tmp_path), **given)
        kind = {"transformers": transformers, "trainwright": trainwright}[side.name].Trainer
        items = MLM.items(8)
        model = MLM.build(0.0)
        trainer = kind(model=model, args=arguments, train_dataset=items, eval_dataset=items[:3], **MLM.parts(model))
        trainer.train()
        sizes = [len(next(iter(trainer.get_eval_dataloader(rows)))["input_ids"]) for rows in (None, items[:2])]
        found.append((weights(trainer.model), sizes))
    (theirs, their_sizes), (ours, sizes) = found
    assert their_sizes == [3, 3]
    assert (not differing(ours, theirs)) is as_original
    assert (sizes == their_sizes) is as_original


@pytest.mark.process
@pytest.mark.framework
@pytest.mark.parametrize("as_original", [True, pytest.param(False, marks=pytest.mark.slow)])  # that it shows them
def test_workers_that_persist_keep_their_epoch_as_with_the_original(as_original: bool, tmp_path: Path) -> None:
    given = {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "report_to": "none",
    }
    found = []
    for side in (PLAIN, REPRODUCING if as_original else OURS):
        arguments = side.arguments(
            output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, log_level="error", **given
        )
        kind = {"transformers": transformers, "trainwright": trainwright}[side.name].Trainer
        trainer = kind(model=models.seeded(lambda: models.ReturnsDict(0.0)), args=arguments, train_dataset=Turns())
        trainer.train()
        found.append(weights(trainer.model))
    assert (not differing(*found)) is as_original


@pytest.mark.framework
@pytest.mark.parametrize("as_original", [True, False])
def test_an_infinite_gradient_that_is_only_measured(as_original: bool, tmp_path: Path) -> None:
    given = {"max_steps": 1, "max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    more = {} if as_original else {"on_nonfinite": "ignore"}
    found = []
    for side in (PLAIN, REPRODUCING if as_original else OURS):
        own = more if side is OURS else {}
        arguments = side.arguments(output_dir=str(tmp_path), use_cpu=True, log_level="error", **given, **own)
        kind = {"transformers": transformers, "trainwright": trainwright}[side.name].Trainer
        model = models.seeded(lambda: models.ReturnsDict(0.0))
        next(model.parameters()).register_hook(lambda gradient: gradient + float("inf"))
        trainer = kind(model=model, args=arguments, train_dataset=Turns())
        trainer.train()
        found.append([bool(value.isfinite().all()) for value in trainer.model.parameters()])
    theirs, ours = found
    assert not any(theirs)
    assert ours == ([False] * len(ours) if as_original else [False, *[True] * (len(ours) - 1)])


def _hundredfold(base: Any) -> Any:
    class Hundredfold(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            return (100 * loss, outputs) if return_outputs else 100 * loss

    return Hundredfold


@pytest.mark.framework
@pytest.mark.parametrize("kind", ["override", "function", "smoothing", "plain"])
@pytest.mark.parametrize("as_original", [True, False])
def test_the_loss_beside_generated_predictions(as_original: bool, kind: str, tmp_path: Path) -> None:
    """With the original it is the model's, with ours the one that is trained."""

    def loss(side: Side) -> float:
        parts: dict[str, Any] = {}
        if kind == "override":
            side = Side(side.name, _hundredfold(side.trainer), side.arguments)
        elif kind == "function":
            parts["compute_loss_func"] = lambda outputs, labels, num_items_in_batch=None: torch.tensor(7.0)
        model = models.seeded(models.t5)
        parts["data_collator"] = transformers.DataCollatorForSeq2Seq(data.tokenizer(), model=model)
        settings = {"predict_with_generate": True, "label_smoothing_factor": 0.3 if kind == "smoothing" else 0.0}
        trainer = side.make(model, tmp_path / side.name, settings, compute_metrics=lambda _: {}, **parts)
        return float(trainer.evaluate(data.pairs(4), max_new_tokens=2)["eval_loss"])

    theirs = loss(Side(PLAIN_SEQ2SEQ.name, transformers.Seq2SeqTrainer, PLAIN_SEQ2SEQ.arguments))
    if as_original:
        assert loss(REPRODUCING_SEQ2SEQ) == theirs
        return
    expected = {"override": 100 * theirs, "function": 7.0}.get(kind, theirs)
    assert loss(OURS_SEQ2SEQ) == pytest.approx(expected, rel=1e-2)


def test_early_stopping_counts_as_the_original_where_nothing_is_a_number_yet() -> None:
    counts = []
    for module in (transformers, trainwright):
        more = {"reproduce": "transformers"} if module is trainwright else {}
        callback = module.EarlyStoppingCallback(early_stopping_patience=3)
        args = module.TrainingArguments(output_dir="x", use_cpu=True, metric_for_best_model="loss", **more)
        for best, value in ((None, float("nan")), (float("inf"), float("nan")), (float("inf"), 1.0), (1.0, 2.0)):
            callback.check_metric_value(args, TrainerState(best_metric=best), None, value)
            counts.append((module.__name__, callback.early_stopping_patience_counter))
    assert [count for name, count in counts if name == "trainwright"] == [0, 1, 0, 1]
    assert [count for _, count in counts[:4]] == [count for _, count in counts[4:]]
