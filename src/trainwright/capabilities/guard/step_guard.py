"""Guards of a step: decide between clipping and the optimizer whether to make an update. There are two kinds.

A step is bad if the norm of its gradients is not finite. The norm is the one computed by clipping (measured for the log
if `max_grad_norm` is 0). A non-finite loss makes it so: `first_gradient` begins the backward pass with 1 + 0 * loss,
which is exactly 1 for a finite loss, and NaN otherwise. NaN multiplied by any derivative is NaN, so all gradients of
the window become NaN. Averaging the gradients spreads that to every process, so that all processes decide alike without
an extra exchange: DDP's sum of NaN and anything is NaN, and the norm of sharded gradients (FSDP) covers all processes.
A single process on a CPU does not need this: it checks the loss. "warn" makes the update and so must not mark the
gradients: it checks the loss, averaged over the processes if there are several.

A step is a spike if its loss or norm is far above the previous values (`history.py`).

`HostGuard` knows the norm before the update. On a CPU, reading it does not wait for anything, so every optimizer is
guarded this way there: a skipped step calls neither the optimizer nor the schedule. On a GPU, it waits for the backward
pass once per step.

`DeviceGuard` does not wait: torch's fused optimizers, and `adamw_bf16`, take a device scalar `found_inf` and leave
weights, states and step counts unchanged if it is 1. The host learns of a skipped step later: the flag is copied
asynchronously, and read before the next update, when the device has long passed it, or before a log, an evaluation or a
save. Until then the schedule is one step ahead, so `settle` undoes its step. Example: a linear schedule from 1.0 to 0
over 10 steps, step 3 bad:

    step  rate used  found_inf  schedule after the step  settle() before the next update  the same, without step 3
    1     1.0        0          0.9                      keeps 0.9                        1.0
    2     0.9        0          0.8                      keeps 0.8                        0.9
    3     (0.8)      1          0.7                      puts 0.8 back                    -
    4     0.8        0          0.7                      keeps 0.7                        0.8

Policies for spikes need numbers on the host, and a rollback must precede the next forward pass, so with these, a run
uses a `HostGuard` on GPUs too. DeepSpeed clips, decides and updates in one call: its guard reports the result. The
first update of an optimizer without a state is read back as well: torch's fused SGD would keep the uninitialized
momentum that it allocates for a skipped first step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from trainwright._types import Batch, JSONObject, Optimizer, is_count
from trainwright.capabilities.guard.diagnosis import WEIGHTS
from trainwright.capabilities.guard.history import NO_BOUND, SpikeHistory
from trainwright.capabilities.guard.incident_log import Diagnose, IncidentLog, Record, find_error
from trainwright.capabilities.guard.plan import GuardPlan
from trainwright.capabilities.guard.rollback import Rollback
from trainwright.capability_table import FILES
from trainwright.checkpoint.training_state import save_json
from trainwright.distributed.device import DelayedScalar, get_kind
from trainwright.loop.extension import Decision, Extension, MicroBatch, Run, SavedRun, Sink, StepFacts
from trainwright.loop.incident import NON_FINITE, SPIKE, Incident
from trainwright.optim.schedules import schedule_memory
from trainwright.state.progress import INCIDENTS, Progress
from trainwright.support.loss_normalization import LossOutput

GradNorm: TypeAlias = torch.Tensor | float | None
Mean: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
DECIDING = ("skip", "rollback", "stop")  # policies that prevent the update
NOT_FINITE = "loss or gradient is not finite"
HIGHEST = sys.float_info.max
LOWEST = -HIGHEST


class LossMark:
    """First gradients of backward passes, which are NaN if the loss is not finite."""

    def __init__(self) -> None:
        self._one = torch.tensor(1.0)
        self._zero = torch.tensor(0.0)

    def __call__(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Returns 1 + 0 * loss; None if the loss is not a real scalar, which the backward pass itself refuses."""
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or loss.is_complex():
            return None
        if self._one.dtype != loss.dtype or self._one.device != loss.device:
            self._one = torch.ones_like(loss)
            self._zero = torch.zeros_like(loss)
        return torch.addcmul(self._one, loss.detach(), self._zero)


