"""Curriculum of one run: calls the user's weight function at its steps, and saves the weights for a resume.

Weights are due at positions in samples: the ends of steps of the size that the run began with. In epochs of n samples
and S steps, step k ends at e * n + min(r * size, end of an epoch), where k = e * S + r, and r is from 1 to S. Weights
come into force `delay` steps of that size later, which is further than the loader has read, whatever its number of
workers. So the order does not depend on the number of workers, nor on the batch size and number of processes of a
resume, provided that the function returns the same weights.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from trainwright._types import JSONObject, counted
from trainwright.capabilities.curriculum.curriculum import (
    Curriculum,
    CurriculumOrder,
    LedgerColumns,
    Weights,
    read_weights,
)
from trainwright.capabilities.ledger.sample_losses import SampleLosses
from trainwright.capabilities.ledger.table import DTYPES
from trainwright.capabilities.mixture.dataset import MixtureDataset
from trainwright.capability_table import FILES
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config.plans import StepPlan
from trainwright.data.batches import EpochBatches
from trainwright.data.loader import Loader
from trainwright.data.positions import IndexedPosition
from trainwright.data.seeding import seed_from
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError, CheckpointError, DataError
from trainwright.loop.extension import Extension, Run, SavedRun, Sink
from trainwright.state.progress import Progress
from trainwright.support.door import MALFORMED

logger = logging.getLogger(__name__)


class Steps(NamedTuple):
    """Steps of a run, in samples over all processes."""

    num_samples: int  # samples per epoch
    size: int  # samples per step
    per_epoch: int
    end: int  # end of an epoch's last step

    def find_end(self, step: int) -> int:
        """Returns the position after an optimizer step."""
        epoch = max(step - 1, 0) // self.per_epoch
        return epoch * self.num_samples + min((step - epoch * self.per_epoch) * self.size, self.end)


class CurriculumRun(Extension):
    """Calls the weight function after the steps at which weights are due. All processes must call its methods together.

    Args:
        dataset: the training data, with its curriculum.
        loader: reads it in the order defined by the weights.
        samples: the losses of samples, with the ledger.
        plan: plan of the run.
        keeps_ledger: whether checkpoints have a separate ledger file.
        writes: this process writes the files of a checkpoint.

    Raises:
        ArgumentError: the order of the data is not the curriculum's.
    """

    name = "curriculum"
    order = 20  # after the ledger, which it reads

    def __init__(
        self,
        dataset: MixtureDataset,
        loader: Loader,
        samples: SampleLosses,
        engine: Engine,
        *,
        plan: StepPlan,
        keeps_ledger: bool,
        writes: bool,
    ) -> None:
        assert isinstance(dataset.curriculum, Curriculum)
        self._curriculum = dataset.curriculum
        self._dataset = dataset
        self._samples = samples
        self._engine = engine
        self._keeps_ledger = keeps_ledger
        self._writes = writes
        self._checkpoint: SavedRun | None = None  # the checkpoint that the run resumes from
        self._loader = loader.dataloader
        batches = getattr(self._loader, "batch_sampler", None)
        order = batches.order if isinstance(batches, EpochBatches) else None
        if engine.dispatches or not isinstance(order, CurriculumOrder):
            cause = "dispatch_batches" if engine.dispatches else "an override of _get_train_sampler or of a dataloader"
            raise ArgumentError(f"A Curriculum decides the order of samples, and {cause} does too. Remove one of them.")
        assert isinstance(batches, EpochBatches)
        assert isinstance(loader.position, IndexedPosition)
        self._batches = batches
        self._order = order
        self._position = loader.position
        chunk = loader.position.chunk
        num = len(order)
        end = min(plan.batches_per_epoch * chunk, num)
        self._now = self._steps = Steps(num, chunk * plan.micro_batches, plan.steps_per_epoch, end)
        self._asked = -1  # the last step after which weights were computed
        self._due: float = 0  # position at which they are due next

    def begin(self, run: Run) -> None:
        """Continues from a checkpoint; computes weights if they are due.

        Raises ArgumentError if batches are read before the weights for their samples are known.
        """
        position = self._place(run.start.epoch, run.start.batches)
        checkpoint = self._checkpoint
        if checkpoint is not None and not self._continue_from(checkpoint, position):
            self._asked = self._last_due(position)
        self._check_distance()
        self._look_ahead()
        if position >= self._due:
            self._ask(position)
        else:  # so that a mistake in the function shows before step 1
            # In the first epoch each sample comes once, so some have no visit when it is called within it.
            is_early = self._asked < 0 and self._due < len(self._dataset)
            made_up = LedgerColumns.made_up(self._dataset, step=max(self._asked, 0), every=2 if is_early else 1)
            when = "before training, with a ledger that is made up"
            self._engine.agree(lambda: self._call(made_up, when, is_made_up=True))

    def after_step(self, run: Run) -> None:
        """Computes weights after a step at which they are due."""
        progress = run.progress
        self._ask_if_due(progress, self._place(progress.epoch, progress.batches_in_epoch))

    def after_epoch(self, run: Run) -> None:
        """Computes weights that were due at steps skipped because a callback ended the epoch.

        Not if it ended the run: a resume continues within the epoch.
        """
        progress = run.progress
        if not progress.control.should_training_stop:
            self._ask_if_due(progress, self._place(progress.epoch + 1, 0))

    def _ask_if_due(self, progress: Progress, position: int) -> None:
        # after the last step nothing is chosen; if the run is extended later, it computes weights first
        state = progress.state
        if position >= self._due and state.global_step < state.max_steps:
            self._ask(position)

    def _place(self, epoch: int, batches: int) -> int:
        """Returns the samples of the run before a batch of an epoch."""
        num = self._now.num_samples
        return epoch * num + min(self._position.samples_before(epoch, batches), num)

    def _last_due(self, position: int) -> int:
        """Returns the last step, after the previous one, at or before a position at which weights are due."""
        step = self._asked
        following = self._curriculum.step_after(self._asked)
        while following is not None and self._steps.find_end(following) <= position:
            step = following
            following = self._curriculum.step_after(following)
        return step

    def _look_ahead(self) -> None:
        """Updates the position at which weights are due next, and up to which the order is known until then."""
        step = self._curriculum.step_after(self._asked)
        self._due = float("inf") if step is None else self._steps.find_end(step)
        self._order.end = self._steps.find_end(step) + self._lead if step else None

    @property
    def _lead(self) -> int:
        """Number of samples between a call and its weights coming into force."""
        return self._curriculum.lead * self._steps.size

    def _check_distance(self) -> None:
        workers = self._loader.num_workers
        chunk = self._position.chunk
        ahead = 1 + workers * (self._loader.prefetch_factor or 0)
        # With another step size, a step may end after the position at which weights are due.
        needed = ahead * chunk + (self._now.size - 1 if self._now.size != self._steps.size else 0)
        if needed > self._lead:
            raise ArgumentError(
                f"{counted(workers, 'worker')} and the loader read {counted(ahead, 'batch')} ahead ({needed} samples), "
                f"but weights of the curriculum come into force after {self._lead} (delay={self._curriculum.lead}). "
                f"Pass delay={-(-needed // self._steps.size)} to Curriculum, or fewer workers."
            )

    def _ask(self, position: int) -> None:
        step = self._last_due(position)
        self._samples.joined()
        assert self._samples.ledger is not None
        columns = LedgerColumns.from_ledger(self._samples.ledger, self._dataset, step=step)
        if step and not columns.visits.any():
            logger.warning("The curriculum's ledger is empty: no micro-batch was trained by Trainer.training_step.")
        weights = self._engine.agree(lambda: self._call(columns, f"after step {step}"))
        start = max(self._steps.find_end(step) + self._lead, position) if step else 0
        self._order.add(start, weights, position=position)
        self._asked = step
        self._look_ahead()
        if isinstance(weights, tuple):
            said = ", ".join(f"{name} {one:.3g}" for name, one in zip(self._dataset.names, weights, strict=True))
        else:
            said = f"{int((weights == 0).sum())} of {len(weights)} samples excluded"
        logger.info("Curriculum %s after step %d: %s, from sample %d on.", self._curriculum.name, step, said, start + 1)

    def _call(self, columns: LedgerColumns, when: str, *, is_made_up: bool = False) -> Weights:
        """Calls the function in the main process and reads its weights."""
        curriculum = self._curriculum
        with unchanged_random_states():
            # so that its random draws are the same as in an uninterrupted run
            seed_from((self._order.seed, columns.step))
            try:
                given = curriculum.weights_fn(columns)
            except Exception as error:
                raise DataError(
                    f"{curriculum.name}, the weights_fn of the Curriculum, raised {type(error).__name__}: {error} "
                    f"(called {when})."
                ) from error
        return read_weights(
            given,
            self._dataset,
            curriculum.name,
            visits=columns.visits,
            excluded=self._batches.excluded,
            is_made_up=is_made_up,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the weights of samples, and the ledger unless it has its own file."""
        if self._writes:
            state = self._state()
            sink.put((), lambda nothing: torch.save(state, folder / FILES["curriculum"]))

    def load(self, checkpoint: SavedRun) -> None:
        """Remembers the checkpoint until `begin`, when the position of the run is known."""
        self._checkpoint = checkpoint

    def _state(self) -> JSONObject:
        """Returns the state for a resume: current and future weights, and the ledger unless it has its own file."""
        assert self._samples.ledger is not None
        columns = {} if self._keeps_ledger else self._samples.ledger.columns
        num = self._now.num_samples
        ledger = {name: torch.from_numpy(column[:num].copy()) for name, column in columns.items()}
        data = self._samples.rows.about()
        return {
            "asked": self._asked,
            "steps": [*self._steps],
            "ledger": ledger,
            "data": data,
            **self._order.state_dict(),
        }

    def _continue_from(self, checkpoint: SavedRun, position: int) -> bool:
        """Restores the state of a checkpoint; returns False if there is none, or it belongs to other data."""
        entry = checkpoint.entry(self.name)
        if entry.path is None:
            logger.warning("%s has no curriculum weights: samples are shuffled until the next call.", checkpoint.path)
            return False
        state = entry.state()
        try:
            is_of_them = state["steps"][0] == self._now.num_samples
            if not is_of_them or ("data" in state and not self._samples.rows.is_same(state["data"])):
                logger.warning(
                    "%s has curriculum weights for other data: samples are shuffled until the next call.",
                    checkpoint.path,
                )
                return False
            self._order.load_state_dict(state, position=position)
            self._asked = int(state["asked"])
            self._steps = Steps(*map(int, state["steps"]))
            if state["ledger"] and self._samples.ledger is not None:
                self._samples.ledger.columns = {
                    name: state["ledger"][name].numpy().astype(dtype) for name, dtype in DTYPES.items()
                }
        except MALFORMED as error:
            raise CheckpointError(f"{entry.path} is not the state of a curriculum: {error!r}.") from error
        return True
