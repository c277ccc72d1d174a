"""The one form of every value, where transformers' is not the yardstick."""

import json

import pytest
import transformers

from trainwright.config import fsdp_config, resolve
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.arguments import TrainingArguments
from trainwright.config.enums import DebugOption, OptimizerNames, SchedulerType
from trainwright.config.rules import advice
from trainwright.engine.fsdp import make_plugin
from trainwright.errors import ArgumentError, LegacyNameWarning


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"report_to": "all"}, {"report_to": ["all"]}),
        ({"report_to": None}, {"report_to": []}),
        ({"report_to": ("wandb",)}, {"report_to": ["wandb"]}),
        ({"debug": ["underflow_overflow"]}, {"debug": [DebugOption.UNDERFLOW_OVERFLOW]}),
        ({"debug": None}, {"debug": []}),
        ({"liger_kernel_config": '{"rope": true}'}, {"liger_kernel_config": {"rope": True}}),
        ({"hub_token": "<HUB_TOKEN>"}, {"hub_token": None}),
        ({"optim": "muon"}, {"optim": OptimizerNames.MUON}),
        ({"lr_scheduler_type": transformers.SchedulerType.COSINE}, {"lr_scheduler_type": SchedulerType.COSINE}),
        ({"deepspeed": "ds.json"}, {"deepspeed": "ds.json"}),
        ({"deepspeed": '{"zero_optimization": {"stage": 2}}'}, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
        ({"fsdp": ""}, {"fsdp": ""}),
        ({"fsdp": []}, {"fsdp": []}),
    ],
    ids=str,
)
def test_values_take_one_form(settings, expected):
    args = TrainingArguments(**settings)
    assert {name: getattr(args, name) for name in expected} == expected
    if "lr_scheduler_type" in expected:
        assert type(args.lr_scheduler_type) is SchedulerType


def test_paths_of_the_user_are_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = TrainingArguments("~/out", logging_dir="~/logs")
    assert (args.output_dir, args.logging_dir) == (f"{tmp_path}/out", f"{tmp_path}/logs")


def test_a_users_dict_is_not_changed():
    given = {"fsdp_min_num_params": 5}
    TrainingArguments(fsdp="full_shard", fsdp_config=given)
    assert given == {"fsdp_min_num_params": 5}


def test_the_older_name_of_activation_checkpointing_warns_once():
    with pytest.warns(LegacyNameWarning, match="activation_checkpointing") as caught:
        args = TrainingArguments(gradient_checkpointing=True)
    assert [one.filename for one in caught] == [__file__], "the line to change is named"
    assert args.activation_checkpointing is True
    assert args.gradient_checkpointing is True


def test_older_optimizer_names():
    with pytest.warns(LegacyNameWarning, match="adamw_torch") as caught:
        assert TrainingArguments(optim="adamw_hf").optim == "adamw_torch"
    assert [one.filename for one in caught] == [__file__]
    with pytest.raises(ArgumentError, match="adamw_torch_fused"):
        TrainingArguments(optim="adamw_apex_fused")


@pytest.mark.parametrize(
    "given",
    [
        {"split_batches": True},
        '{"split_batches": true}',
        AcceleratorConfig(split_batches=True),
        transformers.trainer_pt_utils.AcceleratorConfig(split_batches=True),
        "config.json",
    ],
    ids=lambda given: type(given).__module__ + type(given).__name__,
)
def test_accelerator_config_comes_in_many_forms(given, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"split_batches": True}))
    config = TrainingArguments(accelerator_config=given).accelerator_config
    assert config == AcceleratorConfig(split_batches=True)
    assert set(config.to_dict()) == set(AcceleratorConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator_config": {"split": True}}, "unknown keys"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_step": 2}}}, r"unknown keys \['num_step'\]"),
        ({"accelerator_config": AcceleratorConfig}, "call it first"),
        ({"accelerator_config": "missing.json"}, "missing.json"),
        ({"lr_scheduler_kwargs": "{num_cycles: 2}"}, "is not JSON"),
        ({"fsdp": True, "fsdp_config": "missing.json"}, "missing.json"),
        ({"fsdp": True, "fsdp_config": {"nonsense": 1}}, "nonsense"),
        ({"fsdp": "full_shrad"}, "full_shrad"),
        ({"eval_strategy": "step"}, "Did you mean 'steps'"),
        ({"debug": "overflow"}, "underflow_overflow"),
    ],
    ids=str,
)
def test_what_cannot_be_brought_to_form_is_named(settings, message):
    with pytest.raises(ArgumentError, match=message):
        TrainingArguments(**settings)


