"""The state that a recurrent model hands from one batch to the next (`past_index`, as for Transformer-XL's `mems`)."""

from __future__ import annotations

from typing import Any

from trainwright._types import Batch, Model


class RecurrentForward:
    """Runs a batch through a model together with the state that the batch before it left.

    The state is at `past_index` of the model's output; the next batch gets it as `mems`.
    """

    def __init__(self, past_index: int) -> None:
        self._past_index = past_index
        self._past: Any = None

    def __call__(self, model: Model, inputs: Batch) -> Any:
        """Returns the model's output, and keeps its state."""
        if self._past is not None:
            inputs = {**inputs, "mems": self._past}
        outputs = model(**inputs)
        self._past = outputs[self._past_index]
        return outputs

    def fresh(self) -> RecurrentForward:
        """The same without a state: for a new epoch, or for an evaluation."""
        return RecurrentForward(self._past_index)
