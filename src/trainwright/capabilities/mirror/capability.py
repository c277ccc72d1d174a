"""The mirror: copies of the checkpoints at `checkpoint_mirror`, a URL, and a resume from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright._types import is_url
from trainwright.capabilities.mirror.plan import make_plan
from trainwright.capability import Capability, Extension, Moment, Others, RunContext
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import resolve
from trainwright.config.fields import get_value, value_if_known
from trainwright.engine.base import Engine

if TYPE_CHECKING:
    from trainwright.capabilities.mirror.sources import DownloadGroup

WhyNot = Callable[[Checkpoint], "str | None"]


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the mirror of a run that may save."""
    args = context.args
    engine = context.engine
    plan = make_plan(args, context.folder)
    if plan is None or not resolve.checkpoint(args).may_save:
        return None
    from trainwright.capabilities.mirror.extension import Place, RunMirror

    return RunMirror(
        plan,
        context.folder,
        Place(
            args.process_index,
            args.local_process_index,
            engine.agree,
            engine.gather_objects,
            lambda: engine.writes_parts,
        ),
        wait_s=value_if_known(args, "output_dir_wait_s") or 0.0,
        overwrites=getattr(args, "overwrite_output_dir", None),
    )


@dataclass(frozen=True, slots=True)
class MirroredCheckpoints:
    """The checkpoints of a run at its URL."""

    url: str
    group: DownloadGroup

    @property
    def place(self) -> str:
        """The argument with the URL."""
        return f"checkpoint_mirror={self.url!r}"

    def fetch(self, local: CheckpointStore, *, why_not: WhyNot) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, of the directory and the URL."""
        from trainwright.capabilities.mirror.sources import find_newest

        return find_newest(local, self.url, why_not=why_not, group=self.group)

    def find_steps_after(self, manifest: Manifest) -> list[int]:
        """Returns the steps of later checkpoints of a run that verify."""
        from trainwright.capabilities.mirror.sources import find_steps_after

        return find_steps_after(self.url, manifest)


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """One checkpoint, named by its URL."""

    place: str  # its URL
    group: DownloadGroup

    def fetch(self, local: CheckpointStore, *, why_not: WhyNot) -> Checkpoint:
        """Returns the checkpoint, downloaded into a directory."""
        from trainwright.capabilities.mirror.sources import fetch_named

        return fetch_named(self.place, local, self.group)

    def find_steps_after(self, manifest: Manifest) -> list[int]:
        """Returns none: other checkpoints are not looked at."""
        return []


def find_copies(args: Any, asked: str | bool, engine: Engine) -> MirroredCheckpoints | NamedCheckpoint | None:
    """Returns the checkpoint that `asked` names by a URL, or those at the mirror; None if neither is asked for."""
    url = get_value(args, "checkpoint_mirror")
    if not is_url(asked) and (url is None or asked not in (True, "auto")):
        return None
    from trainwright.capabilities.mirror.sources import DownloadGroup

    first = args.process_index - args.local_process_index if args.save_on_each_node else 0
    group = DownloadGroup(args.process_index, first, engine.agree, engine.gather_objects)
    return NamedCheckpoint(str(asked), group) if is_url(asked) else MirroredCheckpoints(url, group)


CAPABILITY = Capability(make=make, moment=Moment.DIRECTORY, copies=find_copies)
