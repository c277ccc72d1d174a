"""The record of a search, `search.json` in its output directory, written as a whole after each trial.

TrialRunner runs the trials of a backend one after the other and records their results.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright._types import JSONObject, counted, json_value, without_tokens, write_text
from trainwright.config.coerce import output_path
from trainwright.errors import SearchError, SearchSpaceError
from trainwright.search import base
from trainwright.search.base import SearchPlan, TrainerHandle, Trial, TrialResult, TrialSpec, is_better, to_list
from trainwright.support.door import MALFORMED, OwnFolder, RelativeName, parse_number, read_json

logger = logging.getLogger(__name__)

SEARCH_NAME = "search.json"
MAX_BYTES = 1 << 28
MAX_PARTS = 8  # of the name of a trial's directory
MODEL_FOLDER = "model"  # in a trial's directory: its model, while it is the best one and is wanted
FINISHED = "finished"
PRUNED = "pruned"
FAILED = "failed"
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class TrialRecord:
    """Record of one trial."""

    id: str
    state: str
    params: JSONObject = field(default_factory=dict)
    values: list[float] = field(default_factory=list)  # the objectives; empty without one
    curve: list[list[object]] = field(default_factory=list)  # (step, objectives) of each evaluation
    metrics: JSONObject = field(default_factory=dict)
    error: str | None = None  # reason of its failure
    folder: str = ""  # its directory
    seconds: float | None = None

    @classmethod
    def parse(cls, values: JSONObject) -> TrialRecord:
        """Returns the record in an object that was read; TypeError or ValueError if it is none."""
        found = cls(**values)
        for name, kind in TYPES.items():
            if not isinstance(getattr(found, name), kind):
                raise TypeError(f"{name} of a trial is {type(getattr(found, name)).__name__}")
        if found.seconds is not None:
            parse_number(found.seconds, least=0)
        for value in found.values if found.state == FINISHED else ():
            parse_number(value)
        return found


TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "state": str,
    "params": dict,
    "values": list,
    "curve": list,
    "metrics": dict,
    "error": (str, type(None)),
    "folder": str,
}


@dataclass(slots=True)
class SearchRecord:
    """Record of a search so far."""

    directions: list[str]
    backend: str = ""
    trials: list[TrialRecord] = field(default_factory=list)

    def add(self, trial: TrialRecord) -> None:
        """Adds a trial, in place of an earlier record of the same one."""
        self.trials = [one for one in self.trials if one.id != trial.id] + [trial]

    def finished(self) -> list[TrialRecord]:
        """Returns the completed trials."""
        return [trial for trial in self.trials if trial.state == FINISHED]

    def best(self) -> list[TrialRecord]:
        """Returns the best completed trial (the first of equal ones); with several objectives, all undominated ones."""
        done = self.finished()
        best = [one for one in done if not any(is_better(o.values, one.values, self.directions) for o in done)]
        return best if len(self.directions) > 1 else best[:1]

    def errors(self) -> list[str]:
        """Returns one line for each failed trial."""
        return [f"trial {trial.id}: {trial.error}" for trial in self.trials if trial.error]

    def write(self, folder: str | Path) -> None:
        """Writes the record into a directory, made if missing."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_text(Path(folder) / SEARCH_NAME, json.dumps(json_value(dataclasses.asdict(self)), indent=1) + "\n")

    @classmethod
    def read(cls, folder: str | Path) -> SearchRecord:
        """Reads the record in a directory; FileNotFoundError, or ValueError if the file is no such record."""
        values = read_json(Path(folder) / SEARCH_NAME, max_bytes=MAX_BYTES)
        try:
            trials = [TrialRecord.parse(trial) for trial in values.pop("trials")]
            found = cls(**values, trials=trials)
            _check_search(found)
        except MALFORMED as error:
            raise ValueError(f"{Path(folder) / SEARCH_NAME} is not a record of a search: {error}") from error
        return found


def _check_search(found: SearchRecord) -> None:
    """Raises TypeError or ValueError if the directions are none, or a trial has not a value for each."""
    if not isinstance(found.backend, str) or not isinstance(found.directions, list):
        raise TypeError("backend or directions have another type")
    if any(direction not in base.DIRECTIONS for direction in found.directions):
        raise ValueError(f"the directions are not {' and '.join(base.DIRECTIONS)}")
    for trial in found.finished():
        if len(trial.values) != len(found.directions):
            raise ValueError("a trial has not a value for each direction")


def finished(id: str, params: JSONObject, outcome: TrialResult) -> TrialRecord:
    """Makes the record of a completed or pruned trial; a non-finite objective counts as failed."""
    values = [] if outcome.objective is None else to_list(outcome.objective)
    is_bad = not all(math.isfinite(value) for value in values)
    if is_bad:
        state = FAILED
    elif outcome.was_pruned:
        state = PRUNED
    else:
        state = FINISHED
    return TrialRecord(
        id=id,
        state=state,
        params=params,
        values=values,
        curve=[[step, to_list(objective)] for step, objective in outcome.curve],
        metrics=outcome.metrics,
        error=f"the objective is {outcome.objective}" if is_bad else None,
        folder=outcome.folder,
    )


