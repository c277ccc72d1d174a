"""Results of evaluations, predictions and trainings, the step that makes them of a batch, and files of metrics."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from trainwright._types import (
    Batch,
    Model,
    Nested,
    counted,
    is_instance_of,
    json_value,
    plain_numbers,
    printable,
    recordable,
    write_text,
)
from trainwright.errors import DataError, ModelError
from trainwright.support.counterparts import Counterpart
from trainwright.support.door import MAX_SETTINGS, read_json
from trainwright.support.html_table import html_pairs, html_section
from trainwright.support.loss_normalization import LossOutput
from trainwright.support.replaced import current
from trainwright.support.tensor_tree import nested_detach

logger = logging.getLogger(__name__)


class EvalPrediction(Counterpart, original="transformers.trainer_utils"):
    """Argument of `compute_metrics`. Unpacks as `predictions, labels` (and inputs, losses where asked for).

    Attributes:
        predictions: array, or tuple of arrays, with one row for each sample.
        label_ids: labels, shaped as the dataset has them.
        inputs: the model's main input, with `include_for_metrics=["inputs"]`.
        losses: one loss for each sample (that of its batch), with `include_for_metrics=["loss"]`.
    """

    def __init__(self, predictions: Nested, label_ids: Nested, inputs: Nested = None, losses: Nested = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        extras = (extra for extra in (inputs, losses) if extra is not None)
        self.elements: tuple[Nested, ...] = (predictions, label_ids, *extras)

    def __iter__(self) -> Iterator[Nested]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Nested:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"index {index} of an EvalPrediction with {counted(len(self.elements), 'element')}")
        return self.elements[index]


class EvalLoopFields(NamedTuple):
    """Fields of an EvalLoopOutput."""

    predictions: Nested
    label_ids: Nested
    metrics: dict[str, float] | None
    num_samples: int | None


class EvalLoopOutput(EvalLoopFields, Counterpart, original="transformers.trainer_utils"):
    """Result of an evaluation loop: arrays with one row for each sample (or tuples of them), metrics, samples."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _render_html(self)


class PredictionFields(NamedTuple):
    """Fields of a PredictionOutput."""

    predictions: Nested
    label_ids: Nested
    metrics: dict[str, float] | None


