"""Fields that are ours and not the original's: a library's own arguments may use such a name for something else.

TRL's SFTConfig, for one, has a `packing` that is True or False and that its own trainer carries out.
"""

from __future__ import annotations

from typing import Any

from trainwright.config.fields import OurFields


def owned(args: Any, name: str) -> Any:
    """The value of one of our fields; its default where the class of `args` has no such field, or one of its own."""
    ours = OurFields.__dataclass_fields__[name]
    known = getattr(type(args), "__dataclass_fields__", None)
    if known is None:  # no dataclass: a plain stand-in
        return getattr(args, name, ours.default)
    return getattr(args, name) if known.get(name) is ours else ours.default


def is_anothers(args: Any, name: str) -> bool:
    """Whether the class of `args` gives the name of one of our fields another meaning."""
    ours = OurFields.__dataclass_fields__.get(name)
    theirs = getattr(type(args), "__dataclass_fields__", {}).get(name)
    return ours is not None and theirs is not None and theirs is not ours


def batch_formers(args: Any) -> list[str]:
    """The settings that are on and form batches by length themselves."""
    return [name for name in ("max_tokens_per_batch", "packing") if owned(args, name) is not None]