def importance(trials: Sequence[TrialRecord], objective: int = 0) -> dict[str, float]:
    """Returns the share of the objective's variance that each parameter explains, from 0 to 1, largest first.

    For numbers, the squared correlation of ranks; otherwise the variance between their groups, without interactions.
    """
    done = [trial for trial in trials if trial.state == FINISHED and len(trial.values) > objective]
    names = dict.fromkeys(name for trial in done for name in trial.params)
    shares: dict[str, float] = {}
    for name in names:
        pairs = [(trial.params[name], trial.values[objective]) for trial in done if name in trial.params]
        if len({str(value) for value, _ in pairs}) > 1:
            shares[name] = _share([value for value, _ in pairs], [score for _, score in pairs])
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _share(values: list[Any], scores: list[float]) -> float:
    heights = _ranks(scores)
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        ranks = _ranks(values)
        return float(np.corrcoef(ranks, heights)[0, 1] ** 2) if heights.std() and ranks.std() else 0.0
    _, group, sizes = np.unique([str(value) for value in values], return_inverse=True, return_counts=True)
    means = np.bincount(group, weights=heights) / sizes
    total = np.sum((heights - heights.mean()) ** 2)
    return float(np.sum(sizes * (means - heights.mean()) ** 2) / total) if total else 0.0


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Returns ranks from 0; equal values share their mean."""
    _, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts + 1) / 2)[place]
    return ranks


def table(trial: TrialRecord, directions: Sequence[str]) -> list[str]:
    """Formats the best trial for the console: its objectives and its parameters, aligned."""
    kinds = {"minimize": "smallest", "maximize": "largest"}
    rows = [("trial", trial.id)]
    rows += [(f"objective ({kinds[d]})", f"{v:.6g}") for d, v in zip(directions, trial.values, strict=False)]
    rows += [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in trial.params.items()]
    width = max(len(name) for name, _ in rows)
    return ["best trial", *(f"  {name:<{width}}  {value}" for name, value in rows)]


def remove_model(search_folder: str, trial_folder: str) -> None:
    """Removes the model of a trial, where the trial's directory is one below that of the search.

    The directory may be of a file that others have written, or be named by the user's `hp_name`: what is elsewhere, or
    is reached by a link, stays.
    """
    inner = os.path.relpath(os.path.abspath(trial_folder), os.path.abspath(search_folder))
    with suppress(ValueError, OSError):
        name = RelativeName.parse(Path(inner, MODEL_FOLDER).as_posix(), parts=MAX_PARTS)
        OwnFolder(search_folder).remove(name)


class TrialRunner:
    """Runs trials of a backend by the functions of the trainer, and keeps the record of the search."""

    def __init__(self, host: TrainerHandle, plan: SearchPlan, *, backend: str) -> None:
        self._host = host
        self._plan = plan
        self._is_under_way = False
        self.record = SearchRecord(directions=list(plan.directions), backend=backend)
        if plan.settings.resume_search:
            with suppress(FileNotFoundError):
                self.record.trials = SearchRecord.read(output_path(host.args)).trials

    def run(self, offer: TrialSpec, trial: Trial) -> TrialResult:
        """Runs one trial in all processes that train together; its error is raised, and in the record then."""
        begun = time.monotonic()

        def note(entry: TrialRecord) -> None:
            entry.seconds = round(time.monotonic() - begun, 3)
            self.note(entry)

        params = dict(offer.params)
        try:
            self._host.check(params)  # before the other processes get it, so that a failure here does not involve them
            self._host.agree(lambda: offer)
            self._is_under_way = True
            outcome = self._host.run(offer, trial)
        except (KeyboardInterrupt, SystemExit):
            note(TrialRecord(offer.id, INTERRUPTED, params))
            raise
        except SearchSpaceError:
            raise
        except Exception as error:
            reason = without_tokens(f"{type(error).__name__}: {error}")
            note(TrialRecord(offer.id, FAILED, params, error=reason))
            logger.warning("Trial %s failed: %s", offer.id, reason)
            raise
        self._is_under_way = False
        note(finished(offer.id, params | base.drawn(trial), outcome))  # including values drawn by model_init
        return outcome

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Ends the other processes, which wait for the next trial; with a failed trial they have failed too."""
        try:
            yield
        finally:
            if not self._is_under_way or self._host.num_processes == 1:
                self._host.agree(lambda: None)

    def note(self, entry: TrialRecord) -> None:
        """Records a trial, and deletes the models of trials that are no longer the best."""
        self.record.add(entry)
        self.record.write(output_path(self._host.args))
        best = {one.folder for one in self.record.best()}
        for one in self.record.trials if self._plan.settings.load_best_trial else ():
            if one.folder not in best:
                remove_model(output_path(self._host.args), one.folder)

    def require_one(self) -> None:
        """Raises SearchError with the reasons if, after the last trial, none was completed."""
        if not self.record.finished():
            reasons = self.record.errors()
            raise SearchError(
                f"None of {counted(len(self.record.trials), 'trial')} was completed, so there is no best trial. "
                + ("\n  ".join(["They failed with:", *reasons]) if reasons else "All were pruned or cut off.")
            )


def follow(host: TrainerHandle, freeze: Callable[[TrialSpec], Trial]) -> None:
    """Trains each trial that the main process offers, in the other processes, until there are no more."""
    while (offer := host.agree(lambda: None)) is not None:
        host.run(offer, freeze(offer))