class Spikes:
    """Histories of loss and norm, and the policy for spikes in them.

    Values up to the bounds are collected in two lists, and moved to the histories when the lists are full.

    Args:
        plan: the policy, and the definition of a spike.

    Attributes:
        loss_bound, norm_bound: finite values up to them are not spikes; their step is added to the lists.
        losses, norms: accepted values not yet in the histories.
        room: length of the lists above which `flush` must be called.
    """

    def __init__(self, plan: GuardPlan) -> None:
        self.policy = plan.on_spike
        self.threshold = plan.spike_threshold
        self._loss, self._norm = (
            SpikeHistory(window=plan.spike_window, warmup=plan.spike_warmup, threshold=plan.spike_threshold)
            for _ in range(2)
        )
        self._histories = {"loss": self._loss, "grad_norm": self._norm}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.loss_bound = self.norm_bound = NO_BOUND
        self.room = 0

    def accept(self, loss: float, norm: float) -> bool:
        """Adds loss and norm of a step, both finite, if neither is a spike; returns whether they were added."""
        self.flush()
        if self._loss.is_spike(loss) or self._norm.is_spike(norm):
            return False
        self.losses.append(loss)
        self.norms.append(norm)
        self.loss_bound = self._loss.bound
        self.norm_bound = self._norm.bound
        self.room = min(self._loss.room, self._norm.room)
        if self.room == 0:
            self.flush()
        return True

    def flush(self) -> None:
        """Moves the values of the lists to the histories."""
        if self.norms:
            self._loss.add(self.losses)
            self._norm.add(self.norms)
            self.losses.clear()
            self.norms.clear()
        self.loss_bound = self.norm_bound = NO_BOUND

    def find(self, values: Mapping[str, float]) -> str:
        """Compares the values of a step with earlier ones, and adds them if the update will be made.

        Args:
            values: values by the name of their history.

        Returns:
            A description of the spikes; empty if there are none.
        """
        self.flush()
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        spikes = [name for name, value in finite.items() if self._histories[name].is_spike(value)]
        if not spikes or self.policy == "warn":
            for name, value in finite.items():
                self._histories[name].add((value,))
        told = " and ".join(f"{name} {values[name]:.4g}" for name in spikes)
        return f"{told} beyond {self.threshold:g} robust deviations of the accepted steps before it" if told else ""

    @property
    def values(self) -> dict[str, list[float]]:
        """Returns accepted values by name, without empty entries."""
        self.flush()
        return {name: history.values for name, history in self._histories.items() if history.values}

    def load(self, values: Mapping[str, list[float]]) -> None:
        """Continues from accepted values."""
        for name, history in self._histories.items():
            history.load(values.get(name, ()))


