"""Neptune: a run whose values lie under a namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.base import Client, TrackerCallback, config_of, needs, rewrite_logs

CHECKPOINTS = (None, "same", "last", "best")


class NeptuneCallback(TrackerCallback):
    """Reports to `run`, or to one that it opens.

    Args:
        api_token, project: of the service; by default of its environment variables.
        name: of the run.
        base_namespace: root of all that is reported.
        run: an open run to report to.
        log_parameters: report arguments and the model's configuration.
        log_checkpoints: upload checkpoints: "same" (each), "last", "best"; None: none.
        neptune_run_kwargs: further arguments of `neptune.init_run`.
    """

    name = "neptune"
    flat_metrics = ("train/epoch",)

    def __init__(
        self,
        *,
        api_token: str | None = None,
        project: str | None = None,
        name: str | None = None,
        base_namespace: str = "finetuning",
        run: Client = None,
        log_parameters: bool = True,
        log_checkpoints: str | None = None,
        **neptune_run_kwargs: object,
    ) -> None:
        super().__init__()
        with needs("neptune", "neptune"):
            import neptune
        if log_checkpoints not in CHECKPOINTS:
            raise ArgumentError(f"log_checkpoints={log_checkpoints!r}; choose of None, same, last, best.")
        self._neptune: Client = neptune
        self._run = run
        self._is_own = run is None
        self._base = base_namespace
        self._log_parameters = log_parameters
        self._log_checkpoints = log_checkpoints
        self._given = {"api_token": api_token, "project": project, "name": name, **neptune_run_kwargs}

    @property
    def run(self) -> Client:
        """The run at the service, once it is open."""
        self._guard.flush()
        return self._run

    @classmethod
    def get_run(cls, trainer: Any) -> Client:  # a Trainer, which is above the trackers
        """Returns the run that a trainer reports to.

        Raises:
            ArgumentError: the trainer has no NeptuneCallback.
        """
        callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, cls)), None)
        if callback is None:
            raise ArgumentError("This trainer has no NeptuneCallback; pass report_to='neptune'.")
        return callback.run

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        if self._run is None:
            known = {} if self._handle is None else {"with_id": self._handle}
            self._run = self._neptune.init_run(**{**self._given, **known})
        self.remember(args, str(self._run["sys/id"].fetch()))
        base = self._run[self._base]
        if self._log_parameters:
            base["trainer_parameters"] = self._neptune.utils.stringify_unsupported(args.to_sanitized_dict())
            if config_of(model):
                base["model_parameters"] = self._neptune.utils.stringify_unsupported(config_of(model))
        if state.is_hyper_param_search:
            base["trial"] = state.trial_name
            base["trial_params"] = state.trial_params

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        base = self._run[self._base]
        for name, value in rewrite_logs(values).items():
            if name in self.flat_metrics:
                base[name] = value
            elif isinstance(value, (int, float)):
                base[name].append(value, step=state.global_step)

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        kind = self._log_checkpoints
        if kind is None or (kind == "best" and state.best_global_step != state.global_step):
            return
        target = "checkpoints" if kind == "same" else f"checkpoints/{kind}"
        self._run[self._base][target].upload_files(str(folder))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if self._is_own:
            self._run.stop()
            self._run, self._initialized = None, False
