"""Runs whose micro-batches are held against the ids that they carry: sample i consists of the token i + 1.

Run as a script of several processes it checks all cases of `SHARED` in each of them: `carried.py FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler
from transformers import DataCollatorForTokenClassification, LlamaConfig, LlamaForCausalLM

from tests._support.small import StopAt, data, make_trainer
from tests._support.two_processes import tell
from trainwright import Curriculum, Trainer, TrainerCallback
from trainwright.data.streaming import lookahead_buffer
from trainwright.data.streaming.lookahead_buffer import BatchFormer

LENGTHS = [3, 9, 16, 2, 5, 5, 12, 1, 7, 4, 16, 6, 8, 8, 3, 11, 2, 14, 5, 9, 1, 4, 10, 3, 6]
IN_QUARANTINE = [2, 5, 11]


class Carries(Trainer):
    """Notes the ids of each micro-batch, and its rows without padding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[Any, list[list[int]]]] = []
        self._window: Any = None
        self._place = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        window = self._trainwright.run.progress.window.current
        if window is not self._window:
            self._window = window
            self._place = 0
        ids = window.sample_ids[self._place] if window.sample_ids else []
        self._place += 1
        rows = [[token for token in row if token > 0] for row in inputs["input_ids"].tolist()]
        self.seen.append((ids, rows))
        return super().training_step(model, inputs, num_items_in_batch)


class Own(Sampler[int]):
    """Some samples several times, others never, in an order that is drawn when an epoch begins."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(0, len(LENGTHS), (len(LENGTHS),)).tolist())


class WithOwnSampler(Carries):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Own()


class ReadsAhead(Carries):
    """Windows of batches that were read before those of the step."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any = None) -> Any:
        if not hasattr(self, "ahead"):
            self.ahead, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        window = self.ahead
        self.ahead, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return window, num_items


class Drops(Carries):
    """Windows without their first batch."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any = None) -> Any:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches[1:] or batches, num_items


class Quarantines(TrainerCallback):
    """Puts samples into quarantine after step 1."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.trainer.quarantine(IN_QUARANTINE)


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def items() -> list[dict[str, Any]]:
    return [{"input_ids": [i + 1] * length, "labels": [i + 1] * length} for i, length in enumerate(LENGTHS)]


def stream() -> Any:
    return Stream(items())


def hf_stream() -> Any:
    return data.hf_dataset(items()).to_iterable_dataset(num_shards=2)


def shuffled_hf_stream() -> Any:
    return hf_stream().shuffle(seed=5, buffer_size=7)


def mixture() -> Any:
    return {"code": items()[:11], "chat": items()[11:]}


def mixture_of_streams() -> Any:
    return {"code": Stream(items()[:11]), "chat": items()[11:]}


def curriculum() -> Any:
    return Curriculum(items(), lambda ledger: ledger.row % 3 + 1.0, every=6, delay=6)


def token_of_index(sample: int) -> int:
    return sample + 1


def token_of_mixture_of_streams(sample: int) -> int:
    row, number = divmod(sample, 2)
    return row + 1 + 11 * number


