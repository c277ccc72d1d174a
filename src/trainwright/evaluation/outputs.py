"""Results of evaluations, predictions and trainings, the step that makes them of a batch, and files of metrics."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainwright._types import Batch, Model, Nested, counted, plain_numbers, printable, recordable, write_text
from trainwright.errors import DataError
from trainwright.support.counterparts import Counterpart
from trainwright.support.html_table import html_pairs, html_section
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
        return _html_of(self)


class PredictionFields(NamedTuple):
    """Fields of a PredictionOutput."""

    predictions: Nested
    label_ids: Nested
    metrics: dict[str, float] | None


class PredictionOutput(PredictionFields, Counterpart, original="transformers.trainer_utils"):
    """Result of `predict()`: arrays with one row for each sample (or tuples of them), and metrics."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _html_of(self)


class TrainFields(NamedTuple):
    """Fields of a TrainOutput."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainOutput(TrainFields, Counterpart, original="transformers.trainer_utils"):
    """Result of `train()`: optimizer steps done, mean loss, and metrics of speed."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _html_of(self)


def _html_of(output: Any) -> str:  # output: a named tuple from above
    """Returns a result as HTML: numbers as they are, arrays by shape and type, the metrics below."""
    values = {name: _in_short(value) for name, value in output._asdict().items() if name != "metrics"}
    return html_section(type(output).__name__, html_pairs({**values, **metrics_format(output.metrics or {})}))


def _in_short(value: Nested) -> object:
    if isinstance(value, (tuple, list)):
        return ", ".join(str(_in_short(one)) for one in value)
    shape = getattr(value, "shape", None)
    return value if shape is None else f"{getattr(value, 'dtype', '')} of shape {tuple(shape)}"


# -- one batch: forward, and the output split into loss, logits and labels ------------------------------------------


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


def labels_of(inputs: Batch, label_names: Sequence[str]) -> Nested:
    """Returns the labels of a batch, detached, alone if there is one name. Before the loss, which may pop them."""
    labels = current("nested_detach", nested_detach)(tuple(inputs.get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def split_outputs(outputs: Nested, ignore_keys: Sequence[str] | None, *, model: Model, has_loss: bool) -> Nested:
    """Returns the predictions in a model's output, detached, alone if there is one: no loss, no ignored entry.

    `ignore_keys` are by default the keys named in the config of `model`.
    """
    if ignore_keys is None and (config := getattr(model, "config", None)) is not None:
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
    if isinstance(outputs, Mapping):
        skipped = {*(ignore_keys or ()), *(["loss"] if has_loss else [])}
        logits: Nested = tuple(value for key, value in outputs.items() if key not in skipped and value is not None)
    else:
        logits = outputs[1:] if has_loss else outputs
        if isinstance(logits, (tuple, list)):  # without labels a model may return None in place of the loss
            logits = tuple(value for value in logits if value is not None)
    logits = current("nested_detach", nested_detach)(logits)
    return logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits


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
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write_json(path, {**before, **metrics})


def record_of(values: Mapping[str, object], named: set[str]) -> dict[str, Any]:  # JSON
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
    write_text(path, json.dumps(record_of(values, set()), indent=4, sort_keys=True))


def _readable(name: str, value: Any) -> object:  # any value that a user logs
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        seconds = datetime.timedelta(seconds=int(value))
        return f"{seconds}.{int((abs(value) % 1) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
