"""TrialRunner: runs trials one after the other and records their results. The backend decides which are next."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainwright._types import without_tokens
from trainwright.errors import SearchError, SearchSpaceError
from trainwright.search import search_record
from trainwright.search.base import SearchPlan, TrainerHandle, Trial, TrialResult, TrialSpec, drawn
from trainwright.search.search_record import SearchRecord, TrialRecord

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"  # in a trial's directory: its model, while it is the best one and is wanted


class TrialRunner:
    """Runs trials of a backend by the functions of the trainer, and keeps the record of the search."""

    def __init__(self, host: TrainerHandle, plan: SearchPlan, *, backend: str) -> None:
        self._host = host
        self._plan = plan
        self._is_under_way = False
        self.record = SearchRecord(directions=list(plan.directions), backend=backend)
        if plan.settings.resume_search:
            with suppress(FileNotFoundError):
                self.record.trials = SearchRecord.read(host.args.output_dir).trials

    def run(self, offer: TrialSpec, trial: Trial) -> TrialResult:
        """Runs one trial in all processes that train together; its error is raised, and in the record then."""
        begun = time.monotonic()

        def note(entry: TrialRecord) -> None:
            entry.seconds = round(time.monotonic() - begun, 3)
            self.note(entry)

        params = dict(offer.params)
        try:
            self._host.check(params)  # before the others hear of it: what fails here fails without them
            self._host.agree(lambda: offer)
            self._is_under_way = True
            outcome = self._host.run(offer, trial)
        except (KeyboardInterrupt, SystemExit):
            note(TrialRecord(offer.id, search_record.INTERRUPTED, params))
            raise
        except SearchSpaceError:
            raise
        except Exception as error:
            reason = without_tokens(f"{type(error).__name__}: {error}")
            note(TrialRecord(offer.id, search_record.FAILED, params, error=reason))
            logger.warning("Trial %s failed: %s", offer.id, reason)
            raise
        self._is_under_way = False
        note(search_record.finished(offer.id, params | drawn(trial), outcome))  # with what model_init drew
        return outcome

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Ends the other processes, which wait for the next trial, when all trials are done.

        Processes of a failed trial have failed with it.
        """
        try:
            yield
        finally:
            if not self._is_under_way or self._host.num_processes == 1:
                self._host.agree(lambda: None)

    def note(self, entry: TrialRecord) -> None:
        """Records a trial, and deletes the models of trials that are no longer the best."""
        self.record.add(entry)
        self.record.write(self._host.args.output_dir)
        best = {one.folder for one in self.record.best()}
        for one in self.record.trials if self._plan.settings.load_best_trial else ():
            if one.folder and one.folder not in best:
                shutil.rmtree(Path(one.folder) / MODEL_FOLDER, ignore_errors=True)

    def require_one(self) -> None:
        """Raises SearchError with the reasons if, after the last trial, none was completed."""
        if not self.record.finished():
            reasons = self.record.errors()
            raise SearchError(
                f"None of {len(self.record.trials)} trials came to its end, so there is no best one. "
                + ("\n  ".join(["They failed with:", *reasons]) if reasons else "All were pruned or cut off.")
            )


def follow(host: TrainerHandle, freeze: Callable[[TrialSpec], Trial]) -> None:
    """Trains each trial that the main process offers, in the other processes, until there are no more."""
    while (offer := host.agree(lambda: None)) is not None:
        host.run(offer, freeze(offer))
