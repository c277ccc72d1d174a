"""Checks of the fields about accelerate and several processes. This version has one process, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from accelerate import ParallelismConfig

from trainwright.config import resolve, rules
from trainwright.errors import ArgumentError

from .bench import Bench, Toy, samples, seeded
from .table import companion, shows


class Parcel(torch.Tensor):
    """Writes down whether it was sent without waiting."""

    sent: list[bool]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        Parcel.sent.append(kwargs["non_blocking"])
        return self.as_subclass(torch.Tensor)


@shows("accelerator_config", marks="framework")
def what_accelerate_is_told(bench: Bench) -> None:
    steps = {"gradient_accumulation_kwargs": {"num_steps": 3}}
    trainer = bench.train(accelerator_config=steps)
    assert trainer.state.global_step == 2
    assert trainer.get_total_train_batch_size(trainer.args) == 6
    for non_blocking in (False, True):
        Parcel.sent = []
        parcels(bench.trainer(accelerator_config={"non_blocking": non_blocking}))
        assert Parcel.sent == [non_blocking]
    drawn = {"accelerator_config": {"use_seedable_sampler": False}}
    assert order(bench, **drawn) == order_of_transformers(bench, **drawn)
    assert order(bench, **drawn) != order(bench)


def parcels(trainer: Any) -> Any:
    return trainer._prepare_inputs({"x": torch.zeros(2, device="meta").as_subclass(Parcel)})


def order(bench: Bench, **settings: Any) -> list[int]:
    return bench.train(num_train_epochs=2, **settings).model.order  # type: ignore[no-any-return]


def order_of_transformers(bench: Bench, **settings: Any) -> list[int]:
    args = bench.args(transformers.TrainingArguments, num_train_epochs=2, **settings)
    model = seeded(Toy)
    transformers.Trainer(model=model, args=args, train_dataset=samples()).train()
    return model.order  # type: ignore[no-any-return]


def _needs_processes(bench: Bench, **settings: Any) -> None:
    ((name, value),) = settings.items()
    assert bench.args(**settings).to_dict()[name] == value
    messages = rules.advise(bench.args(**settings))
    assert len(messages) == 1
    assert name in messages[0]
    assert "one process" in messages[0]
    bench.train(**settings)
    assert name in bench.warnings()


@companion("ddp_backend", "nothing is sent where there is one process")
def one_process_sends_nothing(bench: Bench) -> None:
    _needs_processes(bench, ddp_backend="gloo")


@companion("ddp_timeout", "nothing is waited for where there is one process")
def one_process_waits_for_nobody(bench: Bench) -> None:
    _needs_processes(bench, ddp_timeout=60)
    assert bench.args(ddp_timeout=60).ddp_timeout_delta.total_seconds() == 60


@companion("ddp_find_unused_parameters", "gradients are not averaged where there is one process")
def one_process_averages_nothing(bench: Bench) -> None:
    _needs_processes(bench, ddp_find_unused_parameters=True)


@companion("ddp_bucket_cap_mb", "gradients are not averaged where there is one process")
def one_process_has_no_buckets(bench: Bench) -> None:
    _needs_processes(bench, ddp_bucket_cap_mb=10)


@companion("ddp_broadcast_buffers", "buffers are not sent where there is one process")
def one_process_has_no_buffers_to_send(bench: Bench) -> None:
    _needs_processes(bench, ddp_broadcast_buffers=False)


@companion("ddp_static_graph", "gradients are not averaged where there is one process")
def one_process_promises_nothing(bench: Bench) -> None:
    _needs_processes(bench, ddp_static_graph=True)


@shows("fsdp")
def sharding_needs_a_launcher(bench: Bench) -> None:
    """What it does to a run is shown where there are several processes: `tests/distributed/test_sharded.py`."""
    with pytest.raises(ArgumentError, match="torchrun"):
        bench.trainer(fsdp=True)
    with pytest.raises(ArgumentError, match="torchrun"):
        bench.trainer(fsdp="full_shard auto_wrap")
    bench.trainer(fsdp="")


@companion("fsdp_config", "it says how to shard, which several processes do: tests/distributed/test_sharded.py")
def nothing_is_sharded_by_a_configuration_alone(bench: Bench) -> None:
    assert "fsdp_config has no effect without fsdp" in rules.advise(bench.args(fsdp_config={"version": 2}))[0]


@shows("deepspeed")
def its_configuration_is_held_against_the_arguments(bench: Bench) -> None:
    """What it does to a run is shown where there are several processes: `tests/distributed/test_zero.py`."""
    args = bench.args(deepspeed={"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}, max_grad_norm=0.7)
    plan = resolve.deepspeed(args)
    assert plan is not None
    assert plan.config["gradient_clipping"] == 0.7
    assert plan.config["train_micro_batch_size_per_gpu"] == args.per_device_train_batch_size
    with pytest.raises(ArgumentError, match=r"gradient_clipping=0\.5.*max_grad_norm.*0\.7"):
        bench.trainer(deepspeed={"gradient_clipping": 0.5}, max_grad_norm=0.7)
    assert resolve.deepspeed(bench.args()) is None


@shows("parallelism_config")
def the_sizes_reach_accelerate_and_must_be_the_launchers(bench: Bench) -> None:
    alone = ParallelismConfig()
    assert bench.trainer(parallelism_config=alone).accelerator.parallelism_config is alone
    with pytest.raises(ArgumentError, match=r"(?s)tp_size=3.*3 processes.*1 process was started"):
        bench.trainer(parallelism_config=ParallelismConfig(tp_size=3))
