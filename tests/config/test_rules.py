"""Each rule beside the nearest legal case. A rule without a row fails."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig

from trainwright.config import resolve
from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.config.coerce import coerce
from trainwright.config.fields import CHOICES, RANGES, SETTINGS, OurFields, batching_fields, read_defaults
from trainwright.config.rules import advice, advise, cautions, check_run, violations
from trainwright.config.rules.stages import RULES, RunFacts, Stage, select_rules
from trainwright.errors import ArgumentError
from trainwright.optim.factory import steps_in_backward
from trainwright.optim.optimizer_table import OPTIMIZERS

BY_NAME = {one.name: one.check for one in RULES}
STEPS = {"eval_strategy": "steps", "eval_steps": 5}
BUDGET = {"max_tokens_per_batch": 64}
PACKING = {"packing": "best_fit", "packing_length": 64}
SIZES = {"dp_replicate_size": 1, "dp_shard_size": 1, "cp_size": 1, "sp_size": 1}
STAGED = {"mixture_schedule": [(0, {"a": 1, "b": 0.5}), (9, {"a": 0, "b": 1})]}
BEST = {"load_best_model_at_end": True}

# rule: refused settings, words of the message, the nearest settings that are legal
ALONE = [
    (
        "mirror_is_a_url",
        {"checkpoint_mirror": "/mnt/run"},
        "checkpoint_mirror",
        {"checkpoint_mirror": "file:///mnt/run"},
    ),
    ("mirror_is_a_url", {"checkpoint_mirror": 5}, "checkpoint_mirror=5", {"checkpoint_mirror": "s3://bucket/run"}),
    (
        "mirror_is_a_url",
        {"checkpoint_mirror": "sftp://me:secret-word@host/run"},
        "checkpoint_mirror *** password",
        {"checkpoint_mirror": "sftp://host/run"},
    ),
    (
        "mirror_is_a_url",
        {"checkpoint_mirror": "s3://bucket/run?key=AKIAX"},
        "checkpoint_mirror query",
        {"checkpoint_mirror": "s3://bucket/run"},
    ),
    ("token_is_text", {"hub_token": 5}, "hub_token int", {"hub_token": "hf_x"}),
    (
        "sizes_are_accelerates",
        {"parallelism_config": {"tp_size": 2}},
        "parallelism_config tp_size ParallelismConfig",
        {"parallelism_config": ParallelismConfig(tp_size=2)},
    ),
    (
        "sizes_are_accelerates",
        {"parallelism_config": SimpleNamespace(**SIZES, tp_size=0)},
        "parallelism_config tp_size",
        {"parallelism_config": SimpleNamespace(**SIZES, tp_size=1)},
    ),
    ("logging_interval", {"logging_steps": 0}, "logging_strategy logging_steps", {"logging_steps": -3}),
    ("logging_interval", {"logging_steps": 1.5}, "logging_steps=1.5", {"logging_steps": 0.5}),
    (
        "eval_interval",
        {"eval_strategy": "steps", "logging_steps": 0, "logging_strategy": "no"},
        "eval_strategy eval_steps logging_steps",
        {"eval_strategy": "steps", "logging_steps": 0, "logging_strategy": "no", "eval_steps": 3},
    ),
    ("eval_interval", {"eval_strategy": "steps", "eval_steps": 2.5}, "eval_steps=2.5", STEPS),
    ("save_interval", {"save_steps": None}, "save_strategy save_steps", {"save_steps": 0}),
    ("save_interval", {"save_steps": 7.5}, "save_steps=7.5", {"save_steps": 7.0}),
    ("layer_above_share", {"layerwise_lr_decay": 0}, "layerwise_lr_decay=0", {"layerwise_lr_decay": 0.01}),
    ("layer_above_share", {"layerwise_lr_decay": 1.1}, "layerwise_lr_decay=1.1", {"layerwise_lr_decay": 1}),
    ("rates_by_pattern", {"lr_groups": ["head"]}, "lr_groups dict", {"lr_groups": {"head": 0.1}}),
    ("rates_by_pattern", {"lr_groups": {"(": 0.1}}, "lr_groups '('", {"lr_groups": {"()": 0.1}}),
    ("rates_by_pattern", {"lr_groups": {"head": "1e-3"}}, "'1e-3' 'head'", {"lr_groups": {"head": "1e-3x"}}),
    ("rates_by_pattern", {"lr_groups": '{"head": -1}'}, "-1 'head'", {"lr_groups": '{"head": 0}'}),
    ("source_shares", {"mixture": 0.3}, "mixture=0.3 dict", {"mixture": {"a": 0.3}}),
    (
        "source_shares",
        {"mixture": {"a": "most", "b": 1}},
        "'most' of 'a'",
        {"mixture": {"a": "all", "b": "2 epochs"}},
    ),
    ("source_shares", {"mixture": {"a": -1, "b": 2}}, "-1 of 'a'", {"mixture": '{"a": 0, "b": 2}'}),
    ("source_shares", {"mixture": {"a": 0.0, "b": 0}}, "no share above 0", {"mixture": {"a": 0.0, "b": 1e-3}}),
    ("source_shares", {"mixture": {"a": "all", "b": 1}}, "sum to less than 1", {"mixture": {"a": "all", "b": 0.9}}),
    ("source_shares", {"mixture": {"a": 1}, **STAGED}, "both", STAGED),
    ("source_shares", {"mixture_schedule": {"a": 1}}, "list of stages", {"mixture_schedule": '[[0, {"a": 1}]]'}),
    (
        "source_shares",
        {"mixture_schedule": [(0, {"a": 1}, 2)]},
        "not a pair",
        {"mixture_schedule": [(0, {"a": 1})]},
    ),
    (
        "source_shares",
        {"mixture_schedule": [(5, {"a": 1})]},
        "at 5 out of order",
        {"mixture_schedule": [[0, {"a": 1}]]},
    ),
    ("source_shares", {"mixture_schedule": [(0, {"a": 1}), (0, {"a": 2})]}, "0 after 0", STAGED),
    ("source_shares", {"mixture_schedule": [(0, {"a": 1}), (1.5, {"a": 2})]}, "1.5 1.0", STAGED),
    (
        "source_shares",
        {"mixture_schedule": [(0, {"a": 1}), (0.5, {"a": 2}), (7, {"a": 2})]},
        "mixes steps",
        {"mixture_schedule": [(0.0, {"a": 1}), (0.5, {"a": 2}), (0.7, {"a": 2})]},
    ),
    ("source_shares", {"mixture_schedule": [(0, {"a": "all"})]}, "'all' passes", STAGED),
    ("source_shares", {"mixture_schedule": [(0, {"a": 1}), (9, {"b": 1})]}, "at 9 names b", STAGED),
    (
        "mixtures_have_their_order",
        {"mixture": {"a": 1}, "train_sampling_strategy": "group_by_length"},
        "mixture train_sampling_strategy='group_by_length'",
        {"mixture": {"a": 1}, "train_sampling_strategy": "sequential"},
    ),
    (
        "branch_has_its_own_directory",
        {"branch_from": "s3://me:secret-word@bucket/run/checkpoint-4"},
        "branch_from URL ***",
        {"branch_from": "runs/checkpoint-4"},
    ),
    (
        "branch_has_its_own_directory",
        {"branch_from": "runs/checkpoint-4", "output_dir": "./runs"},
        "branch_from='runs/checkpoint-4' output_dir",
        {"branch_from": "runs/checkpoint-4", "output_dir": "./runs/cooled"},
    ),
    (
        "cooldown_in_steps",
        {"cooldown": "linear", "lr_scheduler_type": "reduce_lr_on_plateau", **STEPS},
        "cooldown='linear' lr_scheduler_type='reduce_lr_on_plateau'",
        {"cooldown": "linear", "lr_scheduler_type": "cosine"},
    ),
    ("known_evaluator", {"eval_async": "later"}, "eval_async='later' True 'watch'", {"eval_async": "watch"}),
    ("known_evaluator", {"eval_device": "gpu!"}, "eval_device='gpu!' 'cpu'", {"eval_device": "cuda:1"}),
    (
        "best_is_known_at_its_step",
        {**STEPS, "eval_async": True, "save_strategy": "best", "metric_for_best_model": "loss"},
        "save_strategy='best' eval_async save_total_limit=1",
        {**STEPS, "save_strategy": "best", "metric_for_best_model": "loss"},
    ),
    (
        "rate_does_not_wait_for_metrics",
        {**STEPS, "eval_async": True, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
        "lr_scheduler_type='reduce_lr_on_plateau' eval_async",
        {**STEPS, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
    ),
    ("known_average", {"average": "mean"}, "average 'mean' ema swa lawa", {"average": "swa"}),
    (
        "known_average",
        {"average": {"kind": "ema", "decay": 2}},
        "decay 2 below 1",
        {"average": '{"kind": "ema", "decay": 0.9}'},
    ),
    (
        "best_by_the_average",
        {"average": {"kind": "swa", "start": 0.5}, "metric_for_best_model": "average_loss"},
        "metric_for_best_model='average_loss' start=0.5",
        {"average": "swa", "metric_for_best_model": "average_loss"},
    ),
    (
        "best_by_the_average",
        {**BEST, **STEPS, "save_steps": 5, "average": "ema", "metric_for_best_model": "eval_average_loss"},
        "load_best_model_at_end=True average",
        {**BEST, **STEPS, "save_steps": 5, "average": "ema", "metric_for_best_model": "loss"},
    ),
    ("known_levers", {"speed": "fast"}, "speed 'fast' 'auto' loss_kernel", {"speed": "auto"}),
    ("known_levers", {"speed": {"lr": 1}}, "speed 'lr' optim", {"speed": {"optim": "sgd"}}),
    ("profiled_steps", {"profile": "5-3"}, "profile '5-3' last", {"profile": "3-5"}),
    ("recorded_steps", {"record_values": "0-3"}, "record_values '0-3' 1", {"record_values": "1-3"}),
    ("recorded_steps", {"record_values": "first"}, "record_values 'first'", {"record_values": 3}),
    ("profiled_steps", {"profile": "some"}, "profile 'some' '10-15'", {"profile": 3}),
    ("best_needs_evaluation", {**BEST, "save_strategy": "epoch"}, "eval_strategy", {**BEST, "save_strategy": "no"}),
    (
        "best_needs_matching_saves",
        {**BEST, "eval_strategy": "epoch"},
        "eval_strategy='epoch' save_strategy='steps'",
        {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch"},
    ),
    (
        "best_saves_are_multiples",
        {**BEST, **STEPS, "save_steps": 12},
        "save_steps=12 eval_steps=5 multiple",
        {**BEST, **STEPS, "save_steps": 15},
    ),
    (
        "best_saves_are_multiples",
        {**BEST, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 100},
        "share",
        {**BEST, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
    ),
    (
        "saving_the_best_needs_a_metric",
        {"save_strategy": "best", "eval_strategy": "epoch"},
        "metric_for_best_model",
        {"save_strategy": "best", "eval_strategy": "epoch", "load_best_model_at_end": True},
    ),
    (
        "schedule_needs_evaluation",
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        "lr_scheduler_type='reduce_lr_on_plateau' eval_strategy='no'",
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    ),
    (
        "schedule_needs_evaluation",
        {"lr_scheduler_type": "greedy"},
        "greedy",
        {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
    ),
    ("one_precision", {"fp16": True, "bf16": True}, "fp16 bf16", {"fp16": True}),
    (
        "one_eval_precision",
        {"fp16_full_eval": True, "bf16_full_eval": True},
        "fp16_full_eval bf16_full_eval",
        {"bf16_full_eval": True},
    ),
    (
        "nccl_needs_a_gpu",
        {"ddp_backend": "nccl", "use_cpu": True},
        "ddp_backend use_cpu gloo",
        {"ddp_backend": "gloo", "use_cpu": True},
    ),
    ("parts_on_one_disk", {"fsdp": True, "save_on_each_node": True}, "save_on_each_node fsdp", {"fsdp": True}),
    ("one_sharding", {"fsdp": True, "deepspeed": {"a": 1}}, "fsdp deepspeed", {"deepspeed": {"a": 1}}),
    (
        "parts_keep_their_type",
        {"fsdp": True, "bf16_full_eval": True},
        "bf16_full_eval fsdp bf16=True",
        {"bf16_full_eval": True},
    ),
    (
        "one_accumulation",
        {
            "gradient_accumulation_steps": 2,
            "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}},
        },
        "gradient_accumulation_steps=2 num_steps=4",
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
    ),
    (
        "sharded_best_needs_full_checkpoints",
        {**BEST, "eval_strategy": "steps", "save_only_model": True, "deepspeed": {"a": 1}},
        "save_only_model load_best_model_at_end deepspeed",
        {**BEST, "eval_strategy": "steps", "save_only_model": True},
    ),
    (
        "prefetch_needs_workers",
        {"dataloader_prefetch_factor": 2},
        "dataloader_prefetch_factor=2 dataloader_num_workers",
        {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1},
    ),
    (
        "persistence_needs_workers",
        {"dataloader_persistent_workers": True},
        "dataloader_persistent_workers dataloader_num_workers",
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
    ),
    (
        "start_method_needs_workers",
        {"dataloader_multiprocessing_context": "spawn"},
        "dataloader_multiprocessing_context dataloader_num_workers",
        {"dataloader_multiprocessing_context": "spawn", "dataloader_num_workers": 1},
    ),
    (
        "one_way_to_form_batches",
        {**BUDGET, **PACKING},
        "max_tokens_per_batch=64 packing='best_fit'",
        PACKING,
    ),
    (
        "a_budget_or_a_batch_size",
        {**BUDGET, "per_device_train_batch_size": 4},
        "max_tokens_per_batch=64 per_device_train_batch_size=4",
        BUDGET,
    ),
    (
        "formed_batches_have_their_order",
        {**BUDGET, "train_sampling_strategy": "sequential"},
        "max_tokens_per_batch=64 train_sampling_strategy='sequential'",
        BUDGET,
    ),
    (
        "formed_batches_have_their_order",
        {**PACKING, "train_sampling_strategy": "group_by_length"},
        "packing='best_fit' train_sampling_strategy='group_by_length'",
        PACKING,
    ),
    (
        "formed_batches_stay_whole",
        {**BUDGET, "accelerator_config": {"dispatch_batches": True}},
        "max_tokens_per_batch=64 accelerator_config.dispatch_batches",
        {**BUDGET, "accelerator_config": {"even_batches": False}},
    ),
    ("packing_needs_a_length", {"packing": "best_fit"}, "packing='best_fit' packing_length", PACKING),
]

# rule: settings, facts, words of the message, legal settings and facts
RUN = [
    (
        "cooldown_needs_its_schedule",
        ({"cooldown": "1-sqrt"}, {"has_own_schedule": True}),
        "cooldown='1-sqrt' its own scheduler",
        ({"cooldown": "1-sqrt"}, {}),
    ),
    (
        "cooldown_needs_its_schedule",
        ({"cooldown": "1-sqrt", "lr_scheduler_type": "constant"}, {"has_open_end": True}),
        "cooldown='1-sqrt' no length max_steps",
        ({"lr_scheduler_type": "constant"}, {"has_open_end": True}),
    ),
    (
        "open_end_is_possible",
        ({}, {"has_open_end": True}),
        "lr_scheduler_type='linear' max_steps",
        ({"lr_scheduler_type": "constant"}, {"has_open_end": True}),
    ),
    (
        "open_end_is_possible",
        ({"save_steps": 0.5}, {"has_open_end": True, "has_own_schedule": True}),
        "save_steps=0.5 max_steps",
        ({"save_steps": 0.5, "save_strategy": "no"}, {"has_open_end": True, "has_own_schedule": True}),
    ),
    (
        "open_end_is_possible",
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}, {"has_open_end": True}),
        "warmup_steps=0.5 max_steps",
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, {"has_open_end": True}),
    ),
    (
        "open_end_is_possible",
        ({"lr_scheduler_type": "inverse_sqrt", "num_train_epochs": 1.5}, {"has_open_end": True}),
        "num_train_epochs=1.5 max_steps",
        ({"lr_scheduler_type": "inverse_sqrt", "num_train_epochs": 2}, {"has_open_end": True}),
    ),
    (
        "evaluation_needs_data",
        ({"eval_strategy": "epoch"}, {"has_eval_dataset": False}),
        "eval_strategy='epoch' eval_dataset",
        ({"eval_strategy": "epoch"}, {"has_eval_dataset": True}),
    ),
    (
        "first_evaluation_needs_data",
        ({"eval_on_start": True}, {"has_eval_dataset": False}),
        "eval_on_start eval_dataset",
        ({"eval_on_start": True}, {"has_eval_dataset": True}),
    ),
    (
        "best_metric_names_its_set",
        ({**BEST, "eval_strategy": "steps"}, {"eval_names": ("old", "new")}),
        "metric_for_best_model='loss' 'old_loss'",
        ({**BEST, "eval_strategy": "steps", "metric_for_best_model": "eval_new_loss"}, {"eval_names": ("old", "new")}),
    ),
    (
        "best_metric_is_computed",
        (
            {**BEST, "eval_strategy": "steps", "metric_for_best_model": "accuracy"},
            {"has_compute_metrics": False},
        ),
        "metric_for_best_model='accuracy' compute_metrics",
        (
            {**BEST, "eval_strategy": "steps", "metric_for_best_model": "eval_loss"},
            {"has_compute_metrics": False},
        ),
    ),
    (
        "bf16_is_supported",
        ({"bf16": True}, {"device_type": "cuda", "supports_bf16": False}),
        "bf16 cuda fp16",
        ({"bf16": True}, {"device_type": "cpu", "supports_bf16": True}),
    ),
    (
        "tf32_is_supported",
        ({"tf32": True}, {"device_type": "cuda", "supports_tf32": False}),
        "tf32 cuda",
        ({"tf32": True}, {"supports_tf32": True}),
    ),
    (
        "static_graph_sees_every_batch",
        ({"ddp_static_graph": True, "gradient_accumulation_steps": 2}, {"num_processes": 2}),
        "ddp_static_graph gradient_accumulation_steps=2 sync_each_batch",
        (
            {
                "ddp_static_graph": True,
                "gradient_accumulation_steps": 2,
                "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            },
            {"num_processes": 2},
        ),
    ),
    (
        "updates_in_backward_stay_in_one_process",
        ({"optim": "adalomo"}, {"num_processes": 2}),
        "optim='adalomo' processes",
        ({"optim": "adalomo"}, {"num_processes": 1}),
    ),
]

# rule: settings, facts, words of the warning, settings and facts without one
CAUTION = [
    (
        "warmup_fits",
        ({"warmup_steps": 100}, {"max_steps": 5}),
        "warmup_steps=100 num_train_epochs 5",
        ({"warmup_steps": 5}, {"max_steps": 5}),
    ),
    (
        "intervals_are_reached",
        ({"logging_steps": 10}, {"max_steps": 5}),
        "logging_steps=10 5",
        ({"logging_steps": 500}, {"max_steps": 5}),
    ),
    (
        "intervals_are_reached",
        ({"eval_strategy": "steps", "eval_steps": 10}, {"max_steps": 5}),
        "eval_steps=10 num_train_epochs",
        ({"eval_strategy": "steps", "eval_steps": 5}, {"max_steps": 5}),
    ),
    (
        "intervals_are_reached",
        ({"eval_strategy": "steps", "logging_steps": 10, "logging_strategy": "no"}, {"max_steps": 5}),
        "eval_steps=10",
        ({"eval_strategy": "steps", "logging_steps": 0.2}, {"max_steps": 5}),
    ),
    (
        "intervals_are_reached",
        ({"save_steps": 1000}, {"max_steps": 20}),
        "save_steps=1000 save_strategy",
        ({"save_steps": 1000, "save_strategy": "no"}, {"max_steps": 20}),
    ),
    (
        "intervals_are_reached",
        ({"save_steps": 1000, "eval_strategy": "steps", "eval_steps": 900}, {"max_steps": 20}),
        "eval_steps=900 and save_steps=1000 are",
        ({"save_steps": 1000, "save_strategy": "no"}, {"max_steps": 20}),
    ),
    (
        "profiled_steps_are_reached",
        ({"profile": "4-9"}, {"max_steps": 8}),
        "profile='4-9' 8 num_train_epochs",
        ({"profile": "4-8"}, {"max_steps": 8}),
    ),
    (
        "evaluation_is_not_delayed_away",
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 9}, {"max_steps": 8}),
        "eval_delay=9 eval_strategy",
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 8}, {"max_steps": 8}),
    ),
    (
        "evaluation_is_not_delayed_away",
        ({"eval_strategy": "epoch", "eval_delay": 9}, {"max_steps": 80, "num_epochs": 3}),
        "eval_delay=9 epochs eval_strategy",
        ({"eval_strategy": "epoch", "eval_delay": 9}, {"max_steps": 80}),
    ),
    (
        "some_step_is_trained",
        ({"num_train_epochs": 0}, {"max_steps": 0}),
        "num_train_epochs=0",
        ({"num_train_epochs": 0}, {"max_steps": 1}),
    ),
    (
        "some_step_is_trained",
        ({"max_steps": 0}, {"max_steps": 0}),
        "max_steps=0 one step",
        ({"max_steps": 1}, {"max_steps": 1}),
    ),
    ("warmup_is_whole", ({"warmup_steps": 2.5}, {}), "warmup_steps=2.5 2:", ({"warmup_steps": 0.25}, {})),
    (
        "intervals_are_reached",
        ({"logging_steps": -3}, {"max_steps": 5}),
        "logging_steps=-3 never",
        ({"logging_steps": -3, "logging_strategy": "no"}, {"max_steps": 5}),
    ),
    (
        "intervals_are_reached",
        ({"save_steps": 0}, {"max_steps": 5}),
        "save_steps=0 never",
        ({"save_steps": 0, "save_strategy": "no"}, {"max_steps": 5}),
    ),
    (
        "best_is_evaluated",
        ({**BEST, "save_strategy": "no"}, {}),
        "load_best_model_at_end=True eval_strategy='no'",
        ({**BEST, "save_strategy": "best", "eval_strategy": "epoch"}, {}),
    ),
    (
        "best_is_evaluated",
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, {}),
        "save_strategy='best' eval_strategy='no'",
        ({"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch"}, {}),
    ),
    (
        "lengths_need_a_map",
        ({"train_sampling_strategy": "group_by_length", "max_steps": 5}, {"is_stream": True}),
        "train_sampling_strategy='group_by_length' stream",
        ({"train_sampling_strategy": "group_by_length", "max_steps": 5}, {"is_stream": False}),
    ),
]

# rule: settings without effect, the nearest settings with one
IDLE = [
    ("checkpointing_settings", {"activation_checkpointing_kwargs": {"a": 1}}, {"activation_checkpointing": True}),
    (
        "kept_compiled_activations",
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"save": "attention"},
            "torch_compile": True,
        },
        {"torch_compile": False},
    ),
    ("best_between_saves", {**BEST, **STEPS, "save_steps": 10}, {"save_steps": 5}),
    ("best_between_saves", {**BEST, **STEPS, "save_steps": 10}, {"save_strategy": "best"}),
    (
        "best_between_saves",
        {**BEST, **STEPS, "save_steps": 10},
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
    ),
    ("tpu_metrics", {"debug": "tpu_metrics_debug"}, {"debug": ""}),
    ("timeout_of_workers", {"dataloader_timeout": 5.0}, {"dataloader_num_workers": 1}),
    ("liger_settings", {"liger_kernel_config": {"rope": True}}, {"use_liger_kernel": True}),
    ("fsdp_settings", {"fsdp_config": {"version": 2}}, {"fsdp": True}),
    ("hub_settings", {"hub_always_push": True}, {"push_to_hub": True}),
    ("hub_settings", {"hub_token": "hf_x", "hub_strategy": "end"}, {"push_to_hub": True}),
    ("tracker_settings", {"run_name": "first"}, {"report_to": "wandb"}),
    ("tracker_settings", {"project": "ours", "trackio_space_id": "me/space"}, {"report_to": "all"}),
    ("tensorboard_folder", {"logging_dir": "logs"}, {"report_to": ["wandb", "tensorboard"]}),
    ("tensorboard_folder", {"logging_dir": "logs", "report_to": "wandb"}, {"report_to": "all"}),
    ("multi_process_settings", {"ddp_backend": "gloo"}, {"ddp_backend": None}),
    (
        "saving_on_exception",
        {"save_on_exception": True, "optim": "lomo", "on_nonfinite": "ignore"},
        {"optim": "adamw_torch"},
    ),
    ("guarded_updates", {"optim": "lomo"}, {"on_nonfinite": "ignore"}),
    ("guarded_updates", {"optim": "lomo", "on_nonfinite": "ignore", "on_spike": "warn"}, {"optim": "adamw_torch"}),
    ("guarded_updates", {"deepspeed": {"zero_optimization": {"stage": 2}}, "on_spike": "skip"}, {"on_spike": "warn"}),
    ("guarded_updates", {"deepspeed": {"zero_optimization": {"stage": 0}}}, {"on_nonfinite": "ignore"}),
    ("rollback_settings", {"max_rollbacks": 5}, {"on_spike": "rollback"}),
    ("spike_settings", {"spike_warmup": 5}, {"on_spike": "warn"}),
    (
        "accelerator_settings",
        {"accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"non_blocking": True}},
    ),
    (
        "accelerator_settings",
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    ),
    (
        "multi_process_settings",
        {"ddp_timeout": 60, "ddp_static_graph": False},
        {"ddp_timeout": 1800, "ddp_static_graph": None},
    ),
    ("generation_configuration", {"generation_config": "some/model"}, {"predict_with_generate": True}),
    (
        "generated_predictions_are_kept",
        {"predict_with_generate": True, "prediction_loss_only": True},
        {"prediction_loss_only": False},
    ),
    (
        "one_sample_order",
        {"sortish_sampler": True, "train_sampling_strategy": "sequential"},
        {"train_sampling_strategy": "random"},
    ),
    ("known_metric_inputs", {"include_for_metrics": ["input"]}, {"include_for_metrics": ["inputs", "loss"]}),
    ("tf32_needs_a_gpu", {"tf32": True, "use_cpu": True}, {"tf32": False}),
    ("unusual_numbers", {"max_grad_norm": -1.0}, {"max_grad_norm": 0}),
    ("unusual_numbers", {"save_total_limit": 0, "weight_decay": -0.1}, {"save_total_limit": 1, "weight_decay": 0}),
    ("tpu_cores", {"tpu_num_cores": 8}, {"tpu_num_cores": None}),
    ("ray_scope", {"ray_scope": "all"}, {"ray_scope": "last"}),
    ("generation_length", {"generation_max_length": 5}, {"predict_with_generate": True}),
    ("generation_beams", {"generation_num_beams": 5}, {"predict_with_generate": True}),
    ("projected_modules", {"optim_target_modules": "all-linear"}, {"optim": "galore_adamw"}),
    (
        "constant_rate_warmup",
        {"lr_scheduler_type": "constant", "warmup_steps": 5},
        {"lr_scheduler_type": "constant_with_warmup"},
    ),
    ("packing_settings", {"packing_length": 64}, {"packing": "best_fit"}),
    ("packing_settings", {"packing_overflow": "split"}, PACKING),
    ("share_unit", {"mixture_unit": "tokens"}, {"mixture": {"a": 1}}),
    ("schedule_type", {"mixture_schedule_type": "linear"}, STAGED),
    ("last_batch_of_a_budget", {**BUDGET, "dataloader_drop_last": True}, {"max_tokens_per_batch": None}),
    ("limit_without_saves", {"save_total_limit": 1, "save_strategy": "no"}, {"save_strategy": "epoch"}),
    ("limit_without_saves", {"save_total_limit": 1, "save_strategy": "no"}, {"save_every": "20min"}),
    (
        "mirror_without_saves",
        {"checkpoint_mirror": "s3://bucket/run", "save_strategy": "no"},
        {"save_strategy": "epoch"},
    ),
    (
        "mirror_without_saves",
        {"checkpoint_mirror": "s3://bucket/run", "save_strategy": "no"},
        {"save_every": "20min"},
    ),
    ("mirror_settings", {"mirror_every": "1h"}, {"checkpoint_mirror": "s3://bucket/run"}),
    ("mirror_settings", {"mirror_total_limit": 2}, {"checkpoint_mirror": "s3://bucket/run"}),
    ("kept_beyond_no_limit", {"save_keep_every_steps": 100}, {"save_total_limit": 2}),
    ("kept_beyond_no_limit", {"save_keep_every": "2h"}, {"save_total_limit": 2}),
    ("evaluation_beside_nothing", {"eval_queue": "skip", "eval_strategy": "epoch"}, {"eval_async": True}),
    ("evaluation_beside_nothing", {"eval_async": True}, {"eval_strategy": "epoch"}),
    (
        "evaluation_beside_nothing",
        {"eval_async": "watch", "eval_strategy": "epoch", "eval_device": "cuda:1"},
        {"eval_async": True},
    ),
]


def unchecked(**settings):
    """Arguments in their normal form that nobody has checked."""
    args = SimpleNamespace(**{**read_defaults(Seq2SeqTrainingArguments), **settings})
    coerce(args)
    return args


def test_every_rule_has_a_row():
    for table, stage in (
        (ALONE, Stage.CONSTRUCTION),
        (RUN, Stage.START),
        (CAUTION, Stage.WARNING),
        (IDLE, Stage.ADVICE),
    ):
        names = [rule.name for rule in select_rules(stage)]
        assert {row[0] for row in table} == set(names)
        assert len(set(names)) == len(names)


class Recorded(Seq2SeqTrainingArguments):
    """Arguments that note which of their fields are read."""

    world_size = 1

    def __getattribute__(self, name):
        if name in SETTINGS:
            vars(self)["read"].add(name)
        return super().__getattribute__(name)


TRIED = [
    *(row[1] for row in ALONE if row[0] != "profiled_steps"),
    *(row[1][0] for row in [*RUN, *CAUTION]),
    *(row[1] for row in IDLE),
]


@pytest.mark.parametrize("settings", TRIED)
def test_a_rule_reads_the_fields_that_it_is_about_and_no_others(settings):
    plain = vars(unchecked(**settings))
    for one in RULES:
        args = object.__new__(Recorded)
        vars(args).update(plain, read=set())
        one.message(args, RunFacts(max_steps=10, has_open_end=True, eval_names=("a",), supports_bf16=False))
        assert vars(args)["read"] <= one.fields, one.name


@pytest.mark.parametrize(("name", "refused", "words", "legal"), ALONE)
def test_a_contradiction_is_refused_and_its_neighbour_is_not(name, refused, words, legal):
    rule = BY_NAME[name]
    with pytest.raises(ArgumentError) as caught:
        Seq2SeqTrainingArguments(**refused)
    for word in words.split():
        assert word in str(caught.value)
    assert violations(unchecked(**refused)) == [rule(unchecked(**refused))] == [str(caught.value)]
    check_run(Seq2SeqTrainingArguments(**legal), RunFacts())


@pytest.mark.parametrize(("name", "refused", "words", "legal"), RUN)
def test_a_contradiction_of_the_run_is_refused_and_its_neighbour_is_not(name, refused, words, legal):
    settings, facts = refused
    args = TrainingArguments(**settings)
    with pytest.raises(ArgumentError) as caught:
        check_run(args, RunFacts(**facts))
    for word in words.split():
        assert word in str(caught.value)
    assert BY_NAME[name](args, RunFacts(**facts)) == str(caught.value)
    settings, facts = legal
    check_run(TrainingArguments(**settings), RunFacts(**facts))


@pytest.mark.parametrize(("name", "pointless", "words", "useful"), CAUTION)
def test_what_a_run_cannot_make_use_of_is_a_warning(name, pointless, words, useful):
    settings, facts = pointless
    args = TrainingArguments(**settings)
    check_run(args, RunFacts(**facts))
    (message,) = cautions(args, RunFacts(**facts))
    assert message == BY_NAME[name](args, RunFacts(**facts))
    for word in words.split():
        assert word in message
    settings, facts = useful
    assert cautions(TrainingArguments(**settings), RunFacts(**facts)) == []


@pytest.mark.parametrize(("name", "settings", "cure"), IDLE)
def test_what_has_no_effect_is_said(name, settings, cure):
    args = Seq2SeqTrainingArguments(**settings)
    assert advise(args) == [BY_NAME[name](args)]
    assert advise(Seq2SeqTrainingArguments(**{**settings, **cure})) == []


def test_settings_of_several_processes_have_effect_in_several(monkeypatch):
    args = TrainingArguments(ddp_backend="gloo", ddp_timeout=60)
    assert advise(args) == ["ddp_backend, ddp_timeout have no effect in one process."]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert advise(args) == []


def test_a_save_on_an_exception_is_for_one_process(monkeypatch):
    args = TrainingArguments(save_on_exception=True)
    assert advise(args) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [message.split(":")[0] for message in advise(args)] == [
        "save_on_exception has no effect in several processes"
    ]


def test_an_explicit_eval_interval_in_an_unreached_run_is_said_once():
    args = TrainingArguments(eval_strategy="steps", logging_steps=10)
    assert [message.split("=")[0] for message in cautions(args, RunFacts(max_steps=5))] == ["logging_steps"]


def test_defaults_do_not_contradict_and_have_effect():
    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        check_run(kind(), RunFacts())
        check_run(kind(), RunFacts(max_steps=1, has_eval_dataset=False, has_compute_metrics=False, device_type="cpu"))
        assert advise(kind()) == []


def test_arguments_of_transformers_are_checked_too():
    import transformers

    args = transformers.TrainingArguments(warmup_steps=100, use_cpu=True, dataloader_persistent_workers=True)
    with pytest.raises(ArgumentError, match=r"^dataloader_persistent_workers"):
        check_run(args, RunFacts(max_steps=5))
    args.dataloader_persistent_workers = False
    check_run(args, RunFacts(max_steps=5))
    (message,) = cautions(args, RunFacts(max_steps=5))
    assert message.startswith("warmup_steps=100 ")


STRICT = {name: limits for name, limits in RANGES.items() if not limits.only_warns and limits.low > -math.inf}
BELOW = [(name, limits.low - 1) for name, limits in STRICT.items()]
OPEN = [(name, limits.low) for name, limits in STRICT.items() if limits.open_low]
ABOVE = [(name, limits.high + (not limits.open_high)) for name, limits in STRICT.items() if limits.high is not None]
HALF = [(name, 2.5) for name, limits in RANGES.items() if limits.whole]
TEXT = [(name, "5e-5") for name in RANGES]
NONE = [(name, None) for name, limits in RANGES.items() if not limits.optional]
NAN = [("learning_rate", float("nan"))]
YES = [(name, True) for name in RANGES if name in OurFields.__dataclass_fields__]
WORDS = [(name, "nonsense") for name in CHOICES]


@pytest.mark.parametrize(("name", "value"), [*BELOW, *OPEN, *ABOVE, *HALF, *TEXT, *NAN, *YES, *WORDS, *NONE])
def test_a_value_out_of_range_is_refused(name, value):
    with pytest.raises(ArgumentError, match=rf"{name}={value!r}"):
        Seq2SeqTrainingArguments(**{name: value})


UNUSUAL = [(name, -7) for name, limits in RANGES.items() if limits.only_warns]


@pytest.mark.parametrize(("name", "value"), UNUSUAL)
def test_a_number_that_trains_but_is_probably_a_mistake_is_reported(name, value):
    (message,) = [m for m in advise(Seq2SeqTrainingArguments(**{name: value})) if "meant to" in m]
    assert message.startswith(f"{name}=-7 is out of range: it is meant to be ")


LEGAL = [(name, limits.low) for name, limits in STRICT.items() if not limits.open_low]
LEGAL += [(name, None) for name, limits in RANGES.items() if limits.optional and name != "tpu_num_cores"]  # type: ignore[misc]


@pytest.mark.parametrize(("name", "value"), LEGAL)
def test_the_ends_of_a_range_are_legal(name, value):
    beside = {"dataloader_num_workers": 1} if name == "dataloader_prefetch_factor" else {}
    assert getattr(Seq2SeqTrainingArguments(**{name: value}, **beside), name) == value


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    assert TrainingArguments(learning_rate=np.float32(0.5), seed=np.int64(3)).seed == 3


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_error_saves_with_every_optimizer_that_steps_between_two_backward_passes(name):
    args = unchecked(save_on_exception=True, optim=name, world_size=1)
    assert (advice.saving_on_exception(args) is not None) == steps_in_backward(args)


def test_library_may_use_name_of_one_of_our_fields_for_something_else():
    @dataclasses.dataclass
    class Theirs(TrainingArguments):  # as TRL's SFTConfig does
        packing: bool = False
        pad_to_multiple_of: int | None = None

    for args in (Theirs(), Theirs(packing=True, pad_to_multiple_of=8)):
        assert resolve.sampling(args, batch_size=4, seed=0, num_processes=1, length_of=None).batching is None
        assert batching_fields(args) == []
        assert "rows of" not in str(args)
    with pytest.raises(ArgumentError, match="packing=True"):
        TrainingArguments(packing=True)
