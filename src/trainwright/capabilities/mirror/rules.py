"""Rules of the mirror: what a URL is, an `output_dir` that is one, and settings without effect."""

from __future__ import annotations

import os
import re

import xxhash

from trainwright._types import without_tokens
from trainwright.config.coerce import takes_url_output
from trainwright.config.fields import get_value, has_other_meaning
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, idle_family, rule

SETTINGS_OF_COPIES = ("mirror_every", "mirror_total_limit", "mirror_max_mb_per_s")


@rule(Stage.CONSTRUCTION, "checkpoint_mirror")
def mirror_is_a_url(args: Arguments) -> str | None:
    url = get_value(args, "checkpoint_mirror")
    if url is None:
        return None
    if not isinstance(url, str) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]+://[^/]*/*[^/]", url):
        return f"checkpoint_mirror={url!r} is not a URL such as 's3://bucket/run' or 'file:///mnt/backup/run'."
    if without_tokens(url) != url or "?" in url:
        return (
            f"checkpoint_mirror={without_tokens(url.partition('?')[0])!r} has a key, a password or a query in it, "
            "which would be in logs and files of arguments. Leave it out: credentials are read from the environment "
            "and from the files of the store's own client."
        )
    return None


@rule(Stage.ADVICE, "checkpoint_mirror", "save_strategy", "max_train_time", "save_every")
def mirror_without_saves(args: Arguments) -> str | None:
    by_time = any(get_value(args, name) for name in ("save_every", "max_train_time"))
    if get_value(args, "checkpoint_mirror") is not None and args.save_strategy == "no" and not by_time:
        return "checkpoint_mirror has no effect with save_strategy='no': there is nothing to copy."
    return None


@rule(Stage.ADVICE, "checkpoint_mirror", *SETTINGS_OF_COPIES)
def mirror_settings(args: Arguments) -> str | None:
    if get_value(args, "checkpoint_mirror"):
        return None
    return idle_family(args, SETTINGS_OF_COPIES, "without checkpoint_mirror")


def staging_folder(url: str) -> str:
    """Returns the local directory, inside the user's cache, for a run with a URL as `output_dir`.

    The environment variable TRAINWRIGHT_CACHE sets another cache.
    """
    cache = os.environ.get("TRAINWRIGHT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "trainwright"
    )
    url = url.rstrip("/")
    name = re.sub(r"[^\w.-]", "_", url.rpartition("/")[2].partition("?")[0])
    return os.path.join(cache, "runs", f"{name}-{xxhash.xxh3_64(url.encode()).hexdigest()[:8]}")


@takes_url_output
def mirror_the_output(args: Arguments) -> list[str]:
    """Makes a URL in `output_dir` the mirror of a directory in the cache; returns why not, as messages."""
    url = str(args.output_dir)
    other = get_value(args, "checkpoint_mirror")
    if other not in (None, url):
        return [
            f"output_dir is a URL, but checkpoint_mirror={without_tokens(str(other))!r} is a different one. A run "
            "has one URL: remove checkpoint_mirror, or set output_dir to a directory."
        ]
    if has_other_meaning(args, "checkpoint_mirror"):
        return [
            f"output_dir={without_tokens(url)!r} is a URL, which becomes the checkpoint_mirror, "
            f"and {type(args).__name__} has a field of that name. Rename the field, or write into a directory."
        ]
    setattr(args, "checkpoint_mirror", url)  # noqa: B010 -- arguments of transformers lack the field
    args.output_dir = staging_folder(url)
    return []
