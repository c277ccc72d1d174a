"""Samples in quarantine: left out from the next batch on, in later runs and on a resume; epochs are shorter then."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from torch.utils.data import DataLoader

import trainwright
from trainwright.capabilities.packing.plan import RowPlan
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME, add_to_quarantine, read_quarantine
from trainwright.capabilities.quarantine.sample_filter import QuarantinedSamples, find_substitutes
from trainwright.capabilities.token_budget.plan import BudgetPlan
from trainwright.config.plans import Batching, SamplingPlan
from trainwright.data.batches import EpochBatches
from trainwright.data.filter import without
from trainwright.data.loader import Loader
from trainwright.data.order import Order, SamplerOrder
from trainwright.data.positions import ForeignPosition
from trainwright.data.sampler_factory import training_order
from trainwright.data.shards import RankShare
from trainwright.errors import DataError

from ..._support.two_processes import run
from ...contract import doubles
from ..guard.poisoned import POISONS, Hears, samples, trainer
from . import quarantined

BAD = 5


class Sees(trainwright.TrainerCallback):
    """The samples of each batch, and a quarantine at some step."""

    def __init__(self, at_step: int = 0) -> None:
        self.trainer: Any = None
        self.numbers = [BAD]
        self.seen: list[list[int]] = []
        self._at_step = at_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at_step:
            self.trainer.quarantine(self.numbers)

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
        eval_dataset=rows,
        model=trainer(folder).model,
        callbacks=[sees],
        data_collator=sees.collate,
    )
    return sees.trainer, sees


def test_sample_is_left_out_from_next_batch_on_and_in_later_runs(tmp_path: Path) -> None:
    one, sees = seeing(tmp_path, at_step=3, save_strategy="steps", save_steps=2)
    one.train()
    full = [[0, 1], [2, 3], [4, 5], [6, 7]]
    shorter = [[0, 1], [2, 3], [4, 6], [7]]
    assert sees.seen[:9] == [*full, full[3], *shorter]  # when step 3 ends its next batch is fetched, and fetched anew
    (line,) = (tmp_path / QUARANTINE_NAME).read_text().splitlines()
    assert json.loads(line).items() >= {"name": "train[5]", "source": "train", "row": 5, "rows": 8}.items()
    again, sees = seeing(tmp_path)
    again.train()
    assert sees.seen[:8] == [*shorter, *shorter]
    resumed, sees = seeing(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sees.seen[:6] == [*shorter[2:], *shorter]
    assert resumed.state.global_step == 8
    one, sees = seeing(tmp_path / "next", at_step=1)
    one.train()
    assert sees.seen[:9] == [*full[:2], *shorter[1:], *shorter]
    assert one.state.max_steps == one.state.global_step == 8


@pytest.mark.parametrize(
    "settings",
    [{}, {"train_sampling_strategy": "sequential"}, {"shuffle_method": "feistel"}],
    ids=["permutation", "sequence", "feistel"],
)
def test_each_other_sample_is_trained_once_in_an_epoch(settings: dict[str, Any], tmp_path: Path) -> None:
    always = {"save_strategy": "no"}
    quarantined.check([quarantined.scenarios(tmp_path, **always, **settings)])


@pytest.mark.slow  # several launches, and workers for each of many runs
@pytest.mark.parametrize(("processes", "workers"), [(1, "2"), (2, "0,2")])
def test_each_other_sample_is_trained_once_by_processes(processes: int, workers: str, tmp_path: Path) -> None:
    done = run(Path(quarantined.__file__), str(tmp_path / "runs"), workers, folder=tmp_path, processes=processes)
    for number in workers.split(","):
        quarantined.check([told[number] for told in done.told])
        for kind in quarantined.KINDS if processes > 1 else ():
            quarantined.check_rest([told[f"{kind} {number}"] for told in done.told], kind)


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in quarantined.KINDS), ("by length", 2), ("sequence", 2)]
)
def test_the_rest_of_epoch_has_no_sample_of_them_and_none_twice(kind: str, workers: int, tmp_path: Path) -> None:
    stops = (2, 4) if kind == "drawing" else (4,)
    told = quarantined.rest_of_epochs(tmp_path, kind, stops=stops, dataloader_num_workers=workers)
    quarantined.check_rest([told], kind)


@pytest.mark.parametrize(("step", "numbers"), [(3, [6, 7]), (2, [4, 5, 6, 7])])
def test_a_run_that_has_nothing_left_evaluates_and_saves_once(step: int, numbers: list[int], tmp_path: Path) -> None:
    by_steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    one, sees = seeing(tmp_path, at_step=step, max_steps=-1, num_train_epochs=1, **by_steps)
    sees.numbers = numbers
    one.train()
    assert one.state.max_steps == one.state.global_step == step
    assert [entry["step"] for entry in one.state.log_history if "eval_loss" in entry] == [2, *[3] * (step == 3)]
    assert trainwright.get_last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{step}")


def test_steps_that_are_given_stay_and_take_more_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = quarantined.run(tmp_path, at=2, max_steps=26, per_device_train_batch_size=1)
    assert one.state.global_step == 26
    assert [len(numbers) for numbers in one.trained.values()] == [
        12,
        11,
        3,
    ]  # one of both was trained in the first two steps
    assert one.state.num_train_epochs == 3
    assert "In quarantine: 2 samples. Epochs have 11 samples from step 3 on, and the run has 26 steps." in caplog.text


def test_a_quarantine_before_training_keeps_a_bad_sample_away(tmp_path: Path) -> None:
    hears = Hears()
    one = trainer(tmp_path, poison={BAD: POISONS["nan"]}, callbacks=[hears])
    one.quarantine([BAD])
    one.train()
    assert hears.incidents == []
    hand = trainer(tmp_path / "hand")
    hand.train_dataset = [row for number, row in enumerate(samples()) if number != BAD]
    hand.train()
    assert doubles.same(doubles.weights(one), doubles.weights(hand))


@pytest.mark.parametrize("name", ["x", "train[24]", "chat[1]", "train:1"])
def test_a_name_that_the_data_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no sample '.*'\. Sample names look like 'train\[0\]'"):
        trainer(tmp_path).quarantine([name])


@pytest.mark.parametrize("ids", [[24], [-1], [1.5]])
def test_an_invalid_index_is_refused(ids: list[Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not the index of a sample: the training dataset has 24"):
        trainer(tmp_path).quarantine(ids)
    assert read_quarantine(tmp_path).entries == ()


def test_not_all_samples_can_be_left_out(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.quarantine(range(24))
    with pytest.raises(DataError, match="All 24 samples are in quarantine"):
        one.train()


def datasets_stream(rows: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list([{**row, "x": row["x"].tolist()} for row in rows]).to_iterable_dataset()


def shuffled_stream(rows: list[dict[str, Any]]) -> Any:
    return datasets_stream(rows).shuffle(seed=3, buffer_size=4)


STREAMS = {"plain": quarantined.Stream, "counted": quarantined.Counted, "datasets": datasets_stream}
WORKERS = pytest.mark.parametrize("workers", [0, 2])  # 2: the mark for processes follows from the name


@pytest.mark.parametrize("kind", STREAMS)
@WORKERS
def test_a_stream_leaves_samples_out_by_their_places(kind: str, workers: int, tmp_path: Path) -> None:
    if kind == "datasets" and workers:
        with pytest.raises(DataError, match="Name samples by a column"):
            quarantined.run(
                tmp_path, of=STREAMS[kind], bad=quarantined.BAD, max_steps=2, dataloader_num_workers=workers
            )
        return
    steps = {"num_train_epochs": 2} if kind == "counted" else {"max_steps": 12}
    more: Any = {"of": STREAMS[kind], "save_strategy": "no", "dataloader_num_workers": workers, **steps}
    whole = quarantined.run(tmp_path / "whole", bad=quarantined.BAD, **more)
    assert whole.trained == {0: quarantined.KEPT, 1: quarantined.KEPT}
    assert whole.state.global_step == whole.state.max_steps == 12
    first = quarantined.run(tmp_path / "stopped", bad=quarantined.BAD, stop=3, **more)
    second = quarantined.run(tmp_path / "stopped", resume=True, **more)
    assert first.trained[0] + second.trained[0] == quarantined.KEPT
    assert second.trained[1] == quarantined.KEPT
    assert doubles.same(doubles.weights(second), doubles.weights(whole))
    quarantined.run(tmp_path / "since", stop=2, **more)
    since = quarantined.run(tmp_path / "since", bad=(0, *quarantined.BAD), resume=True, **more)
    assert since.trained[0] == [4, *range(6, quarantined.SIZE)]  # 0 to 3 were trained before
    assert since.trained[1] == quarantined.KEPT[1:]
    way = quarantined.run(tmp_path / "way", at=1, **more)
    assert way.trained[0] == [n for n in range(quarantined.SIZE) if workers or n != 5]
    assert way.trained[1] == quarantined.KEPT[: len(way.trained[1])]
    assert way.state.global_step == (12 if kind != "counted" else 12 + bool(workers))


@pytest.mark.process
def test_a_stream_leaves_samples_out_of_both_processes(tmp_path: Path) -> None:
    done = run(Path(quarantined.__file__), str(tmp_path / "runs"), "stream", folder=tmp_path)
    first, second = done.told
    assert [first["whole"]["trained"], second["whole"]["trained"]] == [
        {"0": [0, 1, 6, 7, 10, 11], "1": [0, 1, 6, 7, 10, 11]},
        {"0": [3, 4, 8, 9, 12], "1": [3, 4, 8, 9, 12]},
    ]
    for told in done.told:
        assert told["resumed"]["trained"] == {
            "0": told["whole"]["trained"]["0"][2:],
            "1": told["whole"]["trained"]["1"],
        }
        assert told["since"]["trained"]["1"] == told["whole"]["trained"]["1"]
        assert told["whole"]["steps"] == told["resumed"]["steps"] == [6, 6]
    # 0 to 3 are trained in step 1; 4 to 7 are fetched ahead of a quarantine after it.
    assert [sorted(told["since"]["trained"]["0"]) for told in done.told] == [[4, 6, 9, 10], [7, 8, 11, 12]]
    assert [told["way"]["trained"]["0"] for told in done.told] == [[0, 1, 4, 5, 8, 9, 12], [2, 3, 6, 7, 10, 11]]
    assert [told["way"]["trained"]["1"] for told in done.told] == [told["whole"]["trained"]["1"] for told in done.told]


@WORKERS
def test_a_stream_leaves_samples_out_by_a_column(workers: int, tmp_path: Path) -> None:
    more: Any = {"of": shuffled_stream, "max_steps": 12, "dataloader_num_workers": workers, "save_strategy": "no"}
    whole = quarantined.run(tmp_path / "whole", bad=quarantined.BAD, column="number", **more)
    assert [sorted(numbers) for numbers in whole.trained.values()] == [quarantined.KEPT] * 2
    assert whole.trained[0] != whole.trained[1]
    quarantined.run(tmp_path / "stopped", bad=quarantined.BAD, column="number", stop=3, **more)
    resumed = quarantined.run(tmp_path / "stopped", resume=True, **more)
    assert doubles.same(doubles.weights(resumed), doubles.weights(whole))
    with pytest.raises(DataError, match="Name samples by a column"):
        quarantined.run(tmp_path / "places", bad=quarantined.BAD, **more)
    with pytest.raises(DataError, match="names samples by doc"):
        quarantined.run(tmp_path / "other", bad=quarantined.BAD, column="doc", **{**more, "dataloader_num_workers": 0})


def test_samples_of_a_stream_are_named_by_their_places(tmp_path: Path) -> None:
    hears = Hears()
    one = trainer(tmp_path, poison={BAD: POISONS["nan"]}, callbacks=[hears])
    one.train_dataset = quarantined.Stream(one.train_dataset)
    one.quarantine([1])
    one.train()
    assert [incident.samples for incident in hears.incidents][:1] == [(BAD,)]


def left_out(samples: set[int]) -> QuarantinedSamples:
    return QuarantinedSamples(frozenset(samples))


def test_substitutes() -> None:
    assert find_substitutes({2, 3, 9}, 6) == {2: 4, 3: 4}
    assert find_substitutes({0, 5}, 6) == {0: 1, 5: 1}
    assert find_substitutes({1, 2, 4, 5}, 6, [0, 3, 5]) == {
        1: 0,
        2: 0,
        4: 3,
        5: 0,
    }  # within sources; the last has no other


def test_batches_formed_by_length_lose_the_sample() -> None:
    assert without([2, 1], {2, 3}) == [1]
    rows = [[(2, 0, 5), (0, 0, 3)], [(3, 0, 2)], [(1, 0, 2), (3, 2, 4)]]  # 0, 2 and 3 are also places in a sample
    assert without(rows, {2, 3}) == [[(0, 0, 3)], [(1, 0, 2)]]


@pytest.mark.parametrize(
    "formed", [BudgetPlan(text="budget", max_tokens=8), RowPlan(text="rows", row_length=8)], ids=["budget", "packed"]
)
def test_a_batch_of_which_nothing_is_left_is_another_one(formed: Batching) -> None:
    plan = SamplingPlan(strategy="random", batch_size=1, micro_batches=1, num_processes=1, seed=0, batching=formed)
    order: Any = training_order([{"input_ids": [1] * length} for length in (8, 3, 3, 2, 8, 2)], plan)
    batches = EpochBatches(order, 1)
    before = list(batches)
    batches.exclude(left_out({0, 1}), 6)
    batches.set_epoch(0)
    after = list(batches)
    assert len(after) == len(before) == len(batches)
    assert set(members(before)) == set(range(6))
    assert set(members(after)) == {2, 3, 4, 5}
    assert all(group for (group,) in after)


def members(found: Any) -> list[int]:
    """Samples of batches, which are numbers, or the first entries of pieces."""
    if isinstance(found, int):
        return [found]
    return [found[0]] if isinstance(found, tuple) else [n for one in found for n in members(one)]


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
    assert read_quarantine(tmp_path).entries == (1, 4)


def test_a_dataloader_of_the_user_has_no_indices() -> None:
    with pytest.raises(DataError, match="Exclude them in the dataloader itself"):
        ForeignPosition([]).exclude(left_out({1}), 5)


def test_samples_are_named_as_they_were_trained() -> None:
    """Ids travel with the batches, so those of a window stay what they were whatever is excluded after it."""
    batches = EpochBatches(SamplerOrder(range(8)), 2)
    loader = Loader(DataLoader(range(8), batch_sampler=batches), random_state=dict, set_random_state=bool)
    loader.position.exclude(left_out({1}), 8)

    def window(iterator: Any, size: int) -> Any:
        loader.begin_window()
        return loader.read_ids([next(iterator) for _ in range(size)])

    epoch = loader.epoch(0)
    assert window(epoch, 2) == [[0, 2], [3, 4]]
    loader.exclude(left_out({1, 6}), 8)
    assert loader.refresh(0, 2) == 2  # of three batches, since one is left
    rest = loader.again(0, skip_batches=2)
    assert window(rest, 1) == [[5, 7]]
    assert next(rest, None) is None
    loader.exclude(left_out({1, 4, 5}), 8)
    assert loader.refresh(1, 0) == 0
    assert window(loader.epoch(1), 2) == [[0, 2], [3, 6]]


def test_group_of_which_nothing_is_left_is_shared_out_as_a_tail() -> None:
    order: Any = groups_of([[0, 1], [2], [3, 4], [5]])
    parts = []
    seen = []
    for rank in range(2):
        batches = EpochBatches(order, 1, share=RankShare(batch_size=1, rank=rank, num_processes=2))
        batches.exclude(left_out({1, 2, 3, 4, 5}), 7)
        seen.append(list(batches))
        parts.append({number: (part.num_samples, part.weight) for number, part in batches.parts.items()})
    assert seen == [[[[0]], [[0]]], [[[0]], [[0]]]]  # those of the second process, and both last ones, stand in
    assert parts == [{1: (1, 2.0), 2: (0, 0.0)}, {1: (0, 0.0), 2: (0, 0.0)}]


def groups_of(groups: list[list[int]]) -> Any:
    class Groups(Order):
        def indices(self, epoch: int) -> list[list[int]]:
            return groups

        def __len__(self) -> int:
            return len(groups)

        def describe(self) -> dict[str, Any]:
            return {"kind": "groups"}

    return Groups()
