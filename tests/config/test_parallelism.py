"""Sizes of a ParallelismConfig, of the launcher and of the model, brought to one plan or refused with both numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import ParallelismConfig

from trainwright.config.resolve import parallel
from trainwright.errors import ArgumentError
from trainwright.support.model_facts import ModelLayout

SIZES = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1}


def asking(world: int = 1, config: Any = None, **more: Any) -> Any:
    none = dict.fromkeys(("deepspeed", "fsdp_config"))
    settings = {"mixed_precision": "no", "torch_compile": False, "predict_with_generate": False, **none}
    return SimpleNamespace(**{"world_size": world, "parallelism_config": config, **settings, **more})


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
    ("config", "world", "layout", "num_replicas", "num_together"),
    [
        (ParallelismConfig(cp_size=2), 4, ModelLayout(tp=2, dp=2), 1, 4),
        (ParallelismConfig(sp_size=2, tp_size=2), 8, ModelLayout(tp=2, dp=4), 2, 4),
        (ParallelismConfig(cp_size=2, dp_shard_size=2), 8, ModelLayout(tp=2, dp=4), 2, 4),
        (ParallelismConfig(cp_size=2), 4, ModelLayout(tp=1, dp=4, ep=2, experts=(4,)), 2, 2),
        (ParallelismConfig(cp_size=2, tp_size=2), 4, ModelLayout(), 1, 4),  # taken apart by the user
    ],
)
def test_model_in_parts_counts_the_processes_of_a_sequence_among_its_shards(
    config: Any, world: int, layout: ModelLayout, num_replicas: int, num_together: int
) -> None:
    plan = parallel(asking(world, config), layout)
    assert plan is not None
    assert plan.dp_replicate * plan.dp_shard == num_replicas
    assert plan.num_together == num_together
    assert plan.num_in_all == world


@pytest.mark.parametrize(
    ("config", "world", "how", "sizes"),
    [
        (ParallelismConfig(cp_size=2), 2, {}, (1, 1)),
        (ParallelismConfig(cp_size=2), 4, {}, (2, 1)),
        (ParallelismConfig(sp_size=4), 4, {"has_fsdp": True}, (1, 1)),
        (ParallelismConfig(sp_size=2), 8, {"has_fsdp": True}, (1, 4)),
        (ParallelismConfig(cp_size=2), 8, {"has_fsdp": True, "num_in_copy": 4}, (2, 2)),
        (ParallelismConfig(cp_size=2), 8, {"has_fsdp": True, "num_in_copy": 1}, (1, 4)),
        (ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2), 8, {"has_fsdp": True}, (2, 2)),
        (ParallelismConfig(dp_replicate_size=2, sp_size=2), 4, {"has_fsdp": True}, (2, 1)),
        (ParallelismConfig(sp_size=2), 8, {"has_deepspeed": True}, (4, 1)),
    ],
)
def test_processes_beside_those_that_share_sequences_have_data_of_their_own(
    config: Any, world: int, how: dict[str, Any], sizes: tuple[int, int]
) -> None:
    plan = parallel(asking(world, config), None, **how)
    assert plan is not None
    assert (plan.dp_replicate, plan.dp_shard) == sizes
    assert plan.num_in_all == world


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
        (asking(3), ModelLayout(tp=1, dp=3, ep=3, experts=(8,)), {}, "ep_size=3 8 experts 2, 4, 8"),
        (asking(2), ModelLayout(tp=2, dp=1, ep=2, experts=(8,), dispatch="deepgemm_megamoe"), {}, "backward auto"),
        (asking(2, ParallelismConfig(dp_shard_size=2)), None, {}, "dp_shard_size=2 fsdp=True"),
        (asking(2, ParallelismConfig(tp_size=2)), None, {"has_fsdp": True}, "tp_size=2 fsdp fsdp_size"),
        (asking(2, ParallelismConfig(tp_size=2)), None, {"has_deepspeed": True}, "tp_size=2 deepspeed"),
        (asking(2, ParallelismConfig(tp_size=2), mixed_precision="fp16"), None, {}, "fp16 bf16"),
        (asking(3, ParallelismConfig(cp_size=2)), None, {"has_fsdp": True}, "cp_size=2 2 3 torchrun"),
        (
            asking(2, ParallelismConfig(sp_size=2), predict_with_generate=True),
            None,
            {},
            "sp_size=2 predict_with_generate",
        ),
        (asking(6, ParallelismConfig(cp_size=2)), ModelLayout(tp=2, dp=3), {}, "cp_size=2 fsdp_size multiple"),
        (
            asking(8, ParallelismConfig(cp_size=2, dp_shard_size=4)),
            ModelLayout(tp=2, dp=4),
            {},
            "dp_shard_size=4 for 2",
        ),
        (asking(4, SimpleNamespace(**SIZES | {"cp_size": 2, "sp_size": 2})), None, {}, "cp_size=2 sp_size=2 one way"),
    ],
)
def test_refused(args: Any, layout: ModelLayout | None, how: dict[str, bool], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parallel(args, layout, **how)
    assert all(word in str(caught.value) for word in words.split())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, True),
        ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, True),
        ({"state_dict_type": "FULL_STATE_DICT"}, False),
    ],
)
def test_models_in_parts_write_checkpoints_as_fsdp_config_says(config: Any, expected: bool) -> None:
    plan = parallel(asking(2, fsdp_config=config), ModelLayout(tp=2, dp=1))
    assert plan is not None
    assert plan.writes_parts is expected


def test_a_configuration_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"fsdp_config='nowhere\.json'"):
        parallel(asking(2, fsdp_config="nowhere.json"), ModelLayout(tp=2, dp=1))
