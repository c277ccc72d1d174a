"""The memory of a training step: a copy of the trainer takes two steps on stand-ins, or on a small real batch.

Stand-ins for a model and its batches have shapes and types without memory; a step on them computes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright._types import Batch
from trainwright.config import plan_words, resolve
from trainwright.config.enums import word
from trainwright.config.fields import assign, batching_fields
from trainwright.config.plans import StepPlan
from trainwright.config.protocol import Arguments
from trainwright.data.prepared_dataloader import map_tensors
from trainwright.distributed.device import supports_bf16, total_bytes
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError, ModelError
from trainwright.loop.step import Step, Window
from trainwright.optim.factory import steps_in_backward
from trainwright.preflight.memory.allocation_tracker import AllocationTracker, CollectiveCounter
from trainwright.preflight.memory.memory_plan import Collective, MemoryPlan, PeakMemory, SettingsChange, parse_size
from trainwright.preflight.trainer_copy import AnyTrainer, left_as_it_was, make_copy
from trainwright.run import build, train
from trainwright.run.dry_run import first_batches
from trainwright.run.internals import Internals
from trainwright.run.run import Run
from trainwright.run.silent_events import SilentEvents
from trainwright.support.host import available_bytes
from trainwright.support.model_facts import num_bytes
from trainwright.support.tensor_tree import find_batch_size, iterate_tensors

LOOKED_AT = 4  # batches, of which the largest counts
COPIES = 5  # copies of the weights that a measured step needs
NO_MODE: AbstractContextManager[None] = nullcontext()


def plan_memory(trainer: AnyTrainer, budget: int | float | str | None, *, measures: bool = True) -> MemoryPlan:
    """Returns the memory of a step, and the changes of settings that would make it fit.

    Args:
        trainer: the trainer; it stays as it is.
        budget: bytes that there are, or text such as "24GB"; None: all changes are planned.
        measures: steps on parts of a batch are taken for a model that has no stand-in; else its error is raised.
    """
    engine = Internals(trainer).engine
    if not engine.trains_bare or trainer.train_dataset is None:
        raise ArgumentError(
            "The memory plan needs a trainer with a train_dataset, in one process that holds the whole model. Start "
            "it without a launcher, and without settings that share the model out or exchange its layers."
        )
    device = engine.device
    limit = parse_size(budget) if budget is not None else read_memory(device)
    try:
        with left_as_it_was(trainer.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about stand-ins
            peak = _peak_or_measured(trainer) if measures else predicted_peak(trainer, {})
            fits = budget is not None and peak.total_bytes <= (limit or 0)
            tried = [] if fits else _tried(trainer, None if budget is None else limit)
    finally:
        build.make_engine(trainer.args)  # accelerate's state is one per process: it belongs to the trainer again
    return MemoryPlan(peak=peak, changes=tuple(tried), budget_bytes=limit, device=device.type)


def read_memory(device: torch.device) -> int:
    """Returns the bytes of a device, or those of main memory that are free where it has none of its own."""
    of_device = total_bytes(device)
    return available_bytes() if of_device is None else of_device


def _tried(trainer: AnyTrainer, budget: int | None) -> list[SettingsChange]:
    """Returns the peaks of a step with changed settings, up to the first that fits."""
    device = Internals(trainer).engine.device
    can_bf16 = device.type == "cpu" or supports_bf16(device) is True
    return tried(trainer, changes(trainer.args, can_bf16=can_bf16), budget, base={})


def tried(
    trainer: AnyTrainer, candidates: Iterable[tuple[Settings, str]], budget: int | None, *, base: Settings
) -> list[SettingsChange]:
    """Returns the peaks of a step with changed settings, up to the first that fits.

    Args:
        trainer: whose step it is; the process that this one is now takes it.
        candidates: settings and their price.
        budget: bytes that there are; None: all are tried.
        base: settings of the step before a change.
    """
    found: list[SettingsChange] = []
    for settings, price in candidates:
        try:
            size: int | None = predicted_peak(trainer, base | settings).total_bytes
            reason = ""
        except Exception as error:
            size = None
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        found.append(SettingsChange(settings=settings, price=price, peak_bytes=size, reason=reason))
        if budget is not None and size is not None and size <= budget:
            break
    return found


def _peak_or_measured(trainer: AnyTrainer) -> PeakMemory:
    try:
        return predicted_peak(trainer, {})
    except Exception as error:  # a model may look at values, which stand-ins do not have
        try:
            return measured_peak(trainer, error)
        except ModelError:
            raise
        except Exception as second:
            raise ModelError(
                f"The memory of a step can neither be predicted ({error}) nor measured ({second})."
            ) from second


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step that was gone through with stand-ins, as one process takes it."""

    peak: PeakMemory
    collectives: tuple[Collective, ...]  # by the step and by counting its label items
    plan: StepPlan  # plan of the run
    weights_bytes: int  # all processes together, as in a checkpoint
    optimizer_bytes: int  # likewise
    host_bytes: int  # that the engine keeps in main memory for the device
    batch_bytes: int  # the largest of the first batches
    batch_tokens: int | None  # in a batch, padding included, on average over the first; None: they have no `input_ids`
    num_replicas: int  # groups of processes that work on the same samples


