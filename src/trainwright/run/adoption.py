"""The model that a trainer has taken over, what it derived from it, and the optimizer that it made for it.

A user may assign `trainer.model` at any time. When the next call begins, the trainer derives again what it had derived
from the earlier model, and makes a new optimizer if the old one was its own. What the user has set stays.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from torch import nn

from trainwright._types import Model, Optimizer, Scheduler
from trainwright.config.behaviour import get_behaviour
from trainwright.engine.base import Engine
from trainwright.support import model_facts
from trainwright.support.optimizer_facts import may_train, shown_parameters, trained_parameters

logger = logging.getLogger(__name__)

AnyTrainer: TypeAlias = Any  # a Trainer, or a subclass of the user's: the class is above this package
Reference: TypeAlias = Callable[[], Any]  # of a user's model, optimizer or schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedFacts:
    """Published attributes of a trainer that are derived from its model."""

    is_model_parallel: bool
    place_model_on_device: bool
    model_accepts_loss_kwargs: bool
    can_return_loss: bool
    label_names: list[str]

    @classmethod
    def derive(cls, args: Any, model: Model) -> DerivedFacts:
        is_parallel = model_facts.num_devices(model) > 1
        placed = args.place_model_on_device
        names = args.label_names
        return cls(
            is_model_parallel=is_parallel,
            place_model_on_device=not is_parallel if placed is None else placed,
            model_accepts_loss_kwargs=model_facts.accepts_loss_kwargs(
                model, by_name=get_behaviour(args).gives_items_by_name
            ),
            can_return_loss=model_facts.returns_loss_by_default(model),
            label_names=model_facts.find_label_names(model) if names is None else names,
        )


class Adoption:
    """What a trainer has taken over and made; models, optimizers and schedules are not kept alive by it."""

    def __init__(self) -> None:
        self._model = refer(None)
        self._facts: DerivedFacts | None = None
        self._columns: object = None
        self._optimizer = refer(None)
        self._trained = refer(None)  # the model that the optimizer was made for
        self._scheduler = refer(None)
        self._scheduled = refer(None)  # the optimizer that the schedule was made for

    # -- the model -----------------------------------------------------------------------------------------------------

    def note_model(self, model: Model) -> None:
        """Remembers the model that a trainer takes over."""
        self._model = refer(model)

    def note_facts(self, facts: DerivedFacts) -> None:
        """Remembers what a trainer has derived from its first model."""
        self._facts = facts

    def note_columns(self, columns: object) -> None:
        """Remembers the columns that a trainer has derived from its model."""
        self._columns = columns

    def is_adopted(self, model: Model) -> bool:
        """Returns False for another model than the one that was taken over last; copies of a trainer take over none."""
        return model is None or self._facts is None or self._model() is model

    def derive_again(self, trainer: AnyTrainer, model: Model) -> DerivedFacts | None:
        """Sets the attributes that are derived from a model anew, except for those that the user has set.

        Returns what was derived; `model_accepts_loss_kwargs` is left to the caller. None for a wrapper around
        the earlier model, which may hide the names of the arguments of `forward`.
        """
        earlier = self._facts
        wraps_it = isinstance(model, nn.Module) and any(module is self._model() for module in model.modules())
        if earlier is None or wraps_it:
            return None
        self._facts = DerivedFacts.derive(trainer.args, model)
        before = asdict(earlier)
        facts = asdict(self._facts)
        del facts["model_accepts_loss_kwargs"]
        for name, value in facts.items():
            if getattr(trainer, name, None) == before[name]:
                setattr(trainer, name, value)
        if trainer._signature_columns is self._columns:
            trainer._signature_columns = None
        return self._facts

    # -- optimizer and schedule ----------------------------------------------------------------------------------------

    def note_made(self, trainer: AnyTrainer, *, optimizer: Optimizer, scheduler: Scheduler) -> None:
        """Remembers the optimizer and the schedule of a trainer as its own, unless they were given to it.

        Args:
            trainer: has the new ones.
            optimizer: the one that it had before; None if it had none.
            scheduler: likewise.
        """
        if optimizer is None or optimizer is self._optimizer():
            self._optimizer = refer(trainer.optimizer)
            self._trained = refer(trainer.model)
        if scheduler is None or scheduler is self._scheduler():
            self._scheduler = refer(trainer.lr_scheduler)
            self._scheduled = refer(trainer.optimizer)

    def has_made(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimizer is one that the trainer's methods have made, not one that it was given."""
        return optimizer is self._optimizer()

    def drop_stale(self, trainer: AnyTrainer, engine: Engine) -> None:
        """Removes an optimizer that a trainer made for another model, and its schedule; its hooks make new ones."""
        optimizer = trainer.optimizer
        is_own = optimizer is not None and optimizer is self._optimizer()
        if is_own and not self._fits(trainer.model, optimizer, engine):
            logger.info("trainer.model was replaced, so a new optimizer is made for it.")
            trainer.optimizer = None
        if trainer.lr_scheduler is self._scheduler() and trainer.optimizer is not self._scheduled():
            trainer.lr_scheduler = None

    def _fits(self, model: Model, optimizer: Optimizer, engine: Engine) -> bool:
        held = list(engine.updated_tensors(optimizer))
        trained = trained_parameters([model])
        earlier = self._trained()
        if earlier is not None and model_facts.uncompiled(earlier) is model_facts.uncompiled(model):
            return may_train(held, shown_parameters(optimizer, [model]), trained)
        # A wrapper around the same parameters keeps the optimizer and its states.
        return {*map(id, trained)} <= {*map(id, held)}


def refer(value: Any) -> Reference:
    """Returns a function that returns the value as long as others keep it; None after that."""
    if value is None:
        return lambda: None
    try:
        return weakref.ref(value)
    except TypeError:  # a class with slots
        return lambda: value
