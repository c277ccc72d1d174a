"""Curricula: an order by weights that a function gives under way, the same after a cut and a resume of any kind."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import trainwright
from trainwright import Curriculum, LedgerColumns
from trainwright.capabilities.curriculum.curriculum import CurriculumOrder, read_weights
from trainwright.capabilities.ledger.table import columns_in, read_table
from trainwright.capabilities.mixture.dataset import MixtureDataset, as_mixture
from trainwright.capability_table import FILES
from trainwright.errors import ArgumentError, CheckpointError, DataError

from ..._support.small import StopAt, sign_again
from ..._support.two_processes import run, tell
from ...contract import doubles
from ..ledger.test_ledger import Classifier, Stops, classes

SIZE = 22  # steps of 4: six in an epoch, the last one of 2
STEPS = {"every": 4, "delay": 5}  # asked after 4, 8, ... steps, in force 20 samples later


class Notes(Classifier):
    """Keeps which samples it was trained on, and drops parts of them at random."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, i: torch.Tensor | None = None) -> Any:
        if self.training and i is not None:
            self.seen += i.tolist()
        return super().forward(torch.nn.functional.dropout(x, 0.1, self.training), labels)


def rows() -> list[dict[str, Any]]:
    return [{**row, "i": number} for number, row in enumerate(classes())]


def hard_first(ledger: LedgerColumns) -> Any:
    return np.nan_to_num(ledger.mean_loss, nan=2.0) ** 4


def by_step(ledger: LedgerColumns) -> Any:
    """Depends on nothing that another batch size or number of processes changes; draws random numbers."""
    return 1 + (ledger.sample * ledger.step) % 7 + np.random.rand(len(ledger.sample))


def sources_by_loss(ledger: LedgerColumns) -> Any:
    return {name: np.nanmean(ledger.mean_loss[ledger.source == name]) ** 4 for name in ledger.sources}


