"""SwanLab: an experiment in its cloud, or local, as SWANLAB_MODE says."""

from __future__ import annotations

import os

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import ENDS, Client, TrackerCallback, needs, rewrite_logs, settings_of


class SwanLabCallback(TrackerCallback):
    """Variables: SWANLAB_PROJECT, SWANLAB_MODE, SWANLAB_LOG_DIR, SWANLAB_RUN_ID, SWANLAB_RESUME."""

    name = "swanlab"

    def __init__(self) -> None:
        super().__init__()
        with needs("swanlab", "swanlab"):
            import swanlab
        self._swanlab: Client = swanlab

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self._swanlab.get_run() is None:
            names = [name for name in (args.run_name, state.trial_name) if name is not None]
            known: dict[str, str] = {"experiment_name": "-".join(names)} if names else {}
            if "SWANLAB_RUN_ID" in os.environ:
                known["id"] = os.environ["SWANLAB_RUN_ID"]
            elif self._handle is not None:
                known["id"] = self._handle
            if "SWANLAB_RESUME" in os.environ or state.global_step:
                known["resume"] = os.environ.get("SWANLAB_RESUME", "allow")
            run = self._swanlab.init(project=os.environ.get("SWANLAB_PROJECT"), **known)
            if getattr(run, "id", None) is not None:
                self.remember(args, str(run.id))
        settings = settings_of(args, model)
        if hasattr(model, "num_parameters"):
            settings["model_num_parameters"] = model.num_parameters()
        self._swanlab.config.update(settings)

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        step = state.global_step
        single = {f"single_value/{name}": values[name] for name in ENDS if name in values}
        curves = rewrite_logs({name: value for name, value in values.items() if name not in ENDS})
        self._swanlab.log({**single, **curves, "train/global_step": step}, step=step)

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self._swanlab.log(rewrite_logs(metrics))
