"""Weights & Biases: curves, settings, and by option gradients and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers.base import ENDS, Client, TrackerCallback, logger, needs, rewrite_logs, settings_of


class WandbCallback(TrackerCallback):
    """Variables: WANDB_PROJECT names the project, WANDB_LOG_MODEL uploads models ("checkpoint": each one saved, "end":
    the last), WANDB_WATCH logs "gradients", "parameters" or "all". A resumed run goes on under its id.
    """

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        with needs("wandb", "wandb"):
            import wandb
        self._wandb: Client = wandb
        self._run: Client = None
        self._log_model = os.environ.get("WANDB_LOG_MODEL", "false").lower()
        if self._log_model not in ("checkpoint", "end", "false"):
            raise ArgumentError(f"WANDB_LOG_MODEL={self._log_model!r}; choose of checkpoint, end, false.")

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        model = kwargs.get("model")
        super().on_train_begin(args, state, control, **kwargs)
        kind = os.environ.get("WANDB_WATCH", "false")
        # Hooks on the model are put there by the thread that trains it, which therefore waits for the run to open.
        is_wanted = state.is_world_process_zero and kind in ("gradients", "parameters", "all")
        if is_wanted and self._guard.flush() and self._initialized:
            self._wandb.watch(model, log=kind, log_freq=max(100, int(state.logging_steps)))

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if state.is_hyper_param_search:
            self._wandb.finish()
        self._run = self._wandb.run
        if self._run is None:
            project = os.environ.get("WANDB_PROJECT") or args.project or "huggingface"
            self._run = self._wandb.init(project=project, **self._names(args, state))
            self.remember(args, self._run.id)
        self._run.config.update(settings_of(args, model), allow_val_change=True)
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        if hasattr(model, "num_parameters"):
            self._run.config.update({"model/num_parameters": model.num_parameters()}, allow_val_change=True)

    def _names(self, args: Arguments, state: TrainerState) -> dict[str, str]:
        if state.trial_name is not None:
            return {"name": state.trial_name, "group": args.run_name or args.output_dir}
        names = {} if args.run_name is None else {"name": args.run_name}
        if self._handle is not None and "WANDB_RUN_ID" not in os.environ:
            names |= {"id": self._handle, "resume": "allow"}
        return names

    @property
    def loses_what_it_took(self) -> bool:
        """Returns True if the run is offline: another process writes its file, and ends with this one without it."""
        return bool(getattr(self._run, "offline", False))

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        for name in ENDS:
            if name in values:
                self._run.summary[name] = values[name]
        curves = {name: value for name, value in values.items() if name not in ENDS}
        self._run.log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self._run.log(rewrite_logs(metrics))

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if self._log_model == "checkpoint":
            aliases = [f"epoch_{round(state.epoch, 2)}", f"checkpoint_global_step_{state.global_step}"]
            self._upload(folder, args, aliases)

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._log_model == "end":
            best = state.best_model_checkpoint if args.load_best_model_at_end else None
            folder = Path(best or Path(args.output_dir) / f"checkpoint-{state.global_step}")
            if folder.is_dir():
                self._upload(folder, args, ["final_model"])
            else:
                logger.warning("WANDB_LOG_MODEL=end, but there is no checkpoint of the last step to upload.")

    def _upload(self, folder: Path, args: Arguments, aliases: list[str]) -> None:
        run = self._run
        has_name = args.run_name is not None and args.run_name != args.output_dir
        artifact = self._wandb.Artifact(name=f"model-{run.name if has_name else run.id}", type="model")
        artifact.add_dir(str(folder))
        run.log_artifact(artifact, aliases=aliases)
