"""Training data of several named sources: what the rest of the package asks of it.

`DataHandler` makes such data from what a user passed; `capability_table.py` names the modules that have one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import Sampler

from trainwright._types import DatasetLike
from trainwright.capability_table import TABLE, load
from trainwright.config.plans import SamplingPlan, StepPlan
from trainwright.config.protocol import Arguments
from trainwright.data.cursor import OrderKind
from trainwright.data.order import Order

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Any: indices into the user's dataset, dataloaders of the user's.


class NamedSources(ABC):
    """Several datasets by name, as one.

    Attributes:
        sources: the datasets by name.
        names: their names, in order.
    """

    sources: Mapping[str, DatasetLike]
    names: list[str]

    @abstractmethod
    def find_source(self, sample: int) -> tuple[str, int]:
        """Returns the name of a sample's source, and its row there, or its position in a stream."""

    @abstractmethod
    def find_sources(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of each sample's source: its index in `names`."""


class IndexedSources(NamedSources):
    """Named sources with a length, whose samples have global indices."""

    @abstractmethod
    def with_sources(self, change: Callable[[DatasetLike], DatasetLike]) -> IndexedSources:
        """Returns the same with each source replaced by what `change` returns for it."""


class SourceStream(NamedSources):
    """Named sources of which one is a stream, read one sample after another.

    Attributes:
        description: what it is, in a message.
    """

    description: ClassVar[str]

    @abstractmethod
    def sample(self) -> int:
        """Returns the number of the last item read, which is the same each time it is read."""


class DataHandler(ABC):
    """What a capability does with training data of a form of its own, and with the order of samples.

    It does nothing with data of any other form.
    """

    def adapt(self, dataset: DatasetLike) -> DatasetLike:
        """Returns the dataset that is read for the one that a user passed; DataError if it cannot be read."""
        return dataset

    @abstractmethod
    def check(self, args: Any, dataset: DatasetLike) -> None:
        """Raises ArgumentError if the arguments do not fit the training data."""

    def plan_order(self, args: Arguments, plan: SamplingPlan) -> object | None:
        """Returns how the arguments order the samples; None if they leave it to the plan."""
        return None

    def make_order(self, dataset: DatasetLike, plan: SamplingPlan) -> Sampler[Any] | None:
        """Returns the order of a dataset with a length; None if this handler does not decide it."""
        return None

    def order_stream(self, dataset: DatasetLike, plan: SamplingPlan) -> None:  # noqa: B027
        """Sets the order of a stream of this handler's."""

    def restore_order(self, kind: OrderKind, dataset: DatasetLike, *, num_samples: int, seed: int) -> Order | None:
        """Returns the order that a checkpoint describes; None if it is not of this handler."""
        return None

    def describe(self, args: Any, loader: Any, plan: StepPlan, *, dispatches: bool) -> list[str]:
        """Returns lines about the data of a run for the user.

        Args:
            args: the arguments of the run.
            loader: its training dataloader.
            plan: its steps.
            dispatches: the main process reads for all.

        Raises:
            ArgumentError: an override has replaced the order that the arguments ask for.
        """
        return []


def list_handlers() -> list[DataHandler]:
    """Returns the handlers of the table, in its order."""
    return [load(row.data_handler) for row in TABLE if row.data_handler]


def adapt_data(dataset: DatasetLike) -> DatasetLike:
    """Returns the training data that is read for what a user passed; DataError if it cannot be read."""
    for handler in list_handlers():
        dataset = handler.adapt(dataset)
    return dataset


def plan_order(args: Arguments, plan: SamplingPlan) -> SamplingPlan:
    """Returns the plan of the training data with the order that the arguments ask a capability for."""
    planned = (handler.plan_order(args, plan) for handler in list_handlers())
    return replace(plan, order=next((one for one in planned if one is not None), None))


def find_data(loader: object) -> Any:
    """Returns the user's dataset inside the wrappers of a dataloader; None if it has none."""
    data: Any = getattr(loader, "dataset", None)
    while not isinstance(data, NamedSources) and hasattr(data, "dataset"):
        data = data.dataset
    return data
