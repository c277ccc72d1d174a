"""Whatever the form of outputs, labels and loss: each row of the data has its prediction and its label, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .._support.two_processes import run
from ..parity.sides import REFERENCE
from .result_forms import INSIDE, LABELS, MEAN, NUM, OF_PROCESSES, OUTPUTS, PLACES, ROWS, Stream, trainer_of

OUTSIDE = [place for place in PLACES if not place.startswith(("inside", "nowhere"))]
WITH_LOSS = ("texts beside logits", "dataclass", "namespace")
CASES: list[tuple[str, str, str | None]] = [
    *[(place, form, "tensor") for place in PLACES if place.startswith("inside") for form in INSIDE],
    *[(place, form, "tensor") for place in OUTSIDE for form in OUTPUTS],
    *[("override, forward without labels", form, labels) for form in ("tensor", "boxes") for labels in LABELS],
    *[("inside", "dict with a loss", labels) for labels in LABELS],
    *[("nowhere", form, None) for form in OUTPUTS if "loss" not in form and form not in WITH_LOSS],
]
SOME = [
    ("override", "tensor", "tensor"),
    ("override", "tuple with a loss", "tensor"),
    ("function", "tuple", "tensor"),
    ("inside", "dict with a loss", "boxes"),
    ("inside", "texts beside logits", "texts"),
    ("override, forward without labels", "boxes", "ragged in a tuple"),
    ("override, forward without labels", "square", "boxes"),
    ("function, forward without labels", "layers in a list", "two tasks"),
]


def check(found: Any, form: str, labels: str | None, *, batches: bool = False) -> None:
    """Each row has its prediction and label; `batches`: results are a list with an entry for each batch."""
    for value, (_, read) in ((found.predictions, OUTPUTS[form]), (found.label_ids, LABELS.get(labels or "", (0, 0)))):
        if read == 0:
            assert value is None
        elif not batches:
            assert read(value) == ROWS
        else:
            assert [len(read(one)) for one in value] == [4, 4, 2]
            assert [row for one in value for row in read(one)] == ROWS


class Seen:
    """A metric that keeps what it is given."""

    def __init__(self) -> None:
        self.predictions: list[Any] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        self.predictions.append(prediction)
        return {"calls": float(len(self.predictions))}


@pytest.mark.parametrize(("place", "form", "labels"), CASES)
def test_every_row_has_its_prediction_and_label(place: str, form: str, labels: str | None, tmp_path: Path) -> None:
    seen = Seen()
    trainer = trainer_of(place, form, labels, tmp_path, compute_metrics=seen)
    found = trainer.predict(trainer.eval_dataset)
    check(found, form, labels)
    assert found.metrics.get("test_loss") == (None if place == "nowhere" else pytest.approx(MEAN))
    metrics = trainer.evaluate()
    assert metrics.get("eval_loss") == found.metrics.get("test_loss")
    assert len(seen.predictions) == (0 if labels is None else 2)
    for prediction in seen.predictions:
        check(prediction, form, labels)


SETTINGS: list[dict[str, Any]] = [
    {"eval_accumulation_steps": 1},
    {"include_for_metrics": ["loss", "inputs"]},
    {"preprocess_logits_for_metrics": lambda logits, labels: logits},
    {"per_device_eval_batch_size": 3},
    {"per_device_eval_batch_size": NUM},
    {"eval_dataset": Stream()},
    {"reproduce": "transformers"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
@pytest.mark.parametrize(("place", "form", "labels"), SOME)
def test_whatever_the_settings(place: str, form: str, labels: str, settings: dict[str, Any], tmp_path: Path) -> None:
    seen = Seen()
    trainer = trainer_of(place, form, labels, tmp_path, compute_metrics=seen, **settings)
    if form == "layers in a list" and settings.get("per_device_eval_batch_size") is not None:
        pytest.skip("four layers for batches of four")
    found = trainer.predict(trainer.eval_dataset)
    check(found, form, labels)
    check(seen.predictions[0], form, labels)
    if "include_for_metrics" in settings:
        assert len(seen.predictions[0].losses) == len(seen.predictions[0].inputs) == NUM
    if "reproduce" not in settings:
        assert found.metrics["test_loss"] == pytest.approx(MEAN)


@pytest.mark.parametrize(("place", "form", "labels"), SOME)
def test_a_list_of_batches_has_every_row(place: str, form: str, labels: str, tmp_path: Path) -> None:
    trainer = trainer_of(place, form, labels, tmp_path, eval_do_concat_batches=False)
    check(trainer.predict(trainer.eval_dataset), form, labels, batches=True)


@pytest.mark.parametrize(("place", "form", "labels"), [case for case in SOME if "square" not in case[1]])
def test_metrics_by_batch_see_every_row(place: str, form: str, labels: str, tmp_path: Path) -> None:
    seen = Seen()
    trainer_of(place, form, labels, tmp_path, compute_metrics=seen, batch_eval_metrics=True).evaluate()
    found = [(OUTPUTS[form][1](one.predictions), LABELS[labels][1](one.label_ids)) for one in seen.predictions]
    assert [len(predictions) for predictions, _ in found] == [4, 4, 2]
    assert [row for predictions, _ in found for row in predictions] == ROWS
    assert [row for _, references in found for row in references] == ROWS


class Collects:
    """A metric with a state of its own."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.references: list[Any] = []

    def update(self, predictions: Any, references: Any) -> None:
        self.texts += predictions
        self.references += references

    def compute(self) -> dict[str, float]:
        return {"num": float(len(self.texts))}


