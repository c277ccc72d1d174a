"""Checks of the fields about evaluation and the best model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainwright import EvalPrediction, TrainerCallback
from trainwright.config import rules
from trainwright.evaluation.nested_collector import NestedCollector

from .bench import NUM_SAMPLES, Bench, are_equal, samples, steps_with, weights
from .table import companion, shows


def evaluated_at(bench: Bench, **settings: Any) -> list[int]:
    return steps_with(bench.train(**settings), "eval_loss")


@shows("eval_strategy")
def evaluations_come_by_steps_epochs_or_never(bench: Bench) -> None:
    def steps(strategy: str) -> list[int]:
        return evaluated_at(bench, eval_strategy=strategy, eval_steps=4, num_train_epochs=2)

    assert (steps("steps"), steps("epoch"), steps("no")) == ([4, 8, 12], [6, 12], [])


@shows("eval_steps")
def evaluations_come_every_so_many_steps(bench: Bench) -> None:
    assert evaluated_at(bench, eval_strategy="steps", eval_steps=2) == [2, 4, 6]
    assert evaluated_at(bench, eval_strategy="steps", eval_steps=0.5) == [3, 6]
    assert evaluated_at(bench, eval_strategy="steps", logging_steps=3) == [3, 6]


@shows("eval_delay")
def the_first_evaluations_are_left_out(bench: Bench) -> None:
    assert evaluated_at(bench, eval_strategy="steps", eval_steps=2, eval_delay=3) == [4, 6]
    assert evaluated_at(bench, eval_strategy="epoch", num_train_epochs=3, eval_delay=2) == [12, 18]


@shows("eval_on_start")
def one_evaluation_comes_before_the_first_step(bench: Bench) -> None:
    assert evaluated_at(bench, eval_strategy="epoch", eval_on_start=True) == [0, 6]


@shows("prediction_loss_only")
def predictions_are_thrown_away(bench: Bench) -> None:
    assert bench.trainer().predict(samples()).predictions.shape == (NUM_SAMPLES, 3)
    output = bench.trainer(prediction_loss_only=True).predict(samples())
    assert (output.predictions, output.label_ids) == (None, None)
    assert output.metrics["test_loss"] > 0


@shows("eval_accumulation_steps")
def results_leave_the_device_every_so_many_batches(bench: Bench) -> None:
    """There is no device but the CPU here, so the results only claim to be on another one."""

    def held(**settings: Any) -> list[int]:
        """How many batches of predictions wait on the device, after each batch."""
        waiting: list[int] = []

        class Watched(NestedCollector):
            def add(self, batch: Any) -> None:
                super().add(batch)
                waiting.append(len(self._waiting))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trainwright.evaluation.eval_loop.NestedCollector", Watched)
            patch.setattr(
                "trainwright.evaluation.nested_collector.iterate_tensors", lambda batch: [torch.empty(1, device="meta")]
            )
            predictions = bench.trainer(per_device_eval_batch_size=2, **settings).predict(samples()).predictions
        assert predictions.shape == (NUM_SAMPLES, 3)
        return waiting[::2]  # logits and labels take turns

    assert held() == [1, 2, 3, 4, 5, 6]
    assert held(eval_accumulation_steps=2) == [1, 0, 1, 0, 1, 0]


@shows("eval_do_concat_batches")
def results_are_one_array_or_a_list_of_batches(bench: Bench) -> None:
    assert bench.trainer().predict(samples()).predictions.shape == (NUM_SAMPLES, 3)
    parts = bench.trainer(eval_do_concat_batches=False).predict(samples())
    assert [part.shape for part in parts.predictions] == 3 * [(4, 3)]
    assert [part.shape for part in parts.label_ids] == 3 * [(4,)]


@companion("eval_use_gather_object", "there is nothing to gather from one process, and this version has only one")
def objects_of_other_processes_are_not_gathered(bench: Bench) -> None:
    assert bench.args(eval_use_gather_object=True).to_dict()["eval_use_gather_object"] is True
    assert "eval_use_gather_object" in rules.advise(bench.args(eval_use_gather_object=True))[0]


def shown_to_metrics(bench: Bench, **settings: Any) -> EvalPrediction:
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    bench.trainer(compute_metrics=compute_metrics, **settings).evaluate()
    return seen[0]


@shows("include_for_metrics")
def metrics_see_inputs_and_losses(bench: Bench) -> None:
    plain = shown_to_metrics(bench)
    assert (plain.inputs, plain.losses) == (None, None)
    both = shown_to_metrics(bench, include_for_metrics=["inputs", "loss"])
    assert np.array_equal(both.inputs, np.stack([row["x"].numpy() for row in samples()]))
    assert both.losses.shape == (NUM_SAMPLES,)
    assert shown_to_metrics(bench, include_for_metrics=["loss"]).inputs is None


@shows("batch_eval_metrics")
def metrics_see_one_batch_at_a_time(bench: Bench) -> None:
    calls: list[tuple[int, bool]] = []

    def compute_metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        calls.append((len(prediction.predictions), compute_result))
        return {"calls": len(calls)} if compute_result else {}

    assert bench.trainer(compute_metrics=compute_metrics).evaluate()["eval_calls"] == 1
    assert calls == [(NUM_SAMPLES, True)]
    calls.clear()
    assert bench.trainer(compute_metrics=compute_metrics, batch_eval_metrics=True).evaluate()["eval_calls"] == 3
    assert calls == [(4, False), (4, False), (4, True)]


def scores(*values: float) -> Callable[[Any], dict[str, float]]:
    """Metrics `score` and `other_loss` of these values, one after the other; a rehearsal, of one batch, gets none."""
    rest = iter(values)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        value = next(rest) if len(prediction.predictions) == NUM_SAMPLES else 0.0
        return {"score": value, "other_loss": value}

    return compute_metrics


class Keeps(TrainerCallback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = weights(kwargs["model"])


BY_TWO = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def best_step(bench: Bench, **settings: Any) -> tuple[int | None, list[int]]:
    """The best step by scores of 1, 3, 2; and which steps have the weights that the model ends with."""
    keeps = Keeps()
    trainer = bench.train(compute_metrics=scores(1, 3, 2), callbacks=[keeps], **{**BY_TWO, **settings})
    final = weights(trainer.model)
    return trainer.state.best_global_step, [step for step, kept in keeps.weights.items() if are_equal(kept, final)]


@shows("load_best_model_at_end")
def the_model_ends_with_its_best_weights(bench: Bench) -> None:
    assert best_step(bench, metric_for_best_model="score", load_best_model_at_end=True) == (4, [4])
    assert best_step(bench, metric_for_best_model="score") == (4, [6])


@shows("metric_for_best_model")
def this_metric_decides(bench: Bench) -> None:
    assert best_step(bench, metric_for_best_model="score")[0] == 4
    assert best_step(bench, metric_for_best_model="other_loss")[0] == 2
    assert best_step(bench)[0] is None
    with pytest.raises(KeyError, match=r"'accuracy'.*eval_score"):
        best_step(bench, metric_for_best_model="accuracy")


@shows("greater_is_better")
def the_metric_has_this_direction(bench: Bench) -> None:
    assert best_step(bench, metric_for_best_model="score", greater_is_better=False)[0] == 2
    assert best_step(bench, metric_for_best_model="other_loss", greater_is_better=True)[0] == 4
