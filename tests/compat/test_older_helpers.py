"""Helpers that other code imports from the original's trainer modules do here what they do there."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.utils.data import IterableDataset
from transformers import trainer, trainer_pt_utils, trainer_utils
from transformers.integrations import neftune as their_neftune

import trainwright

from ..parity import models

SIZES = [(1, 2, 3), (5, 2, 2), (8, 2, 2), (23, 3, 4), (7, 4, 3)]  # samples, batch, processes
pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(("samples", "batch", "processes"), SIZES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_shards_are_those_of_transformers(samples: int, batch: int, processes: int, drop_last: bool) -> None:
    for rank in range(processes):
        how = {"batch_size": batch, "drop_last": drop_last, "num_processes": processes, "process_index": rank}
        for name, dataset in (("ShardSampler", list(range(samples))), ("IterableDatasetShard", Stream(samples))):
            ours = getattr(trainwright, name)(dataset, **how)
            theirs = getattr(trainer_pt_utils, name)(dataset, **how)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


def test_a_shard_of_a_stream_draws_by_its_epoch() -> None:
    sides = [
        kind(Stream(9), seed=4) for kind in (trainwright.IterableDatasetShard, trainer_pt_utils.IterableDatasetShard)
    ]
    for epoch in range(3):
        for side in sides:
            side.set_epoch(epoch)
        ours, theirs = map(list, sides)
        assert ours == theirs
    assert sides[0].num_examples == sides[1].num_examples == 9


@pytest.mark.parametrize(("samples", "batch", "processes"), SIZES)
def test_a_sampler_with_a_loop_is_that_of_transformers(samples: int, batch: int, processes: int) -> None:
    for rank in range(processes):
        how: dict[str, Any] = {"batch_size": batch, "num_replicas": processes, "rank": rank, "seed": 3}
        ours = trainwright.DistributedSamplerWithLoop(range(samples), **how)
        theirs = trainer_pt_utils.DistributedSamplerWithLoop(range(samples), **how)
        assert list(ours) == list(theirs)


def test_arguments_are_counted_as_transformers_counts_them() -> None:
    def three(a: int, b: int, c: int = 0) -> None: ...

    for function in (three, functools.partial(three, 1), functools.partial(three, c=1), lambda: None):
        assert trainwright.number_of_arguments(function) == trainer_utils.number_of_arguments(function)


@pytest.mark.parametrize("searches", [False, True])
def test_a_batch_size_is_found_as_transformers_finds_it(searches: bool) -> None:
    found = []
    for side in (trainwright, trainer_utils):
        tried: list[int] = []

        @side.find_executable_batch_size(starting_batch_size=20, auto_find_batch_size=searches)
        def work(batch_size: int, tried: list[int] = tried) -> int:
            tried.append(batch_size)
            if searches and batch_size > 10:
                raise RuntimeError("CUDA out of memory.")
            return batch_size

        found.append((work(), tried))
    assert found[0] == found[1]


def test_names_have_the_values_of_transformers() -> None:
    assert trainwright.FSDP_MODEL_NAME == trainer.FSDP_MODEL_NAME
    assert [c.__name__ for c in trainwright.DEFAULT_CALLBACKS] == [c.__name__ for c in trainer.DEFAULT_CALLBACKS]
    assert trainwright.DEFAULT_PROGRESS_CALLBACK is trainwright.ProgressCallback


def test_one_process_goes_first_where_there_is_only_one() -> None:
    with trainwright.torch_distributed_zero_first(-1):
        pass


def test_neftune_adds_the_noise_of_transformers_until_its_handle_is_removed() -> None:
    outputs = []
    ids = torch.arange(6).reshape(1, 6)
    for activate in (trainwright.activate_neftune, their_neftune.activate_neftune):
        model = models.seeded(lambda: models.bert(0.0))
        handle = activate(model, 5.0)
        torch.manual_seed(0)
        noisy = model.train()(input_ids=ids).logits
        handle.remove()
        outputs.append((noisy, model(input_ids=ids).logits))
    (ours, ours_after), (theirs, theirs_after) = outputs
    assert torch.equal(ours, theirs)
    assert torch.equal(ours_after, theirs_after)
    assert not torch.equal(ours, ours_after)


def test_a_checkpoint_in_several_files_loads_as_with_transformers(tmp_path: Path) -> None:
    saved = models.seeded(lambda: models.ReturnsDict())
    state = saved.state_dict()
    parts = {f"model-{i}.safetensors": {name: state[name]} for i, name in enumerate(state)}
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for side in (trainwright, transformers.trainer_utils):
        model = models.ReturnsDict()
        assert side.load_sharded_checkpoint(model, str(tmp_path)) == ([], [])
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        larger = models.ReturnsDict()
        larger.more = torch.nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match=r"more\.weight"):
            side.load_sharded_checkpoint(larger, str(tmp_path))
        assert side.load_sharded_checkpoint(larger, str(tmp_path), strict=False).missing_keys == [
            "more.weight",
            "more.bias",
        ]
        with pytest.raises(ValueError, match="index"):
            side.load_sharded_checkpoint(model, str(tmp_path / "nowhere"))
