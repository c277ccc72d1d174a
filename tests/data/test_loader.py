"""The loader: batches from any position, one ahead of what is trained, reading nothing that was trained already."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate.state import GradientState
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, default_data_collator

from trainwright.checkpoint import rng
from trainwright.config.plans import LoaderPlan
from trainwright.data.columns import RemoveColumnsCollator
from trainwright.data.cursor import Cursor
from trainwright.data.dataloader import build_dataloader
from trainwright.data.loader import Loader, may_draw_in_this_process
from trainwright.data.prepared_dataloader import PreparedDataLoader
from trainwright.data.seeding import enable_full_determinism, seed_worker, set_seed

from .._support import forked
from .._support.small import Augmented, Diary, data, make_trainer


def loader_over(dataset: Any, *, collate: Any = default_data_collator, **plan: Any) -> Loader:
    from torch.utils.data import RandomSampler

    sampler = None if isinstance(dataset, IterableDataset) else RandomSampler(dataset)
    settings = {"batch_size": 4, "seed": 3, "is_training": True} | plan
    dataloader = build_dataloader(dataset, LoaderPlan(**settings), sampler=sampler, collate=collate)
    return Loader(dataloader, random_state=rng.capture, set_random_state=rng.restore)


def labels(batches: Any) -> list[list[int]]:
    return [batch["labels"].tolist() for batch in batches]


def numbered(size: int) -> list[dict[str, Any]]:
    return [{"x": torch.tensor([float(i)]), "labels": i} for i in range(size)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epoch", [0, 1])
def test_from_every_position_come_the_batches_that_are_left(epoch: int, workers: int) -> None:
    whole = labels(loader_over(numbered(18)).epoch(epoch))
    positions = range(len(whole) + 1) if workers == 0 else (2,)
    for position in positions:
        loader = loader_over(numbered(18), workers=workers)
        assert labels(loader.epoch(epoch, skip_batches=position)) == whole[position:]


def test_epochs_differ_and_are_the_same_for_one_seed() -> None:
    loader = loader_over(numbered(18))
    first = labels(loader.epoch(0))
    second = labels(loader.epoch(1))
    assert first != second
    assert labels(loader.epoch(0)) == first
    assert labels(loader_over(numbered(18), seed=4).epoch(0)) != first


def test_one_batch_is_fetched_ahead_and_no_more() -> None:
    diary = Diary(numbered(18))
    read = []
    for _ in loader_over(diary).epoch(0):
        read.append(len(diary.reads))
    assert read == [8, 12, 16, 18, 18]


def test_nothing_is_read_to_get_to_a_position() -> None:
    diary = Diary(numbered(18))
    loader = loader_over(diary)
    whole = [index for batch in labels(loader_over(numbered(18)).epoch(0)) for index in batch]
    list(loader.epoch(0, skip_batches=3))
    assert diary.reads == whole[12:]


def test_a_stream_is_read_from_its_start_and_only_once() -> None:
    class Counted(data.Stream):
        reads = 0

        def __iter__(self) -> Iterator[Any]:
            for item in self._items:
                self.reads += 1
                yield item

    stream = Counted(numbered(18))
    assert labels(loader_over(stream).epoch(0, skip_batches=3)) == [[12, 13, 14, 15], [16, 17]]
    assert stream.reads == 18


def test_an_epoch_that_was_left_early_does_not_disturb_the_next() -> None:
    loader = loader_over(numbered(18))
    expected = labels(loader_over(numbered(18)).epoch(1))
    next(loader.epoch(0))
    assert labels(loader.epoch(1)) == expected


def test_after_first_is_called_between_the_first_fetch_and_the_second() -> None:
    diary = Diary(numbered(18))
    calls = []
    batches = loader_over(diary).epoch(0, skip_batches=1, after_first=lambda: calls.append(len(diary.reads)))
    next(batches)
    assert calls == [4]


@pytest.mark.parametrize(("batches", "expected"), [(0, (2, 0)), (1, (2, 4)), (4, (2, 16)), (5, (3, 0)), (6, (3, 0))])
def test_the_cursor_counts_samples(batches: int, expected: tuple[int, int]) -> None:
    """Five batches in an epoch of 18: the end of one is the beginning of the next."""
    cursor = loader_over(numbered(18)).cursor(2, batches, batches_per_epoch=5)
    assert (cursor.epoch, cursor.samples, cursor.seed) == (*expected, 3)
    assert Cursor.from_dict(cursor.to_dict()) == cursor


def test_it_answers_for_the_dataloader_within() -> None:
    loader = loader_over(numbered(18))
    assert len(loader) == 5
    assert loader.dataset is loader.dataloader.dataset
    assert loader.collate_fn is default_data_collator
    assert len(labels(loader)) == 5
    with pytest.raises(AttributeError):
        loader.nonsense  # noqa: B018


# -- what a resume needs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_a_batch_that_lay_ready_is_drawn_again_the_same(position: int) -> None:
    """Augmentation of the batch ahead had already drawn when the state was saved."""
    set_seed(5)
    loader = loader_over(Augmented(data.vectors(18)))
    batches = loader.epoch(0)
    for _ in range(position + 1):
        next(batches)
    saved = rng.capture()
    randomness = loader.state()
    rest = [batch["x"] for batch in batches]
    after = rng.capture()
    set_seed(99)
    second = loader_over(Augmented(data.vectors(18)))
    second.resume(Cursor(epoch=0, samples=4 * (position + 1), seed=3), randomness)
    again = second.epoch(0, skip_batches=position + 1, after_first=lambda: rng.restore(saved))
    assert all(torch.equal(a, b) for a, b in zip([batch["x"] for batch in again], rest, strict=True))
    assert str(rng.capture()) == str(after)


def test_the_seed_of_the_interrupted_run_counts() -> None:
    expected = labels(loader_over(numbered(18), seed=3).epoch(0, skip_batches=2))
    other = loader_over(numbered(18), seed=77)
    other.resume(Cursor(epoch=0, samples=8, seed=3), other.state())
    assert labels(other.epoch(0, skip_batches=2)) == expected


# -- who may draw ----------------------------------------------------------------------------------------------------


def columns(transform: bool = False) -> Any:
    dataset = datasets.Dataset.from_dict({"labels": [1, 2, 3, 4]})
    if transform:
        dataset.set_transform(lambda batch: batch)
    return dataset


def tokens() -> Any:
    return data.tokenizer()


MAY_DRAW: list[tuple[str, Callable[[], Any], bool]] = [
    ("a list", lambda: loader_over(numbered(4)), False),
    ("tensors", lambda: loader_over(TensorDataset(torch.ones(4))), False),
    ("columns", lambda: loader_over(columns()), False),
    ("columns as tensors", lambda: loader_over(columns().with_format("torch")), False),
    ("padding", lambda: loader_over(numbered(4), collate=DataCollatorWithPadding(tokens())), False),
    (
        "columns taken away",
        lambda: loader_over(numbered(4), collate=RemoveColumnsCollator(default_data_collator, [])),
        False,
    ),
    ("workers, which draw elsewhere", lambda: loader_over(Augmented(numbered(4)), workers=1), False),
    ("a class of the user's", lambda: loader_over(Augmented(numbered(4))), True),
    ("a stream", lambda: loader_over(data.Stream(numbered(4))), True),
    ("columns with a transform", lambda: loader_over(columns(transform=True)), True),
    ("masking", lambda: loader_over(numbered(4), collate=DataCollatorForLanguageModeling(tokens())), True),
    (
        "masking behind columns taken away",
        lambda: loader_over(numbered(4), collate=RemoveColumnsCollator(DataCollatorForLanguageModeling(tokens()), [])),
        True,
    ),
    ("a function of the user's", lambda: loader_over(numbered(4), collate=lambda items: items), True),
    ("a part of a known function", lambda: loader_over(numbered(4), collate=partial(default_data_collator)), True),
    (
        "an iterable that is no DataLoader",
        lambda: Loader([1], random_state=rng.capture, set_random_state=rng.restore),
        True,
    ),
]


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in MAY_DRAW], ids=[case[0] for case in MAY_DRAW])
def test_only_what_is_known_not_to_draw_is_trusted(make: Callable[[], Loader], expected: bool) -> None:
    assert may_draw_in_this_process(make().dataloader) is expected


# -- seeds -----------------------------------------------------------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_set_seed_seeds_all_three() -> None:
    set_seed(8)
    first = draws()
    assert draws() != first
    set_seed(8)
    assert draws() == first


def test_the_seeds_of_transformers() -> None:
    import transformers

    set_seed(31)
    ours = draws()
    transformers.set_seed(31)
    assert draws() == ours


def test_a_worker_is_seeded_from_its_torch_seed_apart_from_other_ranks() -> None:
    from transformers.trainer_utils import seed_worker as original

    seen = []
    for rank in (0, 1, 2):
        for function in (seed_worker, original):
            torch.manual_seed(123)
            function(0, num_workers=2, rank=rank)
            seen.append(draws())
    assert seen[0::2] == seen[1::2]
    assert len({*seen}) == 3


class SeedOf(Diary):
    """Tells what a worker draws from each generator."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"labels": torch.tensor(draws(), dtype=torch.float64)}


