"""Names the process that the others wait for, with its host, its device, and the phase in which it loses the time.

Processes that train together wait for each other in each step, so all of them take the time of the slowest, and none
looks slow by itself. What differs is the time that a process works before it waits. Each process measures it by the
clock of the run, and the seconds travel with the numbers that the processes exchange for each log and each save.

    own work = reading + copies to the device + saving + 3 x forward pass

A backward pass takes twice the operations of a forward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); it is
not measured itself, because gradients are averaged within it and the waiting is there. Where modules gather their
weights from other processes, that waiting is taken out of the forward pass. Where forward passes wait within a layer
(layers or sequences in parts, experts elsewhere, compiled modules), they do not count, and the other phases are
compared with a whole step.

    slow     own work >= 1.2 x the median of the others, for 20 steps
    waiting  time in the backward pass beyond that of the process with the shortest one, until all have counted the
             labels of a window, and until weights are gathered in the forward pass

On a CPU the times are those of the host. On an accelerator, which works while the host continues, the forward pass is
the time on the device from the beginning of a step to the end of its first forward pass, less the times in which it
waits for weights: pairs of events, read at the next log.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainwright.capabilities.slow_ranks.forward_waits import DeviceWaits, HostWaits, Pair
from trainwright.distributed.device import get_kind
from trainwright.distributed.world import World
from trainwright.engine.base import Engine
from trainwright.journal.record import live_journal
from trainwright.loop.extension import Extension, MicroBatch, Run
from trainwright.state.progress import BACKWARD, DATA, FORWARD, HOST_TO_DEVICE, SAVING, WAITING

logger = logging.getLogger(__name__)

PHASES = (DATA, HOST_TO_DEVICE, FORWARD, BACKWARD, SAVING, WAITING)
WORDS = {
    DATA: ("reading data", "Look at its disk, its workers (dataloader_num_workers) and what else runs on its host."),
    HOST_TO_DEVICE: ("copies to the device", "Look at what else runs on its host."),
    FORWARD: ("the forward pass", "Look at the clock and temperature of its device, and at what else runs on it."),
    SAVING: ("saving", "async_save=True writes beside the training."),
}
SLOWER = 1.2  # times the work of the others from which a process counts as slow
STILL_SLOWER = 1.1  # and down to which one that was named does
NUM_STEPS = 20  # for which it must be
LEAST_S = 0.01  # in a step; smaller differences come from a busy host
BACKWARD_WORK = 2  # forward passes that a backward pass takes
MOST_NAMED = 8  # processes that are looked at in one log, the slowest first
MOST_KEPT = 64  # processes in the journal's table
MOST_SPANS = 100  # steps between two logs whose forward passes are timed on the device
MOST_EVENTS = 4000  # for them, where modules wait


@dataclass(frozen=True, slots=True)
class Slow:
    """A process that the others wait for."""

    rank: int  # rank of the process, or of the first process that shares its copy of the model
    phase: str  # the phase in which it loses most
    ratio: float  # time of its own work, relative to the other processes
    lost_s: float  # in a step


def slow_ranks(seconds: Any, step_s: float, *, waits_in_forward: bool, named: Collection[int] = ()) -> list[Slow]:
    """Returns the slow processes, the slowest first.

    Args:
        seconds: float64 array (processes, `PHASES`), seconds of a step.
        step_s: seconds of a whole step, which all of them take.
        waits_in_forward: the time in the forward pass is not that of a process alone.
        named: ranks that were slow before, which stay so down to a lower ratio.
    """
    if len(seconds) < 2:
        return []
    weights = np.array([1.0, 1.0, 0.0 if waits_in_forward else 1.0 + BACKWARD_WORK, 0.0, 1.0, 0.0])
    own = seconds @ weights
    found = []
    for rank in np.argsort(-own, kind="stable")[:MOST_NAMED]:
        others = np.delete(np.arange(len(own)), rank)
        median = float(np.median(own[others]))
        lost_s = float(own[rank]) - median
        plain_s = step_s - lost_s if waits_in_forward else median
        least = STILL_SLOWER if int(rank) in named else SLOWER
        if lost_s < LEAST_S or lost_s < (least - 1) * plain_s:
            continue
        beyond = (seconds[rank] - np.median(seconds[others], axis=0)) * weights
        found.append(Slow(int(rank), PHASES[int(beyond.argmax())], 1 + lost_s / max(plain_s, 1e-9), lost_s))
    return found


class SlowRanks(Extension):
    """Compares the times of all processes at each log, and names the slow ones.

    Args:
        engine: of the run, of several processes.
        folder: where the run writes its journal.
    """

    name = "slow_ranks"
    order = 94

    def __init__(self, engine: Engine, folder: str) -> None:
        self._engine = engine
        self._folder = folder
        self._has_events = get_kind(engine.device).has_streams
        self._spans: list[tuple[Pair, list[Pair]]] = []  # of a forward pass, and of the waiting in it
        self._most_spans = MOST_SPANS
        self._is_first = False  # of the micro-batches of a step
        self._begun: torch.Event | None = None
        self._run: Run | None = None
        self._waits: HostWaits | DeviceWaits | None = None  # in forward passes; None where there are none
        self._waits_within = False  # forward passes wait within layers, where nothing tells it from work
        self._before = dict[str, float]()  # seconds by phase at the last exchange
        self._step_before = 0
        self._is_warm = False  # the first exchange is over: it includes the start of the run
        self._slow_since: dict[int, int] = {}  # rank -> step before which it was not slow
        self._named: dict[int, str] = {}  # rank -> phase
        self._places: list[tuple[int, str, str]] = []  # rank, host and device of each replica
        self._total: Any = None  # seconds of each rank by phase
        self._num_steps = 0  # over which they are summed

    def listens_to(self) -> set[str]:
        """Leaves the events of a step out if the host's clock knows its times."""
        events = super().listens_to()
        return events if self._has_events else events - {"window", "micro_batch"}

    def begin(self, run: Run) -> None:
        """Begins to count."""
        self._run = run
        self._before = run.progress.clock.read()
        self._step_before = run.progress.state.global_step
        mine = World.for_process().process_index, socket.gethostname(), str(self._engine.device)
        self._places = self._engine.gather_replica_objects(mine)
        self._total = np.zeros((len(self._places), len(PHASES)))
        modules = self._engine.modules_that_wait(run.setup.model)
        self._waits_within = modules is None
        if modules and self._has_events:
            self._waits = DeviceWaits(modules, self._engine.device)
            self._most_spans = max(1, min(MOST_SPANS, MOST_EVENTS // (2 * len(modules))))
        elif modules:
            self._waits = HostWaits(modules, run.progress.clock)

    def window(self, batches: object) -> None:
        """Marks the beginning of a step on the device."""
        self._is_first = len(self._spans) < self._most_spans
        if not self._is_first:
            return
        self._begun = torch.Event(self._engine.device, enable_timing=True)
        self._begun.record()
        if isinstance(self._waits, DeviceWaits):
            self._waits.begin()

    def micro_batch(self, batch: MicroBatch) -> None:
        """Marks the end of the first forward pass of a step on the device."""
        if self._is_first and self._begun is not None:
            self._is_first = False
            ended = torch.Event(self._engine.device, enable_timing=True)
            ended.record()
            waits = self._waits.end() if isinstance(self._waits, DeviceWaits) else []
            self._spans.append(((self._begun, ended), waits))

    def share(self) -> list[float]:
        """Returns the steps since the last exchange, its seconds in all, and the seconds of each phase."""
        assert self._run is not None, "begin comes first"
        progress = self._run.progress
        now = progress.clock.read()
        since = {phase: now.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in PHASES}
        steps = progress.state.global_step - self._step_before
        self._before = now
        self._step_before = progress.state.global_step
        if self._has_events:
            since[FORWARD], waited_s = self._forward_s(steps)
            since[WAITING] += waited_s
        return [float(steps), *(since[phase] for phase in PHASES)]

    def _forward_s(self, num_steps: int) -> tuple[float, float]:
        """Returns the seconds of work and of waiting in forward passes on the device, by those that are over."""
        spans = [(span, waits) for span, waits in self._spans if span[1].query()]
        self._spans = []
        if not spans or self._run is None:
            return 0.0, 0.0
        try:
            all_ms = sum(milliseconds(span) for span, _ in spans)
            waited_ms = sum(milliseconds(wait) for _, waits in spans for wait in waits)
        except RuntimeError:  # events of this kind of device have no time
            return 0.0, 0.0
        scale = num_steps * self._run.plan.micro_batches / len(spans) / 1000
        return (all_ms - waited_ms) * scale, waited_ms * scale

    def shared(self, rows: list[list[float]]) -> None:
        """Compares the times of all processes."""
        steps = int(rows[0][0])
        if steps == 0 or self._run is None:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        seconds = np.array([row[1:] for row in rows])
        self._total += seconds
        self._num_steps += steps
        each = seconds / steps
        step_s = float(each.sum(axis=1).max())
        step = self._run.progress.state.global_step
        found = {
            slow.rank: slow
            for slow in slow_ranks(each, step_s, waits_in_forward=self._waits_within, named=self._named.keys())
        }
        self._slow_since = {rank: self._slow_since.get(rank, step - steps) for rank in found}
        for rank, slow in found.items():
            if step - self._slow_since[rank] >= NUM_STEPS and self._named.get(rank) != slow.phase:
                self._named[rank] = slow.phase
                self._tell(slow, step)
        for rank in [rank for rank in self._named if rank not in found]:
            del self._named[rank]
            if self._is_main:
                logger.warning("Process %d is as fast as the others again, at step %d.", self._places[rank][0], step)

    @property
    def _is_main(self) -> bool:
        return self._run is not None and self._run.progress.state.is_world_process_zero

    def _tell(self, slow: Slow, step: int) -> None:
        if not self._is_main:
            return
        rank, host, device = self._places[slow.rank]
        where, cure = WORDS[slow.phase]
        since = self._slow_since[slow.rank]
        logger.warning(
            "Process %d (%s, %s) is slow: since step %d it needs %.2f times as long for its own work as the other "
            "processes, which wait for it, about %s in each step. It loses most in %s. %s",
            rank,
            host,
            device,
            since,
            slow.ratio,
            f"{slow.lost_s:.2f} s" if slow.lost_s >= 0.1 else f"{slow.lost_s * 1000:.0f} ms",
            where,
            cure,
        )
        if (journal := live_journal(self._folder)) is not None:
            facts = {"rank": rank, "host": host, "device": device, "phase": slow.phase}
            journal.write("slow_rank", step=step, since=since, ratio=round(slow.ratio, 3), **facts)

    def finish(self, run: Run) -> None:
        """Writes the times of the processes into the journal, the slowest first."""
        journal = live_journal(self._folder) if self._is_main else None
        if journal is not None and self._num_steps:
            journal.write("processes", step=run.progress.state.global_step, **self._table())

    def _table(self) -> dict[str, Any]:
        """Returns milliseconds of a step by process and phase."""
        each = 1000 * self._total / self._num_steps
        backward = PHASES.index(BACKWARD)
        waiting = PHASES.index(WAITING)
        beyond = each[:, backward] - each[:, backward].min()
        each[:, backward] -= beyond
        each[:, waiting] += beyond
        own = each.sum(axis=1) - each[:, waiting]
        rows = []
        for replica in np.argsort(-own, kind="stable")[:MOST_KEPT]:
            rank, host, device = self._places[replica]
            times = {phase: round(float(ms), 3) for phase, ms in zip(PHASES, each[replica], strict=True)}
            rows.append({"rank": rank, "host": host, "device": device, **times})
        return {"steps": self._num_steps, "milliseconds_a_step": rows}

    def close(self) -> None:
        """Lets go of the run."""
        if self._waits is not None:
            self._waits.close()
        self._waits = None
        self._run = None
        self._begun = None
        self._spans = []


def milliseconds(pair: Pair) -> float:
    """Returns the time between two events that are over."""
    begun, ended = pair
    return begun.elapsed_time(ended)
