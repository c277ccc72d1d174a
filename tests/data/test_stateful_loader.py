"""A dataloader that tells where it stands is asked on resume: nothing is read twice, and all is the same to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainwright import Trainer
from trainwright.data.positions import ForeignPosition

from .._support.small import StopAt, augmented, data, differing, make_trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13

SIZE = 26


class Counted(Dataset[Any]):
    """Writes down which samples are asked for, in workers too; may draw for each."""

    def __init__(self, reads: Path, *, draws: bool) -> None:
        self.items = data.vectors(SIZE)
        self.reads = reads
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        with self.reads.open("a") as file:
            file.write(f"{index}\n")
        return augmented(self.items[index]) if self.draws else self.items[index]


def test_a_position_does_not_move_on_with_the_dataloader() -> None:
    """Which may hand out the very object that it goes on changing."""
    inside = {"at": 1}
    dataloader = SimpleNamespace(state_dict=lambda: {"inside": inside}, load_state_dict=print)
    position = ForeignPosition(dataloader)
    position.advance(is_last=False)
    inside["at"] = 2
    assert position.state() == {"dataloader": {"inside": {"at": 1}}}


class Own(Trainer):
    workers = 0

    def get_train_dataloader(self) -> Any:
        return StatefulDataLoader(
            self.train_dataset, batch_size=4, shuffle=True, num_workers=self.workers, collate_fn=self.data_collator
        )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_at", [3, 7, 9])
def test_a_resume_goes_on_where_the_dataloader_stood(workers: int, stop_at: int, tmp_path: Path) -> None:
    """Order and items; what workers draw is theirs: their generators are no part of that dataloader's state."""
    kind = type("Own", (Own,), {"workers": workers})

    def trainer(name: str, *callbacks: Any) -> Any:
        dataset = Counted(tmp_path / f"{name}.txt", draws=workers == 0)
        return make_trainer(tmp_path / name, train_dataset=dataset, cls=kind, callbacks=[*callbacks])

    whole = trainer("whole")
    whole.train()
    trainer("parts", StopAt(stop_at)).train()
    (tmp_path / "parts.txt").unlink()
    again = trainer("parts")
    again.train(resume_from_checkpoint=True)
    assert differing(weights(whole.model), weights(again.model)) == {}
    num_read = len((tmp_path / "parts.txt").read_text().split())
    epochs, batches = divmod(stop_at, 7)  # seven in an epoch
    assert num_read == (2 - epochs) * SIZE - 4 * batches