@pytest.mark.process
def test_workers_draw_differently_and_the_same_again() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        loader = loader_over(SeedOf(numbered(8)), workers=2)
        runs.append(torch.cat([batch["labels"] for batch in loader.epoch(0)]))
    assert torch.equal(runs[0], runs[1])
    assert len({*map(tuple, runs[0].tolist())}) == 8
    for column in runs[0].T.tolist():
        assert len({*column}) == 8, "one of the three generators is the same in both workers"


def test_full_determinism_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *a, **k: asked.append((a, k)))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    enable_full_determinism(4, warn_only=True)
    first = draws()
    set_seed(4)
    assert draws() == first
    assert asked == [((True,), {"warn_only": True})]
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)


def test_full_determinism_sets_what_the_original_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *a, **k: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    found: list[dict[str, str]] = []
    for enable in (transformers.enable_full_determinism, enable_full_determinism):
        environment: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", environment)
        enable(4)
        found.append(environment)
    theirs, ours = found
    assert ours == theirs
    assert "FLASH_ATTENTION_DETERMINISTIC" in ours


# -- through a trainer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing_for_data_that_draws_nothing(workers: int, tmp_path: Path) -> None:
    from .._support.small import differing, weights

    plain = make_trainer(tmp_path, num_train_epochs=1)
    plain.train()
    other = make_trainer(tmp_path, num_train_epochs=1, dataloader_num_workers=workers)
    other.train()
    assert differing(weights(other.model), weights(plain.model)) == {}


