"""Every older name: translated, honoured, accepted or refused. A name of the table without a row here fails."""

import pytest

from trainwright.config.arguments import TrainingArguments
from trainwright.config.deprecated import OLD_FLAGS, OLD_NAMES, OLD_NUMBERS, Honoured
from trainwright.errors import ArgumentError, LegacyNameWarning, UnknownArgumentError

TRANSLATED = [
    ("evaluation_strategy", "epoch", {"eval_strategy": "epoch", "do_eval": True}),
    ("per_gpu_train_batch_size", 4, {"per_device_train_batch_size": 4}),
    ("per_gpu_eval_batch_size", 5, {"per_device_eval_batch_size": 5}),
    ("warmup_ratio", 0.1, {"warmup_steps": 0.1}),
    ("no_cuda", True, {"use_cpu": True}),
    ("include_tokens_per_second", True, {"include_num_input_tokens_seen": "all"}),
    ("include_tokens_per_second", False, {"include_num_input_tokens_seen": "no"}),
    ("torchdynamo", "eager", {"torch_compile_backend": "eager", "torch_compile": True}),
    ("push_to_hub_token", "hf_x", {"hub_token": "hf_x"}),
    ("push_to_hub_model_id", "model", {"hub_model_id": "model"}),
    ("push_to_hub_organization", "lab", {"hub_model_id": "lab/trainer_output"}),
    ("adafactor", True, {"optim": "adafactor"}),
    ("adafactor", False, {"optim": "adamw_torch_fused"}),
    ("group_by_length", True, {"train_sampling_strategy": "group_by_length"}),
    ("include_inputs_for_metrics", True, {"include_for_metrics": ["inputs"]}),
    ("include_inputs_for_metrics", False, {"include_for_metrics": []}),
    ("tpu_metrics_debug", True, {"debug": ["tpu_metrics_debug"]}),
    ("fsdp_min_num_params", 0, {"fsdp_config": None}),
    ("jit_mode_eval", False, {}),
    ("use_ipex", False, {}),
    ("fp16_opt_level", "O1", {}),
    ("half_precision_backend", "auto", {}),
    ("fp16_backend", "cuda_amp", {}),
    ("sharded_ddp", "", {}),
    ("mp_parameters", "", {}),
    ("use_mps_device", True, {}),
]
HONOURED = [
    ("overwrite_output_dir", True),
    ("logging_dir", "logs"),
    ("past_index", 2),
    ("tpu_num_cores", 8),
    ("ray_scope", "all"),
    ("save_safetensors", False),
    ("use_legacy_prediction_loop", True),
]
CONFIGURED = [  # names that became an entry of a dict
    ("dispatch_batches", False, "accelerator_config", {}),
    ("split_batches", True, "accelerator_config", {}),
    ("fsdp_min_num_params", 7, "fsdp_config", {"fsdp": True}),
    ("fsdp_transformer_layer_cls_to_wrap", "Block", "fsdp_config", {"fsdp": True}),
]
REFUSED = [
    ("jit_mode_eval", True, "torch_compile"),
    ("use_ipex", True, "bf16"),
    ("fp16_opt_level", "O2", "Apex"),
    ("half_precision_backend", "apex", "Apex"),
    ("fp16_backend", "apex", "Apex"),
    ("sharded_ddp", "simple", "fsdp"),
    ("mp_parameters", "a=1", "fsdp"),
    ("warmup_ratio", 1.5, "between 0 and 1"),
]


def test_every_older_name_has_a_row():
    rows = {row[0] for table in (TRANSLATED, HONOURED, CONFIGURED, REFUSED) for row in table}
    assert rows == set(OLD_NAMES)
    assert OLD_FLAGS | set(OLD_NUMBERS) <= set(OLD_NAMES)
    assert {name for name, row in OLD_NAMES.items() if isinstance(row, Honoured)} == {name for name, _ in HONOURED}


@pytest.mark.parametrize(("name", "value", "expected"), TRANSLATED)
def test_an_older_name_is_translated_with_one_warning(name, value, expected):
    with pytest.warns(LegacyNameWarning, match=f"^{name} is an older name: ") as caught:
        args = TrainingArguments(**{name: value})
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {new: getattr(args, new) for new in expected} == expected
    if expected:
        assert any(new in str(caught[0].message) for new in expected)


@pytest.mark.parametrize(("name", "value"), HONOURED)
def test_an_honoured_name_is_a_field(name, value):
    assert getattr(TrainingArguments(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "new", "beside"), CONFIGURED)