class HostGuard(Extension):
    """Knows the norm before each update, and with a policy for spikes, the loss.

    Args:
        policy: `on_nonfinite`: "skip", "rollback", "warn", "stop" or "ignore".
        log: receives the incidents.
        spikes: finds spikes in loss and norm; None if not needed.
        rollback: returns to a snapshot; None if no policy needs it.
        was_updated: returns whether a bad step's update was made before the norm was known; None if this cannot happen.
        mean: averages a scalar over the processes, for spikes and "warn"; None for a single process.
        is_alone: the losses are in main memory, and no other process has any.
        writes: this process writes the files of a checkpoint.
    """

    name = "guard"

    def __init__(
        self,
        policy: str,
        log: IncidentLog,
        spikes: Spikes | None = None,
        rollback: Rollback | None = None,
        was_updated: Callable[[], bool] | None = None,
        *,
        mean: Mean | None = None,
        is_alone: bool = False,
        writes: bool = True,
    ) -> None:
        self._run: Run | None = None  # until its first window, if a policy rolls back
        self._writes = writes
        self._policy = policy
        self._log = log
        self._spikes = spikes
        self._rollback = rollback
        self._was_updated = was_updated
        self._mean = mean
        self._is_alone = is_alone
        self._judges_loss = policy == "warn" or (is_alone and policy != "ignore")
        self._reads_loss = self._judges_loss or spikes is not None
        self._loss_mark = LossMark() if policy in DECIDING and not is_alone else None
        self._has_counts = False  # a step was bad: until then, no window needs a mark

    def listens_to(self) -> set[str]:
        """Excludes events that this configuration of the guard does not need."""
        events = super().listens_to()
        if self._loss_mark is None:
            events -= {"micro_batch"}
        if self._rollback is None:
            events -= {"window", "after_step", "before_save"}
        if not self._has_counts:
            events -= {"mark"}
        return events

    def micro_batch(self, batch: MicroBatch) -> None:
        """Makes the backward pass of a non-finite loss begin with NaN."""
        if self._loss_mark is not None:
            mark_loss(batch, self._loss_mark)

    def decide(self, facts: StepFacts) -> Decision:
        """Decides whether to make the update of the current step.

        Args:
            facts: norm of the gradients; optimizer and schedule, which a callback may have replaced.

        Returns:
            SKIP if the update must not be made.

        Raises:
            NonFiniteError, SpikeError: the policy is to stop, or too many steps in a row were skipped.
        """
        self._log.optimizer = facts.optimizer
        if self._rollback is not None:
            self._rollback.follow(facts.optimizer, facts.scheduler)
            if self._rollback.leaves_out():
                self._count(facts.run)
                self._log.count_excluded_step()
                return Decision.SKIP
        progress = facts.run.progress
        spikes = self._spikes
        norm = read(facts.grad_norm)
        loss = self._measure_loss(progress)
        if spikes is not None and LOWEST <= norm <= spikes.norm_bound and LOWEST <= loss <= spikes.loss_bound:
            spikes.losses.append(loss)
            spikes.norms.append(norm)
            if len(spikes.norms) > spikes.room:
                spikes.flush()
            self._log.in_a_row = 0
            return Decision.APPLY
        is_finite = LOWEST <= norm <= HIGHEST and LOWEST <= loss <= HIGHEST
        if is_finite and (spikes is None or spikes.accept(loss, norm)):
            self._log.in_a_row = 0
            return Decision.APPLY
        if not (is_finite or (LOWEST <= norm <= HIGHEST and not self._judges_loss)):
            if self._policy == "ignore":
                return Decision.APPLY
            self._count(facts.run)
            return self._refuse(progress, NON_FINITE, self._policy, NOT_FINITE, {"grad_norm": norm})
        if spikes is not None:
            values = {"loss": loss, "grad_norm": norm}
            what = spikes.find(values)
            if what:
                self._count(facts.run)
                return self._refuse(progress, SPIKE, spikes.policy, what, values)
        self._log.accept()
        return Decision.APPLY

    def _count(self, run: Run) -> None:
        """Has each further window marked, from the first bad step on."""
        if not self._has_counts:
            self._has_counts = True
            run.extensions.listen_anew()

    def _refuse(self, progress: Progress, kind: str, action: str, what: str, values: dict[str, float]) -> Decision:
        may_end = action != "warn"
        if self._was_updated is not None:
            is_made = self._was_updated()
            if action != "stop":
                action = "warn" if is_made else "skip"
            if is_made:
                what = f"{what} (the update is made already)"
        threshold = 0.0 if self._spikes is None or kind != SPIKE else self._spikes.threshold
        step = progress.state.global_step + 1
        incident = Incident(kind=kind, step=step, action=action, what=what, values=values, threshold=threshold)
        before = progress.clock.mark(INCIDENTS)
        incident = self._log.record(incident, progress.window.current)
        progress.clock.mark(before)
        if action == "rollback":
            assert self._rollback is not None
            progress.is_updating = True  # an error from here on saves nothing
            step = self._rollback.go_back(find_error(kind))
            self._log.check_parts(
                f"Step {progress.state.global_step + 1}: {what}; the snapshot of step {step} is not better"
            )
            incident = replace(incident, what=f"{what}; weights, optimizer and schedule are back at step {step}")
        self._log.add(incident, may_end=may_end)
        return Decision.APPLY if action == "warn" else Decision.SKIP

    def _measure_loss(self, progress: Progress) -> float:
        if self._is_alone:
            return progress.meter.read_step_loss()
        return read(average_step_loss(progress, self._mean)) if self._reads_loss else 0.0

    def window(self, batches: Sequence[Batch]) -> None:
        """Copies the state before the first step, if a policy rolls back to it."""
        assert self._rollback is not None
        if self._run is not None:
            self._rollback.keep(self._run.progress, is_saved=False)
            self._run = None

    def begin(self, run: Run) -> None:
        """Remembers the run until its first window, before which the state is copied."""
        self._run = run if self._rollback is not None else None
        if self._log.state():
            self._count(run)

    def after_step(self, run: Run) -> None:
        """Copies the state after a finished step, if a copy is due."""
        assert self._rollback is not None
        self._rollback.keep(run.progress, is_saved=False)

    def before_save(self, run: Run) -> None:
        """Copies the state that a checkpoint is about to have, so that a resumed run rolls back to the same step."""
        assert self._rollback is not None
        self._rollback.keep(run.progress, is_saved=True)

    def mark(self) -> JSONObject:
        """Returns the counts of bad steps before a window."""
        return self._log.mark()

    def rewind(self, mark: JSONObject | None) -> None:
        """Restores the counts: the current window does not count."""
        self._log.rewind(mark)

    def state(self) -> JSONObject:
        """Returns this guard's state for a checkpoint; empty if nothing has happened yet."""
        values = {} if self._spikes is None else self._spikes.values
        left_out = 0 if self._rollback is None else self._rollback.left_out
        entries = {**self._log.state(), "accepted": values, "left_out_steps": left_out}
        return {name: value for name, value in entries.items() if value}

    def continue_from(self, state: JSONObject) -> None:
        """Continues from the result of `state`."""
        self._log.load(state)
        if self._spikes is not None:
            self._spikes.load(state.get("accepted", {}))
        if self._rollback is not None:
            self._rollback.left_out = state.get("left_out_steps", 0)

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the guard's record of earlier steps."""
        if self._writes:
            save_json(self.state(), folder / FILES["guard"])

    def load(self, checkpoint: SavedRun) -> None:
        """Continues from a checkpoint; CheckpointError for an invalid file."""
        self.continue_from(checkpoint.entry(self.name).state(is_guard_state))

    def log(self) -> dict[str, float]:
        """Logs new incidents; returns their values for a log."""
        return shown(self._log)

    def finish(self, run: Run) -> None:
        """Summarizes the bad steps of a run; see `IncidentLog.finish` for the errors."""
        step = run.progress.state.global_step
        if self._policy in DECIDING:
            self._log.check_parts(f"Training ends after step {step}", WEIGHTS)
        self._log.finish(step)

    def close(self) -> None:
        """Releases the run."""
        self._run = None


