"""The position of a stream or a user's dataloader has a file of its own beside the cursor; older checkpoints load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainwright import Trainer
from trainwright.errors import CheckpointError

from .._support.small import Diary, StopAt, as_version_0_1, data, differing, make_trainer, sign_again, weights

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13

SIZE = 26  # batches of 4: seven in an epoch


class KeepsState(IterableDataset[dict[str, Any]]):
    """Tells where it stands, and counts the items that are read."""

    def __init__(self) -> None:
        self.items = data.vectors(SIZE)
        self.at = 0
        self.reads = list[int]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = self.at
        self.at = 0
        for number in range(first, SIZE):
            self.at = number + 1
            self.reads.append(number)
            yield self.items[number]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return StatefulDataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)


def trainer_of(kind: str, folder: Path, *callbacks: Any) -> Any:
    if kind == "stream":
        return make_trainer(folder, train_dataset=KeepsState(), callbacks=[*callbacks], max_steps=14)
    cls = OwnLoader if kind == "dataloader" else None
    return make_trainer(folder, train_dataset=Diary(data.vectors(SIZE)), cls=cls, callbacks=[*callbacks])


def stopped(kind: str, folder: Path) -> Path:
    trainer_of(kind, folder, StopAt(9)).train()
    return folder / "checkpoint-9"


@pytest.mark.parametrize("kind", ["stream", "dataloader"])
def test_it_is_a_file_of_plain_values(kind: str, tmp_path: Path) -> None:
    checkpoint = stopped(kind, tmp_path)
    assert list(torch.load(checkpoint / "data_position.pth", weights_only=True)) == [kind]
    states = torch.load(checkpoint / "rng_state.pth", weights_only=True)
    assert {name for name in states if name.startswith("loader")} == {"loader_epoch_start", "loader_before_ahead"}


def test_an_order_of_indices_needs_none(tmp_path: Path) -> None:
    assert not (stopped("indices", tmp_path) / "data_position.pth").exists()


@pytest.mark.parametrize("older", [False, True], ids=["now", "version 0.1"])
@pytest.mark.parametrize("kind", ["stream", "dataloader", "indices"])
def test_a_resume_reads_only_what_is_left(kind: str, older: bool, tmp_path: Path) -> None:
    whole = trainer_of(kind, tmp_path / "whole")
    whole.train()
    checkpoint = stopped(kind, tmp_path / "parts")
    if older:
        as_version_0_1(checkpoint)
    again = trainer_of(kind, tmp_path / "parts")
    again.train(resume_from_checkpoint=True)
    assert len(again.train_dataset.reads) == SIZE - 2 * 4
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_a_stream_without_the_file_is_read_again(tmp_path: Path) -> None:
    kind = "stream"
    whole = trainer_of(kind, tmp_path / "whole")
    whole.train()
    checkpoint = stopped(kind, tmp_path / "parts")
    (checkpoint / "data_position.pth").unlink()
    with pytest.raises(CheckpointError, match=r"data_position\.pth is missing"):
        trainer_of(kind, tmp_path / "parts").train(resume_from_checkpoint=str(checkpoint))
    sign_again(checkpoint)
    again = trainer_of(kind, tmp_path / "parts")
    again.train(resume_from_checkpoint=True)
    assert len(again.train_dataset.reads) == SIZE
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_an_epoch_that_is_begun_again_forgets_it(tmp_path: Path) -> None:
    stopped("dataloader", tmp_path)
    again = trainer_of("dataloader", tmp_path)
    again.args.ignore_data_skip = True
    again.train(resume_from_checkpoint=True)
    assert len(again.train_dataset.reads) == len({*again.train_dataset.reads}) == 5 * 4, "five steps"
