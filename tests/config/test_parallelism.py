"""Sizes of a ParallelismConfig, of the launcher and of the model, brought to one plan or refused with both numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import ParallelismConfig

from trainwright.config.resolve import parallel
from trainwright.errors import ArgumentError
from trainwright.support.model_facts import ModelLayout


def asking(world: int = 1, config: Any = None, **more: Any) -> Any:
    return SimpleNamespace(**{"world_size": world, "parallelism_config": config, "mixed_precision": "no", **more})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_PARALLELISM_CONFIG", raising=False)


def test_nothing_is_shared_by_default() -> None:
    assert parallel(asking(4), None) is None


def test_sizes_of_one_mean_whole_models_in_all_processes() -> None:
    plan = parallel(asking(4, ParallelismConfig()), None)
    assert plan is not None
    assert (plan.dp_replicate, plan.num_together, plan.num_in_all) == (4, 1, 4)


@pytest.mark.parametrize(
    ("config", "world", "layout", "sizes"),
    [
        (ParallelismConfig(tp_size=2), 2, None, (1, 1, 2)),
        (None, 2, ModelLayout(tp=2, dp=1), (1, 1, 2)),
        (None, 4, ModelLayout(tp=2, dp=2), (1, 2, 2)),
        (ParallelismConfig(tp_size=2), 4, ModelLayout(tp=2, dp=2), (1, 2, 2)),
        (ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2), 8, ModelLayout(tp=2, dp=4), (2, 2, 2)),
        (ParallelismConfig(tp_size=4), 4, ModelLayout(), (1, 1, 4)),  # taken apart by the user
    ],
)
def test_the_model_says_what_the_arguments_leave_out(
    config: Any, world: int, layout: ModelLayout | None, sizes: tuple[int, int, int]
) -> None:
    plan = parallel(asking(world, config), layout)
    assert plan is not None
    assert (plan.dp_replicate, plan.dp_shard, plan.tp) == sizes
    assert plan.in_model is (layout is not None)
    assert plan.num_together == plan.tp


def test_the_launcher_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that `accelerate launch` sets from the `parallelism_config` of its file."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")
    plan = parallel(asking(2), None)
    assert plan is not None
    assert (plan.tp, plan.given) == (2, None)
    mine = parallel(asking(4, ParallelismConfig(tp_size=4)), None)  # the arguments come first
    assert mine is not None
    assert mine.tp == 4


@pytest.mark.parametrize(
    ("args", "layout", "how", "words"),
    [
        (asking(2, ParallelismConfig(tp_size=4)), None, {}, "tp_size=4 4 2 torchrun"),
        (asking(1, ParallelismConfig(tp_size=2)), None, {}, "tp_size=2 2 1"),
        (asking(4), ModelLayout(tp=2, dp=1), {}, "tp_size=2 4"),
        (asking(4, ParallelismConfig(tp_size=4)), ModelLayout(tp=2, dp=2), {}, "tp_size=4 tp_size=2"),
        (asking(6, ParallelismConfig(dp_shard_size=3, tp_size=2)), ModelLayout(tp=2, dp=2), {}, "dp_shard_size=3 2"),
        (asking(2), ModelLayout(), {}, "parts ParallelismConfig"),
        (asking(4), ModelLayout(tp=2, dp=1, pp=2), {}, "pp_size=2"),
        (asking(2, ParallelismConfig(dp_shard_size=2)), None, {}, "dp_shard_size=2 fsdp=True"),
        (asking(2, ParallelismConfig(tp_size=2)), None, {"has_fsdp": True}, "tp_size=2 fsdp fsdp_size"),
        (asking(2, ParallelismConfig(tp_size=2)), None, {"has_deepspeed": True}, "tp_size=2 deepspeed"),
        (asking(2, ParallelismConfig(tp_size=2), mixed_precision="fp16"), None, {}, "fp16 bf16"),
        (asking(2, ParallelismConfig(cp_size=2)), None, {"has_fsdp": True}, "cp_size=2"),
        (asking(2, ParallelismConfig(sp_size=2)), None, {"has_deepspeed": True}, "sp_size=2"),
    ],
)
def test_refused(args: Any, layout: ModelLayout | None, how: dict[str, bool], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parallel(args, layout, **how)
    assert all(word in str(caught.value) for word in words.split())
