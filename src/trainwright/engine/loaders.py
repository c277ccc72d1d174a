"""How accelerate treats a loader that somebody gives to `accelerator.prepare`; ours never pass through it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainwright.config.plans import LoadersOfOthers


def loader_configuration(plan: LoadersOfOthers) -> Any:
    """The plan as accelerate's own configuration."""
    from accelerate import DataLoaderConfiguration

    return DataLoaderConfiguration(**asdict(plan))