class DeviceGuard(Extension):
    """Leaves the decision to a fused optimizer on its device, and learns of it one step later.

    Args:
        policy: `on_nonfinite`: "skip", "warn" or "stop".
        log: receives the incidents.
        optimizer: an optimizer that honours `found_inf`.
        device: device of the gradients.
        mean: averages a scalar over the processes, only for "warn"; None for a single process.
        writes: this process writes the files of a checkpoint.
    """

    name = "guard"
    refuses_late = True

    def __init__(
        self,
        policy: str,
        log: IncidentLog,
        optimizer: Optimizer,
        *,
        device: torch.device,
        mean: Mean | None = None,
        writes: bool = True,
    ) -> None:
        self._policy = policy
        self._mean = mean
        self._log = log
        self._optimizer = optimizer
        self._is_read = True  # the optimizer reads `found_inf`
        self._at_once = HostGuard(policy, log, mean=mean, writes=writes)
        self._found_inf = torch.zeros((), device=device)
        self._flag = DelayedScalar(device)
        # A step with an unread flag, its window, and a function that undoes its schedule step.
        self._waiting: tuple[int, object, Callable[[], None]] | None = None

    def listens_to(self) -> set[str]:
        """Excludes `micro_batch` if every update is made."""
        events = super().listens_to()
        return events if "micro_batch" in self._at_once.listens_to() else events - {"micro_batch"}

    def micro_batch(self, batch: MicroBatch) -> None:
        """Makes the backward pass of a non-finite loss begin with NaN."""
        self._at_once.micro_batch(batch)

    def decide(self, facts: StepFacts) -> Decision:
        """Decides about the update of the current step, on the device; see `HostGuard.decide`."""
        self.settle()
        optimizer = facts.optimizer
        progress = facts.run.progress
        if optimizer is not self._optimizer:
            self._release()
            self._optimizer = optimizer
            self._log.optimizer = optimizer
            self._is_read = takes_found_inf(optimizer)
        grad_norm = facts.grad_norm
        is_here = isinstance(grad_norm, torch.Tensor) and grad_norm.device == self._found_inf.device
        if not is_here or not optimizer.state or not self._is_read:
            self._found_inf.zero_()
            return self._at_once.decide(facts)
        is_made = self._policy == "warn"
        assert isinstance(grad_norm, torch.Tensor)
        zero = grad_norm * 0.0 + average_step_loss(progress, self._mean) * 0.0 if is_made else grad_norm * 0.0
        torch.ne(zero, 0.0, out=self._found_inf)
        self._flag.send(self._found_inf)
        if not is_made:
            optimizer.found_inf = self._found_inf
        undo = nothing if is_made else _undo_step(facts)
        self._waiting = progress.state.global_step + 1, progress.window.current, undo
        return Decision.APPLY

    def settle(self) -> None:
        """Reads the flag of the last update, and undoes the schedule's step if it was skipped.

        Raises:
            NonFiniteError: the policy is to stop, or too many steps in a row were skipped.
        """
        if self._waiting is None:
            return
        step, window, undo = self._waiting
        self._waiting = None
        if self._flag.read() == 0.0:
            self._log.accept()
            return
        undo()
        incident = Incident(kind=NON_FINITE, step=step, action=self._policy, what=NOT_FINITE)
        self._log.add(self._log.record(incident, window))

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the guard's record of earlier steps, after `settle`."""
        self._at_once.save(folder, sink)

    def load(self, checkpoint: SavedRun) -> None:
        """Continues from a checkpoint."""
        self._at_once.load(checkpoint)

    def log(self) -> dict[str, float]:
        """Logs new incidents; returns their values for a log."""
        self.settle()
        return self._at_once.log()

    def finish(self, run: Run) -> None:
        """Summarizes the bad steps of a run; see `IncidentLog.finish` for the errors."""
        self.settle()
        self._at_once.finish(run)

    def close(self) -> None:
        """Removes the flag from the optimizer, which others may use."""
        self._release()
        self._waiting = None

    def _release(self) -> None:
        if "found_inf" in vars(self._optimizer):
            del self._optimizer.found_inf


