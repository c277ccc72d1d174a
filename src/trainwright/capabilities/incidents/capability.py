"""Incidents: bad steps are counted, reported, and written as bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any  # for the run and the trainer, above this package

from trainwright.capabilities.incidents.recorder import IncidentRecorder
from trainwright.capability import Capability, Others, RunContext
from trainwright.config import resolve
from trainwright.data.row_names import NamesOf
from trainwright.engine.base import Engine


def make(context: RunContext, others: Others) -> IncidentRecorder:
    """Returns the recorder of a run."""
    return make_recorder(context.run, context.hooks, context.engine, folder=context.folder)


def make_recorder(run: Any, hooks: Any, engine: Engine, *, folder: str) -> IncidentRecorder:
    """Returns a recorder of incidents of a run, also outside of training."""
    names = NamesOf(hooks.train_dataset, id_column=resolve.id_column(hooks.args))
    return IncidentRecorder(hooks, run, engine, folder, names=names)


def capture(hooks: Any, run: Any, engine: Engine, reason: str, *, folder: str) -> Path:
    """Writes a bundle by the recorder of the current run, or by a new one outside of training; returns its path."""
    found = run.extensions.get(IncidentRecorder.name)
    if not isinstance(found, IncidentRecorder):
        found = make_recorder(run, hooks, engine, folder=folder)
    return found.request(reason)


CAPABILITY = Capability(make=make, methods={"capture_incident": capture})
