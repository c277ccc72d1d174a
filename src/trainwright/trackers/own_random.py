"""A generator of its own for the package of a tracker, which draws random numbers on the tracker's thread.

Some clients wait a random time before they try again, and draw it from Python's global generator: wandb, MLflow, and
urllib3 for all that send with it. A dataset or a collator that uses `random` would then get other numbers whenever a
service fails, and a run would not repeat. None of these clients takes a generator as an argument, and none can work in
a process of its own, as copies to an object store do: users and their callbacks call the same client in this process.
So their modules get a second copy of the module `random`, seeded by the system, in the place of the one that training
seeds.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Collection
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

# By which the packages of trackers send, and which draw.
CLIENTS = ("azure", "botocore", "google", "urllib3")

# The functions of `random` are methods of one instance.
_GLOBAL = getattr(random.random, "__self__", None)
_METHODS = (type(random.random), type(random.uniform))


def give_own_random(packages: Collection[str]) -> None:
    """Gives the loaded modules of packages a generator of their own, in place of Python's global one.

    It holds for what they call by the module's name, have imported from it, or use as the default of an argument.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and isinstance(module, ModuleType):
            _separate(module)


def _separate(module: ModuleType) -> None:
    # Most modules have no such value; looking at the functions of all of them would take half a second.
    found = {name: own for name, value in list(vars(module).items()) if (own := _own(value)) is not None}
    for name, own in found.items():
        setattr(module, name, own)
    for value in list(vars(module).values()) if found else ():
        inner = list(vars(value).values()) if isinstance(value, type) and value.__module__ == module.__name__ else []
        for function in (value, *inner):
            if isinstance(function, FunctionType) and function.__defaults__:
                function.__defaults__ = tuple(_own(one) or one for one in function.__defaults__)


def _own(value: Any) -> Any:  # any value of a module
    """Returns what takes the place of a value; None unless it draws from the global generator."""
    if value is random:
        return _copy()
    if type(value) in _METHODS and value.__self__ is _GLOBAL:
        return getattr(_copy(), value.__name__)
    return None


@cache
def _copy() -> ModuleType:
    """A second copy of the module `random`, with a state of its own."""
    found = importlib.util.find_spec("random")
    assert found is not None
    assert found.loader is not None
    copy = importlib.util.module_from_spec(found)
    found.loader.exec_module(copy)
    return copy