def make_guard(
    plan: GuardPlan,
    report: Callable[[Incident], None],
    *,
    record: Record,
    optimizer: Optimizer,
    device: torch.device,
    mean: Mean | None,
    rollback: Rollback | None,
    was_updated: Callable[[], bool] | None,
    has_scaler: bool,
    knows_norm: bool,
    diagnose: Diagnose | None = None,
    writes: bool = True,
) -> HostGuard | DeviceGuard | None:
    """Makes the guard of a run; None if every update is made.

    Args:
        plan: the policies.
        report: called with each incident.
        record: writes the bundle of an incident; returns the incident with further findings.
        optimizer: optimizer of the run.
        device: device of the gradients.
        mean: averages a scalar over the processes, for spikes and "warn"; None for a single process.
        rollback: returns to a snapshot; None if no policy needs it.
        was_updated: for an engine that clips and updates in one call: returns whether it made the update of a bad step.
        has_scaler: a loss scale (fp16) skips overflows; such skips are not incidents.
        knows_norm: the engine reports the norm of each step.
        diagnose: returns which of weights, optimizer state and rates are not finite; None skips this check.
        writes: this process writes the files of a checkpoint.

    Returns:
        The guard.
    """
    policy = "ignore" if has_scaler else plan.on_nonfinite
    has_nothing_to_do = policy == "ignore" and plan.on_spike == "off"
    if has_nothing_to_do or not knows_norm or steps_in_backward(optimizer):
        return None
    log = IncidentLog(
        report,
        max_skipped=plan.max_skipped_steps,
        max_share=plan.max_skipped_share,
        record=record,
        optimizer=optimizer,
        diagnose=diagnose,
    )
    spikes = None if plan.on_spike == "off" else Spikes(plan)
    needs_host = spikes is not None or rollback is not None or was_updated is not None
    if skips_on_device(optimizer, device) and not needs_host:
        return DeviceGuard(policy, log, optimizer, device=device, mean=mean, writes=writes)
    is_alone = mean is None and device.type == "cpu"
    return HostGuard(policy, log, spikes, rollback, was_updated, mean=mean, is_alone=is_alone, writes=writes)


