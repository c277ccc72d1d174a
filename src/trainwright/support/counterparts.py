"""Lets our classes count as the original's: `isinstance(output, transformers.EvalPrediction)` is true of ours too.

A class of ours becomes a subclass of the one with its name when transformers loads that one's module, not before: that
import takes longer than all of this package's. Only the type is taken; every method that ours has comes first.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_waiting: dict[str, list[type]] = {}  # module of the original -> classes whose counterparts are in it
_ours: dict[type, type] = {}  # class of the original -> ours, once they are joined


class Counterpart:
    """Base of a class that is a subclass of the original's class of its name, once that one is loaded.

    `original` is the module of the original's class; a class without it, such as a user's subclass, only inherits.
    Another base than `object` lets the bases be changed later.
    """

    __slots__ = ()

    def __init_subclass__(cls, *, original: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if original is None:
            return
        module = sys.modules.get(original)
        if module is None or cls.__name__ not in vars(module):
            _waiting.setdefault(original, []).append(cls)
        else:
            _join(cls, module)


def is_counterpart(cls: type, thing: object) -> bool:
    """Returns True if a class is the original's counterpart of a class of ours that `thing` is an instance of."""
    ours = _ours.get(cls)
    return ours is not None and isinstance(thing, ours)


def _join(cls: type, module: ModuleType) -> None:
    theirs = vars(module).get(cls.__name__)
    # trainwright.compat may have put ours there
    if not isinstance(theirs, type) or issubclass(theirs, cls) or theirs in cls.__mro__:
        return
    _ours[theirs] = cls
    if hasattr(theirs, "__del__"):
        # Python would call it with our attributes.
        return
    try:
        cls.__bases__ = (*cls.__bases__, theirs)
    except TypeError as error:
        # Another version's class, or a class of the user that has both as bases.
        logger.debug("%s does not inherit from the original's: %s", cls.__qualname__, error)


class _Arrivals:
    """Finder that is asked first, and joins classes to those of a module that has just been loaded."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        finders = (finder for finder in sys.meta_path if finder is not _Arrivals)
        specs = (finder.find_spec(fullname, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module"):
            loader.exec_module = functools.partial(_load_and_join, loader.exec_module)
        return spec


def _load_and_join(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    for cls in _waiting.pop(module.__name__, ()):
        _join(cls, module)


sys.meta_path.insert(0, _Arrivals)
