"""Contents of an incident bundle: the findings from a second run of a step, and the files that record them.

The forward passes of a step are run again, without an update; then parts of a batch, to find the samples.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trainwright._types import Batch, JSONObject, is_instance_of, without_tokens
from trainwright.capabilities.incidents import bundle
from trainwright.capabilities.incidents.probe import (
    Findings,
    entries_not_finite,
    find_bad_rows,
    probe,
    select_rows,
    weights_not_finite,
)
from trainwright.checkpoint import async_writer, rng
from trainwright.checkpoint.rng import States
from trainwright.config.fields import get_value
from trainwright.data.loader import Loader
from trainwright.engine.base import Engine
from trainwright.errors import BundleError
from trainwright.journal import record
from trainwright.loop.extension import Run
from trainwright.loop.retry import MicroBatchPart, split_batches
from trainwright.loop.step import Window
from trainwright.support.loss_normalization import LossOutput, LossScaling
from trainwright.support.tensor_tree import find_batch_size
from trainwright.support.units import size_text

REQUEST = "request"
ERROR = "error"
OUT_OF_MEMORY = "oom"
HANG = "hang"
# Arguments that affect the numbers of the forward and backward passes.
LOSS_SETTINGS = (
    "bf16",
    "fp16",
    "tf32",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "full_determinism",
    "seed",
    "past_index",
)


class RecordedRun(Run, Protocol):
    """A run with recorded incidents."""

    run_id: str
    is_training: bool
    loader: Loader | None
    losses: LossScaling


class ReplayHooks(Protocol):
    """Methods of the trainer that compute the loss of a micro-batch."""

    args: Any
    model: Any

    def _prepare_inputs(self, inputs: Batch) -> Batch: ...
    def compute_loss_context_manager(self) -> Any: ...
    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Facts about a step."""

    states: States | None = None  # random states before its forward passes, reliable if `is_exact`
    is_exact: bool = False  # a second run from `states` gave the same losses (or error) and ended in the same states
    found: Findings | None = None  # findings of that second run; None if there was none
    rows: list[tuple[int, int]] = field(default_factory=list)  # bad samples, as (micro-batch, row)
    samples: list[Any] = field(default_factory=list)  # the same, by number in the dataset
    names: list[str] = field(default_factory=list)  # the same, by name
    described: list[JSONObject] = field(default_factory=list)  # the same, with fingerprints, for files
    all_names: list[list[str]] = field(default_factory=list)  # names of all samples of each micro-batch
    trained: list[torch.Tensor] = field(default_factory=list)  # losses of the step if there was no second run
    weights: Mapping[str, torch.Tensor] | None = None  # gathered from all processes if each has a part of them


def window_losses(hooks: ReplayHooks, run: RecordedRun, model: Any, window: Window) -> Iterator[torch.Tensor]:
    """Runs the forward passes of a window on the bare module as the step does; yields the losses to differentiate."""
    progress = run.progress
    rule = run.losses.rule
    assert rule is not None
    before = progress.window.part_of_micro_batch, progress.window.share
    try:
        for part in split_batches(window.batches, progress.window.num_parts):
            progress.window.part_of_micro_batch = part.of_micro_batch
            progress.window.share = part.of_window
            yield _loss(hooks, run, model, window, part)
    finally:
        progress.window.part_of_micro_batch, progress.window.share = before


def _loss(hooks: ReplayHooks, run: RecordedRun, model: Any, window: Window, part: MicroBatchPart) -> torch.Tensor:
    assert run.losses.rule is not None
    with run.progress.recording_apart(run.progress.meter.total.device), hooks.compute_loss_context_manager():
        inputs = hooks._prepare_inputs(part.inputs)
        loss = hooks.compute_loss(model, inputs, num_items_in_batch=window.num_items)
    if isinstance(loss, LossOutput):
        if loss.num_items is not None and window.divisor is not None:
            mean, items = loss.with_items(part.inputs)
            return (mean * items / window.divisor).to(mean.dtype)
        if loss.num_items is not None:
            return loss.loss
        loss = loss.loss
    num = len(window.batches)
    return run.losses.rule.apply(loss, part.inputs, window.num_items, micro_batches=num, share=part.of_micro_batch)


def bad_rows(
    hooks: ReplayHooks, run: RecordedRun, model: Any, window: Window, *, error: str = ""
) -> list[tuple[int, int]] | None:
    """Searches for the samples of a window that are bad by themselves, by halving its micro-batches.

    Such a sample raises `error` (type and message) or, if that is empty, its loss or gradient is not finite. Returns
    micro-batch and row of each, none if none is bad without the others; None if most are bad, or weights are not
    finite.
    """
    if weights_not_finite(model):
        return None
    rows: list[tuple[int, int]] = []
    for number, batch in enumerate(window.batches):
        size = find_batch_size(batch) or 1

        def is_bad(some: Sequence[int], batch: Batch = batch, size: int = size) -> bool:
            part = MicroBatchPart(select_rows(batch, some, size), of_micro_batch=len(some) / size)
            found = probe(model, lambda: iter([_loss(hooks, run, model, window, part)]))
            kind = error.partition(":")[0]
            return found.error.partition(":")[0] == kind if error else not found.error and not found.is_finite

        if not is_bad(range(size)):
            continue
        some = find_bad_rows(size, is_bad)
        if some is None or (len(some) == size and size > 2):
            return None
        rows += [(number, row) for row in some]
    return rows


