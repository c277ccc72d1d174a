"""Methods with an underscore that libraries override with `super()`: called as often as in the original, or said."""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trainwright
from trainwright.run.checks import HOOKS_WITHOUT_EFFECT
from trainwright.state.memory_tracker import TrainerMemoryTracker

from ..contract import doubles

LIBRARIES = ("transformers", "trainwright")
# By default a run of four steps with two micro-batches each, an evaluation, and no checkpoint.
OVERRIDDEN: dict[str, dict[str, Any]] = {
    "_prepare_context_parallel_inputs": {},
    "_validate_args": {},
    "_build_accelerator_args": {},
    "_has_mixed_mesh_grads": {},
    "_update_auto_batch_size": {"auto_find_batch_size": True},
    "_load_optimizer_and_scheduler": {},
    "_load_scaler": {},
    "create_optimizer": {},
    "create_scheduler": {},
    "compute_loss_context_manager": {},
    "autocast_smart_context_manager": {},
}


def counting(function: Callable[..., Any], calls: Counter[str], name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(self, *args, **kwargs)

    return method


def run(library: str, folder: Path, cls: Any, resume: bool | None = None, **settings: Any) -> Any:
    package = importlib.import_module(library)
    args = package.TrainingArguments(
        output_dir=str(folder / library),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "logging_steps": 1,
            **settings,
        },
    )
    data = {"train_dataset": doubles.samples(40), "eval_dataset": doubles.samples(8)}
    trainer = cls(model=doubles.model(), args=args, **data)
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    return trainer


@pytest.mark.framework
@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_override_is_called_as_often_as_in_the_original(name: str, tmp_path: Path) -> None:
    found = {}
    for library in LIBRARIES:
        base = importlib.import_module(library).Trainer
        calls: Counter[str] = Counter()
        cls = type("Overrides", (base,), {name: counting(getattr(base, name), calls, name)})
        trainer = run(library, tmp_path, cls, **OVERRIDDEN[name])
        found[library] = calls[name], doubles.weights(trainer)
    assert found["trainwright"][0] == found["transformers"][0]
    assert doubles.same(found["trainwright"][1], found["transformers"][1])


@pytest.mark.framework
@pytest.mark.parametrize("name", [name for name in OVERRIDDEN if not name.startswith("_validate")])
def test_a_method_that_is_replaced_in_the_class_is_called_as_often(name: str, tmp_path: Path) -> None:
    """As a library does it that patches the trainer when it is imported."""
    found = {}
    for library in LIBRARIES:
        base = importlib.import_module(library).Trainer
        calls: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, name, counting(getattr(base, name), calls, name))
            run(library, tmp_path, base, **OVERRIDDEN[name])
        found[library] = calls[name]
    assert found["trainwright"] == found["transformers"]


