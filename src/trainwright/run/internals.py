"""Internals: the trainer's private side for preflight, search, replay and pickling.

Other modules read no private attribute of a trainer that is ours; `tests/sources/test_internals.py` checks this. Names
with an underscore that the original publishes (`_get_output_dir`, `_train_batch_size`) are used directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

from trainwright._types import Batch, Model, Optimizer
from trainwright.engine.base import Engine
from trainwright.loop.extension import Extension
from trainwright.loop.step import Step
from trainwright.run.checkpointing import Checkpointer
from trainwright.run.parts import PER_PROCESS, with_parts
from trainwright.run.run import Run
from trainwright.run.services import NoSearch, Services
from trainwright.state.trainer_state import TrainerState
from trainwright.support.loss_normalization import LossRule

AnyTrainer: TypeAlias = Any  # a Trainer, or a subclass of the user's: the class is above this package


@final
class Internals:
    """The only access to the private attributes of a trainer; made for a call, and not stored."""

    __slots__ = ("_trainer",)

    def __init__(self, trainer: AnyTrainer) -> None:
        self._trainer = trainer

    @property
    def _methods(self) -> Any:  # the class is above this package
        return self._trainer._trainwright.methods

    # -- the parts -----------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The backend."""
        engine: Engine = self._trainer._trainwright.services.engine
        return engine

    @property
    def run(self) -> Run:
        """The run that the trainer works on; an idle run between two trainings."""
        run: Run = self._trainer._trainwright.run
        return run

    @run.setter
    def run(self, run: Run) -> None:
        self._trainer._trainwright.run = run

    @property
    def services(self) -> Services:
        """The objects of the trainer in this process."""
        services: Services = self._trainer._trainwright.services
        return services

    @services.setter
    def services(self, services: Services) -> None:
        self._trainer._trainwright.services = services

    @property
    def has_services(self) -> bool:
        """Whether the constructor has already made the services."""
        return hasattr(vars(self._trainer).get("_trainwright"), "services")

    @property
    def is_searching(self) -> bool:
        """Whether a hyperparameter search is running."""
        is_under_way: bool = self._trainer._trainwright.search.is_under_way
        return is_under_way

    @property
    def search(self) -> Any:  # a `SearchState`, outside of the core
        """The current search; ask `is_searching` first if there may be none."""
        return self._trainer._trainwright.search

    @search.setter
    def search(self, search: Any) -> None:
        self._trainer._trainwright.search = search

    @property
    def extensions(self) -> Sequence[Extension]:
        """The extensions that the user has added."""
        extensions: Sequence[Extension] = self._trainer._trainwright.extensions
        return extensions

    @property
    def checkpointer(self) -> Checkpointer:
        """A new object that writes and reads the checkpoints of the trainer."""
        checkpointer: Checkpointer = self._methods._checkpointer(self._trainer)
        return checkpointer

    # -- facts ---------------------------------------------------------------------------------------------------------

    def loss_rule(self) -> LossRule:
        """Returns how losses are scaled, according to the current model and arguments."""
        rule: LossRule = self._methods._loss_rule(self._trainer)
        return rule

    def uses_outputs(self) -> bool:
        """Returns whether training uses the model's outputs besides its own loss."""
        uses_outputs: bool = self._methods._uses_outputs(self._trainer)
        return uses_outputs

    def label_names_in(self, batch: Batch) -> list[str]:
        """Returns the entries of an evaluation batch that are labels."""
        names: list[str] = self._methods._label_names_in(self._trainer, batch)
        return names

    def fresh_state(self) -> TrainerState:
        """Returns the record of a training that has not begun."""
        state: TrainerState = self._methods._fresh_state(self._trainer)
        return state

    def stateful(self) -> list[Any]:
        """Returns the callbacks, and the control, that have a state in checkpoints."""
        stateful: list[Any] = self._methods._stateful(self._trainer)
        return stateful

    def picklable_attributes(self) -> dict[str, Any]:
        """Returns the attributes that can be sent to another process: all but `Parts`."""
        return {name: value for name, value in vars(self._trainer).items() if name != "_trainwright"}

    def picklable_parts(self) -> dict[str, Any]:
        """Returns the `Parts` that can be sent to another process: all but the run and the services."""
        return {name: value for name, value in vars(self._trainer._trainwright).items() if name not in PER_PROCESS}

    # -- actions -------------------------------------------------------------------------------------------------------

    def make_optimizer(self, model: Model, num_steps: int) -> Optimizer:
        """Returns an optimizer for the model, made by the hooks of the trainer."""
        optimizer: Optimizer = self._methods._make_optimizer(self._trainer, model, num_steps)
        return optimizer

    def follow_loss_kwargs(self, accepts: bool) -> None:
        """Sets whether the model is given the number of items, unless the user has said so."""
        if not self._trainer._trainwright.declares_loss_kwargs:
            self._trainer._trainwright.accepts_loss_kwargs = accepts

    def adopt_model(self, model: Model) -> None:
        """Makes this the model of the trainer, on its device."""
        self._methods._adopt_model(self._trainer, model)

    def iterate_steps(self, epoch: int) -> Iterator[Step]:
        """Returns the steps of an epoch, or its remaining steps after a resume."""
        steps: Iterator[Step] = self._methods._iterate_steps(self._trainer, epoch)
        return steps

    def open_repository(self) -> None:
        """Opens the repository on the Hub, unless it is open."""
        self._methods._open_repository(self._trainer)

    def copied_for_preflight(self, *, services: Services, run: Run, **parts: Any) -> AnyTrainer:
        """Returns another trainer with the same objects and hooks except for these, without the user's extensions."""
        return with_parts(self._trainer, {"services": services, "run": run, "extensions": []}, **parts)

    def copied_for_evaluation(self, **parts: Any) -> AnyTrainer:
        """Returns another trainer with the same objects and hooks but for these, without extensions and a search."""
        return with_parts(self._trainer, {"extensions": [], "search": NoSearch()}, **parts)

    def copied_for_trial(self, search: Any, **parts: Any) -> AnyTrainer:
        """Returns another trainer with the same objects and hooks except for these, within this search."""
        return with_parts(self._trainer, {"search": search}, **parts)
