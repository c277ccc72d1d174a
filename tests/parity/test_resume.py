"""A run that stopped at a save and went on in a new trainer ends where an uninterrupted one does, on either side, and
across: each side resumes from the other's checkpoint.

Where the original itself does not return to its own uninterrupted run, the row says why, and only ours is held to it.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from .data import hf_dataset
from .rows import BERT, DICT, LLAMA, MLM, PADDED, T5, Row
from .run import trainer_of
from .sides import OURS, REFERENCE, Outcome, Side, assert_same, differing

DRAWS_AHEAD = "a collator that draws at random has drawn for one batch more than was trained on when the state is saved"
GLOBAL_ORDER = "the order of a later epoch is drawn from the global generator, which resuming seeds afresh"


@dataclass(frozen=True, eq=False)
class Stop:
    row: Row
    at: int
    original_strays: str = ""
    between_logs: bool = False  # the loss of the steps since the last log is not in a checkpoint of the original

    @property
    def id(self) -> str:
        return f"{self.row.id}-at-{self.at}"


# Batches of 4 from 26 samples: 7 micro-batches in an epoch.
STOPS = [
    Stop(Row(BERT, "plain"), at=3),
    Stop(Row(BERT, "second-epoch"), at=10),
    Stop(Row(BERT, "end-of-epoch"), at=7),
    Stop(Row(BERT, "dropout", dropout=0.2), at=4),
    Stop(Row(BERT, "dropout-end-of-epoch", dropout=0.2), at=7),
    Stop(Row(DICT, "dropout-second-epoch", dropout=0.2), at=9),
    Stop(Row(DICT, "dropout-last-step-but-one", dropout=0.2), at=13),
    Stop(Row(DICT, "max-steps-third-epoch", {"max_steps": 20}, dropout=0.2), at=16),
    Stop(Row(LLAMA, "accumulated", {"gradient_accumulation_steps": 3}), at=2),
    Stop(Row(LLAMA, "accumulated-end-of-epoch", {"gradient_accumulation_steps": 3}, dropout=0.2), at=3),
    Stop(Row(LLAMA, "accumulated-second-epoch", {"gradient_accumulation_steps": 3}, dropout=0.2), at=5),
    Stop(Row(DICT, "accumulated-4", {"gradient_accumulation_steps": 4, "num_train_epochs": 4}, dropout=0.2), at=3),
    Stop(Row(LLAMA, "cosine-warmup", {"lr_scheduler_type": "cosine", "warmup_steps": 5}), at=3),
    Stop(Row(BERT, "data-seed", {"data_seed": 77}), at=10),
    Stop(Row(T5, "adafactor", {"optim": "adafactor"}), at=5),
    Stop(Row(DICT, "sgd-constant", {"optim": "sgd", "lr_scheduler_type": "constant"}), at=5),
    Stop(Row(LLAMA, "weight-decay-smoothing", {"weight_decay": 0.2, "label_smoothing_factor": 0.1}), at=8),
    Stop(Row(BERT, "log-every-4", {"logging_steps": 4}), at=6, between_logs=True),
    Stop(Row(PADDED, "hf-dataset", wrap=hf_dataset), at=10),
    Stop(Row(PADDED, "group-by-length", {"train_sampling_strategy": "group_by_length"}), at=3),
    Stop(
        Row(PADDED, "group-by-length-second-epoch", {"train_sampling_strategy": "group_by_length"}),
        at=10,
        original_strays=GLOBAL_ORDER,
    ),
    Stop(Row(MLM, "masking"), at=3, original_strays=DRAWS_AHEAD),
    Stop(Row(MLM, "masking-dropout-second-epoch", dropout=0.2), at=9, original_strays=DRAWS_AHEAD),
    Stop(
        Row(MLM, "masking-accumulated", {"gradient_accumulation_steps": 3}, dropout=0.2),
        at=2,
        original_strays=DRAWS_AHEAD,
    ),
]
FAITHFUL = [stop for stop in STOPS if not stop.original_strays]
STRAYING = [stop for stop in STOPS if stop.original_strays]


@pytest.fixture(scope="module")
def runs() -> Iterator["Runs"]:
    with tempfile.TemporaryDirectory() as root:
        yield Runs(Path(root))


class Runs:
    """Uninterrupted runs, each made once, with the checkpoint they left behind."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.uninterrupted = cache(self._uninterrupted)

    def _uninterrupted(self, stop: Stop, side: Side) -> tuple[Outcome, Path]:
        where = self._root / f"{stop.id}-{side.name}"
        outcome = side.train(trainer_of(stop.row, side, where, save_strategy="steps", save_steps=stop.at))
        return outcome, where / f"checkpoint-{stop.at}"

    def resumed(self, stop: Stop, side: Side, checkpoint: Path) -> Outcome:
        where = Path(tempfile.mkdtemp(dir=self._root))
        trainer = trainer_of(stop.row, side, where, save_strategy="steps", save_steps=stop.at)
        return side.train(trainer, resume_from_checkpoint=str(checkpoint))


