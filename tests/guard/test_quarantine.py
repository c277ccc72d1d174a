"""Samples in quarantine: left out from the next batch on, in later runs and on a resume; steps and positions stay."""

from pathlib import Path
from typing import Any

import pytest

import trainwright
from trainwright.data.positions import ForeignPosition
from trainwright.data.quarantine import QUARANTINE_NAME, add_to_quarantine, read_quarantine, substituted, substitutes
from trainwright.errors import DataError

from ..contract import doubles
from .poisoned import POISONS, Hears, samples, trained, trainer

BAD = 5


class Sees(trainwright.TrainerCallback):
    """The samples of each batch, and a quarantine at some step."""

    def __init__(self, at_step: int = 0) -> None:
        self.trainer: Any = None
        self.seen: list[list[int]] = []
        self._at_step = at_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at_step:
            self.trainer.quarantine([BAD])

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        self.seen.append([row["number"] for row in rows])
        return trainwright.default_data_collator([{k: v for k, v in row.items() if k != "number"} for row in rows])


def seeing(folder: Path, *, at_step: int = 0, **settings: Any) -> tuple[Any, Sees]:
    sees = Sees(at_step)
    rows = [{**row, "number": number} for number, row in enumerate(samples(8))]
    shared = {"max_steps": 8, "logging_steps": 8, "remove_unused_columns": False, **settings}
    sees.trainer = doubles.trainer(
        folder,
        settings={"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", **shared},
        train_dataset=rows,
        model=trainer(folder).model,
        callbacks=[sees],
        data_collator=sees.collate,
    )
    return sees.trainer, sees


def test_a_sample_is_left_out_from_the_next_batch_on_and_in_later_runs(tmp_path: Path) -> None:
    one, sees = seeing(tmp_path, at_step=3, save_strategy="steps", save_steps=2)
    one.train()
    first, second = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1], [2, 3], [4, 6], [6, 7]]
    assert sees.seen[:8] == [*first, *second]
    assert (tmp_path / QUARANTINE_NAME).read_text() == '{"sample": 5}\n'
    again, sees = seeing(tmp_path)
    again.train()
    assert sees.seen[:8] == [*second, *second]
    resumed, sees = seeing(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sees.seen[:6] == [*second[2:], *second]
    assert resumed.state.global_step == 8


def test_a_quarantine_before_training_keeps_a_bad_sample_away(tmp_path: Path) -> None:
    hears = Hears()
    one = trainer(tmp_path, poison={BAD: POISONS["nan"]}, callbacks=[hears])
    one.quarantine([BAD])
    one.train()
    assert hears.incidents == []
    hand = trained(tmp_path / "hand", poison={BAD: samples()[6]})
    assert doubles.same(doubles.weights(one), doubles.weights(hand))


@pytest.mark.parametrize("ids", [[24], [-1], ["x"], [1.5]])
def test_what_is_no_index_is_refused(ids: list[Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not the index of a sample: the training dataset has 24"):
        trainer(tmp_path).quarantine(ids)
    assert read_quarantine(tmp_path) == set()


def test_not_all_samples_can_be_left_out(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.quarantine(range(24))
    with pytest.raises(DataError, match="All 24 samples are in quarantine"):
        one.train()


def test_substitutes() -> None:
    by = substitutes({2, 3, 9}, 6)
    assert [substituted(index, by) for index in [4, 2, 0, 3, 5, 1]] == [4, 4, 0, 4, 5, 1]
    assert substituted([[2, 1], (3,)], by) == [[4, 1], [4]]
    assert substitutes({0, 5}, 6) == {0: 1, 5: 1}


@pytest.mark.parametrize("line", ["{}", "3", "[", '{"sample": -1}', '{"sample": "3"}', '{"sample": 1e3}', "\x00"])
def test_a_line_that_no_run_writes_is_named(line: str, tmp_path: Path) -> None:
    add_to_quarantine(tmp_path, [1, 4])
    with (tmp_path / QUARANTINE_NAME).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=r"quarantine\.jsonl, line 3"):
        read_quarantine(tmp_path)


def test_a_line_that_was_not_finished_is_not_read(tmp_path: Path) -> None:
    add_to_quarantine(tmp_path, [1, 4])
    with (tmp_path / QUARANTINE_NAME).open("a") as file:
        file.write('{"sam')
    assert read_quarantine(tmp_path) == {1, 4}


def test_a_dataloader_of_the_user_has_no_indices() -> None:
    with pytest.raises(DataError, match="a dataset with indices"):
        ForeignPosition([]).leave_out({1}, 5)
