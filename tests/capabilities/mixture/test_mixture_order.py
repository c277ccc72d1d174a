"""Shares of sources: exact in every window, computed at any position, the same through resumes of every kind."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.capabilities.mixture.dataset import MixtureDataset
from trainwright.capabilities.mixture.order import MixtureOrder, ShareCurve, mixture_order
from trainwright.capabilities.mixture.plan import MixturePlan
from trainwright.capabilities.packing.plan import RowPlan
from trainwright.capabilities.quarantine.sample_filter import QuarantinedSamples
from trainwright.capabilities.token_budget.plan import BudgetPlan
from trainwright.config.plans import LoaderPlan, SamplingPlan
from trainwright.data.batches import EpochBatches
from trainwright.data.dataloader import build_dataloader
from trainwright.data.sampler_factory import training_order
from trainwright.data.shards import RankShare
from trainwright.errors import ArgumentError, CheckpointError, DataError

from ..._support.small import Diary, StopAt, data, make_trainer, module, trained_trainer

THREE = MixtureDataset({"a": range(1_000), "b": range(10_000), "c": range(100_000)})
SHARES = {"a": 0.6, "b": 0.3, "c": 0.1}
STAGES = [(0, SHARES), (3_000, {"a": 0.0, "b": 0.2, "c": 0.8}), (6_000, {"a": 0.5, "b": 0.5, "c": 0.0})]


def flat(lists: Any) -> list[Any]:
    return [*itertools.chain.from_iterable(lists)]


def order_of(*stages: Any, dataset: MixtureDataset = THREE, seed: int = 1, **settings: Any) -> MixtureOrder:
    """The order for runs of steps of 8 samples, of two epochs."""
    lengths = settings.pop("lengths", None)
    plan: dict[str, Any] = {"is_linear": False, "unit": "samples", "samples_per_step": 8, "num_steps": None}
    asked = MixturePlan(stages=tuple(stages), num_epochs=2, **{**plan, **settings})
    return mixture_order(dataset, asked, seed=seed, shuffles=True, lengths=lengths)


def sources(indices: Any, dataset: MixtureDataset = THREE) -> Any:
    return np.searchsorted(dataset.offsets[1:], indices, side="right")


def test_each_source_has_its_share_in_every_window_of_a_thousand() -> None:
    order = order_of((0, SHARES))
    found = sources(order.at(0, 2 * len(order)))
    assert len(order) == 111_000
    for source, share in enumerate(SHARES.values()):
        before = np.concatenate([[0], np.cumsum(found == source)])
        windows = before[1000:] - before[:-1000]
        assert abs(windows - 1000 * share).max() <= 0.01 * 1000 * share
    seen = order.at(0, 5_000)
    passes = seen[sources(seen) == 0].reshape(3, 1_000)
    assert [sorted(one) for one in passes.tolist()] == [[*range(1_000)]] * 3, "no row again before the pass is over"
    assert (passes[0] != passes[1]).mean() > 0.99
    assert passes[0].tolist() != order_of((0, SHARES), seed=2).at(0, 1_700)[:1_000].tolist()


def test_many_sources_are_within_a_sample_of_their_shares_at_any_position() -> None:
    draw = random.Random(0)
    shares = {str(i): draw.random() for i in range(20)}
    dataset = MixtureDataset({name: range(50) for name in shares})
    found = sources(order_of((0, shares), dataset=dataset).at(0, 20_000), dataset)
    for source, share in enumerate(shares.values()):
        aim = np.arange(1, 20_001) * share / sum(shares.values())
        assert abs(np.cumsum(found == source) - aim).max() < 1.5


@pytest.mark.parametrize("is_linear", [False, True])
def test_it_begins_anywhere(is_linear: bool) -> None:
    order = order_of(*STAGES, is_linear=is_linear)
    whole = order.at(0, 2 * len(order))
    for position in (0, 1, 23_999, 24_000, 24_001, 65_535, 65_536, 110_999, 111_000, 130_001):
        assert order.at(position, position + 40).tolist() == whole[position : position + 40].tolist()
    epoch = 1
    first = 19_001
    assert [*itertools.islice(order.indices_from(epoch, first), 9)] == whole[111_000 + first :][:9].tolist()


def test_a_schedule_has_the_shares_of_its_stages_or_between_them() -> None:
    staged = order_of(*STAGES)
    linear = order_of(*STAGES, is_linear=True)

    def counts(order: MixtureOrder, at: int) -> list[int]:
        return np.bincount(sources(order.at(at, at + 1_000)), minlength=3).tolist()

    assert [counts(staged, at) for at in (0, 22_900, 24_100, 46_900, 48_100)] == [
        [600, 300, 100],
        [600, 300, 100],
        [0, 200, 800],
        [0, 200, 800],
        [500, 500, 0],
    ]
    for at, expected in ((0, [590, 298, 112]), (11_500, [300, 250, 450]), (48_100, [500, 500, 0])):
        assert np.abs(np.subtract(counts(linear, at), expected)).max() <= 4
    by_share = order_of((0, SHARES), (0.5, {"a": 0.0, "b": 0.0, "c": 1.0}))
    assert [counts(by_share, at)[2] for at in (109_900, 111_100)] == [100, 1_000]


def test_passes_are_exact_in_each_epoch_beside_shares() -> None:
    dataset = MixtureDataset({"a": range(100), "b": range(300), "c": range(1_000), "d": range(7)})
    order = order_of((0, {"a": "2 epochs", "b": "all", "c": 0.2, "d": "0 epochs"}), dataset=dataset)
    assert len(order) == 625
    for epoch in (0, 1, 7):
        visits = Counter(order.indices(epoch))
        assert [visits[index] for index in range(400)] == [2] * 100 + [1] * 300
        assert sum(visits[index] for index in range(400, 1_400)) == 125
        assert not any(visits[index] for index in range(1_400, 1_407))
    assert [round(one.visits, 2) for one in order.uses(2)] == [4, 2, 0.25, 0]


def test_shares_of_tokens() -> None:
    draw = np.random.default_rng(0)
    lengths = np.concatenate([draw.integers(1, 20, 1_000), draw.integers(50, 500, 10_000), np.full(100_000, 9)])
    order = order_of((0, SHARES), unit="tokens", lengths=lengths)
    for first in (0, 50_000):
        chosen = order.at(first, first + 50_000)
        tokens = np.bincount(sources(chosen), weights=lengths[chosen])
        assert tokens / tokens.sum() == pytest.approx([*SHARES.values()], abs=0.005)


def test_another_mixture_changes_nothing_before_its_position() -> None:
    for seed in range(12):
        draw = np.random.default_rng(seed)
        one, other = ({name: draw.random() for name in "abc"} for _ in range(2))
        first = order_of((0, one), (700, other), is_linear=bool(seed % 2))
        second = order_of((0, other), (900, one))
        position = int(draw.integers(1, 9_000))
        whole = first.at(0, 9_000)
        first.curve = ShareCurve.from_json(first.curve.then(second.curve, position).to_json())
        assert first.at(0, position).tolist() == whole[:position].tolist()
        both = first.at(0, 9_000)
        rows = both[sources(both) == 2]
        assert len(set(rows.tolist())) == len(rows), "the large source continues where it was"
        mixed = sources(first.at(position + 50, 30_000))
        until = sources(second.at(position + 50, 30_000))
        assert abs(np.bincount(mixed) - np.bincount(until)).max() <= 4


# -- through loaders and runs ------------------------------------------------------------------------------------------


def batches_of(order: Any, size: int, *, ranks: int = 1, first: int = 0) -> list[list[int]]:
    """The samples of each batch of all ranks, from a sample of the first epoch on."""
    found = []
    for rank in range(ranks):
        share = RankShare(batch_size=size, rank=rank, num_processes=ranks)
        batches = EpochBatches(order, size, share=share)
        batches.seek(0, first)
        found.append(list(batches))
    return [flat(parts) for parts in zip(*found, strict=True)]


def test_batches_of_any_size_and_number_of_ranks_are_of_one_order() -> None:
    dataset = MixtureDataset({"a": range(31), "b": range(60)})
    order = order_of((0, {"a": 0.5, "b": 0.5}), dataset=dataset)
    whole = [*order.indices(0)]
    assert flat(batches_of(order, 4)) == whole
    assert flat(batches_of(order, 2, ranks=2, first=36)) == whole[36:]
    assert flat(batches_of(order, 7, first=36)) == whole[36:]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
@pytest.mark.parametrize("mixture", [None, {"a": 0.5, "b": 0.5}])
def test_a_union_is_exact_for_ranks_workers_and_a_resume(mixture: Any, workers: int) -> None:
    """Half an epoch in batches of 4 on one rank, the rest in batches of 3 on two."""
    dataset = MixtureDataset({"a": [("a", i) for i in range(31)], "b": [("b", i) for i in range(60)]})
    plan = MixturePlan(
        stages=((0, mixture or {}),), is_linear=False, unit="samples", samples_per_step=4, num_steps=None, num_epochs=1
    )
    sampling = SamplingPlan(
        strategy="random", batch_size=4, micro_batches=1, num_processes=1, seed=5, order=plan if mixture else None
    )

    def rows(size: int, rank: int, ranks: int, first: int) -> list[list[Any]]:
        how = LoaderPlan(batch_size=size, seed=5, workers=workers, rank=rank, num_processes=ranks, is_training=True)
        sampler = training_order(dataset, sampling)
        loader = build_dataloader(dataset, how, sampler=sampler, collate=list)
        loader.batch_sampler.seek(0, first)  # type: ignore[union-attr]
        return [*loader.host_batches()]

    whole = flat(rows(4, 0, 1, 0))
    halves = [flat(map(list, rows(3, rank, 2, 49))) for rank in (0, 1)]
    assert Counter(whole[:49] + halves[0] + halves[1]) == Counter(whole)
    if mixture is None:
        assert Counter(whole) == Counter([*dataset.sources["a"], *dataset.sources["b"]])
    else:
        assert abs(sum(name == "a" for name, _ in whole) - 45.5) <= 1


class Rows(Diary):
    """Rows of a source in a diary that several share."""

    def __init__(self, items: list[Any], first: int, reads: list[int]) -> None:
        super().__init__(items)
        self.first = first
        self.reads = reads

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        self.reads[-1] += self.first
        return self.items[index]


def read_by(folder: Path, *, stop_at: int = 999, resume: Any = None, **settings: Any) -> tuple[list[int], Any]:
    """The global indices in the order of training (one batch is fetched ahead), and the trainer."""
    # type: ignore[var-annotated]
    items = data.vectors(26)
    reads = []
    sets = {"a": Rows(items[:6], 0, reads), "b": Rows(items[6:], 6, reads)}
    settings = {"model": module(0.0), "num_train_epochs": 3, **settings}
    trainer = trained_trainer(folder, train_dataset=sets, callbacks=[StopAt(stop_at)], resume=resume, **settings)
    return reads, trainer


BY_STEPS = {"mixture_schedule": [(0, {"a": 0.5, "b": 0.5}), (4, {"a": 0.0, "b": 1.0}), (9, {"a": 0.9, "b": 0.1})]}


@pytest.mark.parametrize(
    "settings",
    [{"mixture": {"a": 0.5, "b": 0.5}}, {"mixture": {"a": "2 epochs", "b": "all"}}, BY_STEPS],
    ids=["shares", "passes", "schedule"],
)
def test_a_resume_with_another_batch_size_continues_the_order(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = read_by(tmp_path / "whole", **settings)
    read_by(tmp_path / "two", stop_at=5, **settings)
    seen, _ = read_by(tmp_path / "two", resume=True, per_device_train_batch_size=2, **settings)
    assert seen == whole[20:]
    cursor = json.loads((tmp_path / "two" / "checkpoint-5" / "manifest.json").read_text())["cursor"]
    assert cursor["order"]["kind"] == "mixture"


def test_another_mixture_on_a_resume(tmp_path: Path) -> None:
    """At once for shares; an epoch that is under way is finished from and to a union."""
    half = {"mixture": {"a": 0.5, "b": 0.5}}
    few = {"mixture": {"a": 0.1, "b": 0.9}}
    whole = {name: read_by(tmp_path / name, **how)[0] for name, how in (("half", half), ("union", {}))}
    for start, how, now in (("half", half, few), ("half", half, {}), ("union", {}, half)):
        folder = tmp_path / f"from {start} {len(now)} {now == few}"
        read_by(folder, stop_at=3, save_strategy="no", **how)
        seen, _ = read_by(folder, resume=True, **now)
        if now == few:
            assert sum(index < 6 for index in seen[:40]) == pytest.approx(4, abs=2)
            rows = [index for index in whole[start][:12] + seen if index >= 6]
            assert len(set(rows[:20])) == 20, "no row of b again before its pass is over"
        else:
            assert seen[:14] == whole[start][12:26]
        if not now:
            assert sorted(seen[14:40]) == [*range(26)]
        if start == "union":
            assert sum(index < 6 for index in seen[14:40]) == 13


TOKENS: dict[str, Any] = {"strategy": "random", "micro_batches": 1, "num_processes": 1, "seed": 3}


@pytest.mark.parametrize(
    "how",
    [
        {"batching": BudgetPlan(text="budget", max_tokens=64), "batch_size": 8},
        {"batching": RowPlan(text="rows", row_length=64), "batch_size": 2},
    ],
    ids=["budget", "packing"],
)
def test_batches_formed_by_length_keep_shares_and_resume(how: dict[str, Any]) -> None:
    draw = random.Random(1)
    items = [{"input_ids": [0] * draw.randrange(1, 40)} for _ in range(4_000)]
    dataset = MixtureDataset({"a": items[:500], "b": items[500:]})
    stages = ((0, {"a": 0.6, "b": 0.4}), (0.5, {"a": 0.1, "b": 0.9}))
    mixture = MixturePlan(
        stages=stages, is_linear=False, unit="samples", samples_per_step=8, num_steps=None, num_epochs=2
    )
    order: Any = training_order(dataset, SamplingPlan(**TOKENS, **how, order=mixture))
    again: Any = training_order(dataset, SamplingPlan(**TOKENS, **how, order=mixture))
    assert len(order) < 4_000 / 2

    def samples(group: list[Any]) -> list[int]:
        return [
            one if isinstance(one, int) else one[0] for row in group for one in ([row] if isinstance(row, int) else row)
        ]

    epochs = [[samples(group) for group in order.indices(epoch)] for epoch in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [len(order)] * 2
    assert Counter(flat(epochs[0])) == Counter(order.mixture.indices(0)), "epoch 1 has its samples, each as often"
    assert [sum(one < 500 for one in flat(epoch[:40])) / len(flat(epoch[:40])) for epoch in epochs] == [
        pytest.approx(0.6, abs=0.1),
        pytest.approx(0.1, abs=0.06),
    ]
    assert [samples(group) for group in again.indices_from(1, 30)] == epochs[1][30:]
    batches = EpochBatches(again, 1, share=RankShare(batch_size=1, rank=1, num_processes=2))
    batches.seek(0, 10)
    assert samples(next(iter(batches))[0]) == epochs[0][11]


@pytest.mark.costly  # a language model packs rows twice
def test_packing_trains_a_mixture_and_resumes(tmp_path: Path) -> None:
    from ...resume.test_resume_order import PACKED, recorder

    mixture = {"mixture": {"a": 0.7, "b": 0.3}, **PACKED}

    def seen(folder: Path, stop_at: int = 999, **how: Any) -> list[int]:
        trainer = recorder(folder, StopAt(stop_at), **mixture, sources=True)
        trainer.train(**how)
        return trainer.seen  # type: ignore[no-any-return]

    whole = seen(tmp_path / "whole")
    first = seen(tmp_path / "two", 3)
    assert first + seen(tmp_path / "two", resume_from_checkpoint=True) == whole


# -- what is refused or said -------------------------------------------------------------------------------------------


def test_shares_fit_the_datasets(tmp_path: Path) -> None:
    items = data.vectors(6)
    two = {"code": items[:4], "chat": items[4:]}
    for said, mixture, dataset in (
        ("Did you mean code", {"cod": 1, "chat": 1}, two),
        ("no share for 'chat'", {"code": 1}, two),
        ("train_dataset is a list", {"code": 1}, items),
        ("'none', which has no sample", {"code": 1, "none": 1}, {"code": items, "none": []}),
    ):
        with pytest.raises(ArgumentError, match=said):
            make_trainer(tmp_path, train_dataset=dataset, mixture=mixture)
    make_trainer(tmp_path, train_dataset={"code": items, "none": []}, mixture={"code": 1, "none": 0})


def test_an_order_of_ones_own_beside_a_mixture_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset={"a": data.vectors(8)}, mixture={"a": 1})
    trainer._get_train_sampler = lambda dataset=None: range(8)
    with pytest.raises(ArgumentError, match="mixture has no effect"):
        trainer.train()


def test_lines_about_the_sources(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    read_by(tmp_path, mixture={"a": 0.9, "b": 0.1}, num_train_epochs=2, save_strategy="no", log_level="info")
    shown = caplog.text + capsys.readouterr().out
    assert "source    a: 6 rows, 90.0% of the samples, 7.83 visits of each row" in shown
    assert "each row of 'a' is seen 7.83 times" in caplog.text
    assert "25 % of the rows of 'b'" in caplog.text


GOOD = [[0, [0.5, 0.5], [0.5, 0.5]], [8, [1.0, 0.0], [1.0, 0.0]]]
STRANGE_SHARES = {
    "no JSON": "[[0",
    "no list": '{"0": [0.5, 0.5]}',
    "nothing": "[]",
    "a text as a position": json.dumps([["0", *GOOD[0][1:]]]),
    "a first position above 0": json.dumps(GOOD[1:]),
    "positions out of order": json.dumps([GOOD[0], GOOD[0]]),
    "another number of sources": json.dumps([GOOD[0], [8, [1.0], [1.0]]]),
    "no number": json.dumps([[0, ["a", "b"], [0.5, 0.5]]]),
    "not a number": "[[0, [NaN, 0.5], [0.5, 0.5]]]",
    "a share below 0": json.dumps([[0, [-1.0, 2.0], [0.5, 0.5]]]),
    "a sum below 1": json.dumps([[0, [0.1, 0.1], [0.5, 0.5]]]),
    "deep": "[" * 10_000,
}


@pytest.mark.parametrize("name", STRANGE_SHARES)
def test_shares_that_no_run_writes_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="shares of a mixture in the checkpoint"):
        ShareCurve.from_json(STRANGE_SHARES[name])


def test_shares_that_a_run_writes_are_read() -> None:
    assert ShareCurve.from_json(json.dumps(GOOD)).to_json() == json.dumps(GOOD)


def test_a_row_in_quarantine_gives_its_place_to_another_of_its_source() -> None:
    batches = EpochBatches(order_of((0, SHARES)), 10)
    before = flat(batches)
    left_out = {*range(100, 1_000), 1_000, 10_999, 11_000, 20_000}
    batches.exclude(QuarantinedSamples(frozenset(left_out)), len(THREE))
    batches.seek(0)
    after = flat(batches)
    assert not left_out & set(after)
    assert left_out & set(before)
    assert sources(after).tolist() == sources(before).tolist()
    assert all(old == new for old, new in zip(before, after, strict=True) if old not in left_out)


def test_another_mixture_of_formed_batches_is_refused_within_an_epoch() -> None:
    items = [{"input_ids": [0] * 4}] * 40
    dataset = MixtureDataset({"a": items[:20], "b": items[20:]})
    budget = BudgetPlan(text="budget", max_tokens=16)
    orders = []
    for share in (0.2, 0.4):
        mixture = MixturePlan(
            stages=((0, {"a": share, "b": 1 - share}),),
            is_linear=False,
            unit="samples",
            samples_per_step=8,
            num_steps=None,
            num_epochs=1,
        )
        orders.append(training_order(dataset, SamplingPlan(**TOKENS, batching=budget, batch_size=8, order=mixture)))
    loaders = [
        build_dataloader(dataset, LoaderPlan(batch_size=8, seed=3, is_training=True), sampler=one, collate=list)
        for one in orders
    ]
    from trainwright.data.cursor import WindowSize
    from trainwright.data.positions import make_position

    size = WindowSize(chunk=1, micro_batches=1)
    before, now = map(make_position, loaders)
    assert before.check_resume(before.cursor(0, 3), before=size, now=size, dataset=dataset) == ""
    with pytest.raises(DataError, match="another mixture"):
        now.check_resume(before.cursor(0, 3), before=size, now=size, dataset=dataset)
    assert now.check_resume(before.cursor(1, 0), before=size, now=size, dataset=dataset) == ""
