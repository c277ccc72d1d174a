"""DeepSpeed's configuration: from a dict, a file or text; "auto" filled in; contradictions to the arguments refused."""

import base64
import json

import pytest
from accelerate import ParallelismConfig

from trainwright import TrainingArguments
from trainwright.config import resolve
from trainwright.config.deepspeed_config import autos, get, put, read, sequence_size, settled
from trainwright.errors import ArgumentError

STAGE = {"zero_optimization": {"stage": 2}}


def test_the_three_forms_are_one(tmp_path):
    text = json.dumps(STAGE)
    (tmp_path / "zero.json").write_text(text)
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    assert read(STAGE) == read(str(tmp_path / "zero.json")) == read(coded) == STAGE
    assert read(STAGE)["zero_optimization"] is not STAGE["zero_optimization"]


@pytest.mark.parametrize("wrong", ["nowhere.json", "%%%"])
def test_an_invalid_configuration_is_named(wrong):
    with pytest.raises(ArgumentError, match="deepspeed="):
        read(wrong)


def test_every_auto_value_comes_from_its_argument():
    config = {
        "train_batch_size": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    args = TrainingArguments(
        "out",
        deepspeed=config,
        learning_rate=3e-4,
        weight_decay=0.2,
        adam_beta2=0.9,
        bf16=True,
        use_cpu=True,
        gradient_accumulation_steps=3,
        per_device_train_batch_size=4,
    )
    made = resolve.deepspeed(args).config
    assert made["train_batch_size"] == 12
    assert made["optimizer"]["params"] == {"lr": 3e-4, "betas": [0.9, 0.9], "eps": 1e-8, "weight_decay": 0.2}
    assert (made["bf16"]["enabled"], made["fp16"]["enabled"]) == (True, False)
    assert made["scheduler"]["params"]["warmup_max_lr"] == 3e-4
    assert list(autos(made)) == ["scheduler.params.warmup_num_steps"]  # known when the run's length is


def test_all_contradictions_are_reported_with_both_values():
    config = {"gradient_accumulation_steps": 2, "optimizer": {"params": {"lr": 0.1}}, "fp16": {"enabled": True}}
    args = TrainingArguments("out", deepspeed=config, learning_rate=0.2, use_cpu=True)
    with pytest.raises(ArgumentError) as caught:
        resolve.deepspeed(args)
    for word in ("gradient_accumulation_steps=2", "says 1", "lr=0.1", "learning_rate", "0.2", "fp16.enabled=True"):
        assert word in str(caught.value)


def test_a_batch_for_another_number_of_processes(monkeypatch):
    config = {"train_batch_size": 64, "zero_optimization": {"stage": 2}}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": True}
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    resolve.deepspeed(TrainingArguments("out", deepspeed=config, **sizes))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match=r"train_batch_size=64 in the configuration.*processes.*says 16"):
        resolve.deepspeed(TrainingArguments("out", deepspeed=config, **sizes))


def test_numbers_written_as_text_are_numbers():
    assert settled({"optimizer": {"params": {"lr": "1e-5"}}}, {"optimizer.params.lr": 1e-5})


def test_an_auto_that_nothing_can_fill_in():
    with pytest.raises(ArgumentError, match=r"zero_optimization\.stage"):
        settled({"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}}, {})


def test_places():
    config = {}
    put(config, "a.b.c", 1)
    assert config == {"a": {"b": {"c": 1}}}
    assert get(config, "a.b.c") == 1
    assert get(config, "a.x.c") is None


def test_the_launchers_configuration_counts_where_the_arguments_have_none(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    made = resolve.deepspeed(TrainingArguments("out", use_cpu=True)).config
    assert made["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert made["gradient_clipping"] == 1.0
    assert resolve.fsdp(TrainingArguments("out", use_cpu=True)) is None


def test_the_fields_of_a_launchers_plugin(monkeypatch):
    """Its clipping counts, as accelerate's own trainers take it; the one of the arguments is the default."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in {
        "ZERO_STAGE": "3",
        "OFFLOAD_OPTIMIZER_DEVICE": "nvme",
        "OFFLOAD_OPTIMIZER_NVME_PATH": "/local",
        "OFFLOAD_PARAM_DEVICE": "cpu",
        "ZERO3_SAVE_16BIT_MODEL": "true",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
    made = resolve.deepspeed(TrainingArguments("out", use_cpu=True)).config
    assert made["gradient_clipping"] == 0.25
    assert made["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        ({}, {"sequence_parallel_size": 2, "data_parallel_size": 2}),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, {}),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, {"sequence_parallel_size": 2}),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, {"sequence_parallel_size": "auto"}),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, {}),
    ],
)
def test_processes_that_share_sequences_count_once_in_the_batch(asked, config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    args = TrainingArguments(
        "out",
        deepspeed={**STAGE, "train_batch_size": "auto", **config},
        use_cpu=True,
        per_device_train_batch_size=3,
        **asked,
    )
    assert resolve.deepspeed(args).config["train_batch_size"] == 6
    plan = resolve.parallel(args, None, has_deepspeed=True)
    assert (plan.num_per_sequence, plan.dp_replicate) == (2, 2)


@pytest.mark.parametrize("size", [0, "two", 2.5])
def test_a_number_of_processes_of_a_sequence_that_is_none_is_named(size):
    with pytest.raises(ArgumentError, match=f"sequence_parallel_size={size!r}"):
        sequence_size({**STAGE, "sequence_parallel_size": size})


def test_two_numbers_of_processes_of_a_sequence_are_a_contradiction():
    asked = ParallelismConfig(sp_size=2)
    args = TrainingArguments(
        "out", deepspeed={**STAGE, "sequence_parallel_size": 4}, use_cpu=True, parallelism_config=asked
    )
    with pytest.raises(ArgumentError, match=r"sequence_parallel_size=4 .* parallelism_config\.sp_size says 2"):
        resolve.deepspeed(args)