def test_a_dataloader_of_the_users_own(tmp_path: Path) -> None:
    from trainwright import Trainer

    diary = Diary(data.vectors(12))

    class Own(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(diary, batch_size=3, collate_fn=default_data_collator)

    make_trainer(tmp_path, cls=Own, num_train_epochs=2).train()
    assert diary.reads == [*range(12)] * 2


PERSISTENT = """
import torch
from torch import nn
from trainwright import Trainer, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}
items = [{"x": torch.ones(2), "labels": i % 2} for i in range(8)]
args = TrainingArguments("run", use_cpu=True, report_to="none", max_steps=2, save_strategy="no", disable_tqdm=True,
                         dataloader_num_workers=1, dataloader_persistent_workers=True)
trainer = Trainer(model=Net(), args=args, train_dataset=items, eval_dataset=items)
trainer.train()
trainer.evaluate()
"""


STUCK = """
import functools, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from trainwright.data import dataloader
class Stuck(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(600 if index >= 2 else 0)
        return torch.ones(2)
dataloader.end_workers_at_exit()
start = functools.partial(dataloader.start_worker, init=None)
batches = iter(DataLoader(Stuck(), batch_size=1, num_workers=2, worker_init_fn=start))
sys.modules["alive until the end"] = batches
next(batches)
"""


@pytest.mark.process
def test_process_whose_workers_are_killed_at_its_end_ends_without_an_error() -> None:
    """The handler that torch has for ended workers raises: the other workers would not be killed but waited for."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", STUCK], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
def test_a_process_whose_workers_wait_for_more_can_end() -> None:
    """At its end a process sends its workers SIGTERM and waits for them; they must not ignore it for ever."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    process = forked.start(["-c", PERSISTENT], env=environment, start_new_session=True)
    try:
        process.communicate(timeout=100)
        assert process.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_iteration_that_is_left_open_may_end_after_accelerate_was_reset() -> None:
    state = GradientState()
    dataloader = PreparedDataLoader(list(range(8)), batch_size=2)
    dataloader.gradient_state = state
    batches = iter(dataloader)
    next(batches)
    assert state.in_dataloader
    GradientState._reset_state()
    batches.close()  # as the garbage collector does, some time later
    assert not dataloader._is_open
