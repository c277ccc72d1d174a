"""Checkpoints listed and thinned out by hand, under names that others import; a run's own retention is elsewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from trainwright._types import PREFIX_CHECKPOINT_DIR
from trainwright.checkpoint.retention import Keep, Saved, to_remove

SAME_TIME_S = 1.0  # file systems that keep no times show directories as made at once


def sort_checkpoints(
    output_dir: str,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Directories of checkpoints, oldest first: by step, or by the time they were changed where that tells.

    The best one, where it is not the newest, is put just before that, so that who deletes from the front spares both.
    """
    found = _numbered(Path(output_dir), checkpoint_prefix)
    order = sorted(found, key=lambda path: found[path])
    times = {path: path.stat().st_mtime for path in order}
    if use_mtime and order and max(times.values()) - min(times.values()) >= SAME_TIME_S:
        order.sort(key=lambda path: times[path])
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    if best in order[:-1]:
        order.remove(best)
        order.insert(-1, best)
    return [str(path) for path in order]


def rotate_checkpoints(
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
) -> None:
    """Deletes the oldest checkpoints beyond a limit, whoever wrote them; never the newest nor the best."""
    if not save_total_limit or save_total_limit < 0:
        return
    order = [Path(path) for path in sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)]
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    places = [Saved(place) for place in range(len(order))]
    best_place = order.index(best) if best in order else None
    for place in to_remove(places, Keep(last=save_total_limit), newest=len(order) - 1, best=best_place):
        shutil.rmtree(order[place], ignore_errors=True)


def _numbered(folder: Path, prefix: str) -> dict[Path, int]:
    """Directories whose whole name is the prefix and a number."""
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    matches = {path: pattern.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return {path: int(match[1]) for path, match in matches.items() if match and path.is_dir()}
