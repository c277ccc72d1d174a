"""Parts: all that a trainer of ours holds beside the attributes that the original publishes, under a single name.

A user's subclass may call its own attributes and methods as it likes. So a trainer has one attribute of ours,
`_trainwright`, and its private methods are called by their class: `Trainer._loss_rule(self)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.loop.extension import Extension
    from trainwright.run.run import Run
    from trainwright.run.services import Services

PER_PROCESS = ("run", "services")  # left out of pickles


class Parts:
    """Attributes of one trainer; those that were not set yet are missing.

    Attributes:
        methods: our class of the trainer, `Trainer` or `Seq2SeqTrainer`, whose private methods are called.
        run: the run that it works on; an idle run between two trainings.
        services: its objects in this process.
        search: the current search, or `NoSearch`.
        extensions: the extensions that the user has added.
        default_collator: the collator for a trainer without one.
        accepts_loss_kwargs: whether the model is given the number of items.
        declares_loss_kwargs: whether the user has said so.
    """

    methods: Any  # the class is above this package
    run: Run
    services: Services
    search: Any
    extensions: list[Extension]
    default_collator: Any
    accepts_loss_kwargs: bool
    declares_loss_kwargs: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # they change

    def copied(self, changed: dict[str, Any]) -> Parts:
        """Returns a copy with some attributes changed."""
        other = Parts()
        vars(other).update(vars(self) | changed)
        return other


def find_own_class(kind: type) -> type:
    """Returns the class of this package that a trainer's class is, or inherits from first."""
    package = __name__.partition(".")[0]
    return next(one for one in kind.__mro__ if one.__module__.partition(".")[0] == package)


def with_parts(trainer: Any, own: Mapping[str, Any] | None = None, **attributes: Any) -> Any:
    """Returns another trainer with the same objects and hooks, except for these.

    Args:
        trainer: any Trainer, or a subclass of the user's.
        own: changed attributes of its `Parts`.
        attributes: changed attributes of the trainer.
    """
    other = object.__new__(type(trainer))
    vars(other).update(vars(trainer) | attributes)
    other._trainwright = trainer._trainwright.copied(dict(own or {}))
    return other


def give_parts(trainer: Any, values: Mapping[str, Any]) -> None:
    """Gives a trainer without a constructor call its `Parts`."""
    trainer._trainwright = Parts().copied({**values, "methods": find_own_class(type(trainer))})
