"""A stream that ends in the middle of a window: where we differ from the original, on purpose.

Of 26 samples in batches of 4, four at a time, a pass leaves a window of 3. The original does not step on it: the
gradients of those three stay, each weighed as a third, and four more, each a quarter, are added in the next pass before
the optimizer steps; the step counts twice in the logged loss. With a dataset of known length it does step on the last
window. Ours steps on it for both.
"""

from dataclasses import replace

from .data import Stream, hf_dataset
from .golden import MARKS
from .rows import DICT, Row
from .run import assert_same_as_the_original, originals, train
from .sides import OURS, differing

pytestmark = MARKS

ARGS = {
    "gradient_accumulation_steps": 4,
    "max_steps": 4,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
}


TAIL = {name: Row(DICT, f"tail-{name}", ARGS, wrap=wrap) for name, wrap in (("stream", Stream), ("sized", hf_dataset))}
EVEN = {name: replace(row, setting=f"even-{name}", size=32) for name, row in TAIL.items()}
GOLDEN = originals("stream_tail", [*TAIL.values(), *EVEN.values()])


def test_ours_trains_on_stream_as_on_the_same_data_with_a_length() -> None:
    stream = train(TAIL["stream"], OURS)
    sized = train(TAIL["sized"], OURS)
    assert stream.losses() == sized.losses()
    assert differing(stream.weights, sized.weights) == {}


def test_the_original_does_not() -> None:
    stream = GOLDEN.result("dict-tail-stream")
    sized = GOLDEN.result("dict-tail-sized")
    assert stream.losses()[0] == sized.losses()[0]
    assert stream.losses()[1] > 1.5 * sized.losses()[1]
    assert_same_as_the_original(TAIL["sized"], GOLDEN)


def test_a_stream_that_ends_with_a_window_is_the_same_on_both() -> None:
    ours = [train(row, OURS).losses() for row in EVEN.values()]
    theirs = [GOLDEN.result(row.id).losses() for row in EVEN.values()]
    assert ours[0] == ours[1]
    assert theirs[0] == theirs[1]