def read(value: GradNorm) -> float:
    """Returns a norm or a loss as a number; waits for it if it is on a device."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return 0.0 if value is None else value


def mark_loss(batch: MicroBatch, mark: LossMark) -> None:
    """Gives a micro-batch the first gradient of its loss."""
    loss = batch.loss
    batch.first_gradient = mark(loss.loss if isinstance(loss, LossOutput) else loss)


def is_guard_state(state: JSONObject) -> bool:
    """Returns whether this may be a guard's state; raises TypeError or AttributeError for another structure."""
    values = [value for history in state.get("accepted", {}).values() for value in history]
    names = ("skipped_in_a_row", "left_out_steps", "skipped_steps", "rollbacks")
    counts = [*(state.get(name, 0) for name in names), *state.get("skipped_recently", ())]
    return all(map(is_count, counts)) and all(isinstance(one, float) and math.isfinite(one) for one in values)


def average_step_loss(progress: Progress, mean: Mean | None) -> torch.Tensor:
    """Returns the loss of the current step on its device, averaged over all processes."""
    loss = progress.meter.sum_step()
    return loss if mean is None else mean(loss)


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer updates the weights in the backward pass, before there is a norm."""
    return hasattr(optimizer, "fused_backward") or hasattr(optimizer, "optimizer_dict")


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Returns True if an optimizer leaves an update out without the host, so that no step waits for the device."""
    return get_kind(device).skips_in_optimizer and takes_found_inf(optimizer)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Returns True for an optimizer that reads `found_inf`, with rates that are plain numbers.

    These are torch's fused ones, and those with `take_back`, which uncounts a step that was left out.
    """
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    return all(
        (hasattr(optimizer, "take_back") or (is_torch and group.get("fused")))
        and not isinstance(group["lr"], torch.Tensor)
        for group in optimizer.param_groups
    )


def _undo_step(facts: StepFacts) -> Callable[[], None]:
    """Returns a function that undoes what the next step counts, if the device leaves its update out."""
    undo_schedule = schedule_memory(facts.scheduler)
    take_back = getattr(facts.optimizer, "take_back", nothing)

    def undo() -> None:
        undo_schedule()
        take_back()

    return undo


def nothing() -> None:
    """Does nothing: there is no step to undo."""


def shown(log: IncidentLog) -> dict[str, float]:
    """Logs new incidents; returns their values for a log of the run."""
    log.show()
    counts = {"guard/skipped_steps": log.num_skipped, "guard/rollbacks": log.num_rollbacks}
    return {name: count for name, count in counts.items() if count}