def trained(folder: Path | str, data: Any, *, resume: Any = None, callbacks: Any = None, **settings: Any) -> Any:
    settings = {"max_steps": -1, "num_train_epochs": 4, "save_strategy": "no", "logging_steps": 7} | settings
    model = doubles.model(Notes)
    one = doubles.trainer(folder, settings=settings, model=model, train_dataset=data, callbacks=callbacks)
    one.train(resume_from_checkpoint=resume)
    return one


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns runs that were not cut, with a checkpoint of each second step, by the function that was asked."""
    runs = {}
    for function in (hard_first, by_step):
        saves = {"save_strategy": "steps", "save_steps": 2, "save_async": False}
        folder = tmp_path_factory.mktemp(function.__name__)
        runs[function] = trained(folder, Curriculum(rows(), function, **STEPS), **saves)
    return runs


def at(order: CurriculumOrder, first: int, stop: int) -> list[int]:
    return order.at(first, stop).tolist()


# -- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffles", [True, False])
def test_in_a_round_a_sample_comes_as_often_as_its_weight_says(shuffles: bool) -> None:
    order = CurriculumOrder(MixtureDataset({"a": range(12), "b": range(8)}), seed=3, shuffles=shuffles)
    assert all(sorted(order.indices(epoch)) == list(range(20)) for epoch in range(3))
    before = at(order, 0, 47)
    weights = np.arange(20, dtype=np.float32) % 5
    order.add(47, weights, position=30)
    assert at(order, 0, 47) == before
    for first in (47, 67, 87):
        found = Counter(at(order, first, first + 20))
        expected = weights * 20 / weights.sum()
        assert all(np.floor(expected[one]) <= found[one] <= np.ceil(expected[one]) for one in range(20))
    drawn = Counter(at(order, 47, 47 + 4000))
    np.testing.assert_allclose([drawn[one] / 200 for one in range(20)], weights * 20 / weights.sum(), atol=0.1)
    assert [one for place in range(40, 90, 7) for one in at(order, place, place + 7)] == at(order, 40, 96)
    order.add(107, np.ones(20, np.float32), position=100)
    assert sorted(at(order, 107, 127)) == sorted(at(order, 127, 147)) == list(range(20))
    assert (at(order, 107, 127) == list(range(20))) is not shuffles
    if shuffles:
        assert at(order, 107, 127) != at(order, 127, 147)


def test_sources_have_their_shares_and_continue_where_they_were() -> None:
    order = CurriculumOrder(MixtureDataset({"a": range(30), "b": range(10)}), seed=0, shuffles=True)
    order.add(20, (0.5, 0.5), position=10)
    order.add(60, np.eye(40, dtype=np.float32)[7] + np.eye(40, dtype=np.float32)[33], position=20)
    order.add(100, (0.1, 0.9), position=60)
    assert [len(order.segments), order.segments[0].start] == [3, 20]
    found = at(order, 20, 400)
    assert abs(sum(one < 30 for one in found[:40]) - 20) <= 2
    assert Counter(found[40:80]) == {7: 20, 33: 20}
    assert abs(sum(one < 30 for one in found[80:]) - 30) <= 2
    of_b = [one for one in found[:40] + found[80:] if one >= 30]
    first = of_b[5:]  # of the first 20 samples, five were of b, so that is where its second pass begins
    assert all(sorted(first[start : start + 10]) == list(range(30, 40)) for start in range(0, 200, 10))
    order.end = 110
    with pytest.raises(DataError, match="larger delay"):
        list(order.indices_from(2, 10))
    other = CurriculumOrder(MixtureDataset({"a": range(30), "b": range(10)}), seed=0, shuffles=True)
    other.load_state_dict(order.state_dict(), position=5)
    assert at(other, 20, 120) == at(order, 20, 120)
    assert len(at(other, 5, 20)) == 15
    assert other.describe() == order.describe()


@pytest.mark.parametrize(
    ("steps", "asked", "lead"),
    [
        ({"every": 200}, [200, 400, 600], 32),
        ({"every": 4}, [4, 8, 12], 4),
        ({"every": 4, "delay": 9}, [4, 8, 12], 9),
        ({"every": [0, 50, 60]}, [0, 50, 60], 10),
        ({"every": (500,)}, [500, None], 32),
    ],
)
def test_steps_at_which_it_is_asked(steps: dict[str, Any], asked: list[Any], lead: int) -> None:
    curriculum = Curriculum([1], len, **steps)
    found = [-1]
    while len(found) <= len(asked):
        found.append(curriculum.step_after(found[-1]))
    assert (found[1:], curriculum.lead) == (asked, lead)
    assert str(curriculum).startswith("by len, called after ")


# -- what is refused ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Curriculum(Stream(), len, every=2), "is a Stream without a length.*mixture_schedule"),
        (lambda: Curriculum({"code": [1], "web": Stream()}, len, every=2), "The source 'web' of a Curriculum"),
        (lambda: Curriculum([1], 3, every=2), "weights_fn=3"),  # type: ignore[arg-type]
        (lambda: Curriculum([1], len, every=0), "every=0.*1 or more"),
        (lambda: Curriculum([1], len, every=[5, 5]), r"every=\[5, 5\]"),
        (lambda: Curriculum([1], len, every="often"), "every='often'"),  # type: ignore[arg-type]
        (lambda: Curriculum([1], len, every=2, delay=0), "delay=0"),
    ],
)
def test_a_curriculum_is_of_datasets_with_a_length(made: Callable[[], Any], said: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=said):
        made()


WRONG: list[tuple[Any, str]] = [
    (None, "returned a NoneType. Return an array with a weight for each of 6 samples, or a dict.* 'code', 'chat'"),
    (np.ones(5), r"returned an array of shape \(5,\)"),
    (np.ones((6, 1)), r"shape \(6, 1\)"),
    ("hard", "returned a str. Return"),
    ({"code": 1.0, "char": 1.0}, "'char', and the training data has 'code', 'chat'. Did you mean chat"),
    ({"code": 1.0}, "gives no weight to 'chat'; a weight of 0 excludes it"),
    ({"code": "much", "chat": 1.0}, "returned a list"),
    ({"code": 1.0, "chat": float("nan")}, "1 of 2 weights that are not numbers >= 0: nan for 'chat'.*nan_to_num"),
    ({"code": 0, "chat": 0}, "0 for all that are not in quarantine"),
    ([1, 1, float("nan"), float("nan"), 1, 1], "returned 2 of 6 weights.*nan for sample 2. Losses of samples without"),
    (torch.tensor([1, 1, -2, 1, 1, 1]), "-2.0 for sample 2. Return numbers that are not negative"),
    ([1, 1, 1, 1, 1, float("inf")], "inf for sample 5"),
    ([0, 1, 0, 0, 0, 0], "0 for all that are not in quarantine"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[str(given)[:20] for given, _ in WRONG])
def test_invalid_weights_are_an_error_with_advice(given: Any, said: str) -> None:
    data = MixtureDataset({"code": range(4), "chat": range(2)})
    visits = np.array([1, 1, 0, 1, 1, 1])
    with pytest.raises(DataError, match=f"^f .*{said}"):
        read_weights(given, data, "f", visits=visits, excluded={1})


def test_weights_are_relative_and_those_in_quarantine_0() -> None:
    data = MixtureDataset({"code": range(4), "none": []})
    more = {"visits": np.ones(4), "excluded": {2}}
    assert read_weights(torch.tensor([1, 2, 8, 4]), data, "f", **more).tolist() == [0.25, 0.5, 0.0, 1.0]  # type: ignore[union-attr, arg-type]
    assert read_weights({"code": 3.0, "none": 5.0}, data, "f", **more) == (1.0, 0.0)  # type: ignore[arg-type]


class OwnOrder(trainwright.Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OwnLoader(trainwright.Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset)


def loss_alone(ledger: LedgerColumns) -> Any:
    return ledger.mean_loss


def loss_by_source(ledger: LedgerColumns) -> Any:
    return {name: ledger.mean_loss[ledger.source == name].mean() for name in ledger.sources}


def fails(ledger: LedgerColumns) -> Any:
    return ledger.mean_loss / ledger.no_such  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "function", "said"),
    [
        ({"mixture": {"code": 1, "chat": 1}}, len, "and mixture does too"),
        ({"max_tokens_per_batch": 64, "per_device_train_batch_size": 8}, len, "and max_tokens_per_batch does"),
        ({"train_sampling_strategy": "group_by_length"}, len, "train_sampling_strategy='group_by_length'"),
        ({"dataloader_in_order": False}, len, "dataloader_in_order=False"),
        ({"cls": OwnLoader}, len, "get_train_dataloader is overridden"),
        ({"cls": OwnOrder}, hard_first, "an override of _get_train_sampler"),
        (
            {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3},
            hard_first,
            r"2 workers and the loader read 7 batches ahead \(28 samples\).*Pass delay=7",
        ),
        (
            {},
            fails,
            r"fails, the weights_fn of the Curriculum, raised AttributeError: .*no_such.*called before training",
        ),
        ({}, lambda ledger: [1.0], r"<lambda> returned an array of shape \(1,\)"),
        ({}, loss_alone, r"loss_alone returned nan for samples without a visit \(called before training\).*nan_to_num"),
        ({}, loss_by_source, "loss_by_source returned nan for samples without a visit.*nan_to_num"),
    ],
)
def test_it_is_refused_before_step_1(settings: dict[str, Any], function: Any, said: str, tmp_path: Path) -> None:
    settings = dict(settings)
    data = {"code": rows()[:11], "chat": rows()[11:]}
    parts = {"cls": settings.pop("cls", None), "model": doubles.model(Notes)}
    with pytest.raises((ArgumentError, DataError), match=said):
        doubles.trainer(tmp_path, settings=settings, train_dataset=Curriculum(data, function, **STEPS), **parts).train()
    assert parts["model"].seen == []


# -- runs --------------------------------------------------------------------------------------------------------------


def test_losses_alone_are_weights_once_each_sample_has_a_visit(tmp_path: Path) -> None:
    """Called within the first epoch, they are refused before step 1; an epoch has six steps."""
    with pytest.raises(DataError, match="loss_alone returned nan for samples without a visit"):
        trained(tmp_path, Curriculum(rows(), loss_alone, every=5, delay=1))
    one = trained(tmp_path, Curriculum(rows(), loss_alone, every=6, delay=1), num_train_epochs=3)
    assert len(one.model.seen) == 3 * SIZE


def test_the_function_sees_the_ledger_and_hard_samples_come_more_often(tmp_path: Path) -> None:
    asked: list[LedgerColumns] = []

    def keeps(ledger: LedgerColumns) -> Any:
        asked.append(ledger)
        return hard_first(ledger)

    saves = {"save_strategy": "steps", "save_steps": 36, "num_train_epochs": 7, "ledger": True}
    one = trained(tmp_path, Curriculum(rows(), keeps, every=6, delay=1), **saves)
    seen = one.model.seen[: 6 * SIZE]
    columns = columns_in(
        read_table(tmp_path / "checkpoint-36" / FILES["ledger"])[0], tmp_path / "checkpoint-36" / FILES["ledger"]
    )
    assert sorted(seen[:SIZE]) == list(range(SIZE))  # the first epoch has each row once
    assert len(one.model.seen) == 7 * SIZE
    assert [ledger.step for ledger in asked] == [0, 6, 12, 18, 24, 30, 36]  # made up first; not after the last step, 42
    last = asked[-1]
    assert last.visits.tolist() == [seen.count(one) for one in range(SIZE)] == columns["visits"].tolist()
    assert last.last_step.max() == 36
    assert set(last.source) == {"train"}
    assert last.row.tolist() == last.sample.tolist() == list(range(SIZE))
    np.testing.assert_allclose(last.mean_loss, columns["loss_sum"] / columns["tokens"])
    ranks = np.argsort(np.argsort(last.mean_loss)), np.argsort(np.argsort(last.visits, kind="stable"))
    assert np.corrcoef(*ranks)[0, 1] > 0.8
    assert not any("loss/train" in entry for entry in one.state.log_history)


@pytest.mark.parametrize(("step", "workers"), [(2, 0), (4, 0), (6, 0), (10, 0), (4, 2), (10, 2)])
def test_a_run_that_was_cut_trains_the_same_samples(step: int, workers: int, whole: Any) -> None:
    """Before it is asked first, asked and not in force, with two askings pending, after some came into force."""
    before = whole[hard_first]
    checkpoint = Path(before.args.output_dir) / f"checkpoint-{step}"
    assert (checkpoint / FILES["curriculum"]).is_file()
    assert not (checkpoint / FILES["ledger"]).exists()
    resumed = trained(
        checkpoint.parent / f"{step}-{workers}",
        Curriculum(rows(), hard_first, **STEPS),
        resume=str(checkpoint),
        dataloader_num_workers=workers,
    )
    assert resumed.model.seen == before.model.seen[len(before.model.seen) - len(resumed.model.seen) :]
    assert len(resumed.model.seen) == 4 * SIZE - (step * 4 if step < 6 else step * 4 - 2)
    assert doubles.same(doubles.weights(resumed), doubles.weights(before))
    assert Counter(before.model.seen[60:]).most_common(1)[0][1] > 2  # weights count


@pytest.mark.parametrize("size", [2, 8])
def test_another_batch_size_trains_the_same_samples(size: int, whole: Any) -> None:
    before = whole[by_step]
    checkpoint = Path(before.args.output_dir) / "checkpoint-8"
    resumed = trained(
        checkpoint.parent / str(size),
        Curriculum(rows(), by_step, **STEPS),
        resume=str(checkpoint),
        per_device_train_batch_size=size,
    )
    assert resumed.model.seen == before.model.seen[30:]


def test_a_function_that_fails_is_asked_again_by_the_resume(
    tmp_path: Path, whole: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_once(ledger: LedgerColumns) -> Any:
        if ledger.step == 8:
            raise ZeroDivisionError("no luck")
        return hard_first(ledger)

    saves = {"save_strategy": "steps", "save_steps": 100, "save_on_exception": True}
    with pytest.raises(DataError, match=r"fails_once.*ZeroDivisionError: no luck \(called after step 8\)"):
        trained(tmp_path, Curriculum(rows(), fails_once, **STEPS), **saves)
    with caplog.at_level(logging.INFO, logger="trainwright.capabilities.curriculum.extension"):
        resumed = trained(tmp_path, Curriculum(rows(), hard_first, **STEPS), resume=True)
    assert resumed.model.seen == whole[hard_first].model.seen[30:]
    assert "Curriculum hard_first after step 8: 0 of 22 samples excluded, from sample 51 on." in caplog.messages
    callbacks = resumed.callback_handler
    assert [type(one).__name__ for one in callbacks.watchers] == ["JournalListener"]


def test_sources_by_loss_with_accumulation_and_a_list_of_steps(tmp_path: Path) -> None:
    """The function is asked before step 1 too; a source of weight 0 is left out; a cut changes nothing."""

    def function(ledger: LedgerColumns) -> Any:
        return {"code": 1.0, "chat": 0.0} if ledger.step == 0 else {"code": 0.25, "chat": 0.75}

    def data() -> Any:
        return Curriculum({"code": rows()[:11], "chat": rows()[11:]}, function, every=[0, 3], delay=1)

    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    saves = {"save_strategy": "steps", "save_steps": 3}
    one = trained(tmp_path, data(), **steps, **saves)
    seen = one.model.seen
    assert all(sample < 11 for sample in seen[:16])
    assert sorted(seen[:11]) == list(range(11))
    assert abs(sum(sample < 11 for sample in seen[20:60]) - 10) <= 2
    assert one.state.log_history[-2]["samples/chat"] > one.state.log_history[-2]["samples/code"]
    resumed = trained(tmp_path / "on", data(), resume=str(tmp_path / "checkpoint-3"), **steps)
    assert resumed.model.seen == seen[12:]
    assert doubles.same(doubles.weights(resumed), doubles.weights(one))


def test_samples_in_quarantine_have_no_weight(tmp_path: Path) -> None:
    class Quarantines(trainwright.TrainerCallback):
        trainer: Any

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                self.trainer.quarantine([7])

    (tmp_path / "quarantine.jsonl").write_text('{"sample": 3}\n')
    callback = Quarantines()
    data = Curriculum(rows(), lambda ledger: np.ones(SIZE), every=6, delay=1)
    one = doubles.trainer(
        tmp_path, settings={"max_steps": 24}, model=doubles.model(Notes), train_dataset=data, callbacks=[callback]
    )
    callback.trainer = one
    one.train()
    seen = one.model.seen
    assert 3 not in seen
    assert 7 not in seen[24:]
    counts = Counter(seen[26:46])  # a round of 22 has each of the other 20 samples once or twice
    assert set(counts.values()) <= {1, 2}
    assert counts[4] + counts[8] < 4  # which would stand in for 3 and 7


def test_what_a_checkpoint_lacks_or_has_of_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    trained(tmp_path, rows(), **plain)
    checkpoint = str(tmp_path / "checkpoint-4")
    one = trained(
        tmp_path / "new",
        Curriculum(rows(), by_step, **STEPS),
        resume=checkpoint,
        max_steps=12,
        **{name: value for name, value in plain.items() if name != "max_steps"},
    )
    assert f"{checkpoint} has no curriculum weights" in caplog.text
    whole = trained(tmp_path / "whole", rows(), max_steps=6)
    assert one.model.seen[:6] == whole.model.seen[16:]  # the epoch is finished in its order
    with pytest.raises(DataError, match="order of a curriculum"):
        trained(tmp_path / "back", rows(), resume=str(tmp_path / "new" / "checkpoint-8"), max_steps=12)
    fewer = trained(
        tmp_path / "fewer",
        Curriculum(rows()[:20], by_step, **STEPS),
        resume=str(tmp_path / "new" / "checkpoint-8"),
        max_steps=12,
    )
    assert "has curriculum weights for other data" in caplog.text
    assert len(fewer.model.seen) == 16
    torch.save({"asked": 4, "steps": [22]}, tmp_path / "new" / "checkpoint-8" / FILES["curriculum"])
    sign_again(tmp_path / "new" / "checkpoint-8")
    with pytest.raises(CheckpointError, match="not the state of a curriculum"):
        trained(
            tmp_path / "bad",
            Curriculum(rows(), by_step, **STEPS),
            resume=str(tmp_path / "new" / "checkpoint-8"),
            max_steps=12,
        )


def test_second_run_starts_from_nothing_and_the_order_can_be_read_before(tmp_path: Path) -> None:
    one = doubles.trainer(
        tmp_path,
        settings={"max_steps": 9},
        model=doubles.model(Notes),
        train_dataset=Curriculum(rows(), lambda ledger: ledger.visits, every=4, delay=2),
        callbacks=[StopAt(8)],
    )
    assert isinstance(as_mixture(one.train_dataset), MixtureDataset)
    order = one.get_train_dataloader().batch_sampler.order
    first = [*order.indices(0), *order.indices(1)]
    one.train()
    one.train()
    assert one.model.seen[:24] == one.model.seen[30:54] == first[:24]


class EndsEpochs(trainwright.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


def test_epochs_of_another_length_than_the_data(tmp_path: Path) -> None:
    """A callback ends them after a step, or the last batch is dropped; weights are asked for all the same."""
    steps: list[int] = []

    def function(ledger: LedgerColumns) -> Any:
        steps.append(ledger.step)
        return (ledger.sample == ledger.step).astype(int)

    data = Curriculum(rows(), function, every=2, delay=1)
    one = trained(tmp_path, data, callbacks=[EndsEpochs()], num_train_epochs=3)
    assert steps == [0, 6, 12, 18]  # of the steps that an epoch would have had
    assert one.model.seen[8:] == [6] * 4  # in force since sample 26, and the third epoch begins at 44
    steps.clear()
    saves = {"save_strategy": "steps", "save_steps": 5, "dataloader_drop_last": True, "num_train_epochs": 2}
    one = trained(tmp_path / "drop", Curriculum(rows(), function, every=5, delay=1), **saves)
    assert steps == [0, 5]
    assert one.model.seen[24:] == [5] * 16
    again = Curriculum(rows(), function, every=5, delay=1)
    resumed = trained(tmp_path / "on", again, resume=str(tmp_path / "drop" / "checkpoint-5"), **saves)
    assert resumed.model.seen == one.model.seen[20:]


def of_two_ranks(folder: str) -> None:
    calls = []

    def counted(ledger: LedgerColumns) -> Any:
        calls.append(ledger.step)
        epochs, steps = divmod(ledger.step, 6)
        assert ledger.visits.sum() == SIZE * epochs + 4 * steps or len(calls) == 1  # of both processes
        return by_step(ledger)

    settings = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 10}
    one = trained(folder, Curriculum(rows(), counted, **STEPS), **settings)
    tell(seen=one.model.seen, calls=calls)


@pytest.mark.process
def test_two_processes_have_the_weights_of_the_first(tmp_path: Path, whole: Any) -> None:
    script = (
        "import sys\nfrom tests.capabilities.curriculum.test_curriculum import of_two_ranks\nof_two_ranks(sys.argv[1])"
    )
    told = run(script, str(tmp_path / "out"), folder=tmp_path).told
    expected = whole[by_step].model.seen
    parts = [told[rank]["seen"] for rank in (0, 1)]
    seen: list[int] = []
    while parts[0]:
        size = 1 if len(seen) % SIZE == 20 else 2  # the tail of 2 is shared
        for part in parts:
            seen += part[:size]
            del part[:size]
    assert seen == expected
    assert [one["calls"] for one in told] == [[0, 4, 8, 12, 16, 20], []]
    resumed = trained(
        tmp_path / "one", Curriculum(rows(), by_step, **STEPS), resume=str(tmp_path / "out" / "checkpoint-10")
    )
    assert resumed.model.seen == expected[38:]


def test_run_that_is_killed_between_two_saves_trains_what_it_would_have(tmp_path: Path, whole: Any) -> None:
    saves = {"save_strategy": "steps", "save_steps": 5}
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, Curriculum(rows(), hard_first, **STEPS), callbacks=[Stops(9)], **saves)
    resumed = trained(tmp_path, Curriculum(rows(), hard_first, **STEPS), resume=True, **saves)
    assert resumed.model.seen == whole[hard_first].model.seen[20:]


def test_a_pickle_that_names_the_former_module_loads() -> None:
    curriculum = Curriculum([1, 2], np.zeros_like, every=3)
    written = pickle.dumps(curriculum, protocol=0)
    now = b"trainwright.capabilities.curriculum.curriculum"
    assert now in written
    assert pickle.loads(written.replace(now, b"trainwright.data.curriculum")) == curriculum