def test_equal_numbers_of_accumulation_are_one_and_survive_a_round_trip():
    """The original refuses two equal numbers above 1; `num_steps` alone fills both, so saved arguments have both."""
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    args = TrainingArguments(accelerator_config=config)
    assert args.gradient_accumulation_steps == 4
    again = TrainingArguments(gradient_accumulation_steps=4, accelerator_config=args.accelerator_config.to_dict())
    assert again.gradient_accumulation_steps == 4
    with pytest.raises(ArgumentError, match="num_steps=4 differ"):
        TrainingArguments(gradient_accumulation_steps=2, accelerator_config=config)


@pytest.mark.parametrize(
    ("given", "reports_to"),
    [("none", ["kubeflow"]), ("wandb", ["wandb", "kubeflow"]), (["kubeflow"], ["kubeflow"])],
    ids=str,
)
def test_a_train_job_of_kubeflow_is_reported_to(given, reports_to, monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:1")
    for kind in (TrainingArguments, transformers.TrainingArguments):
        assert kind("out", report_to=given, use_cpu=True).report_to == reports_to
    assert TrainingArguments("out", report_to=None, use_cpu=True).report_to == ["kubeflow"]
    assert transformers.TrainingArguments("out", report_to=None, use_cpu=True).report_to == [None, "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "true")
    assert "kubeflow" not in TrainingArguments("out", report_to="none").report_to


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, []),
        ({"xla": True, "xla_fsdp_settings": {"a": 1}}, ["xla", "xla_fsdp_settings"]),
        (
            {"backward_prefetch": "backward_pre", "forward_prefetch": True, "limit_all_gathers": True},
            ["backward_prefetch", "forward_prefetch", "limit_all_gathers"],
        ),
        ({"version": 1, "backward_prefetch": "backward_pre"}, []),
        ({"min_num_params": 5}, []),
        ({"min_num_params": 5, "transformer_layer_cls_to_wrap": "Block"}, ["min_num_params"]),
        ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "Block"}, ["transformer_layer_cls_to_wrap"]),
        ({"cpu_offload": True}, ["cpu_offload"]),
        ({"reshard_after_forward": "no_shard", "activation_checkpointing": True}, ["activation_checkpointing"]),
    ],
    ids=str,
)
def test_keys_of_fsdp_config_without_effect_are_named(settings, idle):
    said = advice.fsdp_settings(TrainingArguments(fsdp=True, fsdp_config=settings, use_cpu=True))
    assert [part.split(" (")[0] for part in (said or "").partition("config: ")[2].split("), ") if part] == idle


@pytest.mark.parametrize(
    ("word", "parts", "nodes"),
    [("full_shard", 4, None), ("no_shard", None, None), ("hybrid_shard", 4, (2, 2)), ("hybrid_shard_zero2", 4, (2, 2))],
)
def test_words_of_fsdp_under_version_2(word, parts, nodes, monkeypatch):
    """Four processes on two nodes: hybrid words shard within a node and copy between nodes."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    args = TrainingArguments(fsdp=word, use_cpu=True)
    shards = resolve.fsdp(args)
    assert (shards is not None) == (parts is not None)
    if shards is not None:
        resharding = fsdp_config.RESHARDS[word]
        assert make_plugin(shards.settings, on_cpu=True).reshard_after_forward is resharding
    plan = resolve.engine(args)
    assert (plan.fsdp is not None) == (shards is not None)
    sizes = plan.parallel and (plan.parallel.dp_replicate, plan.parallel.dp_shard)
    assert sizes == nodes


def test_fsdp_config_from_a_file(tmp_path):
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_transformer_layer_cls_to_wrap": "Block", "version": 2}))
    args = TrainingArguments(fsdp="full_shard offload", fsdp_config="fsdp.json")
    assert args.fsdp is True
    assert args.fsdp_config["transformer_layer_cls_to_wrap"] == ["Block"]
    assert args.fsdp_config["cpu_offload"] is True
    assert args.fsdp_config["reshard_after_forward"] is True
