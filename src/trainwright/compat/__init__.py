"""Puts Trainwright's public names where transformers exports its own.

Libraries written for transformers' trainer run on this one then. Nothing else of transformers changes, and it can be
undone. A library takes a name when it is imported, so `install()` comes first:

    import trainwright.compat
    trainwright.compat.install()
    from trl import SFTTrainer      # a subclass of trainwright.Trainer now
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import trainwright
from trainwright.errors import TrainwrightWarning
from trainwright.support.replaced import watch

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Installed", "install", "uninstall"]

logger = logging.getLogger(__name__)

# Modules of transformers' trainer, from the one that everyone imports to its parts.
# Not the trainer's own: what models use too.
OF_THE_LIBRARY = (
    "data.data_collator",
    "deepspeed",
    "integrations.deepspeed",
    "integrations.fsdp",
    "integrations.liger",
    "integrations.neftune",
    "integrations.peft",
    "integrations.tpu",
    "modelcard",
    "optimization",
    "pytorch_utils",
    "utils",
)
MODULES = (
    "transformers",
    *(f"transformers.{path}" for path in vars(trainwright)["ORIGINAL_PATHS"] if path not in OF_THE_LIBRARY),
)
_ABSENT = object()
_TELLING = ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments")


@dataclass
class Installed:
    """Record of the names that `install()` replaced; undone by `undo()`, or at the end of a `with` block.

    Attributes:
        replaced: full names, such as "transformers.trainer.Trainer", in the order of replacement.
    """

    replaced: list[str] = field(default_factory=list)
    _before: list[tuple[ModuleType, str, object]] = field(default_factory=list, repr=False)
    _end_watching: Callable[[], None] | None = field(default=None, repr=False)
    _depth: int = field(default=0, repr=False)  # `with` blocks that are open

    def undo(self) -> None:
        """Restores transformers' own names. Classes derived from ours meanwhile keep their bases."""
        global _installed
        if self._end_watching is not None:
            self._end_watching()
            self._end_watching = None
        for module, name, value in reversed(self._before):
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                setattr(module, name, value)
            # transformers loads itself a second time with its processors, and that copy caches what it is asked for.
            copy = sys.modules.get(module.__name__, module)
            if copy is not module and vars(copy).get(name) is getattr(trainwright, name):
                del vars(copy)[name]
        self._before = []
        if _installed is self:
            _installed = None

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.undo()


_installed: Installed | None = None


def install() -> Installed:
    """Puts our public classes and functions where transformers has its own. A second call changes nothing more.

    Returns:
        The replacements; its `undo()` restores everything.

    Warns:
        TrainwrightWarning: a library that is imported already holds transformers' trainer and keeps it.
    """
    global _installed
    if _installed is not None:
        return _installed
    modules = [module for module in map(_module, MODULES) if module is not None]
    _warn_earlier_importers(modules)
    done = Installed()
    names = [name for name in trainwright.__all__ if not name.startswith("__")]
    for module, name in ((module, name) for module in modules for name in names if hasattr(module, name)):
        ours = getattr(trainwright, name)
        if getattr(module, name) is not ours:
            done._before.append((module, name, vars(module).get(name, _ABSENT)))
            setattr(module, name, ours)
            done.replaced.append(f"{module.__name__}.{name}")
    done._end_watching = watch(importlib.import_module("transformers.trainer"))
    logger.info("trainwright.compat replaced %d names: %s", len(done.replaced), ", ".join(done.replaced))
    _installed = done
    return done


def is_installed() -> bool:
    """Returns whether `install()` is in effect."""
    return _installed is not None


def uninstall() -> None:
    """Undoes `install()`; nothing happens without one."""
    if _installed is not None:
        _installed.undo()


def _module(name: str) -> ModuleType | None:
    """Returns a module of transformers; None if this version has none of that name, or it needs a missing package."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name.startswith(missing) or not missing.startswith("transformers"):
            return None
        raise


def _warn_earlier_importers(modules: list[ModuleType]) -> None:
    theirs = {id(value) for m in modules for n in _TELLING if (value := vars(m).get(n)) is not None}
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("transformers", "trainwright", "__main__")
        and isinstance(module, ModuleType)  # None keeps a name from being imported
        and any(id(vars(module).get(telling)) in theirs for telling in _TELLING)
    )
    if holders:
        warnings.warn(
            f"trainwright.compat.install() came too late for {', '.join(holders)}: imported before, they keep "
            "transformers' trainer. Call install() before importing them, or start the script with "
            "`python -m trainwright.compat script.py`.",
            TrainwrightWarning,
            stacklevel=3,
        )
