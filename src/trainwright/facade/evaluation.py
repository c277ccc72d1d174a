"""The hooks for evaluation and prediction."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from trainwright import assemble, model_facts
from trainwright._types import Batch
from trainwright.config import resolve
from trainwright.engine.precision import eval_precision
from trainwright.errors import EvaluationMemoryError, MetricError
from trainwright.evaluation import eval_loop, gather_objects
from trainwright.evaluation import prediction_step as eval_step
from trainwright.evaluation.dry_run import SilentEvents
from trainwright.evaluation.eval_context import EvalContext
from trainwright.evaluation.outputs import EvalLoopOutput, PredictionOutput
from trainwright.evaluation.streaming_metrics import is_streaming
from trainwright.facade.report import ReportHooks
from trainwright.facade.step import StepHooks
from trainwright.optim import schedules, train_eval_mode
from trainwright.state.throughput import speed_metrics

QUIET = SilentEvents()


class EvaluationHooks(StepHooks, ReportHooks):
    """Runs the model over data without training it, and judges the result."""

    @property
    def only_loss_is_evaluated(self) -> bool:
        """Whether evaluations give no other metric than the loss: none was brought, and nothing is overridden."""
        mine = ("evaluate", "evaluation_loop", "_evaluate", "prediction_loop")
        is_overridden = any(getattr(type(self), name) is not getattr(EvaluationHooks, name) for name in mine)
        return self.compute_metrics is None and not is_overridden

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the model; several sets (a dict) one after the other.

        Args:
            eval_dataset: data to use in place of the trainer's.
            ignore_keys: entries of the model's output that are no predictions.
            metric_key_prefix: first part of the metrics' names; a set's name follows it.

        Returns:
            `<prefix>_loss`, the metrics, run time in seconds and rates per second.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            results: dict[str, float] = {}
            for name, part in dataset.items():
                chosen = name if eval_dataset is None else part
                results |= self.evaluate(chosen, ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return results
        self._memory_tracker.start("eval")
        dataloader = self.get_eval_dataloader(eval_dataset)
        output = self._timed_loop(
            dataloader, "Evaluation", True if self.compute_metrics is None else None, ignore_keys, metric_key_prefix
        )
        assert output.metrics is not None
        self.log(output.metrics)
        self.callback_handler.fire("on_evaluate", self._run, metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics, stage="eval")
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a dataset, one row for each sample, in order; and metrics if it has labels."""
        self._memory_tracker.start("test")
        output = self._timed_loop(
            self.get_test_dataloader(test_dataset), "Prediction", None, ignore_keys, metric_key_prefix
        )
        self.callback_handler.fire("on_predict", self._run, metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics, stage="test")
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _timed_loop(
        self, dataloader: Any, description: str, loss_only: bool | None, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        start_time = time.time()
        with (
            self._engine.together(self._run.interrupts),
            assemble.untouched_randomness(),
            eval_precision(self.model, None if self.is_in_train else self._full_eval_type()),
        ):
            output = self.evaluation_loop(
                dataloader,
                description=description,
                prediction_loss_only=loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        num_steps = math.ceil((output.num_samples or 0) / (self.args.eval_batch_size * self._engine.num_replicas))
        assert output.metrics is not None
        output.metrics.update(speed_metrics(prefix, start_time, num_samples=output.num_samples, num_steps=num_steps))
        return output

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs the model over a dataloader; serves both `evaluate` and `predict`."""
        model = self._wrap_model(self.model, training=False)
        self._rest(model, dataloader)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        past, rule = self._past, self._rule
        self._past, self._rule = None, (rule or self._loss_rule()).of_one_process()
        session = self._eval_session(model, loss_only, ignore_keys, is_prediction=description == "Prediction")
        mixed = contextlib.nullcontext() if self.is_in_train else self._engine.mixed_precision(self.model)
        try:
            with mixed:
                run: Any = QUIET if self._is_rehearsing else self._run
                return eval_loop.evaluation_loop(session, run, self, dataloader, prefix=metric_key_prefix)
        finally:
            self._past, self._rule = past, rule

    def _rest(self, model: Any, dataloader: Any) -> None:
        """Evaluation mode, of which training will find no trace when it goes on."""
        if self._is_rehearsing:
            train_eval_mode.eval_mode(model, None)
            return
        self.callback_handler.eval_dataloader = dataloader
        if not self.is_in_train:
            train_eval_mode.eval_mode(model, self.optimizer)
        elif self._pause is None:
            self._pause = train_eval_mode.EvalModeGuard(model, self.optimizer)

    def _eval_session(
        self, model: Any, loss_only: bool, ignore_keys: list[str] | None, *, is_prediction: bool
    ) -> EvalContext:
        assert self._rule is not None
        streams = self.args.batch_eval_metrics or is_streaming(self.compute_metrics)
        return EvalContext(
            plan=resolve.evaluation(self.args),
            model=model,
            rule=self._rule,
            events=QUIET if self._is_rehearsing else self.callback_handler,
            gather=self._gather_results,
            total=self._engine.sum,
            label_names=self.label_names,
            device=self._engine.device,
            main_input=model_facts.main_input_name(self.model),
            compute_metrics=self.compute_metrics,
            preprocess_logits=self.preprocess_logits_for_metrics,
            loss_only=loss_only,
            needs_labels=not is_prediction,
            keeps_results=is_prediction or not streams,
            ignore_keys=ignore_keys,
        )

    def _gather_results(self, value: Any) -> Any:
        """A value of all processes; as Python objects where `eval_use_gather_object` asks for it."""
        if not self.args.eval_use_gather_object or self._engine.num_replicas == 1:
            return self.gather_function(value)
        return gather_objects.gather_results(value, self._engine.objects_of_replicas)

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Older name of `evaluation_loop`."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: Any, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, each None where there is none."""
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])

        def loss_and_outputs(batch: Batch) -> tuple[torch.Tensor, Any]:
            num_items = self._get_num_items_in_batch([batch], self._engine.device)
            with self.compute_loss_context_manager():
                return self.compute_loss(model, batch, return_outputs=True, num_items_in_batch=num_items)  # type: ignore[no-any-return]

        def outputs_only(batch: Batch) -> Any:
            with self.compute_loss_context_manager():
                return model(**batch)

        return_loss = inputs.get("return_loss")
        return eval_step.prediction_step(
            inputs,
            label_names=self.label_names,
            returns_loss=self.can_return_loss if return_loss is None else bool(return_loss),
            loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            loss_and_outputs=loss_and_outputs,
            outputs_only=outputs_only,
        )

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """An evaluation in the middle of training; drives the schedules that follow a metric."""
        try:
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        except RuntimeError as error:
            if not self._engine.is_out_of_memory(error):
                raise
            raise EvaluationMemoryError(
                f"Out of memory in an evaluation, at step {self.state.global_step}: {error} Lower "
                f"per_device_eval_batch_size ({self.args.per_device_eval_batch_size}), or set eval_accumulation_steps "
                "to move results off the device; auto_find_batch_size only changes training."
            ) from error
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if schedules.follows_metrics(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(self._best_metric_of(metrics))
        return metrics

    def _best_metric_of(self, metrics: Mapping[str, float]) -> float:
        name = self.args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise MetricError(
                f"metric_for_best_model={self.args.metric_for_best_model!r}, but the evaluation gave no {name!r}; it "
                f"gave {', '.join(sorted(metrics))}. Name one of these, or return it from compute_metrics."
            )
        return metrics[name]

    def _determine_best_metric(self, metrics: Mapping[str, float], trial: Any) -> bool:
        """Whether these metrics are the best so far; remembers them if so. NaN is never the best."""
        if self.args.metric_for_best_model is None:
            return False
        value, best = self._best_metric_of(metrics), self.state.best_metric
        is_better = value == value and (best is None or (value > best if self.args.greater_is_better else value < best))
        if is_better:
            self.state.best_metric = value
            if self.args.save_strategy != "no":
                self.state.best_global_step = self.state.global_step
        return bool(is_better)
