"""Whatever the model, the batch size and the number of processes: the same loss, the same predictions, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .._support.two_processes import Done, run
from ..parity.sides import OURS, REFERENCE
from .evaluations import BATCH_SIZES, KINDS, NUM, digest, trainer_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).parents[1] / "distributed" / "evaluations.py"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("evaluations")
    return run(SCRIPT, str(folder), folder=folder, timeout_s=200)


@pytest.mark.parametrize("kind", KINDS)
def test_one_loss_for_every_batch_size_and_number_of_processes(kind: str, two: Done, tmp_path: Path) -> None:
    losses = [value["test_loss"] for told in two.told for value in told[kind].values()]
    losses += [
        trainer_of(kind, OURS, tmp_path, per_device_eval_batch_size=size, compute_metrics=None).evaluate()["eval_loss"]
        for size in BATCH_SIZES
    ]
    assert len(losses) == 12
    assert max(losses) - min(losses) <= 1e-6 * abs(losses[0])


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_one_process_in_order(kind: str, two: Done, tmp_path: Path) -> None:
    trainer = trainer_of(kind, OURS, tmp_path, per_device_eval_batch_size=NUM)
    alone = digest(trainer.predict(trainer.eval_dataset))
    for told in two.told:
        for found in told[kind].values():
            assert found["shapes"] == alone["shapes"]
            assert found["labels"] == alone["labels"]
            np.testing.assert_allclose(found["rows"], alone["rows"], atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_and_metrics_are_those_of_transformers(kind: str, two: Done, tmp_path: Path) -> None:
    """In one process bit for bit; in two as well, where its padding of the last batch does no harm."""
    found = []
    for side in (OURS, REFERENCE):
        trainer = trainer_of(kind, side, tmp_path, per_device_eval_batch_size=4)
        found.append(trainer.predict(trainer.eval_dataset))
    for mine, theirs in zip(*([*_parts(f.predictions), *_parts(f.label_ids)] for f in found), strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    assert found[0].metrics["test_score"] == found[1].metrics["test_score"]
    for told in two.told:
        ours = told[kind]["3"]
        theirs = told[f"{kind} of transformers"]
        assert ours["shapes"] == theirs["shapes"]
        assert ours["labels"] == theirs["labels"]
        np.testing.assert_allclose(ours["rows"], theirs["rows"], atol=2e-4)
        assert ours["score"] == pytest.approx(theirs["score"], rel=1e-5)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_both_processes_have_everything(two: Done) -> None:
    for kind in KINDS:
        assert two.told[0][kind] == two.told[1][kind]


def test_metrics_that_stream_see_every_sample_once(two: Done, tmp_path: Path) -> None:
    trainer = trainer_of("module", OURS, tmp_path, compute_metrics=None)
    found = trainer.predict(trainer.eval_dataset)
    accuracy = float((found.predictions.argmax(-1) == found.label_ids).mean())
    for told in two.told:
        assert told["counts"]["eval_num"] == NUM
        assert told["counts"]["eval_mean"] == pytest.approx(accuracy)
        assert told["torchmetrics"]["eval_MulticlassAccuracy"] == pytest.approx(accuracy)
        num, sizes = told["by_batch"]
        assert num == NUM
        assert sizes == [[6, 6, 6]] * 3 + [[5, 5, 5]]


def test_the_originals_helpers_give_the_same(two: Done) -> None:
    for told in two.told:
        assert told["concat of ours"] == told["concat of theirs"]
        assert told["concat of ours"][0][0] == [[0] * 3] * 2 + [[1] * 3]


def test_objects_of_all_processes_are_joined(two: Done, tmp_path: Path) -> None:
    trainer = trainer_of("module", OURS, tmp_path, compute_metrics=None)
    rows = trainer.predict(trainer.eval_dataset).predictions
    for told in two.told:
        boxes = [box for batch in told["objects"] for box in batch]
        assert [len(box) for box in boxes] == [1 + int(row.argmax()) for row in rows]
        for box, row in zip(boxes, rows, strict=True):
            np.testing.assert_allclose(box, row[: len(box)], rtol=1e-5, atol=1e-6)
