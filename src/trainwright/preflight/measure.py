"""Measures levers on the first samples of a run: seconds of a step with and without them, and whether it is the same.

Time decides how much is measured. First come two sizes of micro-batches, from which the time of a step, and so of the
run and of measuring, is estimated; then the split of batches by length, whose tokens are known from the lengths; then
the other levers, on as many micro-batches as time allows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch, DataLoaderLike, JSONObject, counted, has_length
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config import resolve
from trainwright.config.fields import get_value
from trainwright.data.balanced_batches import BatchRebalanceSampler
from trainwright.data.length_sampler import fetch_items
from trainwright.data.order import ShuffledOrder
from trainwright.data.prepared_dataloader import inner_dataloader
from trainwright.distributed.device import get_kind, has_compiler, runs_flash_attention
from trainwright.errors import ModelError
from trainwright.preflight import padding, remembered
from trainwright.preflight.prove import allowed_gap, gap
from trainwright.preflight.sample_lengths import LengthReader
from trainwright.preflight.trainer_copy import AnyTrainer
from trainwright.preflight.trials import ATTENTION, NUM_TIMED, PAD_TO, Tensors, Trials, copy_with
from trainwright.run import build
from trainwright.run.dry_run import first_batches
from trainwright.run.internals import Internals
from trainwright.support.hooks import is_overridden
from trainwright.support.loss_kernels import choose as choose_kernel
from trainwright.support.loss_kernels import without_logits
from trainwright.support.model_facts import core_model, is_causal_lm
from trainwright.support.patches import read_attention, repeated_blocks
from trainwright.support.tensor_tree import iterate_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

MULTIPLE = 8  # tokens, as the matrix units of GPUs need in half precision. Source: NVIDIA, Matrix Multiplication Guide
# Settings of batches that are split by length.
SPLIT = ("train_sampling_strategy", "per_device_train_batch_size", "gradient_accumulation_steps")
SHARE = 0.02  # share of the run's time that measuring may take
MIN_STEPS = 100  # steps of a run below which 2 % do not pay for a measurement
MIN_STEPS_KNOWN = 25  # the same, if an earlier run has measured
NUM_BATCHES = 4  # batches of a window used to measure a step
WORTH_KEEPING = 0.97  # share of the time before that a lever must stay below
WORTH_SUGGESTING = 0.9  # the same, for suggestions
COMPILE_S = 30.0  # seconds that must be left before a lever is tried that compiles
WORKER_S = 2.0  # the same, for workers to start
NUM_LENGTHS = 4096  # lengths that are read, at most
SLOW_READING = 0.05  # share of a step that reading its batches takes before workers are tried
MUCH_PADDING = 0.2  # share of padding inside of samples that is worth a sentence
MIN_PROVED = 4  # samples with which the split of batches is proved, or a quarter of a batch

now = perf_counter

Shapes = tuple[torch.Size, ...]  # shapes of the tensors in a batch


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

    @property
    def is_kept(self) -> bool:
        return self.result == "kept"

    @property
    def is_suggested(self) -> bool:
        return self.result.startswith("suggested")

    def line(self) -> str:
        """Returns the row for the console, with the settings as one would type them."""
        kind, _, reason = self.result.partition(": ")
        ratio = "" if self.ratio is None else f"about {self.ratio:.2f} x the time; "
        return f"{kind}: {in_words(self.settings) or self.lever} ({ratio}{reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings to train with, how they were found, and a sentence about both."""

    settings: JSONObject = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    note: str = ""

    def lines(self) -> list[str]:
        """Returns the choice for the console, and a line for each suggestion."""
        return [self.note, *(row.line() for row in self.rows if row.is_suggested)]

    def to_dict(self) -> JSONObject:
        """Returns plain values, as for JSON."""
        return {"settings": self.settings, "note": self.note, "rows": [asdict(row) for row in self.rows]}