def test_an_older_name_becomes_an_entry(name, value, new, beside):
    key = name.removeprefix("fsdp_")
    with pytest.warns(LegacyNameWarning, match=new):
        args = TrainingArguments(**{name: value}, **beside)
    config = getattr(args, new)
    found = config[key] if isinstance(config, dict) else getattr(config, key)
    assert found in (value, [value])


def test_entries_join_what_is_given():
    with pytest.warns(LegacyNameWarning):
        args = TrainingArguments(split_batches=True, accelerator_config={"even_batches": False})
    assert (args.accelerator_config.split_batches, args.accelerator_config.even_batches) == (True, False)
    with pytest.warns(LegacyNameWarning):
        args = TrainingArguments(dispatch_batches=True, accelerator_config='{"even_batches": false}')
    assert (args.accelerator_config.dispatch_batches, args.accelerator_config.even_batches) == (True, False)
    with pytest.warns(LegacyNameWarning):
        args = TrainingArguments(include_inputs_for_metrics=True, include_for_metrics=["loss"])
    assert args.include_for_metrics == ["loss", "inputs"]
    with pytest.warns(LegacyNameWarning):
        args = TrainingArguments(tpu_metrics_debug=True, debug="underflow_overflow")
    assert args.debug == ["underflow_overflow", "tpu_metrics_debug"]


@pytest.mark.parametrize(
    ("settings", "hub_model_id"),
    [
        ({"push_to_hub_model_id": "m", "push_to_hub_organization": "lab"}, "lab/m"),
        ({"push_to_hub_organization": "lab", "output_dir": "a/b"}, "lab/b"),
        ({"push_to_hub_organization": "lab", "hub_model_id": "me/m"}, "me/m"),
        ({"push_to_hub_organization": None}, None),
    ],
)
def test_the_owner_of_a_repository(settings, hub_model_id):
    with pytest.warns(LegacyNameWarning):
        assert TrainingArguments(**settings).hub_model_id == hub_model_id


@pytest.mark.parametrize(("name", "value", "word"), REFUSED)
def test_a_refused_name_says_why_and_what_instead(name, value, word):
    with pytest.raises(ArgumentError, match=rf"^{name}={value!r} is refused: .*{word}"):
        TrainingArguments(**{name: value})


@pytest.mark.filterwarnings("ignore::trainwright.errors.LegacyNameWarning")
def test_both_names_may_agree_and_must_not_differ():
    assert TrainingArguments(evaluation_strategy="epoch", eval_strategy="epoch").eval_strategy == "epoch"
    # a parser or a saved configuration lists every field: one at its default says nothing
    assert TrainingArguments(evaluation_strategy="epoch", eval_strategy="no").eval_strategy == "epoch"
    assert TrainingArguments(evaluation_strategy="no", eval_strategy="epoch").eval_strategy == "epoch"
    assert TrainingArguments(include_tokens_per_second=True, include_num_input_tokens_seen=True)
    with pytest.raises(ArgumentError, match="evaluation_strategy and eval_strategy are given and differ"):
        TrainingArguments(evaluation_strategy="epoch", eval_strategy="steps")


def test_a_ratio_of_one_is_all_steps():
    with pytest.warns(LegacyNameWarning):
        assert TrainingArguments(warmup_ratio=1.0).get_warmup_steps(400) == 400


@pytest.mark.filterwarnings("ignore::trainwright.errors.LegacyNameWarning")
def test_all_values_of_an_old_run_may_come_back():
    old_defaults = dict.fromkeys(("push_to_hub_token", "torchdynamo", "dispatch_batches", "warmup_ratio"))
    old_defaults |= {"no_cuda": False, "adafactor": False, "fp16_backend": "auto", "sharded_ddp": [], "use_ipex": False}
    assert TrainingArguments(**old_defaults) == TrainingArguments()


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("learning_rat", "learning_rate"),
        ("evaluation_stategy", "evaluation_strategy"),
        ("epochs", "num_train_epochs"),
        ("zzz", None),
    ],
)
def test_an_unknown_name_gets_a_guess(name, guess):
    expected = f"{name} is not an argument." + (f" Did you mean {guess}?" if guess else "")
    with pytest.raises(UnknownArgumentError) as caught:
        TrainingArguments(**{name: 1})
    assert str(caught.value) == expected
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
