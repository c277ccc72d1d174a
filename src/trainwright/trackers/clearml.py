"""ClearML: a task with curves, settings, and by option checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import ENDS, Client, TrackerCallback, config_of, needs, rewrite_logs
from trainwright.trackers.mlflow import is_set

SINGLE = (*ENDS, "epoch")


class ClearMLCallback(TrackerCallback):
    """Continues the current task, else opens one: variables CLEARML_PROJECT, CLEARML_TASK, CLEARML_LOG_MODEL."""

    name = "clearml"

    def __init__(self) -> None:
        super().__init__()
        with needs("clearml", "clearml"):
            import clearml
        self._clearml: Client = clearml
        self._clearml_task: Client = None
        self._is_own = False

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        self._clearml_task = self._clearml.Task.current_task()
        if self._clearml_task is None:
            self._is_own = True
            self._clearml_task = self._clearml.Task.init(
                project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
                task_name=state.trial_name or os.environ.get("CLEARML_TASK", "Trainer"),
                auto_connect_frameworks={"tensorboard": False, "pytorch": False},
                continue_last_task=self._handle or False,
            )
            self.remember(args, self._clearml_task.id)
        self._clearml_task.connect(args.to_dict(), "Transformers")
        if config_of(model):
            self._clearml_task.set_configuration_object(name="Model Configuration", config_dict=config_of(model))

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        board = self._clearml_task.get_logger()
        for name, value in values.items():
            if not isinstance(value, (int, float)):
                continue
            if name in SINGLE:
                board.report_single_value(name=name, value=value)
                continue
            title, _, series = next(iter(rewrite_logs({name: value}))).partition("/")
            board.report_scalar(title=title, series=series, value=value, iteration=state.global_step)

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if not is_set("CLEARML_LOG_MODEL"):
            return
        model = self._clearml.OutputModel(task=self._clearml_task, name=folder.name)
        model.update_weights_package(weights_path=str(folder), target_filename=folder.name, auto_delete_file=False,
                                     iteration=state.global_step)  # fmt: skip

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._is_own:
            self._clearml_task.close()
            self._initialized = False
