"""The plan of a run of many processes: its peak, collectives and checkpoint against those of real processes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from trainwright.errors import ArgumentError, ModelError
from trainwright.preflight.memory.run_plan import RunPlan
from trainwright.preflight.memory.run_planner import plan_run

from .._support.engines import needs
from .._support.small import differing, make_trainer, weights
from .._support.two_processes import run
from .memory_cases import CASES, Case, LooksAtValues, mlp, vectors
from .test_memory import trainer_for

pytestmark = pytest.mark.costly

CLOSE = 0.05
HEADERS = 65536  # bytes of names and shapes in the files of a checkpoint
SCRIPT = Path(__file__).with_name("memory_of_ranks.py")
SHARDED = {"fsdp": True}
ROWS: dict[str, tuple[str, Any, dict[str, Any]]] = {  # name -> case, engine, settings
    "ddp": ("llama", "ddp", {}),
    "ddp, accumulated": ("llama-accumulated", "ddp", {}),
    "ddp, bf16": ("llama-bf16", "ddp", {}),
    "ddp, used parameters": ("bert", "ddp", {"ddp_find_unused_parameters": False}),
    "ddp, buffers": ("convolutions", "ddp", {}),
    "fsdp2": ("llama", "fsdp2", SHARDED),
    "fsdp2, accumulated": ("llama-accumulated", "fsdp2", SHARDED),
    "fsdp2, recomputed": ("llama-checkpointed", "fsdp2", SHARDED),
    "fsdp2, bf16": ("llama-bf16", "fsdp2", SHARDED),
    "fsdp2, tied": ("gpt2", "fsdp2", SHARDED),
    "shard_grad_op": ("bert", "shard_grad_op", {"fsdp": "shard_grad_op"}),
    "hsdp": ("llama", "hsdp", {"fsdp": "hybrid_shard"}),
    "ddp, sp": ("llama", "ddp+sp2", {"sequences": {"sp_size": 2}}),
    "ddp, sp, packed": ("llama-packed", "ddp+sp2", {"sequences": {"sp_size": 2}}),
    "ddp, cp, packed": ("llama-packed", "ddp+cp2", {"sequences": {"cp_size": 2}}),
    "fsdp2, sp": ("llama", "fsdp2+sp2", SHARDED | {"sequences": {"sp_size": 2}}),
    "fsdp2, cp, packed": ("llama-packed", "fsdp2+cp2", SHARDED | {"sequences": {"cp_size": 2}}),
}


def zero(stage: int, *, bf16: bool = False, **settings: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed with buckets that small models fill.

    Gloo lets go of what it has sent when its own thread comes to it: where that is small, or the bucket itself, the
    measured peak stays where it is.
    """
    if stage == 3:
        settings = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 50_000, **settings}
    settings = {"reduce_bucket_size": 60_000, "allgather_bucket_size": 60_000, **settings}
    config = {"zero_optimization": {"stage": stage, **settings}, "train_batch_size": "auto"}
    return {**config, "bf16": {"enabled": True}} if bf16 else config


TORCH_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False}  # in place of DeepSpeed's, which is compiled first
FEW = {"per_device_train_batch_size": 1}  # so that little is taken by activations
ZERO_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> case, configuration, settings
    "zero 1": ("llama", zero(1), {}),
    "zero 1, few samples": ("bert", zero(1), FEW),
    "zero 1, accumulated": ("llama-accumulated", zero(1), FEW),
    "zero 2": ("llama", zero(2), {}),
    "zero 2, accumulated": ("llama-accumulated", zero(2), {}),
    "zero 2, large buckets": ("llama", zero(2, reduce_bucket_size=300_000), {}),
    "zero 2, two buckets": ("bert", zero(2, overlap_comm=True), FEW),
    "zero 2, whole sums": ("mlp", zero(2, reduce_scatter=False, reduce_bucket_size=140_000), FEW),
    "zero 2, bf16": ("llama", zero(2, bf16=True), {**FEW, "bf16": True}),
    "zero 2, tied": ("gpt2", zero(2), {}),
    "zero 2, offloaded": ("llama", {**zero(2, offload_optimizer={"device": "cpu"}), **TORCH_OPTIMIZER}, {}),
    "zero 2, sp": ("llama", {**zero(2), "sequence_parallel_size": 2}, {}),
    "zero 3": ("llama", zero(3), FEW),
    "zero 3, sp, packed": ("llama-packed", {**zero(3), "sequence_parallel_size": 2}, FEW),
    "zero 3, accumulated": ("llama-accumulated", zero(3), FEW),
    "zero 3, freed": ("llama", zero(3, stage3_max_reuse_distance=0, stage3_max_live_parameters=0), FEW),
    "zero 3, large buckets": ("llama", zero(3, reduce_bucket_size=300_000), FEW),
    "zero 3, small groups": ("llama", zero(3, sub_group_size=100_000), FEW),
    "zero 3, persistent": ("bert", zero(3, stage3_param_persistence_threshold=100_000), FEW),
    "zero 3, bf16": ("llama", zero(3, bf16=True), {**FEW, "bf16": True}),
    "zero 3, tied": ("gpt2", zero(3), FEW),
    "zero 3, offloaded": ("llama", {**zero(3, offload_optimizer={"device": "cpu"}), **TORCH_OPTIMIZER}, FEW),
}
# Collectives of the plan, by the names under which torch dispatches them.
DISPATCHED = {
    "all_reduce": ("c10d::allreduce_", "_c10d_functional::all_reduce"),
    "all_gather": ("c10d::_allgather_base_", "c10d::allgather_"),
    "reduce_scatter": ("c10d::_reduce_scatter_base_",),
    "broadcast": ("c10d::broadcast_",),
    "all_to_all": ("c10d::alltoall_base_",),
}


