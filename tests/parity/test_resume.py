"""A run that stopped at a save and went on in a new trainer ends where an uninterrupted one does, on either side, and
across: each side resumes from the other's checkpoint.

Where the original itself does not return to its own uninterrupted run, the row says why, and only ours is held to it.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from .data import hf_dataset
from .golden import MARKS, Golden
from .rows import BERT, DICT, LLAMA, MLM, PADDED, T5, Row
from .run import trainer_of
from .sides import OURS, REFERENCE, Outcome, Side, assert_same, differing

pytestmark = [*MARKS, pytest.mark.costly]

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
# One stop for each kind of state that a checkpoint carries; the others cross in the slow tier, since what differs in
# them (where in an epoch, which model) is covered by the tests that stay on one side.
CROSSED = {
    "bert-dropout-at-4",
    "dict-dropout-second-epoch-at-9",
    "llama-accumulated-end-of-epoch-at-3",
    "llama-cosine-warmup-at-3",
    "t5-adafactor-at-5",
    "bert-log-every-4-at-6",
    "padded-group-by-length-at-3",
}


def uninterrupted(stop: Stop, side: Side, folder: Path) -> tuple[Outcome, Path]:
    """A run that saves on its way, and the checkpoint that it left where the other one stops."""
    outcome = side.train(trainer_of(stop.row, side, folder, save_strategy="steps", save_steps=stop.at))
    return outcome, folder / f"checkpoint-{stop.at}"


def resumed(stop: Stop, side: Side, checkpoint: Path, folder: Path) -> Outcome:
    trainer = trainer_of(stop.row, side, folder, save_strategy="steps", save_steps=stop.at)
    return side.train(trainer, resume_from_checkpoint=str(checkpoint))


def in_two(stop: Stop, side: Side) -> dict[str, Outcome]:
    """Both on one side: the uninterrupted run, and one that resumes from its checkpoint."""
    with TemporaryDirectory() as folder:
        through, checkpoint = uninterrupted(stop, side, Path(folder, "through"))
        return {"uninterrupted": through, "resumed": resumed(stop, side, checkpoint, Path(folder, "resumed"))}


GOLDEN = Golden("resume", {stop.id: partial(in_two, stop, REFERENCE) for stop in STOPS})


def assert_same_course(stop: Stop, one: Outcome, other: Outcome) -> None:
    """All but the summary at the end, which averages over the steps that its own call to train() took."""
    unknown = {"loss"} if stop.between_logs else set()
    logs = [[{key: entry[key] for key in entry.keys() - unknown} for entry in each.log[:-1]] for each in (one, other)]
    assert logs[0] == logs[1]
    assert differing(one.weights, other.weights) == {}


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.id)
@pytest.mark.one_in(2)
def test_a_saving_and_a_resumed_run_end_like_those_of_transformers(stop: Stop) -> None:
    """Saving leaves the run as it was, and the resumed run ends like the uninterrupted one."""
    ours = in_two(stop, OURS)
    assert_same_course(stop, ours["resumed"], ours["uninterrupted"])

    def compare(theirs: dict[str, Outcome]) -> None:
        assert_same(ours["uninterrupted"], theirs["uninterrupted"])
        if not stop.original_strays:
            assert_same(ours["resumed"], theirs["resumed"])

    GOLDEN.check(stop.id, compare)


@pytest.mark.framework
@pytest.mark.parametrize(
    "stop",
    [pytest.param(stop, id=stop.id, marks=() if stop.id in CROSSED else pytest.mark.slow) for stop in FAITHFUL],
)
def test_each_side_resumes_from_a_checkpoint_of_the_other(stop: Stop, tmp_path: Path) -> None:
    theirs, their_checkpoint = uninterrupted(stop, REFERENCE, tmp_path / "theirs")
    assert_same_course(stop, resumed(stop, OURS, their_checkpoint, tmp_path / "ours-from-theirs"), theirs)
    ours, our_checkpoint = uninterrupted(stop, OURS, tmp_path / "ours")
    assert_same_course(stop, resumed(stop, REFERENCE, our_checkpoint, tmp_path / "theirs-from-ours"), ours)


def test_every_stop_that_crosses_is_in_the_table() -> None:
    assert {stop.id for stop in FAITHFUL} >= CROSSED


@pytest.mark.parametrize("stop", STRAYING, ids=lambda stop: stop.id)
def test_the_original_strays_where_the_table_says_so(stop: Stop) -> None:
    theirs = GOLDEN.result(stop.id)
    assert differing(theirs["resumed"].weights, theirs["uninterrupted"].weights)


@pytest.mark.parametrize("stop", STOPS[3:6], ids=lambda stop: stop.id)
def test_resuming_finds_the_newest_checkpoint_by_itself(stop: Stop, tmp_path: Path) -> None:
    through, _ = uninterrupted(stop, OURS, tmp_path)
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    again = OURS.train(
        trainer_of(stop.row, OURS, tmp_path, save_strategy="steps", save_steps=stop.at), resume_from_checkpoint=True
    )
    assert differing(again.weights, through.weights) == {}
    assert newest.is_dir()
