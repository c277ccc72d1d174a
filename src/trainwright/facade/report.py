"""The hooks that report: logs, metrics, records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright._types import TRAINER_STATE_NAME
from trainwright.evaluation import metrics_io
from trainwright.facade.parts import Parts
from trainwright.hub import model_card_data as card_facts
from trainwright.hub.model_card import write_card
from trainwright.state.throughput import speed_metrics


class ReportHooks(Parts):
    """What a run tells: to callbacks, to the record, to the terminal, to files."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Records values and tells the callbacks; adds the epoch, and the tokens where they are counted."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            self._run.settle_tokens()
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._run.first_tokens
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append(metrics_io.plain_numbers({**logs, "step": self.state.global_step}))
        self.callback_handler.fire("on_log", self._run, logs=logs)

    def store_flos(self) -> None:
        """Moves the operations counted since the last call into `state.total_flos`."""
        self._run.settle()

    @staticmethod
    def metrics_format(metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics as a person reads them."""
        return metrics_io.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Prints metrics, aligned."""
        if self.is_world_process_zero():
            metrics_io.print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes `<split>_results.json`, and with `combined` adds them to `all_results.json`."""
        if self.is_world_process_zero():
            metrics_io.save_metrics(self.args.output_dir, split, metrics, combined=combined)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | Sequence[str] | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: str | Sequence[str] | None = None,
    ) -> None:
        """Writes a model card, README.md, into the output directory; one that somebody edited is left alone."""
        if not self.is_world_process_zero():
            return
        given = {"language": language, "license": license, "tags": tags, "model_name": model_name, "tasks": tasks,
                 "base_model": finetuned_from, "dataset": dataset, "dataset_tags": dataset_tags,
                 "dataset_args": dataset_args}  # fmt: skip
        facts = card_facts.collect(self.args, self.model, self.train_dataset, self.state.log_history, given)
        write_card(self.args.output_dir, facts)

    def save_state(self) -> None:
        """Writes `trainer_state.json` to the output directory."""
        if self.is_world_process_zero():
            self.state.save_to_json(Path(self.args.output_dir) / TRAINER_STATE_NAME)
