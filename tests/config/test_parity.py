"""Ours beside transformers' own arguments: names, defaults, normal forms, setters, properties, parsing."""

import dataclasses
import inspect
import json
import logging
import warnings

import pytest
import transformers

from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.config.enums import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from trainwright.config.fields import POSITIONS, OlderFields, OurFields
from trainwright.distributed.world import ParallelMode

# Names, defaults and forms are those of one version of transformers.
pytestmark = pytest.mark.framework

OURS_ONLY = {field.name for group in (OlderFields, OurFields) for field in dataclasses.fields(group)}
PAIRS = [
    (TrainingArguments, transformers.TrainingArguments),
    (Seq2SeqTrainingArguments, transformers.Seq2SeqTrainingArguments),
]

SETTINGS = [
    {},
    {"output_dir": "~/runs", "use_cpu": True},
    {"eval_strategy": "steps"},
    {"eval_strategy": "steps", "eval_steps": 100.0, "logging_steps": 50.0, "save_steps": 0.25},
    {"eval_strategy": "steps", "logging_steps": 7, "eval_steps": 0},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "accuracy"},
    {"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"},
    {"eval_strategy": "epoch", "lr_scheduler_type": "greedy", "metric_for_best_model": "eval_loss"},
    {"report_to": "wandb"},
    {"report_to": ["none"]},
    {"report_to": ["wandb", "tensorboard"]},
    {"debug": "underflow_overflow"},
    {"include_num_input_tokens_seen": True},
    {"include_num_input_tokens_seen": "non_padding"},
    {"lr_scheduler_kwargs": '{"num_cycles": "2", "last": "true", "x": "0.5", "inner": {"y": "no"}}'},
    {"accelerator_config": {"split_batches": True, "gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    {"accelerator_config": '{"even_batches": "false"}'},
    {"torch_compile_mode": "max-autotune"},
    {"torch_compile_backend": "eager"},
    {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
    {"fsdp": True},
    {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_min_num_params": 5}},
    {"fsdp": "shard_grad_op", "fsdp_config": '{"fsdp_transformer_layer_cls_to_wrap": "Block"}'},
    {"fsdp": ["hybrid_shard"], "fsdp_config": {"version": 1}},
    {"push_to_hub": True, "hub_token": "hf_secret", "hub_strategy": "end"},
    {"optim": "adafactor", "lr_scheduler_type": "cosine", "warmup_steps": 0.1},
    {"disable_tqdm": True, "ddp_timeout": 60},
    {"use_cpu": True, "bf16": True},
    {"do_eval": True, "seed": 3, "data_seed": 4, "log_level": "info"},
]


def reference(kind, /, *args, **kwargs):
    """transformers' own, without its warnings about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(*args, **kwargs)


def without_ours(values):
    """`values` less the fields that transformers no longer has, and less a key that its config drops when read."""
    values = {name: value for name, value in values.items() if name not in OURS_ONLY}
    values["accelerator_config"] = {
        key: value for key, value in values["accelerator_config"].items() if key != "use_configured_state"
    }
    return values


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_field_has_the_same_name_and_default(ours, theirs):
    def defaults(kind):
        found = {}
        for field in dataclasses.fields(kind):
            found[field.name] = field.default_factory() if field.default is dataclasses.MISSING else field.default
        return found

    mine = defaults(ours)
    assert {name: value for name, value in mine.items() if name not in OURS_ONLY} == defaults(theirs)
    assert set(mine) - set(defaults(theirs)) == OURS_ONLY


def test_arguments_by_position_mean_the_same():
    theirs = list(inspect.signature(transformers.TrainingArguments).parameters)
    assert list(POSITIONS) == theirs
    given = ("out", 16, 2.0, 30, 1e-3, "cosine")
    ours = TrainingArguments(*given)
    other = reference(transformers.TrainingArguments, *given)
    assert without_ours(ours.to_dict()) == other.to_dict()


def test_every_field_has_a_short_help_text():
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        text = field.metadata["help"]
        assert text.endswith(".")
        assert 10 < len(text) < 130


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_take_the_same_form(ours, theirs, settings):
    mine = ours(**json.loads(json.dumps(settings)))
    other = reference(theirs, **json.loads(json.dumps(settings)))
    expected = other.to_dict()
    assert without_ours(mine.to_dict()) == expected
    assert json.loads(mine.to_json_string()) == mine.to_dict()
    assert mine.mixed_precision == other.mixed_precision


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sanitized_values_are_the_same(settings):
    mine = TrainingArguments(**json.loads(json.dumps(settings))).to_sanitized_dict()
    other = reference(transformers.TrainingArguments, **json.loads(json.dumps(settings))).to_sanitized_dict()
    for name in OURS_ONLY | {"accelerator_config", "fsdp_config"}:  # text of dicts: the order of keys differs
        mine.pop(name)
        other.pop(name, None)
    assert mine == other


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (IntervalStrategy, transformers.IntervalStrategy),
        (SaveStrategy, transformers.trainer_utils.SaveStrategy),
        (HubStrategy, transformers.trainer_utils.HubStrategy),
        (SchedulerType, transformers.SchedulerType),
        (OptimizerNames, transformers.training_args.OptimizerNames),
        (ParallelMode, transformers.training_args.ParallelMode),
    ],
)
def test_enums_have_the_same_members(ours, theirs):
    mine = {member.name: member.value for member in ours}
    for name in ("MUON", "ADAMW_BF16"):  # ours alone
        mine.pop(name, None)
    assert mine == {member.name: member.value for member in theirs}


SETTERS = [
    ("set_training", {}),
    ("set_training", {"learning_rate": 1e-3, "batch_size": 2, "max_steps": 7, "activation_checkpointing": True}),
    ("set_evaluate", {}),
    ("set_evaluate", {"strategy": "steps", "steps": 100, "accumulation_steps": 2, "delay": 1, "loss_only": True}),
    ("set_testing", {}),
    ("set_testing", {"batch_size": 3, "loss_only": True}),
    ("set_save", {}),
    ("set_save", {"strategy": "epoch", "total_limit": 2, "on_each_node": True}),
    ("set_logging", {"report_to": ["wandb"]}),
    ("set_logging", {"strategy": "epoch", "steps": 3, "report_to": ["wandb"], "level": "info", "first_step": True}),
    ("set_push_to_hub", {"model_id": "me/model"}),
    ("set_push_to_hub", {"model_id": "me/model", "strategy": "end", "token": "secret", "private_repo": True}),
    ("set_optimizer", {}),
    ("set_optimizer", {"name": "adafactor", "beta1": 0.8, "args": "a=1"}),
    ("set_lr_scheduler", {}),
    ("set_lr_scheduler", {"name": "cosine", "warmup_steps": 0.05, "num_epochs": 1}),
    ("set_dataloader", {}),
    ("set_dataloader", {"train_batch_size": 16, "num_workers": 2, "prefetch_factor": 3, "sampler_seed": 4}),
]


@pytest.mark.parametrize(("method", "settings"), SETTERS)
def test_setters_change_the_same_fields(method, settings):
    ours = TrainingArguments()
    theirs = reference(transformers.TrainingArguments)
    assert getattr(ours, method)(**settings) is ours
    getattr(theirs, method)(**settings)
    if method == "set_evaluate" and "delay" not in settings:
        theirs.eval_delay = 0  # there None, which its loop cannot compare with a step
    assert without_ours(ours.to_dict()) == theirs.to_dict()


@pytest.mark.parametrize("method", sorted({name for name, _ in SETTERS}))
def test_setters_have_the_same_parameters_and_then_those_of_older_versions(method):
    def parameters(kind):
        return [(p.name, p.default) for p in inspect.signature(getattr(kind, method)).parameters.values()]

    older = {("jit_mode", False), ("warmup_ratio", 0.0)}
    ours = parameters(TrainingArguments)
    theirs = parameters(transformers.TrainingArguments)
    assert ours[: len(theirs)] == theirs
    assert older.issuperset(ours[len(theirs) :])


@pytest.mark.parametrize("method", ["set_evaluate", "set_save", "set_logging"])
def test_setters_refuse_an_interval_of_zero(method):
    for kind in (TrainingArguments, transformers.TrainingArguments):
        with pytest.raises(ValueError, match="steps"):
            getattr(reference(kind), method)(strategy="steps", steps=0)


@pytest.mark.parametrize("level", ["detail", "debug", "info", "warning", "error", "critical", "passive"])
def test_log_levels_are_the_same(level, monkeypatch):
    for env in ({}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}):
        ours = TrainingArguments(log_level=level, log_level_replica="error")
        theirs = reference(transformers.TrainingArguments, log_level=level, log_level_replica="error")
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        if not env:
            assert ours.get_process_log_level() == theirs.get_process_log_level()
        else:
            assert ours.get_process_log_level() == logging.ERROR


@pytest.mark.parametrize("warmup", [0, 0.1, 0.333, 1, 5, 10.0])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_warmup_steps_are_the_same(warmup, steps):
    ours = TrainingArguments(warmup_steps=warmup)
    theirs = reference(transformers.TrainingArguments, warmup_steps=warmup)
    assert ours.get_warmup_steps(steps) == theirs.get_warmup_steps(steps)


@pytest.mark.parametrize("use_cpu", [False, True])
def test_properties_are_the_same_in_one_process(use_cpu):
    settings = {"use_cpu": use_cpu, "per_device_train_batch_size": 3, "log_on_each_node": False, "ddp_timeout": 5}
    ours = TrainingArguments(**settings)
    theirs = reference(transformers.TrainingArguments, **settings)
    names = (
        "train_batch_size eval_batch_size device n_gpu world_size process_index local_process_index should_log "
        "should_save ddp_timeout_delta place_model_on_device"
    )
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.parallel_mode.value == theirs.parallel_mode.value


BOTH_REFUSE = [
    {"fp16": True, "bf16": True, "use_cpu": True},
    {"eval_strategy": "sometimes"},
    {"logging_steps": 0},
    {"logging_steps": 1.5},
    {"eval_strategy": "steps", "eval_steps": 2.5},
    {"save_steps": 3.5},
    {"warmup_steps": -1},
    {"torch_empty_cache_steps": 0},
    {"torch_empty_cache_steps": 1.5},
    {"dataloader_prefetch_factor": 2},
    {"load_best_model_at_end": True, "eval_strategy": "epoch"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 10},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.3, "save_steps": 0.5},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.3, "save_steps": 10},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"lr_scheduler_type": "greedy"},
    {"bf16_full_eval": True, "fp16_full_eval": True, "use_cpu": True},
    {"fsdp": "some_shard"},
    {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "ALWAYS"}},
    {"debug": "everything"},
]


@pytest.mark.parametrize("settings", BOTH_REFUSE, ids=str)
def test_both_refuse(settings):
    for kind in (TrainingArguments, transformers.TrainingArguments):
        with pytest.raises(ValueError, match=r"\S"):
            reference(kind, **settings)


BOTH_ALLOW = [
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250},
    {"save_strategy": "no", "logging_strategy": "no", "save_steps": 0, "logging_steps": 0},
    {"max_grad_norm": 0, "max_steps": 0, "num_train_epochs": 0.5},
    {"eval_strategy": "no", "eval_steps": 0},
]


@pytest.mark.parametrize("settings", BOTH_ALLOW, ids=str)
def test_both_allow(settings):
    for kind in (TrainingArguments, transformers.TrainingArguments):
        reference(kind, **settings)
