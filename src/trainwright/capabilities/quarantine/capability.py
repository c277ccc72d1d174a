"""The quarantine: samples that a run and all later runs in its directory leave out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any  # for the user's objects

from trainwright._types import DatasetLike
from trainwright.capabilities.quarantine.extension import Quarantine, exclude
from trainwright.capability import Capability, Moment, Others, RunContext
from trainwright.config import resolve
from trainwright.config.coerce import output_path
from trainwright.data.row_names import NamesOf, row_names
from trainwright.data.sources import adapt_data
from trainwright.support.hooks import is_overridden


def make(context: RunContext, others: Others) -> Quarantine:
    """Returns the quarantine of the output directory."""
    dataset = find_data(context.hooks)
    names = NamesOf(dataset, id_column=resolve.id_column(context.args))
    return Quarantine(output_path(context.args), dataset, names, context.engine.agree)


def find_data(hooks: Any) -> DatasetLike:
    """Returns the training data; a dict, which may be assigned after construction, as what is read for it.

    The user's own dataloader may take the dict itself.
    """
    is_own = is_overridden(hooks, "get_train_dataloader")
    return hooks.train_dataset if is_own else adapt_data(hooks.train_dataset)


def quarantine(hooks: Any, run: Any, samples: Iterable[Any], column: str | None) -> None:
    """Adds samples to the quarantine of the output directory and of the current run; see `Trainer.quarantine`."""
    found = run.extensions.get(Quarantine.name)
    dataset = find_data(hooks)
    exclude(
        samples,
        column,
        dataset=dataset,
        names=row_names(dataset, id_column=resolve.id_column(hooks.args)),
        folder=output_path(hooks.args),
        writes=hooks.args.should_save,
        quarantine=found if isinstance(found, Quarantine) else None,
        loader=run.loader,
    )


CAPABILITY = Capability(make=make, moment=Moment.DIRECTORY, methods={"quarantine": quarantine})
