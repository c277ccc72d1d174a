"""Laws of every way to order samples and to form batches: each sample once, the same again, exact after a resume."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorForTokenClassification, LlamaConfig, LlamaForCausalLM

from trainwright import Trainer
from trainwright.data.batches import EpochBatches
from trainwright.data.shards import RankShare
from trainwright.data.streaming import lookahead_buffer
from trainwright.data.streaming.lookahead_buffer import BatchFormer
from trainwright.errors import DataError

from .._support.small import StopAt, data, differing, make_trainer, weights

pytestmark = pytest.mark.costly

LENGTHS = [3, 9, 16, 2, 5, 5, 12, 1, 7, 4, 16, 6, 8, 8, 3, 11, 2, 14, 5, 9, 1, 4, 10, 3, 6]
PACKING = {"packing": "best_fit", "packing_length": 16, "per_device_train_batch_size": 2}
STREAM = {"lr_scheduler_type": "constant"}  # its length is known when it has ended
STRATEGIES: dict[str, dict[str, Any]] = {
    "random": {},
    "sequential": {"train_sampling_strategy": "sequential"},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "token budget": {"max_tokens_per_batch": 32, "per_device_train_batch_size": 8},
    "packing": PACKING,
    "packing, split": {**PACKING, "packing_length": 7, "packing_overflow": "split"},
    "token budget, stream": {"max_tokens_per_batch": 32, "per_device_train_batch_size": 8, **STREAM},
    "packing, stream": {**PACKING, **STREAM},
    "packing, split, stream": {**PACKING, "packing_length": 7, "packing_overflow": "split", **STREAM},
}
TABLE = [
    pytest.param(name, workers, accumulation, id=f"{name}, {workers} workers, accumulation {accumulation}")
    for name in STRATEGIES
    for workers, accumulation in ((0, 1), (0, 3), (2, 3))
]


class Recorder(Trainer):
    """Remembers the tokens of each epoch; sample i consists of the token i + 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[int]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        tokens = [token for token in inputs["input_ids"].flatten().tolist() if token > 0]
        self.seen.append(tokens)
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
            attention_dropout=0.2,
        )
        return LlamaForCausalLM(config)


def recorder(output_dir: Path, **settings: Any) -> Any:
    items = [{"input_ids": [i + 1] * length, "labels": [i + 1] * length} for i, length in enumerate(LENGTHS)]
    items = data.Stream(items) if settings.get("lr_scheduler_type") == "constant" else items
    collator = DataCollatorForTokenClassification(data.tokenizer())
    return make_trainer(
        output_dir, cls=Recorder, model=llama(), train_dataset=items, data_collator=collator, **settings
    )


def settings_of(name: str, workers: int, accumulation: int) -> dict[str, Any]:
    return {**STRATEGIES[name], "dataloader_num_workers": workers, "gradient_accumulation_steps": accumulation}


@pytest.fixture(autouse=True)
def short_look_aheads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in an epoch of a stream this small."""
    monkeypatch.setattr(lookahead_buffer, "BatchFormer", partial(BatchFormer, size=8, min_batches=2, block=3))


@pytest.mark.parametrize(("name", "workers", "accumulation"), TABLE)
@pytest.mark.one_in(3)
def test_stopped_and_resumed_it_sees_each_sample_once_and_ends_the_same(
    name: str, workers: int, accumulation: int, tmp_path: Path
) -> None:
    settings = settings_of(name, workers, accumulation)
    through = recorder(tmp_path / "through", **settings)
    through.train()
    per_epoch = len(through.seen) // 2
    expected = Counter({i + 1: length for i, length in enumerate(LENGTHS)})
    epochs = [through.seen[:per_epoch], through.seen[per_epoch:]]
    assert [Counter(token for batch in epoch for token in batch) for epoch in epochs] == [expected, expected]
    if name != "sequential":
        assert epochs[0] != epochs[1]

    stop = max(through.state.max_steps * 2 // 3, 1)
    first = recorder(tmp_path / "twice", **settings, callbacks=[StopAt(stop)])
    first.train()
    second = recorder(tmp_path / "twice", **settings)
    second.train(resume_from_checkpoint=True)
    assert first.seen + second.seen == through.seen
    assert differing(weights(second.model), weights(through.model)) == {}


@pytest.mark.parametrize("name", ["token budget", "packing", "batch_rebalance"])
def test_the_plan_counts_what_is_trained(name: str, tmp_path: Path) -> None:
    trainer = recorder(tmp_path, **settings_of(name, 0, 3), num_train_epochs=1)
    trainer.train()
    batches = len(trainer.get_train_dataloader())
    assert len(trainer.seen) == batches
    assert trainer.state.max_steps == trainer.state.global_step == -(-batches // 3)
    assert trainer.state.epoch == 1.0
    assert trainer.num_examples(trainer.get_train_dataloader()) == len(LENGTHS)


@pytest.mark.parametrize("name", ["token budget", "packing", "batch_rebalance"])
def test_the_tokens_of_an_epoch_are_known_without_reading(name: str, tmp_path: Path) -> None:
    trainer = recorder(tmp_path, **settings_of(name, 0, 2))
    dataloader = trainer.get_train_dataloader()
    counted = sum(batch["input_ids"].numel() for batch in trainer.get_train_dataloader())
    assert trainer.num_tokens(dataloader) == counted
    vars(dataloader).update(dataset=None, reading=None)
    assert trainer.num_tokens(dataloader) == counted


def test_a_resume_with_other_groups_is_refused(tmp_path: Path) -> None:
    first = recorder(tmp_path, **STRATEGIES["token budget"], callbacks=[StopAt(2)])
    first.train()
    other = recorder(tmp_path, **{**STRATEGIES["token budget"], "max_tokens_per_batch": 40})
    with pytest.raises(DataError, match=r"max_tokens_per_batch=32.*max_tokens_per_batch=40"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["token budget", "packing", "batch_rebalance"])
@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_take_the_same_number_of_steps_and_share_the_groups(
    name: str, num_processes: int, tmp_path: Path
) -> None:
    order = recorder(tmp_path, **STRATEGIES[name])._get_train_sampler().for_all_processes()
    parts = []
    for rank in range(num_processes):
        share = RankShare(batch_size=1, rank=rank, num_processes=num_processes)
        batches = EpochBatches(order, 1, share=share)
        parts.append([group for (group,) in batches])
        assert len(parts[-1]) == len(batches)
    assert len({len(part) for part in parts}) == 1
    in_turn = [group for step in zip(*parts, strict=True) for group in step]
    assert in_turn[: len(order)] == list(order.indices(0)) != list(order.indices(1))