# -- files -------------------------------------------------------------------------------------------------------------


def cause_in(details: JSONObject, seen: Evidence) -> list[str] | None:
    """Returns the cause, by which repetitions are recognized; None if the incident has no such cause."""
    if details["kind"] in (REQUEST, HANG):
        return None
    origin = seen.found.origin if seen.found is not None else ""
    return [details["kind"], origin or details["what"], *map(str, seen.names or seen.rows)]


def find_cause(folder: Path, run_id: str) -> list[str] | None:
    """Returns the cause of a bundle of a run; None for another run's, and if it was requested or cannot be read."""
    try:
        about = bundle.read_object(folder, bundle.INCIDENT)
    except BundleError:
        return None
    cause: list[str] | None = about.get("cause") if about.get("run_id") == run_id else None
    return cause


def words_for(seen: Evidence) -> str:
    """Describes the samples that caused a bad value, as far as they were found."""
    if not seen.rows:
        return ""
    places = [place_text(number, row) for number, row in seen.rows]
    if not seen.names:
        text = ", ".join(places)
        return f"{text[:1].upper()}{text[1:]} made it."
    made = ", ".join(f"{name} ({place})" for name, place in zip(seen.names, places, strict=True))
    named = ", ".join(repr(part) for name in seen.names for part in name.split(" + "))
    return f"{made} made it; trainer.quarantine([{named}]) excludes {'it' if len(seen.names) == 1 else 'them'}."


def place_text(micro_batch: int, item: int) -> str:
    """Describes the position of a sample in a step, with both numbers from 0."""
    return f"micro-batch {micro_batch}, item {item}"


def fill(folder: Path, window: Window, seen: Evidence, *, engine: Engine, model: Any, is_hang: bool) -> dict[str, str]:
    """Writes each part of a bundle that can be written; returns the reasons for missing parts."""
    missing: dict[str, str] = {}

    def part(name: str, write: Any) -> None:  # a function without arguments
        try:
            reason = write()
            if reason:
                missing[name] = reason
        except Exception as error:  # a failed device, or an object that cannot be written
            missing[name] = f"{type(error).__name__}: {without_tokens(str(error))}"

    def batches() -> str:
        lost = bundle.write_batches(window.batches, folder)
        return f"kept as text only: {', '.join(lost)}" if lost else ""

    def weights() -> str:
        from trainwright.checkpoint.weights import save_weights

        free = async_writer.free_bytes(folder.parent)
        if engine.holds_parts and not seen.weights:
            return (
                "each process has a part of them, and only all processes together could gather them; a replay takes "
                "the weights of the newest checkpoint before the step, or with --model the weights from the function"
            )
        if free is not None and free < 2 * async_writer.weights_bytes(model):
            return f"only {size_text(free)} are free"
        save_weights(model, folder, state_dict=None if seen.weights is None else dict(seen.weights))
        return ""

    part("batch", batches)
    part("random states", lambda: bundle.write_random_states(rng.plain(seen.states or rng.capture()), folder))

    def stacks() -> None:
        with (folder / bundle.STACKS).open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)

    if is_hang:
        part("stacks", stacks)
    if is_hang and engine.device.type != "cpu":
        missing["weights"] = "the device may not answer"
    else:
        part("weights", weights)
    return missing


def about(window: Window, seen: Evidence, *, run: RecordedRun, args: Any, engine: Engine, model: Any) -> JSONObject:
    """Returns the contents of `incident.json` about a step, except for its cause."""
    found = seen.found
    losses = seen.trained if found is None else found.losses
    num_items = window.num_items
    return {
        "format": 1,
        "time": time.time(),
        "run_id": run.run_id,
        "epoch": run.progress.epoch,
        "num_processes": engine.num_processes,
        "samples": seen.all_names,
        "bad_samples": seen.described,
        "bad_rows": seen.rows,
        "weights_not_finite": weights_not_finite(model),
        "entries_not_finite": [entries_not_finite(batch) for batch in window.batches],
        "origin": found.origin if found is not None else "",
        "module": found.module if found is not None else "",
        "largest_gradients": found.largest if found is not None else {},
        "error": found.error if found is not None else "",
        "losses": [float(loss) for loss in losses],
        "loss_bits": [bundle.bits(loss) for loss in losses],
        "is_exact": seen.is_exact,
        "num_items": float(num_items) if num_items is not None else None,
        "num_items_is_tensor": isinstance(num_items, torch.Tensor),
        "divisor": None if window.divisor is None else float(window.divisor),
        "num_parts": run.progress.window.num_parts,
        "loss_rule": asdict(run.losses.rule) if run.losses.rule is not None else {},
        "model_class": type(model).__name__,
        "is_pretrained": is_instance_of(model, "transformers.modeling_utils", "PreTrainedModel"),
        "attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "modules_in_eval_mode": [name for name, module in model.named_modules() if not module.training],
        "device": engine.device.type,
        "environment": record.environment(engine.device),
        "arguments": record.changed_arguments(args),
        "loss_settings": {name: get_value(args, name) for name in LOSS_SETTINGS},
    }
