"""The plan of the mirror: which checkpoints are copied to which URL, from the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainwright.capabilities.mirror.rules import staging_folder
from trainwright.config import resolve
from trainwright.config.coerce import output_path
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorPlan:
    """Settings of the copies under a URL."""

    url: str  # such as s3://bucket/run
    every_s: float | None = None  # least seconds between two checkpoints that are copied; None: each is
    keep_last: int | None = None  # newest copies to keep, including the best; None for all
    bytes_per_s: float | None = None  # limit of the speed; None: no limit


def make_plan(args: Arguments, folder: str) -> MirrorPlan | None:
    """Returns how checkpoints are copied under a URL; None without one.

    Args:
        args: of the run.
        folder: directory of the run: `output_dir`, or one below it for a trial of a search.
    """
    url = get_value(args, "checkpoint_mirror")
    if url is None:
        return None
    top = Path(output_path(args))
    here = Path(folder).absolute()
    below = here.relative_to(top).as_posix() if here.is_relative_to(top) else here.name
    speed = get_value(args, "mirror_max_mb_per_s")
    limit = get_value(args, "mirror_total_limit")
    if limit is None and args.output_dir == staging_folder(url):  # the user's limit is that of the URL
        limit = resolve.checkpoint(args).keep_last
    return MirrorPlan(
        url=url.rstrip("/") if below == "." else f"{url.rstrip('/')}/{below}",
        every_s=get_value(args, "mirror_every"),
        keep_last=limit,
        bytes_per_s=None if speed is None else speed * 1e6,
    )