def in_words(settings: Mapping[str, object]) -> str:
    """Returns settings as one would type them."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class TooShort(ModelError):
    """The run does not pay for a measurement."""

    @classmethod
    def for_steps(cls, num_steps: int | None) -> TooShort:
        """Returns the error for a run of `num_steps` steps; None if the number is unknown."""
        steps = "of unknown length" if num_steps is None else f"of {counted(num_steps, 'step')}"
        return cls(f"a run {steps} is too short to gain by it; measuring may take {SHARE:.0%} of a run")


class FirstSamples:
    """The first micro-batches of a loader, and batches of any of their samples."""

    def __init__(self, loader: DataLoaderLike, number: int) -> None:
        self._loader = loader
        self.batches, self.read_s, self.shapes = _read(loader, number)  # seconds per batch
        batches: Any = getattr(loader, "batch_sampler", None)
        self.groups: list[list[int]] | None = None  # indices of the samples of each batch; None: they stay together
        if isinstance(loader, DataLoader) and type(getattr(batches, "order", None)) is ShuffledOrder:
            with unchanged_random_states():
                self.groups = [list(batch) for batch in islice(iter(batches), number)]

    def collated(self, groups: Sequence[Sequence[int]], loader: DataLoaderLike | None = None) -> list[Batch]:
        """Returns a batch of each group of samples, made by the collator of `loader`, by default that of this one."""
        chosen = [list(group) for group in groups]
        collate = inner_dataloader(loader or self._loader).collate_fn
        rows = inner_dataloader(self._loader).dataset
        return list(DataLoader(rows, batch_sampler=chosen, collate_fn=collate))


def _read(loader: DataLoaderLike, number: int) -> tuple[list[Batch], float, set[Shapes]]:
    """Returns the first batches, the seconds in which this process reads one, and the shapes of all that were read."""
    marks: list[float] = []
    batches: list[Batch] = []
    with unchanged_random_states():
        for batch in first_batches(loader, max(number + 1, NUM_TIMED + 1)):
            marks.append(now())
            batches.append(batch)
    steps = [after - before for before, after in pairwise(marks)]
    return batches[:number], statistics.median(steps) if steps else 0.0, find_shapes(batches)


def find_shapes(batches: Sequence[Batch]) -> set[Shapes]:
    """Returns the shapes that batches have, each once."""
    return {tuple(tensor.shape for tensor in iterate_tensors(batch)) for batch in batches}


class Measurement:
    """Times and gradients of steps over the first samples, with one choice of settings or another."""

    def __init__(self, trainer: AnyTrainer, restore: Any) -> None:
        self._trainer = trainer
        self._started = now()
        copied = copy_with(trainer, {})
        loader = copied.get_train_dataloader()
        plan = build.step_plan(copied.args, copied.set_initial_training_values(copied.args, loader))
        if plan.has_open_end or plan.max_steps < MIN_STEPS_KNOWN:
            raise TooShort.for_steps(None if plan.has_open_end else plan.max_steps)
        self._trials = Trials(trainer, restore, num_steps=plan.max_steps, now=now)
        self._reader = LengthReader(trainer, now)
        self._micro_batches = resolve.micro_batches(copied.args)
        self._num_processes = Internals(trainer).engine.num_replicas
        self._first = FirstSamples(loader, min(self._micro_batches, NUM_BATCHES))
        self._read_s = self._first.read_s * self._micro_batches  # in a step
        self._item_s = 0.0  # seconds in which the length of one sample is read
        self._lengths = self._sampled_lengths()
        self._memory = remembered.Memory(
            remembered.collect_facts(
                trainer.model, trainer.args, Internals(trainer).engine.device, remembered.find_shapes(self._widths())
            )
        )
        if self._memory.known.cost is None and plan.max_steps < MIN_STEPS:
            raise TooShort.for_steps(plan.max_steps)
        self._cost = self._memory.known.cost or self._measured_cost()
        self._step_s = self._cost.seconds(self._micro_batches, self._plain_tokens() * self._micro_batches)
        self._budget_s = SHARE * plan.max_steps * (self._step_s + self._read_s)
        self._kept: JSONObject = {}
        self._split_ratio = 1.0
        self._groups = self._first.groups  # samples of the first micro-batches under the settings kept so far
        self._probe_groups: list[list[int]] = []  # samples of the micro-batches with which levers are timed

    # -- the samples -----------------------------------------------------------------------------------------------

    def _sampled_lengths(self) -> NDArray[np.int64] | None:
        """Returns the lengths of random samples, for at least one step; None if samples have no length."""
        dataset = self._trainer.train_dataset
        if self._first.groups is None:
            return None
        drawn = np.random.default_rng(0).integers(len(dataset), size=min(len(dataset), NUM_LENGTHS)).tolist()
        lengths, self._item_s = self._reader.read(dataset, drawn)
        window = len(self._first.groups[0]) * self._micro_batches * self._num_processes
        return None if lengths is None or len(lengths) < window else lengths

    def _widths(self) -> dict[str, float]:
        """Sizes of the batches, for the name under which their times are remembered."""
        if self._lengths is not None:
            return {f"p{p}": float(np.percentile(self._lengths, p)) for p in (50, 90, 100)}
        tensors = [tensor for tensor in iterate_tensors(self._first.batches) if tensor.ndim]
        return {"elements": float(max((tensor.numel() for tensor in tensors), default=0))}

    def _plain_tokens(self) -> float:
        """Tokens of a micro-batch, padding included."""
        if self._lengths is None or self._first.groups is None:
            return 0.0
        return padding.plain_tokens(self._lengths, len(self._first.groups[0]))

    # -- a step ----------------------------------------------------------------------------------------------------

    def _measured_cost(self) -> padding.StepCost:
        """Times two sizes of micro-batches; a whole one where its samples stay together."""
        groups = self._first.groups
        size = 1 if groups is None else len(groups[0])
        with self._trials.opened({}) as copied:
            if groups is None or self._lengths is None or size < 2:
                return padding.StepCost(0.0, self._trials.measure_steps(copied, self._first.batches[:1]), 0.0)
            rows = (groups[0][: max(size // 16, 1)], groups[0][: max(size // 2, 2)])
            tokens, large_tokens = (len(some) * max(self._reader.count_in_training(some)) for some in rows)
            small, large = self._first.collated(rows)
            one_s = self._trials.measure_steps(copied, [small])
            two_s = self._trials.measure_steps(copied, [small, small], num_warm=0)
            large_s = self._trials.measure_steps(copied, [large], num_warm=0)
        return padding.StepCost.through(one_s, two_s, large_s, tokens=tokens, large_tokens=large_tokens)

    # -- the choice ------------------------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """Tries one lever after the other, as far as the budget goes."""
        first_s = self._step_s + self._read_s
        rows: list[Row] = []
        for attempt in (self._split, self._evaluation, self._others, self._workers):
            rows += attempt()
        ratio = (self._step_s + self._read_s) / first_s if first_s else 1.0
        rows += self._suggestions()
        self._memory.write(self._cost)
        how = "measured" if self._memory.known.cost is None else "proved, with times of earlier runs,"
        spent = f"{how} in {now() - self._started:.1f} s of {self._budget_s:.1f} s"
        note = f"{in_words(self._kept)}: a step in {ratio:.2f} x the time" if self._kept else "no lever is kept"
        return Choice(settings=self._kept, rows=tuple(rows), note=f"{note}, {spent}")

    def _left(self) -> float:
        return self._budget_s - (now() - self._started)

    # -- batches split by length -----------------------------------------------------------------------------------

    def _split(self) -> list[Row]:
        """Splits batches by length, so that each step trains on the same samples; no row if that does not apply."""
        groups = self._first.groups
        if groups is None or self._lengths is None or self._fixed_batches():
            return []
        size = len(groups[0])
        found = padding.best_split(
            self._lengths,
            batch_size=size,
            micro_batches=self._micro_batches,
            cost=self._cost,
            processes=self._num_processes,
        )
        if found is None or found.ratio > WORTH_KEEPING:
            return []
        values = ("batch_rebalance", size * self._micro_batches // found.num_groups, found.num_groups)
        settings: JSONObject = dict(zip(SPLIT, values, strict=True))
        row = Row("batches split by length", settings, "kept", ratio=round(found.ratio, 3))
        reading_s = self._item_s * len(self._trainer.train_dataset)
        if reading_s > self._budget_s:
            why = f"to read the lengths of all samples takes about {reading_s:.0f} s, a column of lengths less"
            return [replace(row, result=f"suggested: {why}")]
        window = [index for group in groups for index in group]
        some = window[: max(MIN_PROVED, size // 4)]
        whole = [some[start : start + size] for start in range(0, len(some), size)]
        parts = self._by_length(some, min(found.num_groups, len(some) // 2))
        plain = self._trials.try_without_dropout({}, self._first.collated(whole))
        difference = _difference(self._trials.try_without_dropout(settings, self._first.collated(parts)), plain)
        row = replace(row, proof=f"without dropout loss and gradients differ by {difference:.1e}")
        limit = allowed_gap(self._trainer)
        if difference > limit:
            return [replace(row, result=f"rejected: its result is another; {limit:.0e} is allowed")]
        self._kept = settings
        self._split_ratio = found.ratio
        self._step_s *= found.ratio
        self._groups = self._by_length(window, found.num_groups * len(groups) // self._micro_batches)
        return [row]

    def _fixed_batches(self) -> bool:
        """Returns whether the arguments or the user's code need the batches as they are."""
        trainer = self._trainer
        args = trainer.args
        names = ("get_train_dataloader", "_get_dataloader", "_get_train_sampler", "get_batch_samples")
        return (
            is_overridden(trainer, *names)
            or args.auto_find_batch_size
            or args.dataloader_drop_last
            or not self._reads_its_own_share()
            or args.train_batch_size != args.per_device_train_batch_size
            or args.gradient_accumulation_steps != self._micro_batches
        )

    def _reads_its_own_share(self) -> bool:
        """Returns whether each process reads its own samples, and the loss is a mean over the labels of all."""
        args = self._trainer.args
        engine = Internals(self._trainer).engine
        if args.world_size <= 1:
            return True
        is_cut = args.accelerator_config.split_batches or engine.dispatches
        return bool(engine.num_replicas == args.world_size and args.average_tokens_across_devices and not is_cut)

    def _by_length(self, samples: list[int], num_parts: int) -> list[list[int]]:
        order = BatchRebalanceSampler(
            self._reader.count_in_training(samples), len(samples), 1, max(num_parts, 1), shuffle=False
        )
        return [[samples[place] for place in part] for part in order.indices(0)]

    def _evaluation(self) -> list[Row]:
        """Sorts evaluations by length, if the split of batches has shown that padding changes nothing."""
        trainer = self._trainer
        args = trainer.args
        dataset = trainer.eval_dataset
        dataset = next(iter(dataset.values()), None) if isinstance(dataset, dict) else dataset
        names = ("get_eval_dataloader", "evaluation_loop", "prediction_loop", "_get_eval_sampler")
        is_free = get_value(args, "eval_sampling_strategy") == "sequential" and not is_overridden(trainer, *names)
        if not (self._kept and is_free and args.eval_strategy != "no" and has_length(dataset)):
            return []
        size = args.eval_batch_size
        lengths, item_s = self._reader.read(dataset, range(min(len(dataset), NUM_LENGTHS)))
        if isinstance(dataset, IterableDataset) or lengths is None or len(lengths) < 2 * size:
            return []
        before = padding.plain_tokens(lengths, size)
        after = padding.plain_tokens(np.sort(lengths), size)
        saved_s = (before - after) * self._cost.per_token_s / 3 / size  # a forward pass is a third of a step
        settings = {"eval_sampling_strategy": "by_length"}
        row = Row("evaluation sorted by length", settings, "kept", ratio=round(after / before, 3))
        if after > WORTH_KEEPING * before or saved_s < 2 * item_s:
            return []
        self._kept = self._kept | settings
        return [replace(row, proof="padding changes nothing, as the split of batches has shown")]

    # -- other levers ----------------------------------------------------------------------------------------------

    def _others(self) -> list[Row]:
        """Tries levers that keep the samples of each micro-batch."""
        rows: list[Row] = []
        levers = list(self._levers())
        if not levers:
            return rows
        probe, probe_s = self._probe(sum(lever.setup_s < self._left() for lever in levers))
        plain: Tensors | None = None
        for lever in levers:
            needed = (NUM_TIMED + 2) * probe_s * (2 if plain is None else 1) + lever.setup_s
            if needed > self._left():
                left = f"{max(self._left(), 0):.1f} s of the {self._budget_s:.1f} s are left"
                rows.append(Row(lever.name, lever.settings, f"not measured: it may take {needed:.1f} s, and {left}"))
                continue
            try:
                plain = self._trials.try_once({}, probe) if plain is None else plain
                row = self._try(lever, probe, plain)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                row = Row(lever.name, lever.settings, f"rejected: {reason}")
            rows.append(row)
            if row.is_kept and row.ratio is not None:
                self._kept = self._kept | row.settings
                self._step_s *= row.ratio
        return rows

    def _probe(self, num_levers: int) -> tuple[list[Batch], float]:
        """Micro-batches for which time is left, or a part of one, and the seconds of a step over them."""
        groups = self._groups
        num_groups = self._kept.get("gradient_accumulation_steps", self._micro_batches)
        each_s = self._step_s / num_groups
        fits = self._left() / max((num_levers + 1) * (NUM_TIMED + 2) * each_s, 1e-9)
        if groups is None:
            chosen = self._first.batches[: max(int(fits), 1)]
            return chosen, each_s * len(chosen)
        if fits >= 1:
            self._probe_groups = groups[: int(fits)]
            return self._first.collated(self._probe_groups), each_s * len(self._probe_groups)
        group = groups[0]
        rows = min(max(round(len(group) * fits), len(group) // 8, 2), len(group))
        self._probe_groups = [group[:rows]]
        return self._first.collated(self._probe_groups), each_s * rows / len(group)

    def _padded_as(self, settings: JSONObject, probe: list[Batch]) -> list[Batch]:
        """Returns the samples of the probe as a collator with these settings pads them."""
        if PAD_TO not in settings:
            return probe
        return self._first.collated(self._probe_groups, copy_with(self._trainer, settings).get_train_dataloader())

    def _shapes(self) -> set[Shapes]:
        """Returns the shapes of micro-batches under the settings kept so far."""
        groups = self._groups
        if groups is None or groups is self._first.groups:
            return self._first.shapes
        return find_shapes(self._first.collated(groups))

    def _levers(self) -> Iterator[Lever]:
        """Those that apply to the model, the arguments and the device, the quickest to try first."""
        args = self._trainer.args
        device = Internals(self._trainer).engine.device
        core = core_model(self._trainer.model)
        find = getattr(core, "get_output_embeddings", None)
        if get_value(args, "loss_kernel") is None and callable(find) and find() is not None:
            yield Lever("loss kernel", {"loss_kernel": choose_kernel("auto", runs_triton=get_kind(device).runs_triton)})
        current = read_attention(core)
        if current == "eager":
            yield Lever("attention", {ATTENTION: "sdpa"})
        if current in ("eager", "sdpa") and runs_flash_attention(device):
            yield Lever("attention", {ATTENTION: "flash_attention_2"})
        makes_optimizer = self._trainer.optimizer is None and self._trainer.optimizer_cls_and_kwargs is None
        if makes_optimizer and args.optim == "adamw_torch":
            yield Lever("fused optimizer", {"optim": "adamw_torch_fused"}, changes_update=True)
        can_pad = self._groups is not None and padding.pads_to_any_length(self._trainer.data_collator)
        if can_pad and get_kind(device).is_accelerator and is_half_precision(self._trainer):
            yield Lever("padding to multiples", {PAD_TO: MULTIPLE})
        if not args.torch_compile and has_compiler(device) and repeated_blocks(self._trainer.model):
            settings = {"torch_compile": "regional", "torch_compile_backend": "inductor"}
            yield Lever("regional compile", settings, setup_s=COMPILE_S)
            if get_kind(device).captures_graphs:
                replayed = settings | {"torch_compile_mode": "reduce-overhead"}
                yield Lever("captured blocks", replayed, setup_s=COMPILE_S)

    def _try(self, lever: Lever, probe: list[Batch], plain: Tensors) -> Row:
        """Returns the row of a lever on top of the kept ones.

        `plain` is loss and gradients of the probe without any.
        """
        row = Row(lever.name, lever.settings, "kept")
        known = self._memory.known.ratios.get(_key(lever))
        if known is not None and known > WORTH_KEEPING:
            return replace(row, ratio=known, result="rejected: it was not faster in an earlier run")
        if (kernel := lever.settings.get("loss_kernel")) is not None and (reason := self._unused(kernel)):
            return replace(row, result=f"rejected: {reason}")
        if "torch_compile_mode" in lever.settings and (num_shapes := len(self._shapes())) > 1:
            return replace(row, result=f"rejected: the first micro-batches have {num_shapes} shapes; it needs one")
        settings = self._kept | lever.settings
        updates = lever.changes_update
        plain = self._trials.try_once({}, probe, updates=True) if updates else plain
        unpadded = probe
        before_s = (
            self._trials.measure(self._kept, self._padded_as(self._kept, probe), updates=updates)
            if known is None
            else 0.0
        )
        probe = self._padded_as(settings, probe)
        limit = allowed_gap(self._trainer)
        seconds = None
        with self._trials.opened(settings) as copied:
            difference = _difference(self._trials.compute(copied, probe, updates=updates), plain)
            if difference <= limit and known is None:
                self._trials.restore()
                seconds = self._trials.measure_steps(copied, probe, updates=updates)
        proof = f"{'the update differs' if updates else 'loss and gradients differ'} by {difference:.1e}"
        if difference > limit and not updates:  # it may be that only the draws of dropout are others
            plain = self._trials.try_without_dropout({}, unpadded)
            difference = _difference(self._trials.try_without_dropout(settings, probe), plain)
            proof = f"without dropout loss and gradients differ by {difference:.1e}"
        row = replace(row, proof=proof)
        if difference > limit:
            what = "update" if updates else "result"
            return replace(row, result=f"rejected: its {what} is another; {limit:.0e} is allowed")
        if known is None:
            seconds = self._trials.measure(settings, probe, updates=updates) if seconds is None else seconds
            whole_s = self._step_s if updates else before_s  # an update comes once in a step, whatever the probe is
            known = 1 + (seconds - before_s) / whole_s if whole_s else 1.0
            self._memory.ratios[_key(lever)] = known
        row = replace(row, ratio=round(known, 3))
        return row if known <= WORTH_KEEPING else replace(row, result="rejected: it is not faster")

    def _unused(self, kernel: str) -> str | None:
        """Returns the reason why a kernel cannot compute the model's loss; None if it can."""
        internals = Internals(self._trainer)
        obstacle = internals.engine.changes_layers
        keeps = internals.uses_outputs()
        runs_triton = get_kind(internals.engine.device).runs_triton
        with without_logits(
            self._trainer.model, kernel, keeps_outputs=keeps, obstacle=obstacle, runs_triton=runs_triton
        ) as reason:
            return reason

    # -- reading ---------------------------------------------------------------------------------------------------

    def _workers(self) -> list[Row]:
        """Compares reading batches in worker processes with reading them in this process."""
        args = self._trainer.args
        cores = (os.cpu_count() or 1) // max(args.world_size, 1)
        settings = {"dataloader_num_workers": min(4, cores - 1)}
        row = Row("workers", settings, "kept")
        if args.dataloader_num_workers or cores < 2:
            return []
        if self._read_s < SLOW_READING * self._step_s:
            share = self._read_s / max(self._step_s, 1e-9)
            return [replace(row, result=f"not measured: reading takes {share:.1%} of the time of a step")]
        if WORKER_S + 2 * (NUM_TIMED + 2) * (self._step_s + self._read_s) > self._left():
            return [replace(row, result="not measured: the time is used up")]
        number = min(self._kept.get("gradient_accumulation_steps", self._micro_batches), NUM_BATCHES)
        here = FirstSamples(copy_with(self._trainer, self._kept).get_train_dataloader(), number)
        with unchanged_random_states():
            reads = iter(copy_with(self._trainer, self._kept | settings).get_train_dataloader())
            found = list(islice(reads, number))
        pairs = zip(iterate_tensors(found), iterate_tensors(here.batches), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            return [replace(row, result="suggested: samples draw random numbers, and would draw others")]
        without_compiler = {name: value for name, value in self._kept.items() if name != "torch_compile"}
        with self._trials.opened(without_compiler) as copied:
            seconds = self._trials.measure_steps(copied, here.batches, reads=reads)
            alone = self._trials.measure_steps(copied, here.batches)
        before = here.read_s * number + alone
        row = replace(row, ratio=round(seconds / before, 3), proof="the batches are the same")
        if seconds > WORTH_KEEPING * before:
            return [replace(row, result="rejected: it is not faster")]
        self._read_s = max(seconds - alone, 0.0)
        self._kept = self._kept | settings
        return [row]

    # -- suggestions ---------------------------------------------------------------------------------------------------

    def _suggestions(self) -> list[Row]:
        """Ways to form batches with which a step has other samples, and padding inside of the samples."""
        groups = self._first.groups
        args = self._trainer.args
        if groups is None or self._lengths is None or self._lengths.min() < 1:
            return []
        if (share := self._padded_share(groups[0])) > MUCH_PADDING:
            why = f"suggested: {share:.0%} of the tokens of the samples are padding; a collator pads each batch less"
            return [Row("samples without padding", {}, why)]
        others = padding.other_batches(
            self._lengths,
            batch_size=len(groups[0]),
            micro_batches=self._micro_batches,
            cost=self._cost,
            can_join_samples=is_causal_lm(self._trainer.model) and args.world_size == 1,
        )
        found = [replace(other, ratio=other.ratio / self._split_ratio) for other in others]
        why = "a step would have other samples, so it is left to you"
        return [
            Row(other.name, other.settings, f"suggested: {other.note}{why}", ratio=round(other.ratio, 3))
            for other in found
            if other.ratio < WORTH_SUGGESTING
        ]

    def _padded_share(self, samples: Sequence[int]) -> float:
        """Returns the share of the samples' tokens that their own masks exclude."""
        items = fetch_items(self._trainer.train_dataset, samples)
        masks = [item.get("attention_mask") for item in items if isinstance(item, Mapping)]
        found = [np.asarray(mask) for mask in masks if mask is not None]
        total = sum(mask.size for mask in found)
        return 1 - sum(float(mask.sum()) for mask in found) / total if total else 0.0


def is_half_precision(trainer: AnyTrainer) -> bool:
    """Returns whether a model computes in 16 bits."""
    dtype = next((p.dtype for p in trainer.model.parameters() if p.is_floating_point()), torch.float32)
    return dtype.itemsize == 2 or getattr(trainer.args, "mixed_precision", "no") in ("fp16", "bf16")


def _key(lever: Lever) -> str:
    """Returns the name under which the time of a lever is remembered."""
    return in_words(lever.settings)


def _difference(ours: Tensors, plain: Tensors) -> float:
    """Returns the larger difference of loss and gradients, each as a share of the largest value."""
    losses = [{"loss": found["loss"]} for found in (plain, ours)]
    others = [{name: one for name, one in found.items() if name != "loss"} for found in (plain, ours)]
    found = [gap(*losses), gap(*others)]
    return max(found) if all(one == one for one in found) else float("inf")
