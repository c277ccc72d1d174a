"""Trackio: a local or a Space's dashboard."""

from __future__ import annotations

import re
import secrets

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers.base import ENDS, Client, TrackerCallback, needs, rewrite_logs, settings_of


class TrackioCallback(TrackerCallback):
    """Reports under `project` and `run_name`, to the Space and bucket that the `trackio_...` arguments name."""

    name = "trackio"

    def __init__(self) -> None:
        super().__init__()
        with needs("trackio", "trackio"):
            import trackio
        self._trackio: Client = trackio
        self._space_id: str | None = None
        self._static_space_id: str | None = None

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        settings = settings_of(args, model)
        if hasattr(model, "num_parameters"):
            settings["model/num_parameters"] = model.num_parameters()
        name = state.trial_name or args.run_name or self._handle
        self._trackio.init(
            project=args.project,
            name=name,
            space_id=args.trackio_space_id,
            resume="allow",
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            config=settings,
        )
        context = self._trackio.context_vars
        self._space_id = context.current_space_id.get()
        run = context.current_run.get()
        if getattr(run, "name", None):
            self.remember(args, run.name)

    def send(self, values: dict[str, object], state: TrainerState) -> None:
        curves = {name: value for name, value in values.items() if name not in ENDS}
        self._trackio.log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def predicted(self, metrics: dict[str, object], state: TrainerState) -> None:
        self._trackio.log(rewrite_logs(metrics))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        try:
            self._trackio.finish()
        finally:
            self._initialized = False
        if self._space_id is not None and args.trackio_static_space_id is not False:
            self._static_space_id = self._trackio.freeze(
                space_id=self._space_id,
                project=args.project,
                new_space_id=self._static_name(args),
                private=args.hub_private_repo,
            )
            tag(kwargs.get("model"), self._static_space_id or self._space_id)

    def on_push_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        is_wanted = self._space_id is None and args.trackio_static_space_id is not False
        if state.is_world_process_zero and self._initialized and is_wanted:
            model = kwargs.get("model")
            self._guard.submit(lambda: self._publish(args, model))

    def _publish(self, args: Arguments, model: object) -> None:
        self._static_space_id = self._trackio.sync(
            project=args.project,
            sdk="static",
            space_id=self._static_name(args),
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            force=True,
        )
        tag(model, self._static_space_id)

    def _static_name(self, args: Arguments) -> str:
        return self._static_space_id or args.trackio_static_space_id or space_name(args.project)


def space_name(project: str) -> str:
    """Returns a valid, unused name for a Space, from the project's name and a random suffix."""
    safe = re.sub(r"-+", "-", re.sub(r"[^a-z0-9._-]", "-", project.strip().lower())).strip("-_.")
    return f"{(safe or 'trackio-project')[:81].rstrip('-')}-static-{secrets.token_hex(3)}"


def tag(model: object, space_id: str | None) -> None:
    """Adds the Space of a training to the model's tags, which the model card copies."""
    if model is None or space_id is None:
        return
    before = [t for t in getattr(model, "model_tags", None) or [] if not str(t).startswith("trackio:https://")]
    marks = ["trackio", f"trackio:https://huggingface.co/spaces/{space_id}"]
    tags = before + [mark for mark in marks if mark not in before]
    setattr(model, "model_tags", tags)  # noqa: B010 -- an attribute of transformers' models