def test_metrics_with_update_and_compute_see_every_row(tmp_path: Path) -> None:
    metric = Collects()
    trainer = trainer_of("override", "texts", "texts", tmp_path, compute_metrics=metric)
    assert trainer.evaluate()["eval_num"] == NUM
    assert metric.texts == metric.references == [f"row {i}" for i in ROWS]


@pytest.mark.parametrize(("place", "form", "labels"), SOME[:5])
def test_evaluations_of_a_training_see_every_row(place: str, form: str, labels: str, tmp_path: Path) -> None:
    seen = Seen()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 0.0}
    trainer = trainer_of(place, form, labels, tmp_path, compute_metrics=seen, **settings)
    trainer.train_dataset = trainer.eval_dataset
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses == [pytest.approx(MEAN)] * 2
    for prediction in seen.predictions[-2:]:
        check(prediction, form, labels)


# Where transformers gives every row.
RIGHT_THERE = [
    ("inside", "tuple with a loss"),
    ("inside", "list with a loss"),
    ("inside", "dict with a loss"),
    ("inside", "dict with its loss last"),
    ("inside", "output with a loss"),
    ("inside", "named tuple with a loss"),
    ("override", "tuple with a loss"),
    ("override", "tuple with another loss"),
    ("override", "tuple with losses of rows"),
    ("override", "dict"),
    ("override", "dict in a dict"),
    ("override", "output"),
    ("function", "dict"),
    ("function", "output"),
    ("nowhere", "tensor"),
    ("nowhere", "tuple"),
    ("nowhere", "tuple of one"),
    ("nowhere", "dict"),
    ("nowhere", "list"),
    ("nowhere", "list of one"),
    ("nowhere", "layers"),
    ("nowhere", "layers in a list"),
]


@pytest.mark.framework
@pytest.mark.parametrize(("place", "form"), RIGHT_THERE)
def test_as_transformers_where_it_is_right(place: str, form: str, tmp_path: Path) -> None:
    labels = None if place == "nowhere" else "tensor"
    theirs = trainer_of(place, form, labels, tmp_path, REFERENCE)
    ours = trainer_of(place, form, labels, tmp_path)
    found = [trainer.predict(trainer.eval_dataset) for trainer in (ours, theirs)]
    for one in found:
        check(one, form, labels)
    assert_equal(found[0].predictions, found[1].predictions)
    assert_equal(found[0].label_ids, found[1].label_ids)


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert [*ours] == [*theirs]
        ours = [*ours.values()]
        theirs = [*theirs.values()]
    if isinstance(ours, (list, tuple)):
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other)
    elif ours is not None:
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


@pytest.mark.process
@pytest.mark.timeout(240)
def test_two_processes_have_every_row(tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("result_forms_of_two.py"), str(tmp_path), folder=tmp_path, timeout_s=200)
    for told in done.told:
        assert len(told) == 9 * len(OF_PROCESSES)
        for name, found in told.items():
            assert (name, found["predictions"]) == (name, ROWS)
            assert (name, found["labels"]) == (name, ROWS)
            assert found["loss"] == pytest.approx(MEAN)