# What a case does not say: rows of lists with a length, batches of two, two epochs.
OPEN_END = {"max_steps": 9, "num_train_epochs": 1}
PACKED = {"packing": "best_fit", "packing_length": 16}
SPLIT = {"packing": "best_fit", "packing_length": 7, "packing_overflow": "split"}
BUDGET = {"max_tokens_per_batch": 32, "per_device_train_batch_size": 8}
SHARES = {"mixture": {"code": 0.7, "chat": 0.3}}
CASES: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "feistel": {"shuffle_method": "feistel"},
    "sequential": {"train_sampling_strategy": "sequential"},
    "sampler of the user's": {"cls": WithOwnSampler},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "balanced": {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
    "token budget": BUDGET,
    "packed": PACKED,
    "packed and split": SPLIT,
    "drop_last": {"dataloader_drop_last": True},
    "seeded one by one": {"seed_samples": True},
    "union": {"of": mixture},
    "mixture": {"of": mixture, **SHARES},
    "mixture, token budget": {"of": mixture, **SHARES, **BUDGET},
    "mixture, packed": {"of": mixture, **SHARES, **PACKED},
    "curriculum": {"of": curriculum},
    "stream": {"of": stream, **OPEN_END},
    "stream, token budget": {"of": stream, **BUDGET, **OPEN_END},
    "stream, packed": {"of": stream, **PACKED, **OPEN_END},
    "stream, packed and split": {"of": stream, **SPLIT, **OPEN_END},
    "stream of datasets": {"of": hf_stream, **OPEN_END},
    "mixture of streams": {"of": mixture_of_streams, **OPEN_END, **SHARES},
    "mixture of streams, packed": {"of": mixture_of_streams, **OPEN_END, **SHARES, **PACKED},
    "streams by turns": {"of": mixture_of_streams, **OPEN_END},
    "drops batches": {"cls": Drops, "gradient_accumulation_steps": 3},
}
TOKENS: dict[Any, Callable[[int], int]] = {mixture_of_streams: token_of_mixture_of_streams}
# Ids are not known where the place in what a process or a worker reads is not the place in the stream, or changes from
# epoch to epoch; and where batches are not those that were given.
UNKNOWN: dict[str, dict[str, Any]] = {
    "shuffled stream": {"of": shuffled_hf_stream, **OPEN_END},
    "workers that finish in any order": {"dataloader_num_workers": 2, "accelerator_config": {}, "in_order": False},
    "stream of datasets, workers": {"of": hf_stream, "dataloader_num_workers": 2, **OPEN_END},
    "reads ahead": {"cls": ReadsAhead, "gradient_accumulation_steps": 2, "max_steps": 4},
}
FORMED_STREAMS = ("stream, token budget", "stream, packed", "stream, packed and split", "mixture of streams, packed")
# With several processes: cases whose order is shared otherwise than among workers.
DISPATCHED = {"accelerator_config": {"dispatch_batches": True}, "padding": "max_length"}
SHARED: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in ("shuffled", "sampler of the user's", "balanced", "token budget", "packed")},
    **{name: CASES[name] for name in ("mixture", "stream", "stream, packed", "mixture of streams")},
    "dispatched": DISPATCHED,
    "dispatched, mixture": {**DISPATCHED, "of": mixture, **SHARES},
}


def llama() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            pad_token_id=0,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        return LlamaForCausalLM(config)


def trainer(
    folder: Path, *, of: Callable[[], Any] = items, cls: Any = Carries, padding: str = "longest", **settings: Any
) -> Any:
    in_order = settings.pop("in_order", True)
    shared = {"per_device_train_batch_size": 2, "lr_scheduler_type": "constant", **settings}
    one = make_trainer(
        folder,
        cls=cls,
        model=llama(),
        train_dataset=of(),
        data_collator=DataCollatorForTokenClassification(data.tokenizer(), padding=padding, max_length=16),
        **shared,
    )
    if not in_order:
        make = one.get_train_dataloader

        def any_order() -> Any:
            dataloader = make()
            dataloader.in_order = False
            return dataloader

        one.get_train_dataloader = any_order
    return one


def rows_of(ids: Any, token_of: Callable[[int], int]) -> list[list[int]]:
    """The tokens that rows with these ids have."""
    rows = []
    for row in ids:
        if isinstance(row, int):
            token = token_of(row)
            rows.append([token] * LENGTHS[token - 1])
        else:
            rows.append([token_of(sample) for sample, start, stop in row for _ in range(start, stop)])
    return rows


def is_named(ids: Any, rows: list[list[int]], token_of: Callable[[int], int] = token_of_index) -> bool:
    return rows_of(ids, token_of) == rows


def check(folder: Path, case: dict[str, Any], *, stop: int = 0, quarantine: bool = False) -> None:
    """Trains, and with `stop` resumes after so many steps; each micro-batch must consist of the samples it names."""
    token_of = TOKENS.get(case.get("of"), token_of_index)
    first = trainer(folder, **case)
    if quarantine:
        callback = Quarantines()
        callback.trainer = first
        first.add_callback(callback)
    if stop:
        first.add_callback(StopAt(stop))
    first.train()
    seen = list(first.seen)
    if stop:
        second = trainer(folder, **case)
        second.train(resume_from_checkpoint=True)
        assert second.seen
        seen += second.seen
    assert seen
    for ids, rows in seen:
        assert is_named(ids, rows, token_of)
    if quarantine:
        later = [sample for ids, _ in seen[3:] for row in ids for sample in samples_of(row)]
        assert later
        assert not set(IN_QUARANTINE) & set(later)


def samples_of(row: Any) -> list[int]:
    return [row] if isinstance(row, int) else [sample for sample, _, _ in row]


def short_look_aheads() -> None:
    """Several in an epoch of a stream this small."""
    lookahead_buffer.BatchFormer = partial(BatchFormer, size=8, min_batches=2, block=3)  # type: ignore[misc, assignment]


if __name__ == "__main__":
    short_look_aheads()
    done = []
    for name, case in SHARED.items():
        check(Path(sys.argv[1]) / name, case, stop=2)
        done.append(name)
    tell(done=done)