def assert_same_course(stop: Stop, one: Outcome, other: Outcome) -> None:
    """All but the summary at the end, which averages over the steps that its own call to train() took."""
    unknown = {"loss"} if stop.between_logs else set()
    logs = [[{key: entry[key] for key in entry.keys() - unknown} for entry in each.log[:-1]] for each in (one, other)]
    assert logs[0] == logs[1]
    assert differing(one.weights, other.weights) == {}


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.id)
def test_saving_leaves_the_run_as_it_was(stop: Stop, runs: Runs) -> None:
    assert_same(runs.uninterrupted(stop, OURS)[0], runs.uninterrupted(stop, REFERENCE)[0])


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.id)
def test_a_resumed_run_ends_like_an_uninterrupted_one(stop: Stop, runs: Runs) -> None:
    uninterrupted, checkpoint = runs.uninterrupted(stop, OURS)
    assert_same_course(stop, runs.resumed(stop, OURS, checkpoint), uninterrupted)


@pytest.mark.parametrize("stop", FAITHFUL, ids=lambda stop: stop.id)
def test_a_resumed_run_ends_like_one_that_transformers_resumed(stop: Stop, runs: Runs) -> None:
    theirs = runs.resumed(stop, REFERENCE, runs.uninterrupted(stop, REFERENCE)[1])
    assert_same(runs.resumed(stop, OURS, runs.uninterrupted(stop, OURS)[1]), theirs)


@pytest.mark.parametrize("stop", FAITHFUL, ids=lambda stop: stop.id)
def test_ours_resumes_from_a_checkpoint_of_transformers(stop: Stop, runs: Runs) -> None:
    uninterrupted, checkpoint = runs.uninterrupted(stop, REFERENCE)
    assert_same_course(stop, runs.resumed(stop, OURS, checkpoint), uninterrupted)


@pytest.mark.parametrize("stop", FAITHFUL, ids=lambda stop: stop.id)
def test_transformers_resumes_from_a_checkpoint_of_ours(stop: Stop, runs: Runs) -> None:
    uninterrupted, checkpoint = runs.uninterrupted(stop, OURS)
    assert_same_course(stop, runs.resumed(stop, REFERENCE, checkpoint), uninterrupted)


@pytest.mark.parametrize("stop", STRAYING, ids=lambda stop: stop.id)
def test_the_original_strays_where_the_table_says_so(stop: Stop, runs: Runs) -> None:
    uninterrupted, checkpoint = runs.uninterrupted(stop, REFERENCE)
    assert differing(runs.resumed(stop, REFERENCE, checkpoint).weights, uninterrupted.weights)


@pytest.mark.parametrize("stop", STOPS[3:6], ids=lambda stop: stop.id)
def test_resuming_finds_the_newest_checkpoint_by_itself(stop: Stop, tmp_path: Path) -> None:
    first = trainer_of(stop.row, OURS, tmp_path, save_strategy="steps", save_steps=stop.at)
    uninterrupted = OURS.train(first)
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    again = OURS.train(
        trainer_of(stop.row, OURS, tmp_path, save_strategy="steps", save_steps=stop.at), resume_from_checkpoint=True
    )
    assert differing(again.weights, uninterrupted.weights) == {}
    assert newest.is_dir()