def many(case: Case) -> Case:
    """The same with enough data for the batches of all processes."""
    return dataclasses.replace(case, data=lambda: case.data() * 64)


def plan_of(folder: Path, name: str, processes: int, *, engine: str | None = None, **more: Any) -> RunPlan:
    """The plan of a row, by a trainer that has no settings of several processes."""
    case, word, settings = (ROWS | ZERO_ROWS)[name]
    alone = {key: value for key, value in settings.items() if key not in ("fsdp", "sequences")}
    trainer = trainer_for(folder, many(CASES[case]), **alone)
    return plan_run(trainer, processes, per_node=processes, engine=engine or word, budget=None, tries=False, **more)


def check_row(name: str, processes: int, told: list[dict[str, Any]], folder: Path) -> None:
    plan = plan_of(folder / "plan", name, processes)
    by_name = {rank.name: rank.peak.total_bytes + rank.offloaded_bytes for rank in plan.ranks}  # all on the CPU
    for rank in {0, processes - 1}:
        planned = by_name.get(f"rank {rank}", by_name.get("every rank"))
        gap = planned / told[rank][name]["peak"] - 1
        assert abs(gap) <= CLOSE, f"{name}, rank {rank} of {processes}: {gap:+.1%}"
    assert plan.checkpoint.total_bytes == pytest.approx(told[0][name]["saved"], rel=CLOSE, abs=HEADERS)
    calls = told[0][name]["calls"]
    for one in plan.collectives:
        assert one.calls == sum(calls.get(dispatched, 0) for dispatched in DISPATCHED[one.name]), (name, one, calls)


@pytest.mark.process
def test_the_plan_of_two_processes_is_what_two_processes_take(tmp_path: Path) -> None:
    rows = {name: (ROWS[name][0], ROWS[name][2]) for name in ("ddp", "fsdp2")}
    done = run(SCRIPT, str(tmp_path / "run"), json.dumps(rows), folder=tmp_path)
    for name in rows:
        check_row(name, 2, done.told, tmp_path / name)


@pytest.mark.process
@pytest.mark.slow  # a training in each of up to four processes, for every row
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_plan_is_what_so_many_processes_take(processes: int, tmp_path: Path) -> None:
    rows = {name: (case, settings) for name, (case, _, settings) in ROWS.items()}
    done = run(SCRIPT, str(tmp_path / "run"), json.dumps(rows), folder=tmp_path, processes=processes, timeout_s=500)
    for name in rows:
        check_row(name, processes, done.told, tmp_path / name)


@needs("deepspeed")
@pytest.mark.process
@pytest.mark.slow  # DeepSpeed, and a training in each of up to four processes, for every row
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_plan_of_zero_is_what_so_many_processes_take(processes: int, tmp_path: Path) -> None:
    rows = {name: (case, {**settings, "deepspeed": config}) for name, (case, config, settings) in ZERO_ROWS.items()}
    how: dict[str, Any] = {"processes": processes, "timeout_s": 500, "environment": {"DS_ACCELERATOR": "cpu"}}
    done = run(SCRIPT, str(tmp_path / "run"), json.dumps(rows), folder=tmp_path, **how)
    for name in rows:
        check_row(name, processes, done.told, tmp_path / name)


def test_a_plan_of_one_process_is_the_memory_plan(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, CASES["llama"])
    alone = trainer.check(memory=True, budget="1TB").memory
    plan = plan_run(trainer, 1, per_node=None, engine=None, budget=None, tries=False)
    assert alone is not None
    assert plan.peak_bytes == alone.peak.total_bytes
    assert plan.collectives == ()