def predicted_peak(trainer: AnyTrainer, settings: dict[str, Any]) -> PeakMemory:
    """The peak of a step with these settings; nothing is computed and no memory taken."""
    return predicted_step(trainer, settings).peak


def predicted_step(trainer: AnyTrainer, settings: dict[str, Any]) -> PlannedStep:
    """A step with these settings, of the process that this one is now; nothing is computed and no memory taken."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # every operation gives a tensor of its shape and no value
    copied = _with_settings(trainer, fake_model(trainer.model, mode), settings, stands_in=True)
    first = list(first_batches(copied.get_train_dataloader(), LOOKED_AT))
    batches = _largest(first)
    engine = Internals(copied).engine
    if resolve.micro_batches(copied.args) > 1 and engine.num_processes > 1:
        batches *= 2  # gradients may stay whole until the last micro-batch of the window
    with CollectiveCounter() as counter:
        window = copied.get_batch_samples(iter(batches), len(batches), engine.device)
    samples = [map_tensors(_stand_in(mode, engine), batch) for batch in window[0]]
    tracker, run = _track(copied, samples, window[1], mode)
    saved = engine.saved_bytes(copied.model, run.setup.optimizer)
    if saved is None:
        weights = _num_bytes([*_saved_weights(copied.model, engine), *copied.model.buffers()])
        saved = weights, _num_bytes(iterate_tensors([*getattr(run.setup.optimizer, "state", {}).values()]))
    tokens = [int(batch["input_ids"].numel()) for batch in first if "input_ids" in batch]
    return PlannedStep(
        peak=max(tracker.peaks.values(), key=lambda peak: peak.total_bytes),
        collectives=joined(counter.found(), tracker.collectives.found()),
        plan=run.plan,
        weights_bytes=saved[0],
        optimizer_bytes=saved[1],
        host_bytes=engine.host_bytes(run.setup.optimizer),
        batch_bytes=_num_bytes(iterate_tensors(batches[0])),
        batch_tokens=round(sum(tokens) / len(tokens)) if tokens else None,
        num_replicas=engine.num_replicas,
    )


def _stand_in(mode: FakeTensorMode, engine: Engine) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that makes a stand-in for a tensor of a batch.

    Where the engine decides by values of a batch, it looks at the tensor, and the stand-in is on its device.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = mode.from_tensor(tensor).to(engine.device)
        return made

    noted = engine.noting_copies(moved)
    return mode.from_tensor if noted is moved else noted


def _saved_weights(model: nn.Module, engine: Engine) -> list[nn.Parameter]:
    """Returns the parameters of a checkpoint: a shared parameter is gathered from its parts under each name."""
    return [weight for _, weight in model.named_parameters(remove_duplicate=not engine.holds_parts)]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of tensors; for a sharded tensor the bytes in all processes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measured_peak(trainer: AnyTrainer, error: Exception) -> PeakMemory:
    """The peak of a step, by real ones on a quarter and on half of its samples: memory grows evenly with them."""
    size = num_bytes(trainer.model)
    if size * COPIES > read_memory(Internals(trainer).engine.device):
        raise ModelError(
            f"The memory of a step cannot be predicted ({error}), and {COPIES} times the weights do not fit for "
            "measuring it."
        ) from error
    rows = max(find_batch_size(batch) or 1 for batch in _batches(_with_settings(trainer, trainer.model, {})))
    few = max(rows // 4, 1)
    more = max(rows // 2, 2)
    one, two = (_measured(trainer, number) for number in (few, more))
    steps = (rows - few) / (more - few)
    return max((_grown(one[m], two[m], steps) for m in one if m in two), key=lambda peak: peak.total_bytes)


def _measured(trainer: AnyTrainer, num_rows: int) -> dict[str, PeakMemory]:
    """The peaks of a step with the first rows of its batch, on a copy of the model."""
    copied = _with_settings(trainer, copy.deepcopy(trainer.model), {})
    cut = (torch.Tensor, list)
    batches = [{n: v[:num_rows] if isinstance(v, cut) else v for n, v in batch.items()} for batch in _batches(copied)]
    window, num_items = copied.get_batch_samples(iter(batches), len(batches), Internals(copied).engine.device)
    return _track(copied, window, num_items)[0].peaks


def _grown(one: PeakMemory, two: PeakMemory, steps: float) -> PeakMemory:
    """Extrapolates the growth from the first to the second peak by a factor."""

    def grown(first: int, second: int) -> int:
        return round(first + (second - first) * steps)

    def each(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        return {name: grown(first.get(name, 0), second.get(name, 0)) for name in (*first, *second)}

    return PeakMemory(
        total_bytes=grown(one.total_bytes, two.total_bytes),
        by_kind=each(one.by_kind, two.by_kind),
        by_module=each(one.by_module, two.by_module),
        moment=two.moment,
        is_measured=True,
    )


def _with_settings(trainer: AnyTrainer, model: Any, settings: dict[str, Any], *, stands_in: bool = False) -> Any:
    """A copy with an engine, an optimizer and a schedule of its own; `stands_in`: its tensors have no memory."""
    copied = make_copy(trainer, settings, model=model, optimizer=None, lr_scheduler=None)
    plan_words.apply(copied.args, settings)
    # Stand-ins have no values to guard.
    assign(copied.args, {"on_nonfinite": "ignore", "on_spike": "off"})
    Internals(copied).services.use_engine(build.make_engine(copied.args, stands_in=stands_in))
    return copied


def _batches(copied: AnyTrainer) -> list[Batch]:
    return _largest(list(first_batches(copied.get_train_dataloader(), LOOKED_AT)))


def _largest(batches: Sequence[Batch]) -> list[Batch]:
    """The largest batch, alone: the others of a window come and go like it."""
    return [dict(max(batches, key=lambda batch: sum(t.numel() for t in iterate_tensors(dict(batch)))))]


def _track(
    copied: AnyTrainer, samples: Sequence[Batch], num_items: Any, mode: AbstractContextManager[Any] = NO_MODE
) -> tuple[AllocationTracker, Run]:
    """Takes a step at which the optimizer has its states, and in which an earlier micro-batch left gradients.

    Args:
        copied: the trainer whose step it is.
        samples: the micro-batches of the step.
        num_items: their label items.
        mode: the mode of stand-ins, which is entered once the model is set up: processes are numbered before.
    """
    engine: Any = Internals(copied).engine  # its method is replaced below
    model = copied.model
    tracker = AllocationTracker(engine.device)
    engine.backward = tracker.marking(engine.backward)  # the engine of this copy alone
    with contextlib.ExitStack() as stack:
        stack.enter_context(train.patched_model(copied))
        run = _begun(copied)
        stack.enter_context(mode)
        stack.enter_context(tracker)
        tracker.count(model.parameters(), "weights")
        tracker.count(model.buffers(), "buffers")
        tracker.count(iterate_tensors(list(samples)), "batch")
        engine.show_buffers(tracker.count)
        stack.enter_context(tracker.inside(model))
        window = Window(list(samples), num_items)
        hooks = _MarkedHooks(copied, tracker)
        if steps_in_backward(copied.args):
            _take_step(run, hooks, window)
        else:
            # Where parameters are in parts, the window itself has the micro-batch that leaves gradients.
            keeps_gradients = resolve.micro_batches(copied.args) > 1 and len(samples) == 1
            _make_states(run, model, engine, keeps_gradients=keeps_gradients)
        for _ in range(engine.settles_in):
            _take_step(run, hooks, window)
        tracker.count(iterate_tensors([*getattr(run.setup.optimizer, "state", {}).values()]), "optimizer")
        tracker.count([parameter.grad for parameter in model.parameters()], "gradients")
        tracker.peaks = {}
        tracker.collectives = CollectiveCounter()
        tracker.moment = "forward"
        _take_step(run, hooks, window)
    return tracker, run


def _take_step(run: Run, hooks: Any, window: Window) -> None:
    step = Step(run, hooks, window, epoch=0.0)
    for batch in step.micro_batches:
        step.add(hooks.training_step(step.model, batch, step.num_items))
    step.update()


def _make_states(run: Run, model: Any, engine: Engine, *, keeps_gradients: bool) -> None:
    """Makes the optimizer create its states, as in a first step; gradients remain if the window has more batches."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    if not engine.scales_loss and not engine.updates_in_clip:  # the scaler takes gradients once for each update
        # torch works out the layouts of parameters in parts at the first call, with whole stand-ins.
        engine.clip(run.setup.model, 1.0)
    run.setup.optimizer.step()
    if not keeps_gradients:
        run.setup.engine.zero_grad(run.setup.model)


