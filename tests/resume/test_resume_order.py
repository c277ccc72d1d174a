"""A resume in mid-epoch with another order of samples: each sample is still trained once in each epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler
from transformers import DataCollatorForTokenClassification, LlamaConfig, LlamaForCausalLM

from trainwright import Trainer
from trainwright.errors import DataError

from .._support.small import StopAt, data, make_trainer, sign_again

SIZE = 24  # six batches of 4 in an epoch
LENGTHS = [1 + i * 7 % 11 for i in range(SIZE)]
OTHERS = [1 + i * 5 % 13 for i in range(SIZE)]
GROUPED: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
SEQUENTIAL: dict[str, Any] = {"train_sampling_strategy": "sequential"}
FEISTEL: dict[str, Any] = {"shuffle_method": "feistel"}
UNSEEDED: dict[str, Any] = {"accelerator_config": {"use_seedable_sampler": False}}
BUDGET: dict[str, Any] = {"max_tokens_per_batch": 32, "per_device_train_batch_size": 8}
PACKED: dict[str, Any] = {"packing": "best_fit", "packing_length": 16, "per_device_train_batch_size": 2}
STREAM: dict[str, Any] = {"lr_scheduler_type": "constant"}  # `recorder` makes a stream of the data then

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "permutation, feistel": ({}, FEISTEL),
    "feistel, permutation": (FEISTEL, {}),
    "random, sequential": ({}, SEQUENTIAL),
    "sequential, random": (SEQUENTIAL, {}),
    "sequential, feistel": (SEQUENTIAL, FEISTEL),
    "random, by length": ({}, GROUPED),
    "by length, random": (GROUPED, {}),
    "seeded, unseeded": ({}, UNSEEDED),
    "unseeded, seeded": (UNSEEDED, {}),
    "data_seed": ({}, {"data_seed": 99}),
    "data_seed and method": ({"data_seed": 5}, {"data_seed": 99, **FEISTEL}),
    "data_seed by length": ({"data_seed": 5, **GROUPED}, {"data_seed": 99, **GROUPED}),
    "column of lengths": (GROUPED, {**GROUPED, "length_column_name": "other"}),
    "by length, batch size": (GROUPED, {**GROUPED, "per_device_train_batch_size": 2}),
    "by length, accumulation": (GROUPED, {**GROUPED, "gradient_accumulation_steps": 2}),
    "by length, batch size and strategy": (GROUPED, {"per_device_train_batch_size": 3}),
}
changes = pytest.mark.parametrize("name", CHANGES)


class Recorder(Trainer):
    """Remembers which samples are trained; sample i consists of the token i + 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[int] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.seen += [int(row[row > 0][0]) - 1 for row in inputs["input_ids"]]
        return super().training_step(model, inputs, num_items_in_batch)


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


def recorder(output_dir: Path, *callbacks: Any, cls: type[Recorder] = Recorder, **settings: Any) -> Any:
    items = [{"input_ids": [i + 1] * length, "labels": [i + 1] * length} for i, length in enumerate(LENGTHS)]
    dataset: Any = data.hf_dataset(items, length=LENGTHS, other=OTHERS)
    if settings.pop("sources", False):
        dataset = {"a": dataset.select(range(6)), "b": dataset.select(range(6, SIZE))}
    if settings.get("lr_scheduler_type") == "constant":
        dataset = dataset.to_iterable_dataset()
    return make_trainer(
        output_dir,
        cls=cls,
        model=llama(),
        train_dataset=dataset,
        data_collator=DataCollatorForTokenClassification(data.tokenizer()),
        callbacks=[*callbacks],
        **{"num_train_epochs": 3, **settings},
    )


def trained(output_dir: Path, *, stop_at: int = 999, resumes: bool = False, **settings: Any) -> Any:
    trainer = recorder(output_dir, StopAt(stop_at), **settings)
    trainer.train(resume_from_checkpoint=resumes)
    return trainer


def epochs_of(seen: list[int]) -> list[list[int]]:
    return [seen[start : start + SIZE] for start in range(0, len(seen), SIZE)]


@changes
@pytest.mark.parametrize("stop_at", [2, pytest.param(8, marks=pytest.mark.costly)])
@pytest.mark.one_in(3)
def test_each_sample_once_in_each_epoch(name: str, stop_at: int, tmp_path: Path) -> None:
    before, now = CHANGES[name]
    whole = trained(tmp_path / "whole", **before).seen
    first = trained(tmp_path / "two", stop_at=stop_at, **before)
    second = trained(tmp_path / "two", resumes=True, **now)
    seen = first.seen + second.seen
    assert [sorted(epoch) for epoch in epochs_of(seen)] == [[*range(SIZE)]] * 3
    under_way = first.state.global_step // 6
    assert seen[: (under_way + 1) * SIZE] == whole[: (under_way + 1) * SIZE], "it is finished in its own order"


def test_the_new_order_begins_with_the_next_epoch(tmp_path: Path) -> None:
    trained(tmp_path / "two", stop_at=2)
    seen = trained(tmp_path / "two", resumes=True, **FEISTEL).seen
    assert seen[-2 * SIZE :] == trained(tmp_path / "whole", **FEISTEL).seen[-2 * SIZE :]