def test_sharding_divides_what_stays_and_leaves_what_one_process_computes(tmp_path: Path) -> None:
    plans = {number: plan_of(tmp_path / str(number), "fsdp2", number).ranks[0].peak.by_kind for number in (2, 4, 8)}
    for kind in ("weights", "optimizer"):
        assert plans[2][kind] == pytest.approx(2 * plans[4][kind], rel=0.02)
        assert plans[4][kind] == pytest.approx(2 * plans[8][kind], rel=0.02)
    assert plans[2]["batch"] == plans[8]["batch"]


# Of the paper on ZeRO (arXiv:1910.02054, section 5), in bytes for each parameter: weights, gradients, and 12 bytes of
# masters and two states of Adam; what is partitioned is divided by the number of processes.
PAPER = {
    "zero1": lambda num: 2 + 12 / num,
    "zero2": lambda num: 2 + 12 / num,
    "zero3": lambda num: (2 + 2 + 12) / num,
}


@pytest.mark.parametrize("engine", PAPER)
def test_model_states_of_zero_are_those_of_the_paper(engine: str, tmp_path: Path) -> None:
    """At 64 processes. Gradients of stages 1 and 2 come and go within a step."""
    processes = 64
    case = dataclasses.replace(many(CASES["llama"]), settings={"bf16": True})
    limits = {"reduce_bucket_size": 60_000, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": {"stage": int(engine[-1]), **limits}, "bf16": {"enabled": True}}
    trainer = trainer_for(tmp_path, case)
    num = sum(parameter.numel() for parameter in trainer.model.parameters())
    plan = plan_run(trainer, processes, per_node=8, engine=config, budget=None, tries=False)
    assert plan.engine == engine
    for rank in plan.ranks:
        kinds = ["weights", "masters", "optimizer", *(["gradients"] if engine == "zero3" else [])]
        states = sum(rank.peak.by_kind[kind] for kind in kinds)
        assert states == pytest.approx(num * PAPER[engine](processes), rel=0.02)
    again = plan_run(trainer, processes, per_node=8, engine=engine, budget=None, tries=False)
    assert again.peak_bytes > plan.peak_bytes, "DeepSpeed's own buckets have 500 million elements"


def test_offloaded_states_are_in_host_memory(tmp_path: Path) -> None:
    plans = {}
    for stage in (1, 2, 3):
        for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
            config = zero(stage, **offload)
            trainer = trainer_for(tmp_path / f"{stage}{bool(offload)}", many(CASES["llama"]))
            plans[bool(offload)] = plan_run(trainer, 4, per_node=4, engine=config, budget=None, tries=False).ranks[0]
        on = plans[True]
        off = plans[False]
        assert off.offloaded_bytes == 0
        assert off.peak.by_kind["optimizer"] > 0
        assert "masters" not in on.peak.by_kind
        assert on.peak.by_kind.get("optimizer", 0) < 100, "numbers of steps"
        moved = off.peak.by_kind["optimizer"] + off.peak.by_kind["masters"]
        assert on.offloaded_bytes > moved * 4 / 3, "and the gradients of the masters"
        assert on.peak.total_bytes < off.peak.total_bytes


def test_more_sharding_is_a_change_that_is_tried_for_zero(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, CASES["llama"], per_device_train_batch_size=1)
    plan = trainer.check(processes=8, engine=zero(1), budget=1000).plan
    assert plan is not None
    stages = [
        change.settings["deepspeed"]["zero_optimization"]["stage"]
        for change in plan.changes
        if "deepspeed" in change.settings
    ]
    assert stages[:2] == [2, 3]
    assert stages[-1] == 3


@pytest.mark.parametrize("engine", ["zero3+cp2", "zero2+sp4"])
def test_zero_and_shared_sequences_are_asked_for_together(engine: str, tmp_path: Path) -> None:
    together = int(engine[-1])
    trainer = trainer_for(tmp_path, many(CASES["llama"]))
    plan = plan_run(trainer, 8, per_node=8, engine=engine, budget=None, tries=False)
    alone = plan_run(trainer, 8, per_node=8, engine=engine[:5], budget=None, tries=False)
    assert plan.engine == engine
    assert plan.num_replicas == plan.samples_per_step / 8 == 8 / together
    activations = plan.ranks[0].peak.by_kind["activations"]
    assert activations < 1.2 * alone.ranks[0].peak.by_kind["activations"] / together


def test_batch_steps_and_tokens_are_those_of_the_run(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, many(CASES["llama-accumulated"]), max_steps=10)
    plan = plan_run(trainer, 64, per_node=8, engine=None, budget=None, tries=False)
    assert (plan.batch_size, plan.micro_batches, plan.samples_per_step) == (8, 2, 8 * 2 * 64)
    assert (plan.num_steps, plan.tokens_per_step) == (10, 48 * 8 * 2 * 64)
    assert plan.num_tokens == 10 * 48 * 8 * 2 * 64
    assert plan.engine == "ddp"


def test_nothing_of_the_plan_is_left(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "planned", CASES["mlp"])
    before = weights(trainer.model)
    environment = dict(os.environ)
    attributes = dict(vars(trainer))
    resize = __import__("torch").UntypedStorage.resize_
    plan_run(trainer, 16, per_node=4, engine="fsdp2", budget=None, tries=False)
    assert not dist.is_initialized()
    assert dict(os.environ) == environment
    assert __import__("torch").UntypedStorage.resize_ is resize
    assert differing(weights(trainer.model), before) == {}
    assert all(vars(trainer)[name] is value for name, value in attributes.items())
    assert trainer.args.world_size == trainer.accelerator.num_processes == 1
    trainer.train()
    other = trainer_for(tmp_path / "other", CASES["mlp"])
    other.train()
    assert differing(weights(trainer.model), weights(other.model)) == {}


def test_the_cheapest_change_that_fits_comes_last_and_sharding_is_among_them(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, CASES["llama"], per_device_train_batch_size=1)
    whole = plan_run(trainer, 8, per_node=8, engine="ddp", budget="1TB")
    assert whole.fits
    assert whole.changes == ()
    plan = trainer.check(processes=8, engine="ddp", budget=whole.peak_bytes // 2).plan
    assert plan is not None
    assert plan.fits is False
    assert plan.cheapest is plan.changes[-1]
    assert plan.cheapest.settings["fsdp"] in ("shard_grad_op", "full_shard")
    assert f"the cheapest change that fits is {plan.cheapest}" in "\n".join(plan.lines())


def test_the_report_has_the_plan_in_every_form(tmp_path: Path) -> None:
    report = trainer_for(tmp_path, CASES["mlp"]).check(processes=4, per_node=2, engine="fsdp2", budget="1TB")
    text = str(report)
    assert "plan of 4 processes on 2 nodes" in text
    assert "reduce_scatter" in text
    assert report.plan is not None
    assert report.to_dict()["plan"] == dataclasses.asdict(report.plan)
    assert "communication of a step" in report._repr_html_()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "nodes that are not full": ({"processes": 10, "per_node": 4}, "processes=64, per_node=8"),
    "no process": ({"processes": 0}, "processes=0"),
    "an engine that is none": ({"processes": 4, "engine": "fast"}, "ddp, fsdp2"),
    "a sequence that is shared in two ways": ({"processes": 4, "engine": "ddp+cp2+sp2"}, "shared in one way"),
    "sizes that the processes do not divide into": ({"processes": 4, "engine": "ddp+cp3"}, "cp_size=3"),
    "no such stage": ({"processes": 4, "engine": "zero4"}, "zero1, zero2, zero3"),
    "DeepSpeed without ZeRO": ({"processes": 4, "engine": {"train_batch_size": "auto"}}, "'ddp'"),
    "an optimizer of DeepSpeed": (
        {"processes": 4, "engine": {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion"}}},
        "Leave its section out",
    ),
    "weights in host memory": (
        {"processes": 4, "engine": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}},
        "offload_param",
    ),
    "buckets that are none": (
        {"processes": 4, "engine": {"zero_optimization": {"stage": 1, "contiguous_gradients": False}}},
        "contiguous_gradients",
    ),
    "a size that follows from the model": (
        {"processes": 4, "engine": {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}},
        "reduce_bucket_size.* follows from config.hidden_size",
    ),
    "a number of processes is missing": ({"engine": "fsdp2"}, "say how many"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_planned_is_refused(name: str, tmp_path: Path) -> None:
    asked, text = REFUSALS[name]
    with pytest.raises(ArgumentError, match=text):
        trainer_for(tmp_path, CASES["mlp"]).check(**asked)


def test_a_process_with_a_group_makes_no_plan(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, CASES["mlp"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ArgumentError, match="in a process that is alone"):
            trainer.check(processes=4)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_model_that_looks_at_values_cannot_be_planned(tmp_path: Path) -> None:
    case = Case(lambda: mlp(LooksAtValues), vectors)
    with pytest.raises(ModelError, match="a step without values fails"):
        plan_run(trainer_for(tmp_path, case), 4, per_node=None, engine=None, budget=None, tries=False)
    assert not dist.is_initialized()


def test_a_stream_is_planned_too(tmp_path: Path) -> None:
    from .._support.small import data

    trainer = make_trainer(tmp_path, train_dataset=data.Stream(data.vectors(26)), max_steps=3)
    plan = plan_run(trainer, 64, per_node=8, engine="ddp", budget=None, tries=False)
    assert plan.num_steps == 3
    assert plan.tokens_per_step is None
