"""What `compute_metrics` receives: unpacked and indexed as in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from trainwright.evaluation.outputs import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput

EXTRAS: list[dict[str, Any]] = [{}, {"inputs": "i"}, {"losses": "l"}, {"inputs": "i", "losses": "l"}]


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_a_prediction_unpacks_as_in_transformers(extras: dict[str, Any]) -> None:
    ours = EvalPrediction("p", "y", **extras)
    theirs = transformers.EvalPrediction("p", "y", **extras)
    assert [*ours] == [*theirs]
    assert [ours[i] for i in range(len([*ours]))] == [*theirs]
    assert vars(ours) == vars(theirs)
    for index in (-1, len([*ours])):
        with pytest.raises(IndexError):
            ours[index]


@pytest.mark.parametrize("cls", [EvalLoopOutput, PredictionOutput, TrainOutput])
def test_results_have_the_fields_of_transformers(cls: Any) -> None:
    assert cls._fields == getattr(transformers.trainer_utils, cls.__name__)._fields