class PredictionOutput(PredictionFields, Counterpart, original="transformers.trainer_utils"):
    """Result of `predict()`: arrays with one row for each sample (or tuples of them), and metrics."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _render_html(self)


class TrainFields(NamedTuple):
    """Fields of a TrainOutput."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainOutput(TrainFields, Counterpart, original="transformers.trainer_utils"):
    """Result of `train()`: optimizer steps done, mean loss, and metrics of speed."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _render_html(self)


def _render_html(output: Any) -> str:  # output: a named tuple from above
    """Returns a result as HTML: numbers as they are, arrays by shape and type, the metrics below."""
    values = {name: _in_short(value) for name, value in output._asdict().items() if name != "metrics"}
    return html_section(type(output).__name__, html_pairs({**values, **metrics_format(output.metrics or {})}))


def _in_short(value: Nested) -> object:
    if isinstance(value, (tuple, list)):
        return ", ".join(str(_in_short(one)) for one in value)
    shape = getattr(value, "shape", None)
    return value if shape is None else f"{getattr(value, 'dtype', '')} of shape {tuple(shape)}"


# -- one batch: forward, and the output split into loss, logits and labels ------------------------------------------


# Entries of a batch that are labels where neither `label_names` nor `forward` names one, in this order.
COMMON_LABELS = ("labels", "label", "label_ids")
TARGET = re.compile(
    r"(?!.*mask)(?:ys?|y_.*|class(?:es)?|class_ids?|(?:.*_)?(?:labels?|targets?|tgt|truth|gt|answers?)(?:_.*)?)",
    re.IGNORECASE,
)


def find_common_labels(inputs: Batch) -> list[str]:
    """Returns the name of the entry of a batch that holds labels by its name; [] if there is none."""
    if not hasattr(inputs, "get"):
        return []
    return next(([name] for name in COMMON_LABELS if inputs.get(name) is not None), [])


def find_target_names(inputs: Batch, label_names: Sequence[str]) -> list[str]:
    """Returns the entries of a batch that look like targets and are not among the label names."""
    if not isinstance(inputs, Mapping):
        return []
    return [name for name in inputs if isinstance(name, str) and name not in label_names and TARGET.fullmatch(name)]


def quote_names(names: Sequence[str]) -> str:
    """Returns names as a list in Python, as in `["y"]`; "" without names."""
    return f"[{', '.join(json.dumps(name) for name in names)}]" if names else ""


def is_for_loss(inputs: Batch, label_names: Sequence[str], *, returns_loss: bool) -> bool:
    """Returns whether a batch has all labels; where none are needed, whether it or the model asks for a loss.

    Raises:
        DataError: the batch has no entries by name, so that labels cannot be found in it.
    """
    if not hasattr(inputs, "get"):
        raise DataError(
            f"An evaluation batch is a {type(inputs).__name__}, and labels are found by name, in a dict. Override "
            "prediction_step to read batches of this type, or let the data_collator return a dict."
        )
    for name in label_names:
        if inputs.get(name) is None:
            return False
    asked = inputs.get("return_loss")
    return bool(label_names) or (returns_loss if asked is None else bool(asked))


def take_labels(inputs: Batch, label_names: Sequence[str]) -> Nested:
    """Returns the labels of a batch, detached, alone if there is one name. Before the loss, which may pop them."""
    labels = current("nested_detach", nested_detach)(tuple(inputs.get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def split_loss(returned: Any, *, needs_outputs: bool) -> tuple[torch.Tensor | LossOutput, Nested]:
    """Returns the loss and the outputs that `compute_loss` returned; a loss alone comes without outputs.

    Args:
        returned: by `compute_loss` with `return_outputs=True`, possibly of a subclass.
        needs_outputs: whether a metric cannot do without them.

    Raises:
        ModelError: it is neither a loss nor a pair, or it lacks outputs that are needed.
    """
    loss = returned
    outputs: Nested = None
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss, outputs = returned
    if isinstance(loss, LossOutput) and outputs is None and loss.outputs is not None:
        outputs = loss.predictions()
    if not isinstance(loss, (torch.Tensor, LossOutput)):
        what = f"a {type(returned).__name__}"
        if isinstance(returned, (tuple, list)):
            what += f" of {', '.join(type(part).__name__ for part in returned) or 'nothing'}"
        raise ModelError(
            f"compute_loss was called with return_outputs=True and returned {what}. Return the pair (loss, outputs) "
            "then, or the loss alone, a tensor, if there are no outputs for metrics and predictions."
        )
    if outputs is None and needs_outputs:
        raise ModelError(
            "compute_loss was called with return_outputs=True and returned the loss without outputs, so "
            "compute_metrics would have no predictions. Return (loss, outputs) if return_outputs is True; or set "
            "prediction_loss_only=True, or leave compute_metrics out, to evaluate the loss alone."
        )
    return loss, outputs


def find_loss(outputs: Any) -> torch.Tensor | LossOutput | None:
    """Returns the loss in the output of a model that may have computed none; None if there is none."""
    if isinstance(outputs, LossOutput):
        return outputs
    named = _by_name(outputs)
    if named is not None:
        loss = named.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else None
    is_loss = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    return loss if is_loss else None


def split_outputs(
    outputs: Any,
    ignore_keys: Sequence[str] | None,
    *,
    model: Model,
    loss: torch.Tensor | LossOutput | None,
    num_rows: int | None = None,
) -> Nested:
    """Returns the predictions in a model's output, detached, alone if there is one: no loss, no ignored entry.

    Args:
        outputs: a mapping or another object with names, a tuple, a list, or one tensor, which is the prediction.
        ignore_keys: names that are no predictions; default: those named in the config of `model`. A cache of keys and
            values is none under any name.
        model: the model.
        loss: of this batch, which is among the outputs or was computed from them; None: it has none.
        num_rows: samples of the batch, if known: a list of one entry for its only sample stays a list.
    """
    if outputs is None:
        return None
    if ignore_keys is None and (config := getattr(model, "config", None)) is not None:
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
    named = _by_name(outputs, is_split=loss is not None)
    logits: Nested = outputs
    if named is not None:
        skipped = {*(ignore_keys or ()), *(["loss"] if loss is not None else [])}
        if "cache" in skipped:  # as transformers calls it from 5.24 on
            skipped.add("past_key_values")
        kept = tuple(value for key, value in named.items() if key not in skipped)
        logits = tuple(value for value in kept if not is_instance_of(value, "transformers.cache_utils", "Cache"))
        logits = _without_nones(logits)
    elif isinstance(outputs, (tuple, list)) and loss is not None and _begins_with_loss(outputs, loss):
        logits = _without_nones(outputs[1:])
    elif isinstance(outputs, tuple):
        # Without labels, a model may return None in place of the loss.
        logits = _without_nones(outputs)
    logits = current("nested_detach", nested_detach)(logits)
    if isinstance(logits, list):
        is_alone = len(logits) == 1 and isinstance(logits[0], torch.Tensor) and num_rows != 1
    else:
        is_alone = isinstance(logits, tuple) and len(logits) == 1
    return logits[0] if is_alone else logits


def _without_nones(values: Sequence[Any]) -> Nested:
    """Returns the values that are there, as a tuple; None if there are only Nones: then nothing was predicted."""
    there = tuple(value for value in values if value is not None)
    return None if values and not there else there


def _by_name(outputs: Any, *, is_split: bool = True) -> Mapping[str, Any] | None:
    """Returns the output of a model by name, if it has names; `is_split`: a named tuple with a loss has them."""
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, LossOutput):
        return outputs.predictions()
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {one.name: getattr(outputs, one.name) for one in dataclasses.fields(outputs)}
    if isinstance(outputs, SimpleNamespace):
        return vars(outputs)
    if is_split and isinstance(outputs, tuple) and "loss" in getattr(outputs, "_fields", ()):
        return dict(zip(outputs._fields, outputs, strict=True))  # type: ignore[attr-defined]
    return None


def _begins_with_loss(outputs: Sequence[Any], loss: torch.Tensor | LossOutput) -> bool:
    """Returns whether the first of several outputs is the loss, or a loss of the model from which it was computed.

    A scalar is no prediction for samples. A row of losses is recognised by its mean.
    """
    value = loss.loss if isinstance(loss, LossOutput) else loss
    first = outputs[0] if len(outputs) else None
    if not isinstance(first, torch.Tensor):
        return first is loss and first is not None
    if first is value:
        return True
    if first.ndim == 0:
        is_list_of_scalars = isinstance(outputs, list) and all(getattr(one, "ndim", None) == 0 for one in outputs)
        return not is_list_of_scalars
    is_row = first.ndim == 1 and first.is_floating_point() and value.ndim == 0
    return is_row and first.dtype == value.dtype and bool(torch.equal(first.detach().mean(), value.detach()))


# -- metrics for the console, and as files at the root of the output directory ---------------------------------------


def metrics_format(metrics: Mapping[str, object]) -> dict[str, object]:
    """Formats metrics for the console: memory in MB, times as h:mm:ss, FLOPs in GF, other floats to four decimals.

    Args:
        metrics: values by name.

    Returns:
        A new dict with the formatted values.
    """
    return {name: _readable(name, value) for name, value in metrics.items()}


def print_metrics(split: str, metrics: Mapping[str, object]) -> None:
    """Prints the metrics of a split ("train", "eval", ...), one a line."""
    shown = {printable(str(name)): printable(str(value)) for name, value in metrics_format(metrics).items()}
    names = max((len(name) for name in shown), default=0)
    values = max((len(value) for value in shown.values()), default=0)
    print(f"***** {printable(split)} metrics *****")
    for name in sorted(shown):
        print(f"  {name: <{names}} = {shown[name]:>{values}}")


def save_metrics(output_dir: str | Path, split: str, metrics: Mapping[str, object], *, combined: bool = True) -> None:
    """Writes `<split>_results.json` into a directory, made if missing; `combined` adds them to all_results.json too."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / f"{split}_results.json", dict(metrics))
    if combined:
        path = folder / "all_results.json"
        before = read_json(path, max_bytes=MAX_SETTINGS) if path.exists() else {}
        _write_json(path, {**before, **metrics})


def make_record(values: Mapping[str, object], named: set[str]) -> dict[str, Any]:  # JSON
    """Returns the values that the record of a run can hold; warns about others that are not yet in `named`."""
    dropped: dict[str, str] = {}
    kept = recordable(values, dropped)
    for name in (name for name in dropped if name not in named):
        logger.warning(
            "The metric %s is %s, which the record of a run cannot hold: it is not in log_history and "
            "trainer_state.json. Return numbers (or text, or lists of them) from compute_metrics, and log them.",
            printable(name),
            dropped[name],
        )
    named.update(dropped)
    return kept


denumpify_detensorize = plain_numbers  # the original's name


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    # Strict JSON: a metric that is not finite is text.
    kept = json_value(make_record(values, set()))
    write_text(path, json.dumps(kept, indent=4, sort_keys=True, allow_nan=False))


def _readable(name: str, value: Any) -> object:  # any value that a user logs
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        seconds = datetime.timedelta(seconds=int(value))
        return f"{seconds}.{int((abs(value) % 1) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