class _MarkedHooks:
    """The hooks of the copy. They report the current part of a step to the tracker."""

    def __init__(self, copied: AnyTrainer, tracker: AllocationTracker) -> None:
        vars(self).update(_copied=copied, _tracker=tracker)  # not through __setattr__, which is the copy's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copied, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._copied, name, value)

    def _clip_grad_norm(self, model: Any) -> Any:
        self._tracker.moment = "clip"
        return self._copied._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._tracker.moment = "clip"
        norm = self._copied._get_grad_norm(model, grad_norm=grad_norm)
        self._tracker.moment = "update"
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is due after a step of the plan."""


def _begun(copied: AnyTrainer) -> Run:
    internals = Internals(copied)
    run = internals.run
    args = copied.args
    run.plan = build.step_plan(args, copied.set_initial_training_values(args, copied.get_train_dataloader()))
    model, _ = copied._prepare_for_training(run.plan.max_steps, None, None)
    run.begin(
        internals.engine,
        args,
        rule=internals.loss_rule(),
        start=(0, 0),
        checkpoint=None,
        fresh_plan=lambda: run.plan,
        events=SilentEvents(),
        model=model,
        optimizer=copied.optimizer,
        scheduler=copied.lr_scheduler,
    )
    return run


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Returns a copy of the model with parameters and buffers that use no memory."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        memo[id(tensor)] = mode.from_tensor(tensor)
    with mode:
        return copy.deepcopy(model, memo)


def joined(*counted: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Adds up collectives that were counted apart, the most bytes first."""
    rows: dict[str, Collective] = {}
    for row in chain(*counted):
        before = rows.get(row.name, Collective(name=row.name, calls=0, bytes=0))
        rows[row.name] = Collective(name=row.name, calls=before.calls + row.calls, bytes=before.bytes + row.bytes)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))


