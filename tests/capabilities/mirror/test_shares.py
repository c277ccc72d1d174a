"""Who fetches which file of a checkpoint: each file once, its own by a process, the rest in even shares."""

from __future__ import annotations

import random

import pytest

from trainwright.capabilities.mirror.shares import find_owner, shares
from trainwright.checkpoint.rng import file_name

WHOLE = [
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "optimizer.pt",
    "optimizer_0/.metadata",
    "rng_state.pth",
    "trainer_state.json",
    "added_tokens_2/notes.txt",
    "pytorch_model_fsdp_0/.metadata",
    "ledger.parquet",
]


@pytest.mark.parametrize("name", WHOLE)
def test_files_of_the_whole_run_belong_to_nobody(name: str) -> None:
    assert find_owner(name) is None


@pytest.mark.parametrize("rank", [0, 7, 130])
def test_files_of_a_process_are_its_own(rank: int) -> None:
    names = [file_name(rank, 200, name) for name in ("rng_state.pth", "extension_states.pt", "data_position.pth")]
    names += [file_name(rank, 200, "ledger.parquet"), f"optimizer_0/__{rank}_0.distcp"]
    assert [find_owner(name) for name in names] == [rank] * 5


@pytest.mark.parametrize("ranks", [[0], [0, 1], [4, 5, 6, 7]])
def test_each_file_is_fetched_once_by_own_process_or_in_even_shares(ranks: list[int]) -> None:
    draw = random.Random(len(ranks))
    for _ in range(50):
        whole = {name: {"size": draw.randint(0, 1000)} for name in WHOLE}
        own = {file_name(rank, 9, "rng_state.pth"): {"size": draw.randint(0, 100)} for rank in range(9)}
        found = shares(own | whole, ranks)
        assert sorted(name for names in found.values() for name in names) == sorted(own | whole)
        for rank in ranks:
            assert file_name(rank, 9, "rng_state.pth") in found[rank]
        sums = [sum((own | whole)[name]["size"] for name in found[rank]) for rank in ranks]
        assert max(sums) - min(sums) <= max(entry["size"] for entry in (own | whole).values())
