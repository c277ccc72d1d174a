"""`speed="auto"`: measures levers before the first step, proves each on the user's model, keeps the fastest that pass.

A lever is settings with which a step takes another time and computes the same. Each is tried on the first batches and
on top of those that are kept so far; afterwards weights, gradients, buffers and random states are what they were. What
changes the samples of a batch, or random draws, is suggested and never taken.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainwright._types import Batch, DataLoaderLike, JSONObject, has_length
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config import resolve
from trainwright.config.fields import value_of
from trainwright.distributed.device import has_compiler, kind_of, runs_flash_attention
from trainwright.errors import ModelError
from trainwright.loop.extension import Extension, Run
from trainwright.optim.factory import steps_in_backward
from trainwright.preflight.prove import allowed_gap, gap, no_dropout
from trainwright.preflight.trainer_copy import AnyTrainer, copy_of, left_as_it_was, losses_of_window
from trainwright.run import build, console
from trainwright.run.dry_run import first_batches
from trainwright.run.internals import Internals
from trainwright.run.train import noise_on_embeddings
from trainwright.support.host import available_bytes
from trainwright.support.loss_kernels import choose as choose_kernel
from trainwright.support.loss_kernels import without_logits
from trainwright.support.model_facts import core_model
from trainwright.support.patches import attention_of, repeated_blocks, with_attention
from trainwright.support.tensor_tree import tensors_of

ATTENTION = "attn_implementation"  # the lever that is no field of the arguments
SHARE = 0.02  # share of the run's time that measuring may take
MIN_STEPS = 400  # steps of a run below which 2 % do not pay for a single lever
NUM_TIMED = 3  # timed steps; their median counts
NUM_BATCHES = 4  # batches of a window used to measure a step
WORTH_KEEPING = 0.97  # share of the time before that a lever must stay below
COMPILE_S = 30.0  # seconds that must be left before a lever is tried that compiles
WORKER_S = 2.0  # the same, for workers to start
SLOW_READING = 0.05  # share of a step that reading its batches takes before workers are tried
MUCH_PADDING = 0.2

now = time.perf_counter

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Lever:
    """Settings that may make a step faster."""

    name: str
    settings: JSONObject
    setup_s: float = 0.0  # seconds that it may take before its first step
    changes_update: bool = False  # the update is another too, and is compared as well


@dataclass(frozen=True, slots=True)
class Row:
    """One lever, its measurement and its result."""

    lever: str
    settings: JSONObject
    result: str  # "kept", or "rejected", "suggested" or "not measured" with the reason
    ratio: float | None = None  # time of a step, in that without it
    proof: str = ""

    def line(self) -> str:
        """Returns the row for the console."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} x the time of a step; "
        return (
            f"{in_words(self.settings) or self.lever}: {ratio}{self.result}{f' ({self.proof})' if self.proof else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings to train with, how they were found, and a sentence about both."""

    settings: JSONObject = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    note: str = ""

    def to_dict(self) -> JSONObject:
        """Returns plain values, as for JSON."""
        return {"settings": self.settings, "note": self.note, "rows": [asdict(row) for row in self.rows]}


def in_words(settings: Mapping[str, object]) -> str:
    """Returns settings as one would type them."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


class SpeedLevers(Extension):
    """Trains with the levers that `speed` names, that the checkpoint was trained with, or that are measured now."""

    name = "speed"
    order = -60  # before anything that reads the settings

    def __init__(self, trainer: AnyTrainer) -> None:
        self._trainer = trainer
        self._choice = Choice()
        self._before: dict[str, Any] = {}
        self._attention = ExitStack()

    def model_ready(self, run: Run) -> None:
        """Chooses the settings and puts them into the arguments."""
        trainer = self._trainer
        args = trainer.args
        internals = Internals(trainer)
        checkpoint = internals.run.checkpoint
        choice = internals.engine.agree(lambda: _noted(args.speed, checkpoint) or choose(trainer))
        console.show_lines(args, [f"speed     {choice.note}"])
        self._choice = choice
        fields = {name: value for name, value in choice.settings.items() if name != ATTENTION}
        self._before = {name: getattr(args, name) for name in (*fields, "speed")}
        vars(args).update(fields, speed=choice.settings)
        self._attention.enter_context(with_attention(trainer.model, choice.settings.get(ATTENTION)))

    def facts(self) -> JSONObject:
        """Returns the levers, for the journal."""
        return {"levers": self._choice.to_dict()}

    def close(self) -> None:
        """Puts the settings back."""
        self._attention.close()
        if self._trainer is not None:
            vars(self._trainer.args).update(self._before)
        self._trainer = None


def _noted(speed: object, checkpoint: Checkpoint | None) -> Choice | None:
    """The choice that was made already."""
    if isinstance(speed, dict):
        return Choice(settings=speed, note=f"{in_words(speed) or 'as the arguments are'}: set by hand")
    arguments = None if checkpoint is None else checkpoint.arguments
    saved = (arguments or {}).get("speed")
    if not isinstance(saved, dict):
        return None
    return Choice(settings=saved, note=f"{in_words(saved) or 'as the arguments are'}: the choice of the checkpoint")


def choose(trainer: AnyTrainer) -> Choice:
    """Measures the levers of a trainer whose model is placed; nothing of the trainer is changed. In one process."""
    logger = logging.getLogger("trainwright")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        if reason := _obstacle(trainer):
            return Choice(note=f"nothing was measured: {reason}")
        with left_as_it_was(trainer.model), _kept_weights(trainer.model) as restore:
            return _Measurement(trainer, restore).choose()
    except Exception as error:  # from the user's model, data or hooks; the run itself will raise it again
        return Choice(note=f"nothing was kept: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    finally:
        Internals(trainer).engine.empty_cache()
        logger.setLevel(level)


def _obstacle(trainer: AnyTrainer) -> str | None:
    if reason := Internals(trainer).engine.changes_layers:
        return str(reason)
    if getattr(trainer.args, "mixed_precision", "no") == "fp8":
        return "fp8 exchanges layers"
    if steps_in_backward(trainer.args):
        return f"optim={trainer.args.optim} updates the weights in the backward pass"
    if isinstance(trainer.train_dataset, IterableDataset) or not has_length(trainer.train_dataset):
        return "the training data are a stream, which may be read once only"
    return None


class TooShort(ModelError):
    """The run does not pay for a measurement."""


@contextmanager
def _kept_weights(model: nn.Module) -> Iterator[Any]:
    """Gives a function that puts the trainable weights back; they are put back at the end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if sum(p.numel() * p.element_size() for p in trained) > available_bytes():
        raise ModelError("there is no memory for a copy of the weights")
    copies = [(p, p.detach().to("cpu", copy=True)) for p in trained]

    def restore() -> None:
        with torch.no_grad():
            for parameter, before in copies:
                parameter.copy_(before)

    try:
        yield restore
    finally:
        restore()


def _read(loader: DataLoaderLike, number: int) -> tuple[list[Batch], float]:
    """Returns the first batches and the seconds in which this process reads them."""
    marks: list[float] = []
    batches: list[Batch] = []
    with unchanged_random_states():
        for batch in first_batches(loader, number * (NUM_TIMED + 1)):
            marks.append(now())
            batches += [batch] if len(batches) < number else []
    steps = [after - before for before, after in pairwise(marks)]
    return batches, number * statistics.median(steps) if steps else 0.0


class _Measurement:
    """Times and gradients of steps over the first batches, with one choice of settings or another."""

    def __init__(self, trainer: AnyTrainer, restore: Any) -> None:
        self._trainer = trainer
        self._restore = restore
        self._started = now()
        copied = self._copy({})
        loader = copied.get_train_dataloader()
        plan = build.step_plan(copied.args, copied.set_initial_training_values(copied.args, loader))
        if plan.has_open_end or plan.max_steps < MIN_STEPS:
            steps = "an unknown number of" if plan.has_open_end else str(plan.max_steps)
            raise TooShort(f"{SHARE:.0%} of a run of {steps} steps do not pay for it")
        self._num_steps = plan.max_steps
        micro_batches = resolve.micro_batches(copied.args)
        self._batches, self._read_s = _read(loader, min(micro_batches, NUM_BATCHES))
        self._share = micro_batches / len(self._batches)  # share of a whole step that one measured step covers
        self._plain = self._tried({}, updates=False)
        self._seconds = self._timed({})
        self._budget_s = SHARE * self._num_steps * self._share * (self._seconds + self._read_s)

    # -- a step ----------------------------------------------------------------------------------------------------

    def _copy(self, settings: JSONObject) -> AnyTrainer:
        trainer = self._trainer
        fields = {name: value for name, value in settings.items() if name != ATTENTION}
        fields |= {"speed": None, "average_tokens_across_devices": False}  # the divisor is not shared between processes
        parts = {"_train_batch_size": trainer._train_batch_size}
        return copy_of(trainer, fields, lr_scheduler=None, _created_lr_scheduler=False, **parts)

    @contextmanager
    def _trying(self, settings: JSONObject) -> Iterator[AnyTrainer]:
        """Returns a copy of the trainer with its model set up as in a run with the settings."""
        copied = self._copy(settings)
        engine = Internals(self._trainer).engine
        with ExitStack() as stack:
            stack.callback(self._restore)
            stack.enter_context(unchanged_random_states())
            stack.enter_context(with_attention(copied.model, settings.get(ATTENTION)))
            keeps = Internals(copied).uses_outputs()
            stack.enter_context(
                build.patched(copied.args, copied.model, engine, keeps_outputs=keeps, noise=noise_on_embeddings(copied))
            )
            copied.model.train()
            yield copied

    def _step(self, copied: AnyTrainer) -> torch.Tensor:
        """The loss of a window; gradients are left."""
        copied.model.zero_grad(set_to_none=True)
        return torch.stack([loss.float() for loss in losses_of_window(copied, self._batches)]).sum()

    def _optimizer(self, copied: AnyTrainer) -> Any:
        """Returns a new optimizer; None if the trainer has one, because its state must not change."""
        if copied.optimizer is not None:
            return None
        return Internals(copied).make_optimizer(copied.model, self._num_steps)

    def _found(self, copied: AnyTrainer, *, updates: bool) -> Tensors:
        """Loss and gradients of a step, or the weights after its update."""
        with unchanged_random_states():
            loss = self._step(copied)
        named = [(name, p) for name, p in copied.model.named_parameters() if p.grad is not None]
        found = {"loss": loss.detach().cpu()}
        if not updates:
            return found | {name: p.grad.detach().float().cpu() for name, p in named}
        before = {name: p.detach().float().cpu().clone() for name, p in named}
        self._optimizer(copied).step()
        return found | {name: p.detach().float().cpu() - before[name] for name, p in named}

    def _tried(self, settings: JSONObject, *, updates: bool) -> Tensors:
        with self._trying(settings) as copied:
            return self._found(copied, updates=updates)

    def _times(self, copied: AnyTrainer, batches: Iterator[object] | None = None) -> float:
        """Median seconds of a step after one that sets things up; where given, a batch is waited for before each."""
        optimizer = self._optimizer(copied)
        seconds = []
        for _ in range(NUM_TIMED + 1):
            begun = now()
            if batches is not None:
                list(islice(batches, len(self._batches)))
            self._step(copied)
            if optimizer is not None:
                optimizer.step()
            if (kind := Internals(self._trainer).engine.device.type) != "cpu":
                getattr(torch, kind).synchronize()
            seconds.append(now() - begun)
        return statistics.median(seconds[1:])

    def _timed(self, settings: JSONObject) -> float:
        with self._trying(settings) as copied:
            return self._times(copied)

    # -- levers ----------------------------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """Tries one lever after the other, as far as the budget goes."""
        kept: JSONObject = {}
        rows: list[Row] = []
        first_s = self._seconds + self._read_s
        for lever in self._levers():
            needed = 3 * (NUM_TIMED + 2) * self._seconds + lever.setup_s
            left = self._left()
            if needed > left:
                why = f"it may take {needed:.1f} s, and {max(left, 0):.1f} s of the {self._budget_s:.1f} s are left"
                rows.append(Row(lever.name, lever.settings, f"not measured: {why}"))
                continue
            try:
                row, seconds = self._try(lever, kept)
            except Exception as error:
                reason = f"rejected: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                row = Row(lever.name, lever.settings, reason)
                seconds = None
            rows.append(row)
            if seconds is not None:
                kept = kept | lever.settings
                self._seconds = seconds
        rows += [row for row in (self._workers(kept), self._padding()) if row is not None]
        for row in rows:
            kept = kept | (row.settings if row.result == "kept" else {})
        ratio = (self._seconds + self._read_s) / first_s
        spent = f"measured in {now() - self._started:.1f} s of {self._budget_s:.1f} s"
        note = f"{in_words(kept)}: a step in {ratio:.2f} x the time" if kept else "no lever is kept"
        others = "; ".join(row.line() for row in rows if row.result != "kept")
        return Choice(settings=kept, rows=tuple(rows), note=f"{note}, {spent}{f'; {others}' if others else ''}")

    def _left(self) -> float:
        return self._budget_s - (now() - self._started)

    def _levers(self) -> Iterator[Lever]:
        """Those that apply to the model, the arguments and the device, the quickest to try first."""
        args = self._trainer.args
        device = Internals(self._trainer).engine.device
        core = core_model(self._trainer.model)
        makes_optimizer = self._trainer.optimizer is None and self._trainer.optimizer_cls_and_kwargs is None
        if makes_optimizer and args.optim == "adamw_torch":
            yield Lever("fused optimizer", {"optim": "adamw_torch_fused"}, changes_update=True)
        current = attention_of(core)
        if current == "eager":
            yield Lever("attention", {ATTENTION: "sdpa"})
        if current in ("eager", "sdpa") and runs_flash_attention(device):
            yield Lever("attention", {ATTENTION: "flash_attention_2"})
        find = getattr(core, "get_output_embeddings", None)
        if value_of(args, "loss_kernel") is None and callable(find) and find() is not None:
            yield Lever("loss kernel", {"loss_kernel": choose_kernel("auto", runs_triton=kind_of(device).runs_triton)})
        if not args.torch_compile and has_compiler(device) and repeated_blocks(self._trainer.model):
            settings = {"torch_compile": "regional", "torch_compile_backend": "inductor"}
            yield Lever("regional compile", settings, setup_s=COMPILE_S)

    def _try(self, lever: Lever, kept: JSONObject) -> tuple[Row, float | None]:
        """The row of a lever on top of those kept, and the seconds of a step if it is kept too."""
        row = Row(lever.name, lever.settings, "kept")
        if (kernel := lever.settings.get("loss_kernel")) is not None and (reason := self._unused(kernel)):
            return replace(row, result=f"rejected: {reason}"), None
        plain = self._tried({}, updates=True) if lever.changes_update else self._plain
        limit = allowed_gap(self._trainer)
        seconds = None
        with self._trying(kept | lever.settings) as copied:
            difference = self._difference(self._found(copied, updates=lever.changes_update), plain)
            if difference <= limit:
                self._restore()
                seconds = self._times(copied)
        row = replace(row, proof=f"loss and gradients differ by {difference:.1e}")
        if seconds is None:  # the model must be as it was before it is tried again
            without = float("inf") if lever.changes_update else self._without_dropout(kept | lever.settings)
            if without <= limit:
                why = "suggested: its draws of dropout are others, without them it computes the same"
                return replace(row, result=why, proof=f"{row.proof}, without dropout by {without:.1e}"), None
            what = "update" if lever.changes_update else "result"
            return replace(row, result=f"rejected: its {what} is another; {limit:.0e} is allowed"), None
        row = replace(row, ratio=round(seconds / self._seconds, 3))
        if seconds <= WORTH_KEEPING * self._seconds:
            return row, seconds
        return replace(row, result="rejected: it is not faster"), None

    def _unused(self, kernel: str) -> str | None:
        """Returns the reason why a kernel cannot compute the model's loss; None if it can."""
        internals = Internals(self._trainer)
        obstacle = internals.engine.changes_layers
        keeps = internals.uses_outputs()
        runs_triton = kind_of(internals.engine.device).runs_triton
        with without_logits(
            self._trainer.model, kernel, keeps_outputs=keeps, obstacle=obstacle, runs_triton=runs_triton
        ) as reason:
            return reason

    def _without_dropout(self, settings: JSONObject) -> float:
        with no_dropout(self._trainer.model):
            return self._difference(self._tried(settings, updates=False), self._tried({}, updates=False))

    def _difference(self, ours: Tensors, plain: Tensors) -> float:
        """Returns the larger difference of loss and gradients, each as a share of the largest value."""
        losses = [{"loss": found["loss"]} for found in (plain, ours)]
        others = [{name: one for name, one in found.items() if name != "loss"} for found in (plain, ours)]
        found = [gap(*losses), gap(*others)]
        return max(found) if all(one == one for one in found) else float("inf")

    # -- data ------------------------------------------------------------------------------------------------------

    def _workers(self, kept: JSONObject) -> Row | None:
        """Processes that read batches, compared with the batches that this one reads."""
        args = self._trainer.args
        cores = (os.cpu_count() or 1) // max(args.world_size, 1)
        settings = {"dataloader_num_workers": min(4, cores - 1)}
        row = Row("workers", settings, "kept")
        if args.dataloader_num_workers or cores < 2:
            return None
        if self._read_s < SLOW_READING * self._seconds:
            share = self._read_s / max(self._seconds, 1e-9)
            return replace(row, result=f"not measured: reading takes {share:.1%} of the time of a step")
        if WORKER_S + 2 * (NUM_TIMED + 2) * (self._seconds + self._read_s) > self._left():
            return replace(row, result="not measured: the time is used up")
        with unchanged_random_states():
            batches = iter(self._copy(settings).get_train_dataloader())
            found = list(islice(batches, len(self._batches)))
        pairs = zip(tensors_of(found), tensors_of(self._batches), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            return replace(row, result="suggested: samples draw random numbers, and would draw others")
        with self._trying({name: value for name, value in kept.items() if name != "torch_compile"}) as copied:
            seconds = self._times(copied, batches)
            alone = self._times(copied)
        before = self._read_s + alone
        row = replace(row, ratio=round(seconds / before, 3), proof="the batches are the same")
        if seconds > WORTH_KEEPING * before:
            return replace(row, result="rejected: it is not faster")
        self._read_s = max(seconds - alone, 0.0)
        return row

    def _padding(self) -> Row | None:
        """Batches by tokens, which are other batches: only suggested."""
        masks = [batch.get("attention_mask") for batch in self._batches if isinstance(batch, Mapping)]
        found: Sequence[torch.Tensor] = [mask for mask in masks if isinstance(mask, torch.Tensor) and mask.ndim == 2]
        args = self._trainer.args
        if not found or value_of(args, "max_tokens_per_batch") or value_of(args, "packing"):
            return None
        share = 1 - sum(float(mask.sum()) for mask in found) / sum(mask.numel() for mask in found)
        if share < MUCH_PADDING:
            return None
        settings = {"max_tokens_per_batch": max(mask.numel() for mask in found)}
        why = f"suggested: {share:.0%} of the tokens are padding; it, or packing, makes other batches of the samples"
        return Row("token budget", settings, why)