Settings: TypeAlias = dict[str, bool | int | str]

SMALLER = "somewhat slower"
ROUNDED = "rounded arithmetic"
RECOMPUTED = "about a third slower"
ANOTHER = "another optimizer: other numbers"


def changes(
    args: Arguments, *, can_bf16: bool, sharding: Sequence[tuple[Settings, str]] = ()
) -> Iterator[tuple[Settings, str]]:
    """Yields settings that take less memory, with their price: first each alone, then together.

    Args:
        args: of the step as it is.
        can_bf16: the device computes in bf16.
        sharding: settings with which a process holds less of the model, and their price.
    """
    size = args.per_device_train_batch_size
    steps = args.gradient_accumulation_steps
    by_samples = not batching_fields(args)
    factors = [k for k in (2, 4, 8, 16, 32, 64) if size % k == 0] if by_samples else []
    smaller: list[Settings] = [
        {"per_device_train_batch_size": size // k, "gradient_accumulation_steps": steps * k} for k in factors
    ]
    rounded: list[Settings] = [{"bf16": True}] if can_bf16 and args.mixed_precision == "no" else []
    recomputed: list[Settings] = [] if args.activation_checkpointing else [{"activation_checkpointing": True}]
    another: list[Settings] = [{"optim": "adafactor"}] if word(args.optim).startswith("adamw") else []
    yield from ((settings, SMALLER) for settings in smaller)
    yield from sharding
    for single, price in ((rounded, ROUNDED), (recomputed, RECOMPUTED)):
        yield from ((settings, price) for settings in single)
    together: Settings = {}
    prices: list[str] = []
    ladder = [(smaller[-1:], SMALLER), *(([settings], price) for settings, price in sharding[-1:])]
    ladder += [(recomputed, RECOMPUTED), (rounded, ROUNDED), (another, ANOTHER)]
    for step, price in ladder:
        for settings in step:
            together |= settings
            prices = [*prices, price]
            if len(prices) > 1 or price is ANOTHER:
                yield dict(together), ", ".join(prices)
