"""Batches formed by length from a stream: how far is read ahead, what a kill loses, what is refused."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset
from transformers import DataCollatorForTokenClassification

from trainwright import TrainerCallback
from trainwright.capabilities.packing.plan import RowPlan
from trainwright.capabilities.token_budget.plan import BudgetPlan
from trainwright.config.plans import SamplingPlan
from trainwright.data.sample_filter import EVERY_SAMPLE
from trainwright.data.streaming.kept_items import KeptItems
from trainwright.data.streaming.lookahead_buffer import BatchFormer, LookaheadBuffer, next_lookahead
from trainwright.errors import DataError

from .._support.small import StopAt, data, differing, make_trainer, weights
from ..laws.test_sampling_laws import llama

PACKING = {"packing": "best_fit", "packing_length": 64, "per_device_train_batch_size": 4}
BUDGET = {"max_tokens_per_batch": 256, "per_device_train_batch_size": 8}  # which is the default
ENDLESS = {"lr_scheduler_type": "constant", "max_steps": 60, "num_train_epochs": 1}


def lengths_of(num: int | None, longest: int = 60) -> Iterator[int]:
    draw = random.Random(3)
    return (min(1 + int(draw.lognormvariate(2.5, 0.7)), longest) for _ in (range(num) if num else itertools.count()))


class Endless(IterableDataset[dict[str, Any]]):
    """Counts what is read of it, and can be read once."""

    def __init__(self, num: int | None = None) -> None:
        self.num_reads = 0
        self.lengths = lengths_of(num)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for length in self.lengths:
            self.num_reads += 1
            yield {"input_ids": [1 + self.num_reads % 30] * length, "labels": [1] * length}


def plan(**how: Any) -> SamplingPlan:
    return SamplingPlan(strategy="random", batch_size=4, micro_batches=1, num_processes=1, seed=0, **how)


PLANS = {
    "packing": plan(batching=RowPlan(text="rows", row_length=64)),
    "budget": plan(batching=BudgetPlan(text="budget", max_tokens=256)),
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("processes", [1, 3, 40])
def test_every_look_ahead_but_the_last_gives_all_processes_full_batches(kind: str, processes: int) -> None:
    former = BatchFormer(PLANS[kind])
    num = 6000
    items = ({"input_ids": [i] * length} for i, length in enumerate(lengths_of(num)))
    buffer = LookaheadBuffer(
        KeptItems(items, 0, lambda: EVERY_SAMPLE), lambda number: None, block=former.block, at=0, state=None
    )
    seen: list[int] = []
    counts = []
    tokens = 0
    room = 0
    while ahead := next_lookahead(buffer, former, multiple=processes, seed=1):
        formed, size = ahead
        counts.append(len(formed.groups))
        assert len(buffer) <= 2 * max(former.size, size * (counts[-1] + processes) / counts[-1]) + former.block
        for batch in (formed.batches_from(i)(None) for i in range(counts[-1])):
            rows = batch if kind == "packing" else [[item] for item in batch]
            seen += [item["input_ids"][0] for row in rows for item in row]
            widths = [sum(len(item["input_ids"]) for item in row) for row in rows]
            tokens = tokens + sum(widths)
            room = room + (256 if kind == "packing" else max(widths) * len(widths))
        buffer.drop(size)
    assert sorted(seen) == [*range(num)]
    assert len(counts) > 1
    assert [count % processes for count in counts[:-1]] == [0] * (len(counts) - 1)
    assert all(count >= former.min_batches for count in counts[:-1])
    assert tokens / room > 0.9


@pytest.mark.parametrize("settings", [PACKING, BUDGET], ids=["packing", "budget"])
def test_no_more_is_read_of_stream_without_end_than_a_look_ahead(settings: dict[str, Any], tmp_path: Path) -> None:
    stream = Endless()
    trainer = make_trainer(
        tmp_path,
        model=llama(),
        train_dataset=stream,
        **settings,
        **ENDLESS | {"max_steps": 5},
        data_collator=DataCollatorForTokenClassification(data.tokenizer()),
    )
    result = trainer.train()
    assert trainer.state.global_step == 5
    assert stream.num_reads == 1024
    assert result.metrics["train_samples_per_second"] > 5 * 4 / result.metrics["train_runtime"]  # rows hold several


def test_stream_that_can_be_read_once_loses_no_item_to_the_proof(tmp_path: Path) -> None:
    """The model is proved to keep samples apart before step 1, and no item of the stream is used up for that."""
    stream = Endless(300)
    trainer = make_trainer(
        tmp_path,
        model=llama(),
        train_dataset=stream,
        include_num_input_tokens_seen="non_padding",
        **PACKING,
        **ENDLESS | {"max_steps": -1},
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(lengths_of(300))
    assert (trainer.state.epoch, trainer.state.max_steps) == (1.0, trainer.state.global_step)


class Drawn(IterableDataset[dict[str, Any]]):
    """Tokens that are drawn when they are read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for length in lengths_of(2500):
            tokens = np.random.randint(1, 30, length).tolist()
            yield {"input_ids": tokens, "labels": tokens}


class KillAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 37:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_it_ends_with_the_same_weights(workers: int, tmp_path: Path) -> None:
    settings = {
        **PACKING,
        **ENDLESS,
        "save_strategy": "steps",
        "save_steps": 8,
        "save_async": False,
        "dataloader_num_workers": workers,
        "gradient_accumulation_steps": 2,
    }
    settings |= {"packing_length": 128, "max_steps": 45}
    through = make_trainer(tmp_path / "through", model=llama(), train_dataset=Drawn(), **settings)
    through.train()
    child = os.fork()
    if child == 0:
        killed = make_trainer(
            tmp_path / "killed", model=llama(), train_dataset=Drawn(), callbacks=[KillAt()], **settings
        )
        killed.train()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    again = make_trainer(tmp_path / "killed", model=llama(), train_dataset=Drawn(), **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 45
    assert differing(weights(again.model), weights(through.model)) == {}


class Stateful(IterableDataset[dict[str, Any]]):
    """Knows where it is, and counts what is read of it."""

    def __init__(self) -> None:
        self.place = self.num_reads = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for length in itertools.islice(lengths_of(9000), self.place, None):
            self.num_reads = self.num_reads + 1
            self.place = self.place + 1
            yield {"input_ids": [1] * length, "labels": [1] * length}

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.costly
def test_a_resume_reads_no_more_than_a_look_ahead_again(tmp_path: Path) -> None:
    settings = {**PACKING, **ENDLESS, "packing_length": 128, "max_steps": 152}
    first = Stateful()
    make_trainer(tmp_path, model=llama(), train_dataset=first, callbacks=[StopAt(150)], **settings).train()
    again = Stateful()
    make_trainer(tmp_path, model=llama(), train_dataset=again, **settings).train(resume_from_checkpoint=True)
    assert first.num_reads > 4500
    assert again.num_reads <= 2 * (1024 + 64)


BAD = {
    "too long": ([3, 65], "Item 1 of the stream has 65 tokens, more than packing_length=64. Raise packing_length"),
    "empty": ([3, 0], "Item 1 of the stream has no tokens. Remove such samples"),
    "no tokens": ([None], "the length of 'input_ids', but item 0 of the stream has labels"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_item_that_cannot_be_placed_is_named(kind: str, tmp_path: Path) -> None:
    lengths, message = BAD[kind]
    items = [{"labels": [1]} if n is None else {"input_ids": [1] * n, "labels": [1] * n} for n in lengths]
    trainer = make_trainer(tmp_path, model=llama(), train_dataset=data.Stream(items), **PACKING, **ENDLESS)
    with pytest.raises(DataError, match=message):
        trainer.train()


def test_a_resume_with_other_rows_is_refused(tmp_path: Path) -> None:
    def trainer(**more: Any) -> Any:
        settings = {**PACKING, **ENDLESS, **more}
        return make_trainer(tmp_path, model=llama(), train_dataset=Endless(), **settings)

    trainer(callbacks=[StopAt(3)]).train()
    with pytest.raises(DataError, match=r"4 rows of 64 from look-aheads of 1024.*4 rows of 32 from"):
        trainer(packing_length=32, packing_overflow="split").train(resume_from_checkpoint=True)


def test_without_max_steps_a_schedule_that_needs_them_is_refused(tmp_path: Path) -> None:
    class Sized(Endless):
        def __len__(self) -> int:
            return 300

    with pytest.raises(DataError, match=r"read as a stream with packing and max_steps=-1.*lr_scheduler_type='linear'"):
        make_trainer(tmp_path, model=llama(), train_dataset=Sized(300), **PACKING)