@pytest.mark.framework
def test_a_schedule_is_made_once_where_both_are_made_together(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    class MakesBoth(trainwright.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.create_optimizer()
            self.create_scheduler(num_training_steps=num_training_steps)

        create_scheduler = counting(trainwright.Trainer.create_scheduler, calls, "schedule")

    run("trainwright", tmp_path, MakesBoth)
    assert calls["schedule"] == 1


def test_states_are_loaded_from_a_checkpoint_once(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    names = ("_load_optimizer_and_scheduler", "_load_scaler")
    base = trainwright.Trainer
    cls = type("Loads", (base,), {name: counting(getattr(base, name), calls, name) for name in names})
    run("trainwright", tmp_path, cls, save_strategy="steps", save_steps=2, max_steps=2)
    assert not calls
    run("trainwright", tmp_path, cls, save_strategy="steps", save_steps=2, resume=True)
    assert calls == dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", HOOKS_WITHOUT_EFFECT)
def test_an_override_without_effect_is_named_once(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    cls: Any = type("Overrides", (trainwright.Trainer,), {name: method})
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        run("trainwright", tmp_path, cls, log_level="warning")
    assert caplog.text.count(f"Overrides.{name} has no effect") == 1


def test_inputs_and_a_context_of_an_override_are_used(tmp_path: Path) -> None:
    """In the order of the original: inside of it are the move to the device, the loss and the backward pass."""
    seen: list[str] = []

    class Own(trainwright.Trainer):
        def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
            base, inputs = super()._prepare_context_parallel_inputs(model, inputs)

            @contextmanager
            def context() -> Iterator[None]:
                seen.append("in")
                with base():
                    yield
                seen.append("out")

            return context, {name: torch.zeros_like(value) for name, value in inputs.items()}

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("loss" if all(bool((value == 0).all()) for value in inputs.values()) else "other inputs")
            return super().compute_loss(model, inputs, *args, **kwargs)

    run("trainwright", tmp_path, Own, max_steps=1, gradient_accumulation_steps=1)
    assert seen == ["in", "loss", "out"] * 2  # a step and an evaluation batch


def test_the_norm_of_mixed_meshes_is_an_overrides(tmp_path: Path) -> None:
    norms: list[float] = []

    class Own(trainwright.Trainer):
        def _has_mixed_mesh_grads(self, model: Any) -> bool:
            return True

        def _mixed_mesh_grad_norm(self, model: Any, max_norm: float) -> Any:
            norms.append(max_norm)
            return super()._mixed_mesh_grad_norm(model, max_norm)

    run("trainwright", tmp_path, Own, max_steps=1)
    run("trainwright", tmp_path, Own, max_steps=1, max_grad_norm=0.0)
    assert norms == [1.0, torch.inf]


def test_smaller_micro_batches_are_reported(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Own(trainwright.Trainer):
        def _update_auto_batch_size(self, batch_size: int) -> None:
            sizes.append(batch_size)
            super()._update_auto_batch_size(batch_size)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(next(iter(inputs.values()))) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer: Any = Own(
        model=doubles.model(),
        args=trainwright.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", max_steps=1, auto_find_batch_size=True, save_strategy="no"
        ),
        train_dataset=doubles.samples(40),
    )
    trainer.train()
    assert sizes == [8, 4, 2]


@pytest.mark.parametrize("value", [None, torch.ones(2), {"a": (torch.ones(2),)}], ids=["none", "tensor", "nested"])
def test_the_older_name_of_gathering(value: Any, tmp_path: Path) -> None:
    trainer = run("trainwright", tmp_path, trainwright.Trainer, max_steps=1)
    gathered = trainer._nested_gather(value, "labels")
    assert str(gathered) == str(value)


# -- arguments ------------------------------------------------------------------------------------------------------

FSDP: dict[str, dict[str, Any]] = {
    "none": {},
    "words": {"fsdp": "full_shard auto_wrap"},
    "version 2": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
    "classes": {
        "fsdp": "shard_grad_op offload",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["A", "B"], "activation_checkpointing": "true"},
    },
    "version 1": {
        "fsdp": True,
        "fsdp_config": {"version": 1, "limit_all_gathers": True, "use_orig_params": "false", "backward_prefetch": "x"},
    },
}


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FSDP)
def test_plugin_arguments_are_the_originals(name: str, tmp_path: Path) -> None:
    ours, theirs = (
        package.TrainingArguments(str(tmp_path), use_cpu=True, **{**FSDP[name]})
        for package in (trainwright, transformers)
    )
    assert ours.fsdp_plugin_args == theirs.fsdp_plugin_args
    assert ours.default_optim == theirs.default_optim


def test_the_record_of_processes_may_be_assigned(tmp_path: Path) -> None:
    args = trainwright.TrainingArguments(str(tmp_path), use_cpu=True)
    assert args.distributed_state.num_processes == 1
    args.distributed_state = None
    assert args.distributed_state is None


# -- the memory tracker -----------------------------------------------------------------------------------------------


def test_parts_of_the_memory_tracker_are_called(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    names = ("stop", "update_metrics", "peak_monitor_func")
    with ExitStack() as stack:
        for name in names:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            function = getattr(TrainerMemoryTracker, name)
            patch.setattr(TrainerMemoryTracker, name, counting(function, calls, name))

        class Tracker(TrainerMemoryTracker):
            def derive_stage(self) -> str:
                calls["derive_stage"] += 1
                return super().derive_stage() and "mine"

        tracker = Tracker()
        metrics: dict[str, Any] = {}
        tracker.start()
        tracker.stop_and_update_metrics(metrics)
        assert calls == {"derive_stage": 2, "stop": 1, "update_metrics": 1, "peak_monitor_func": 1}
        assert metrics.keys() == {"mine_mem_cpu_alloc_delta", "mine_mem_cpu_peaked_delta"}
        run("trainwright", tmp_path, trainwright.Trainer, max_steps=1, skip_memory_metrics=False)
    assert calls["stop"] == calls["update_metrics"] + 1 == 1 + 3  # of the constructor, training, evaluation
