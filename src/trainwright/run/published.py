"""Attributes that a trainer publishes although another object owns them: its run, its services or its search.

They behave like plain attributes: a test may assign them on a trainer without a constructor call, delete them, and
restore them. The owners decide how to use them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config.plans import EnginePlan
from trainwright.engine.base import Engine
from trainwright.run.parts import Parts
from trainwright.run.run import Run
from trainwright.run.services import NoSearch, Services
from trainwright.state.memory_tracker import TrainerMemoryTracker


class Published(property):
    """A published attribute, read from and assigned to its owner.

    Reading calls no Python function, so that a hook can do it during a step.
    """

    name = ""  # as spelled in the trainer's class

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name


def owned_by(owner: str, name: str) -> Any:
    """Makes a published attribute of `Trainer`.

    Args:
        owner: names of attributes from the trainer to the owner, joined by dots.
        name: the attribute of the owner.
    """
    find = attrgetter(owner)

    def assign(trainer: Any, value: Any) -> None:
        try:
            found = find(trainer)
        except AttributeError:  # the constructor has not run, or an owner was deleted
            found = _make_owner(trainer, owner)
        setattr(found, name, value)

    def delete(trainer: Any) -> None:
        try:
            delattr(find(trainer), name)
        except AttributeError:
            raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {attribute.name!r}") from None

    attribute = Published(attrgetter(f"{owner}.{name}"), assign, delete)
    return attribute


def declarable(name: str, *, flag: str) -> Any:
    """Makes a published attribute whose assignment is noted as a declaration of the user.

    Args:
        name: attribute of the trainer's `Parts` that has the value.
        flag: attribute of them that becomes True with an assignment.
    """

    def assign(trainer: Any, value: Any) -> None:
        own = _make_owner(trainer, "_trainwright")
        setattr(own, name, value)
        setattr(own, flag, True)

    def delete(trainer: Any) -> None:
        try:
            delattr(trainer._trainwright, name)
        except AttributeError:
            raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {attribute.name!r}") from None

    attribute = Published(attrgetter(f"_trainwright.{name}"), assign, delete)
    return attribute


def _make_owner(trainer: Any, owner: str) -> Any:
    """Makes the missing objects between a trainer and an owner, and returns the owner."""
    found = trainer
    for name in owner.split("."):
        if not hasattr(found, name):
            setattr(found, name, OWNERS[name]())
        found = getattr(found, name)
    return found


def _services() -> Services:
    services = Services(writer=CheckpointWriter(goes_on=False), memory_tracker=TrainerMemoryTracker(True))
    services.engine = _engine()
    return services


def _engine() -> Engine:
    """A single device, until the constructor sets the real one; its accelerator exists only if assigned."""
    device = torch.device("cpu")
    engine = Engine(EnginePlan(device=device), None, device)
    del engine.accelerator
    return engine


# Owners of published attributes assigned before the constructor of a trainer, which makes its own.
OWNERS: dict[str, Callable[[], Any]] = {
    "_trainwright": Parts,
    "run": lambda: Run.idle(None),
    "services": _services,
    "search": NoSearch,
    "engine": _engine,
}
