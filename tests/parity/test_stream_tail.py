"""A stream that ends in the middle of a window: where we differ from the original, on purpose.

Of 26 samples in batches of 4, four at a time, a pass leaves a window of 3. The original does not step on it: the
gradients of those three stay, each weighed as a third, and four more, each a quarter, are added in the next pass before
the optimizer steps; the step counts twice in the logged loss. With a dataset of known length it does step on the last
window. Ours steps on it for both.
"""

from pathlib import Path

import pytest

from .data import Stream, hf_dataset
from .rows import DICT, Row
from .run import trainer_of
from .sides import OURS, REFERENCE, Outcome, Side, differing

ARGS = {
    "gradient_accumulation_steps": 4,
    "max_steps": 4,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
}


def train(side: Side, output_dir: Path, wrap: object) -> Outcome:
    return side.train(trainer_of(Row(DICT, "tail", ARGS, wrap=wrap), side, output_dir))  # type: ignore[arg-type]


def test_ours_trains_on_a_stream_as_on_the_same_data_with_a_length(tmp_path: Path) -> None:
    stream, sized = train(OURS, tmp_path, Stream), train(OURS, tmp_path, hf_dataset)
    assert stream.losses() == sized.losses()
    assert differing(stream.weights, sized.weights) == {}


def test_the_original_does_not(tmp_path: Path) -> None:
    stream, sized = train(REFERENCE, tmp_path, Stream), train(REFERENCE, tmp_path, hf_dataset)
    assert stream.losses()[0] == sized.losses()[0]
    assert stream.losses()[1] > 1.5 * sized.losses()[1]
    assert differing(sized.weights, train(OURS, tmp_path, hf_dataset).weights) == {}


@pytest.mark.parametrize("side", [OURS, REFERENCE], ids=lambda side: side.name)
def test_a_stream_that_ends_with_a_window_is_the_same_on_both(side: Side, tmp_path: Path) -> None:
    row = Row(DICT, "even", ARGS, size=32, wrap=Stream)
    sized = Row(DICT, "even", ARGS, size=32, wrap=hf_dataset)
    losses = [side.train(trainer_of(one, side, tmp_path)).losses() for one in (row, sized)]
    assert losses[0] == losses[1]