def test_at_the_end_of_an_epoch_the_new_order_begins_at_once(tmp_path: Path) -> None:
    trained(tmp_path / "two", stop_at=6)
    seen = trained(tmp_path / "two", resumes=True, **FEISTEL).seen
    assert seen == trained(tmp_path / "whole", **FEISTEL).seen[-2 * SIZE :]


@pytest.mark.costly
@changes
@pytest.mark.one_in(2)
def test_stopped_again_before_that_epoch_ends(name: str, tmp_path: Path) -> None:
    before, now = CHANGES[name]
    seen = trained(tmp_path / "parts", stop_at=2, **before).seen
    through = trained(tmp_path / "through", stop_at=2, **before)
    through = trained(tmp_path / "through", resumes=True, **now)
    for stop_at in (3, 8):
        seen += trained(tmp_path / "parts", stop_at=stop_at, resumes=True, **now).seen
    seen += trained(tmp_path / "parts", resumes=True, **now).seen
    assert seen[-len(through.seen) :] == through.seen
    assert [sorted(epoch) for epoch in epochs_of(seen)] == [[*range(SIZE)]] * 3


@pytest.mark.parametrize("name", ["permutation, feistel", "random, sequential", "column of lengths"])
def test_it_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = CHANGES[name]
    trained(tmp_path, stop_at=2, **before)
    with caplog.at_level("INFO", "trainwright.run"):
        trained(tmp_path, stop_at=3, resumes=True, **now)
    shown = capsys.readouterr().out
    assert "from the next epoch on; an epoch that is under way is finished in the checkpoint's order" in shown
    assert "epoch 1 is finished in the order it began with" in shown


# -- what cannot be finished -----------------------------------------------------------------------------------------


class Evens(Sampler[int]):
    """The even ones first."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter([*range(0, SIZE, 2), *range(1, SIZE, 2)])


class Odds(Evens):
    pass


def of_own(sampler: type[Evens]) -> type[Recorder]:
    class Own(Recorder):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return sampler()

    return Own


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another sampler": ({"cls": of_own(Evens)}, {"cls": of_own(Odds)}, "of the sampler Evens.*of the sampler Odds"),
    "the user's sampler, random": ({"cls": of_own(Evens)}, {}, "of the sampler Evens.*of a permutation"),
    "padding of a budget": (BUDGET, {**BUDGET, "pad_to_multiple_of": 8}, "pad_to=None.*pad_to=8"),
    "lengths of a budget": (BUDGET, {**BUDGET, "length_column_name": "other"}, "lengths of its samples have changed"),
    "samples that are split": (
        {**PACKED, "packing_overflow": "error"},
        {**PACKED, "packing_overflow": "split"},
        "splits_long=False.*splits_long=True",
    ),
    "padding of a budget, stream": (
        {**BUDGET, **STREAM},
        {**BUDGET, **STREAM, "pad_to_multiple_of": 8},
        "pad_to=None.*pad_to=8",
    ),
    "random, stream": ({}, STREAM, "of a permutation.*of a stream"),
    "stream, random": (STREAM, {}, "of a stream.*of a permutation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_epoch_that_cannot_be_finished_is_refused(name: str, tmp_path: Path) -> None:
    before, now, said = REFUSED[name]
    trained(tmp_path, stop_at=2, **before)
    with pytest.raises(DataError, match=rf"(?s){said}.*ignore_data_skip=True"):
        trained(tmp_path, resumes=True, **now)
    trained(tmp_path, stop_at=3, resumes=True, **now, ignore_data_skip=True)


def test_lengths_that_are_others_now_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, stop_at=2, **GROUPED)
    other = recorder(tmp_path, **GROUPED)
    other.train_dataset = other.train_dataset.remove_columns("length").add_column("length", OTHERS)
    with pytest.raises(DataError, match=r"lengths of its samples have changed.*ignore_data_skip=True"):
        other.train(resume_from_checkpoint=True)


def test_an_older_checkpoint_does_not_say_its_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is resumed as ever: in the order of the arguments."""
    first = trained(tmp_path, stop_at=2)
    manifest = tmp_path / "checkpoint-2" / "manifest.json"
    assert "order" in json.loads(manifest.read_text())["cursor"]
    sign_again(tmp_path / "checkpoint-2", without=("order",))
    assert "order" not in json.loads(manifest.read_text())["cursor"]
    second = trained(tmp_path, stop_at=10, resumes=True)
    seen = first.seen + second.seen
    assert sorted(seen[:SIZE]) == [*range(SIZE)]
    sign_again(tmp_path / "checkpoint-10", without=("order",))
    with caplog.at_level("INFO", "trainwright.run"):
        third = trained(tmp_path, resumes=True, **FEISTEL)
    assert "does not name its order: epoch 2 is finished in this run's" in capsys.readouterr().out
    assert third.seen == trained(tmp_path / "whole", **FEISTEL).seen[len(seen) :]
