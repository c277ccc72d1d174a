"""DVCLive: files beside the code that DVC shows."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import Client, TrackerCallback, needs
from trainwright.trackers.mlflow import is_set


class DVCLiveCallback(TrackerCallback):
    """Reports to `live`, or to one that it makes.

    Args:
        live: a dvclive.Live to report to; by default one is made.
        log_model: True: the last checkpoint is logged when training ends; "all": the output directory at each one;
            None: as the variable HF_DVCLIVE_LOG_MODEL says.
        **kwargs: arguments of dvclive.Live.
    """

    name = "dvclive"

    def __init__(self, live: Client = None, log_model: bool | str | None = None, **kwargs: object) -> None:
        super().__init__()
        with needs("dvclive", "dvclive"):
            import dvclive
        self._dvclive: Client = dvclive
        self._given = kwargs
        self.live = live
        if log_model is None:
            log_model = "all" if os.environ.get("HF_DVCLIVE_LOG_MODEL") == "all" else is_set("HF_DVCLIVE_LOG_MODEL")
        self._log_model = log_model

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self.live is None:
            self.live = self._dvclive.Live(**{**({"resume": True} if state.global_step else {}), **self._given})
        self.live.log_params(args.to_dict())

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        from dvclive.utils import standardize_metric_name

        self.live.step = state.global_step
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.live.log_metric(standardize_metric_name(name, "dvclive.huggingface"), value)
        self.live.make_summary()

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if self._log_model == "all":
            self.live.log_artifact(str(args.output_dir))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        last = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._log_model is True and last.is_dir():
            name = "best" if args.load_best_model_at_end else "last"
            folder = state.best_model_checkpoint if args.load_best_model_at_end else last
            self.live.log_artifact(str(folder), name=name, type="model", copy=True)
        self.live.end()
