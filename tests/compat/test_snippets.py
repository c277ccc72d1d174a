"""Snippets as the documentation of transformers' Trainer has them, versions 4.34 to 5.23, with the import changed.

Each row of a table is one snippet; rows about training train.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright
from trainwright import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from trainwright.checkpoint.weights import weight_files
from trainwright.config.deprecated import OLD_NAMES, Honoured
from trainwright.errors import ArgumentError, CallbackError, LegacyNameWarning

from .._support import forked
from .._support.small import (
    OURS,
    REFERENCE,
    data,
    losses,
    make_trainer,
    models,
    module,
    trained_trainer,
)

SHORT: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "save_strategy": "no"}
OLDER = pytest.mark.filterwarnings("ignore::trainwright.errors.LegacyNameWarning")

# -- overrides with the parameters of an older version --------------------------------------------------------------


class ComputeLoss(Trainer):  # 4.34 to 4.45
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        self.was_called = True
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss, outputs) if return_outputs else loss


class ComputeLossInOtherWords(Trainer):
    def compute_loss(self, net: Any, batch: Any, return_outputs: bool = False) -> Any:
        self.was_called = True
        return super().compute_loss(net, batch, return_outputs)


class TrainingStep(Trainer):  # 4.34 to 4.45
    def training_step(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self.was_called = True
        return super().training_step(model, inputs)


class WholeTrainingStep(Trainer):  # the body that was copied from 5.x and changed
    def training_step(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self.was_called = True
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class Log(Trainer):  # 4.34 to 4.46
    def log(self, logs: dict[str, float]) -> None:
        self.was_called = True
        logs["extra"] = 1.0
        super().log(logs)


class LogWithMore(Trainer):
    def log(self, logs: dict[str, float], **kwargs: Any) -> None:
        self.was_called = True
        super().log(logs, **kwargs)


class PredictionStep(Trainer):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
        self.was_called = True
        return super().prediction_step(model, inputs, prediction_loss_only)


class CreateScheduler(Trainer):
    def create_scheduler(self, num_training_steps: int) -> Any:
        self.was_called = True
        return super().create_scheduler(num_training_steps)


class CreateOptimizer(Trainer):
    def create_optimizer(self) -> Any:
        self.was_called = True
        return super().create_optimizer()


class EvaluationLoop(Trainer):
    def evaluation_loop(self, dataloader: Any, description: str, prediction_loss_only: Any = None) -> Any:
        self.was_called = True
        return super().evaluation_loop(dataloader, description, prediction_loss_only)


class SaveModel(Trainer):
    def save_model(self, output_dir: str | None = None) -> None:
        self.was_called = True
        super().save_model(output_dir)


class GetBatchSamples(Trainer):  # 4.46 to 4.49
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int) -> Any:
        self.was_called = True
        return super().get_batch_samples(epoch_iterator, num_batches)


class TrainSampler(Trainer):  # 4.34 to 4.51
    def _get_train_sampler(self) -> Any:
        self.was_called = True
        return super()._get_train_sampler()


class LogSaveEvaluate(Trainer):  # 4.38 to 4.46
    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any, ignore_keys_for_eval: Any
    ) -> None:
        self.was_called = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval)


class LogSaveEvaluateWithoutNorm(Trainer):  # 4.34 to 4.37
    def _maybe_log_save_evaluate(
        self, tr_loss: Any, model: Any, trial: Any, epoch: Any, ignore_keys_for_eval: Any
    ) -> None:
        assert (model is self.model_wrapped, trial, ignore_keys_for_eval) == (True, None, None)
        self.was_called = True
        super()._maybe_log_save_evaluate(tr_loss, model, trial, epoch, ignore_keys_for_eval)


class LogSaveEvaluateByName(Trainer):
    def _maybe_log_save_evaluate(
        self, tr_loss: Any, model: Any, trial: Any, epoch: Any, ignore_keys_for_eval: Any
    ) -> None:
        self.was_called = True
        super()._maybe_log_save_evaluate(
            tr_loss=tr_loss, model=model, trial=trial, epoch=epoch, ignore_keys_for_eval=ignore_keys_for_eval
        )


class SaveCheckpoint(Trainer):  # 4.34 to 4.46
    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        self.was_called = True
        super()._save_checkpoint(model, trial)


class OptimizerClass(Trainer):  # 4.34 to 4.37
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any) -> Any:
        return Trainer.get_optimizer_cls_and_kwargs(args)


class Mixin:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        self.was_called = True
        return super().compute_loss(model, inputs, return_outputs)  # type: ignore[misc]


class WithMixin(Mixin, Trainer):  # type: ignore[misc]  # as users write it
    pass


OVERRIDES = (
    ComputeLoss,
    ComputeLossInOtherWords,
    TrainingStep,
    WholeTrainingStep,
    Log,
    LogWithMore,
    PredictionStep,
    CreateScheduler,
    CreateOptimizer,
    EvaluationLoop,
    SaveModel,
    GetBatchSamples,
    TrainSampler,
    LogSaveEvaluate,
    LogSaveEvaluateWithoutNorm,
    LogSaveEvaluateByName,
    SaveCheckpoint,
    OptimizerClass,
    WithMixin,
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained_trainer(tmp_path_factory.mktemp("plain"), eval_dataset=data.vectors(8), **SHORT)


@pytest.mark.parametrize("kind", OVERRIDES, ids=lambda kind: kind.__name__)
def test_an_override_of_an_older_version_is_called_with_what_it_takes(kind: Any, plain: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        cls=kind,
        eval_dataset=data.vectors(8),
        **{**SHORT, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert kind is OptimizerClass or trainer.was_called
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
    assert losses(trainer) == losses(plain)
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_override_on_the_trainer_itself_is_called_with_what_it_takes(plain: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SHORT)
    trainer.compute_loss = lambda model, inputs, return_outputs=False: model(**inputs)["loss"]
    trainer.train()
    assert losses(trainer) == losses(plain)


def test_loss_that_does_not_count_items_is_a_mean_over_the_window(tmp_path: Path) -> None:
    """A model that divides by the number of items is told none, so the micro-batches are averaged."""
    settings = {"max_steps": 2, "train_dataset": data.sequences(16), "save_strategy": "no", "learning_rate": 1e-3}

    def run(cls: Any, size: int, steps: int) -> Any:
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        return trained_trainer(tmp_path / f"{cls.__name__}{size}", cls=cls, model=models.llama(), **settings, **sizes)

    whole = run(Trainer, 8, 1)
    cut = run(ComputeLoss, 2, 4)
    assert losses(cut) == pytest.approx(losses(whole), rel=0.01)
    norms = [[entry["grad_norm"] for entry in one.state.log_history if "grad_norm" in entry] for one in (whole, cut)]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)  # the sum would be four times as large


def test_an_override_of_today_is_left_as_it_is(tmp_path: Path) -> None:
    class Today(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    before = Today.compute_loss
    trained_trainer(tmp_path, cls=Today, max_steps=1, save_strategy="no")
    assert Today.compute_loss is before
    with pytest.raises(TypeError, match="unknown"):
        ComputeLoss.compute_loss(None, None, None, unknown=1)


# -- what a callback returns ----------------------------------------------------------------------------------------


class StopsByDict(TrainerCallback):  # as the page "Callbacks" has it
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return {"should_training_stop": True} if state.global_step >= 2 else {}


class Returns(TrainerCallback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.value


def test_a_callback_may_return_a_dict_of_flags(tmp_path: Path) -> None:
    trainer = trained_trainer(tmp_path, callbacks=[StopsByDict], max_steps=9, save_strategy="no")
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("value", [5, {"should_stop": True}, [True]], ids=repr)
def test_another_value_of_a_callback_is_an_error_that_names_it(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"Returns\.on_step_end returned .*should_training_stop"):
        trained_trainer(tmp_path, callbacks=[Returns(value)], max_steps=2, save_strategy="no")


# -- setters, and older names ---------------------------------------------------------------------------------------

SETTERS: tuple[tuple[Callable[[Any], Any], dict[str, Any]], ...] = (
    (lambda a: a.set_evaluate(strategy="steps", steps=100), {"eval_steps": 100, "eval_delay": 0}),
    (lambda a: a.set_evaluate("no", jit_mode=False), {"eval_strategy": "no"}),
    (lambda a: a.set_testing(batch_size=32, jit_mode=False), {"per_device_eval_batch_size": 32}),
    (lambda a: a.set_lr_scheduler(name="cosine", warmup_ratio=0.05), {"warmup_steps": 0.05}),
    (lambda a: a.set_lr_scheduler(name="cosine", warmup_ratio=0.05, warmup_steps=7), {"warmup_steps": 7}),
    (lambda a: a.set_lr_scheduler("linear", 2.0, -1, 0.05, 0), {"warmup_steps": 0.05, "num_train_epochs": 2.0}),
    (lambda a: a.set_optimizer(name="adamw_hf", beta1=0.8), {"optim": "adamw_torch", "adam_beta1": 0.8}),
    (lambda a: a.set_dataloader(train_batch_size=16, eval_batch_size=64), {"per_device_train_batch_size": 16}),
    (lambda a: a.set_training(learning_rate=1e-4, batch_size=32), {"learning_rate": 1e-4}),
    (lambda a: a.set_logging(strategy="steps", steps=100), {"logging_steps": 100}),
    (lambda a: a.set_save(strategy="steps", steps=100), {"save_steps": 100}),
    (lambda a: a.set_push_to_hub("me/awesome-model"), {"hub_model_id": "me/awesome-model"}),
)


@OLDER
@pytest.mark.parametrize("row", range(len(SETTERS)))
def test_setters_take_the_parameters_of_all_versions(row: int, tmp_path: Path) -> None:
    call, expected = SETTERS[row]
    args = TrainingArguments(str(tmp_path))
    assert call(args) is args
    assert {name: getattr(args, name) for name in expected} == expected


def test_setters_refuse_tracing() -> None:
    with pytest.raises(ArgumentError, match="torch_compile"):
        TrainingArguments().set_evaluate("no", jit_mode=True)


def test_an_evaluation_without_delay_comes_in_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(8), **SHORT)
    trainer.args.set_evaluate(strategy="steps", steps=1)
    trainer.train()
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 3


# name, value, what it changes, and the same in another value
ATTRIBUTES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("evaluation_strategy", "steps", {"eval_strategy": "steps", "do_eval": True, "eval_steps": 500}),
    ("per_gpu_train_batch_size", 3, {"per_device_train_batch_size": 3}),
    ("per_gpu_eval_batch_size", 3, {"per_device_eval_batch_size": 3}),
    ("warmup_ratio", 0.25, {"warmup_steps": 0.25}),
    ("no_cuda", True, {"use_cpu": True}),
    ("adafactor", True, {"optim": "adafactor"}),
    ("group_by_length", True, {"train_sampling_strategy": "group_by_length"}),
    ("include_inputs_for_metrics", True, {"include_for_metrics": ["inputs"]}),
    ("include_tokens_per_second", True, {"include_num_input_tokens_seen": "all"}),
    ("split_batches", True, {}),
    ("dispatch_batches", True, {}),
    ("fsdp_min_num_params", 20, {"fsdp_config": {"min_num_params": 20}}),
    ("fsdp_transformer_layer_cls_to_wrap", "Layer", {"fsdp_config": {"transformer_layer_cls_to_wrap": "Layer"}}),
    ("torchdynamo", "eager", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ("push_to_hub_model_id", "me/model", {"hub_model_id": "me/model"}),
    ("push_to_hub_organization", "us", {"hub_model_id": "us/run"}),
    ("push_to_hub_token", "secret", {"hub_token": "secret"}),
    ("tpu_metrics_debug", True, {"debug": ["tpu_metrics_debug"]}),
)


@pytest.mark.parametrize(("name", "value", "expected"), ATTRIBUTES, ids=[row[0] for row in ATTRIBUTES])
def test_an_older_name_is_an_attribute_with_effect(name: str, value: Any, expected: dict[str, Any]) -> None:
    args = TrainingArguments("run")
    before = getattr(args, name)
    assert before != value
    with pytest.warns(LegacyNameWarning, match=name):
        setattr(args, name, value)
    assert getattr(args, name) == value
    assert {field: getattr(args, field) for field in expected} == expected
    assert name not in vars(args)
    if isinstance(value, bool):
        with pytest.warns(LegacyNameWarning, match=name):
            setattr(args, name, False)
        assert not getattr(args, name)


@OLDER
def test_every_older_name_can_be_read() -> None:
    args = TrainingArguments("run")
    named = {name for name, row in OLD_NAMES.items() if not isinstance(row, Honoured)}
    assert named >= {row[0] for row in ATTRIBUTES}
    for name in named:
        setattr(args, name, getattr(args, name))  # what is read may be assigned, and changes nothing
    assert args.to_dict() == TrainingArguments("run").to_dict()
    with pytest.raises(ArgumentError, match="IPEX"):
        args.use_ipex = True
    assert not hasattr(TrainingArguments, "no_cuda")  # dataclasses read defaults of fields from the class


@OLDER
def test_an_older_name_assigned_before_training_is_trained_with(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(8), **SHORT)
    trainer.args.evaluation_strategy = "steps"
    trainer.args.include_tokens_per_second = True
    trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    assert "num_input_tokens_seen" in trainer.state.log_history[0]


@OLDER
def test_warmup_steps_win_over_a_ratio_in_the_constructor() -> None:
    assert TrainingArguments("run", warmup_ratio=0.1, warmup_steps=7).warmup_steps == 7
    assert TrainingArguments("run", warmup_ratio=0.1).get_warmup_steps(100) == 10


COMMAND_LINES: tuple[tuple[str, str, Any], ...] = (
    ("--include_tokens_per_second", "include_num_input_tokens_seen", "all"),
    ("--include_tokens_per_second True", "include_num_input_tokens_seen", "all"),
    ("--include_num_input_tokens_seen non_padding", "include_num_input_tokens_seen", "non_padding"),
    ("--include_num_input_tokens_seen", "include_num_input_tokens_seen", "all"),
    ("", "include_num_input_tokens_seen", "no"),
    ('--accelerator_config {"split_batches":true}', "split_batches", True),
    ("--warmup_ratio 0.1 --warmup_steps 5", "warmup_steps", 5),
    ("--use_legacy_prediction_loop", "use_legacy_prediction_loop", True),
    ("--save_safetensors False", "save_safetensors", False),
)


@OLDER
@pytest.mark.parametrize(("line", "name", "expected"), COMMAND_LINES, ids=[row[0] for row in COMMAND_LINES])
def test_command_lines(line: str, name: str, expected: Any) -> None:
    parser = HfArgumentParser(Seq2SeqTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "run", *line.split()], look_for_args_file=False)
    assert getattr(args, name) == expected


def test_accumulation_may_be_given_to_accelerate(tmp_path: Path) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    trainer = trained_trainer(tmp_path, max_steps=3, save_strategy="no", accelerator_config=config)
    assert trainer.args.gradient_accumulation_steps == trainer.current_gradient_accumulation_steps == 2
    assert trainer.state.epoch == pytest.approx(6 / 7)


# -- methods of the trainer -----------------------------------------------------------------------------------------


def test_train_takes_the_older_name_of_a_checkpoint(tmp_path: Path) -> None:
    trained_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = make_trainer(tmp_path, max_steps=4, save_strategy="no")
    with pytest.warns(LegacyNameWarning, match="resume_from_checkpoint"):
        trainer.train(model_path=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert len(losses(trainer)) == 4  # two of them from the checkpoint


def test_a_parameter_group_is_found_by_name(plain: Any) -> None:
    name, parameter = next(iter(plain.model.named_parameters()))
    assert plain.get_optimizer_group(name) is plain.get_optimizer_group(parameter) is not None
    assert plain.get_optimizer_group("none of this name") is None


def test_a_model_that_counts_its_operations_is_asked(tmp_path: Path) -> None:
    class Counts(models.ReturnsDict):
        def floating_point_ops(self, inputs: dict[str, torch.Tensor]) -> int:
            return 7 * len(inputs["labels"])

    trainer = trained_trainer(tmp_path, model=module(kind=Counts), **SHORT)
    assert trainer.state.total_flos == 7 * 4 * 6 - 7 * 2 * 0


def test_init_git_repo_is_the_older_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, **SHORT)
    asked = []
    monkeypatch.setattr(trainer, "init_hf_repo", lambda: asked.append(True))
    with pytest.warns(LegacyNameWarning, match="init_hf_repo"):
        trainer.init_git_repo(at_init=True)
    assert asked


@pytest.mark.parametrize(("precision", "dtype"), [({"bf16": True}, torch.bfloat16), ({}, torch.float32)])
def test_autocast_is_a_real_context(precision: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, use_cpu=True, **precision, **SHORT)
    with trainer.autocast_smart_context_manager():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_an_override_of_the_autocast_context_is_entered(tmp_path: Path) -> None:
    class InBfloat16(Trainer):
        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
            return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=bool(cache_enabled))

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            self.was_on = torch.is_autocast_enabled("cpu")
            return super().compute_loss(model, inputs, **kwargs)

    assert trained_trainer(tmp_path, cls=InBfloat16, **SHORT).was_on


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_older_prediction_loop_is_called_on_request(is_wanted: bool, tmp_path: Path) -> None:
    class Older(Trainer):
        def prediction_loop(
            self,
            dataloader: Any,
            description: str,
            prediction_loss_only: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            self.was_called = True
            return super().prediction_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )

    trainer = make_trainer(tmp_path, cls=Older, use_legacy_prediction_loop=is_wanted, **SHORT)
    assert trainer.evaluate(data.vectors(8))["eval_loss"] > 0
    assert hasattr(trainer, "was_called") == is_wanted


def test_a_search_space_may_use_older_names(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, model_init=lambda: module(), eval_dataset=data.vectors(8), max_steps=1, save_strategy="no"
    )
    seen = []

    def space(trial: Any) -> dict[str, Any]:
        trial.suggest_categorical("per_gpu_train_batch_size", [2])
        return {"per_gpu_train_batch_size": 2, "warmup_ratio": 0.5}

    class Sees(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((args.per_device_train_batch_size, args.warmup_steps))

    trainer.add_callback(Sees)
    trainer.hyperparameter_search(hp_space=space, n_trials=1, backend="optuna")
    assert seen == [(2, 0.5)]


# -- import paths ---------------------------------------------------------------------------------------------------

PATHS: dict[str, str] = {
    "trainer_utils": "EvalPrediction IntervalStrategy SchedulerType set_seed PredictionOutput get_last_checkpoint "
    "FSDPOption EvalLoopOutput HPSearchBackend default_compute_objective speed_metrics BestRun",
    "training_args": "TrainingArguments OptimizerNames ParallelMode",
    "training_args_seq2seq": "Seq2SeqTrainingArguments",
    "trainer_seq2seq": "Seq2SeqTrainer",
    "trainer_callback": "TrainerCallback TrainerState TrainerControl PrinterCallback EarlyStoppingCallback",
    "trainer_pt_utils": "LabelSmoother nested_concat get_parameter_names IterableDatasetShard AcceleratorConfig",
    "debug_utils": "DebugOption",
    "trainer": "Trainer TRAINING_ARGS_NAME TrainerCallback OPTIMIZER_NAME",
    "integrations": "WandbCallback TensorBoardCallback is_wandb_available",
    "integrations.integration_utils": "MLflowCallback rewrite_logs",
    "hf_argparser": "HfArgumentParser HfArg",
    "optimization": "get_linear_schedule_with_warmup Adafactor",
    "data.data_collator": "DataCollatorWithPadding default_data_collator",
}


@pytest.mark.parametrize("path", PATHS)
def test_import_paths(path: str) -> None:
    found = importlib.import_module(f"trainwright.{path}")
    for name in PATHS[path].split():
        assert getattr(found, name) is getattr(trainwright, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = found.no_such_name
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"trainwright.{path}_of_another_name")


def test_names_of_transformers_itself_are_found_at_their_path() -> None:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    there = importlib.import_module("trainwright.integrations.deepspeed")
    assert there.is_deepspeed_zero3_enabled is is_deepspeed_zero3_enabled


@pytest.mark.parametrize("name", ["ShardedDDPOption", "default_hp_space_sigopt"])
@pytest.mark.parametrize("path", ["trainwright", "trainwright.trainer_utils"])
def test_names_without_a_meaning_are_imported_with_a_warning(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(trainwright), name, raising=False)
    with pytest.warns(LegacyNameWarning, match=name):
        value = getattr(importlib.import_module(path), name)
    assert value.SIMPLE == "simple" if name == "ShardedDDPOption" else value(None)[0]["name"] == "learning_rate"
    vars(trainwright).pop(name)


# -- files ----------------------------------------------------------------------------------------------------------


def test_the_arguments_beside_a_model_are_plain_values(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, hub_token="hf_secret", lr_scheduler_type="cosine", **SHORT)
    trainer.save_model()
    args = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert args.hub_token is None
    assert {**trainer.args.to_dict(), "hub_token": None} == args
    assert trainer.args.hub_token == "hf_secret"
    assert b"hf_secret" not in (tmp_path / "training_args.bin").read_bytes()
    assert losses(trained_trainer(tmp_path / "again", **{**SHORT, "lr_scheduler_type": args.lr_scheduler_type}))


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": module, "pretrained": models.llama}


@pytest.mark.parametrize("kind", ["plain", pytest.param("pretrained", marks=pytest.mark.framework)])
def test_weights_without_safetensors(kind: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {} if kind == "plain" else {"train_dataset": data.sequences(16)}
    settings = {"save_strategy": "steps", "save_steps": 2, "save_safetensors": False, **parts}
    trainer = trained_trainer(tmp_path / "a", model=MODELS[kind](), max_steps=4, **settings)
    found = tmp_path / "a" / "checkpoint-2"
    assert [path.name for path in weight_files(found)] == ["pytorch_model.bin"]
    assert not list(found.glob("*.safetensors"))
    assert torch.load(found / "pytorch_model.bin", weights_only=True)
    other = trained_trainer(tmp_path / "b", model=MODELS[kind](), max_steps=4, **settings, resume=str(found))
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True))
    if kind == "pretrained":
        loaded = type(trainer.model).from_pretrained(tmp_path / "a" / "checkpoint-4")
        assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.framework
def test_sharded_weights_and_adapters_without_safetensors(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from trainwright.checkpoint.weights import load_weights, rewrite_with_torch

    model = models.llama()
    model.save_pretrained(tmp_path / "parts", max_shard_size="8KB")
    rewrite_with_torch([tmp_path / "parts"])
    assert not list((tmp_path / "parts").glob("*.safetensors*"))
    assert len(weight_files(tmp_path / "parts")) > 1
    other = models.llama()
    for parameter in other.parameters():
        parameter.data.zero_()
    load_weights(other, tmp_path / "parts")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    def adapted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(models.llama(), LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))

    trainer = make_trainer(tmp_path / "lora", model=adapted(), save_safetensors=False, **SHORT)
    trainer.save_model()
    assert (tmp_path / "lora" / "adapter_model.bin").is_file()
    again = adapted()
    for name, parameter in again.named_parameters():
        if "lora" in name:
            parameter.data.zero_()
    load_weights(again, tmp_path / "lora")
    pairs = zip(trainer.model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


BEST: dict[str, dict[str, Any]] = {
    "no best": {},
    "load best": {"load_best_model_at_end": True, "metric_for_best_model": "loss"},
    "best by metric": {"metric_for_best_model": "loss"},
}


@pytest.mark.framework
@pytest.mark.parametrize("rate", [1e-2, 5.0], ids=["the last is best", "an earlier one is best"])
@pytest.mark.parametrize("best", BEST)
def test_a_limit_of_one_keeps_what_the_original_keeps(best: str, rate: float, tmp_path: Path) -> None:
    kept = {}
    for side in (OURS, REFERENCE):
        trainer = make_trainer(
            tmp_path / side.name,
            side=side,
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            save_total_limit=1,
            learning_rate=rate,
            eval_dataset=data.vectors(8),
            **BEST[best],
        )
        side.train(trainer)
        kept[side.name] = sorted(path.name for path in (tmp_path / side.name).glob("checkpoint-*"))
        assert len(kept[side.name]) == 1
    assert len({tuple(names) for names in kept.values()}) == 1


# -- messages -------------------------------------------------------------------------------------------------------


def test_the_level_is_transformers_too(tmp_path: Path) -> None:
    library = logging.getLogger("transformers")
    before = logging.getLogger("transformers").level
    try:
        make_trainer(tmp_path, log_level="info", **SHORT)
        assert library.level == logging.INFO
        make_trainer(tmp_path, log_level="passive", **SHORT)
        assert library.level == logging.INFO
    finally:
        library.setLevel(before)
        logging.getLogger("trainwright").setLevel(before)


SCRIPT = """
import logging
import trainwright, transformers
from tests._support.small import data, module
logging.getLogger().handlers.clear()
transformers.utils.logging.set_verbosity({verbosity})  # as TRANSFORMERS_VERBOSITY does
args = trainwright.TrainingArguments({out!r}, max_steps=2, logging_steps=1, use_cpu=True, save_strategy="no", {given})
trainwright.Trainer(model=module(), args=args, train_dataset=data.vectors(8)).train()
logging.getLogger("trainwright").info("a line of level info")
logging.getLogger("trainwright").warning("a line of level warning")
"""
CONSOLES: tuple[tuple[int, str, set[str]], ...] = (
    (logging.WARNING, "", {"loss", "warning"}),
    (logging.WARNING, "log_level='info'", {"loss", "warning", "info"}),
    (logging.ERROR, "", {"loss"}),
    (logging.ERROR, "disable_tqdm=False", {"loss"}),
    (logging.WARNING, "log_level='error'", set()),
)


@pytest.mark.process
@pytest.mark.parametrize(("verbosity", "given", "expected"), CONSOLES)
def test_what_a_script_without_logging_shows(verbosity: int, given: str, expected: set[str], tmp_path: Path) -> None:
    done = forked.run(["-c", SCRIPT.format(out=str(tmp_path), given=given, verbosity=verbosity)])
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    marks = {"loss": " loss=", "warning": "a line of level warning", "info": "a line of level info"}
    assert {name for name, mark in marks.items() if mark in shown} == expected
    assert all(shown.count(mark) <= 2 for mark in marks.values())
