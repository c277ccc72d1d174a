"""What is refused, what is warned of, and why: a table of provocations, each beside what transformers' Trainer does.

A row is (id, parts of `make_trainer` or settings, words). Rows of TRAINS train on both sides, and one of our warnings
has the words. Rows of RAISES end in an error on both sides; the third entry is the place of ours. PROTECTED are refused
only by ours, with a line in docs/migrate.md; tests/contract/test_refusals_are_justified.py compares places with src.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import torch
from torch.utils.data import IterableDataset

from .._support.small import accuracy, data, module

EVAL = {"eval_dataset": data.vectors(8)}
BEST = {"load_best_model_at_end": True}
SMOKE = {"max_steps": 2}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data.vectors(26))


TRAINS: list[tuple[str, dict[str, Any], str]] = [
    ("warm-up", {**SMOKE, "warmup_steps": 100}, "warmup_steps=100 max_steps=2"),
    ("half a step of warm-up", {**SMOKE, "warmup_steps": 1.5}, "warmup_steps=1.5"),
    ("logging", {**SMOKE, "logging_steps": 10}, "logging_steps=10 max_steps=2"),
    ("eval", {**SMOKE, **EVAL, "eval_strategy": "steps", "eval_steps": 10}, "eval_steps=10 max_steps=2"),
    ("save", {**SMOKE, "save_strategy": "steps", "save_steps": 50}, "save_steps=50 max_steps=2"),
    ("no save", {**SMOKE, "save_strategy": "steps", "save_steps": 0}, "save_steps=0"),
    ("negative", {**SMOKE, "logging_steps": -1}, "logging_steps=-1"),
    (
        "delay",
        {**SMOKE, **EVAL, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 9},
        "eval_delay=9 max_steps=2",
    ),
    ("delay in epochs", {**EVAL, "num_train_epochs": 1, "eval_strategy": "epoch", "eval_delay": 9}, "eval_delay=9"),
    (
        "no batch",
        {"max_steps": 3, "dataloader_drop_last": True, "per_device_train_batch_size": 64},
        "dataloader_drop_last",
    ),
    ("no epoch", {"num_train_epochs": 0}, "num_train_epochs=0"),
    ("grouped stream", {**SMOKE, "train_dataset": Stream(), "train_sampling_strategy": "group_by_length"}, "stream"),
    ("balanced stream", {**SMOKE, "train_dataset": Stream(), "train_sampling_strategy": "batch_rebalance"}, "stream"),
    ("best without evaluation", {**SMOKE, **BEST}, "load_best_model_at_end=True eval_strategy='no'"),
    ("best by a metric, none", {**SMOKE, **BEST, "metric_for_best_model": "f1"}, "load_best_model_at_end=True"),
    ("best saves, none", {**SMOKE, "save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best'"),
    ("input of metrics", {**SMOKE, "include_for_metrics": ["input"]}, "include_for_metrics ['input']"),
    ("empty evaluation", {**SMOKE, "eval_dataset": [], "eval_strategy": "steps", "eval_steps": 1}, "set is empty"),
    ("decay", {**SMOKE, "weight_decay": -0.1}, "weight_decay=-0.1"),
    ("norm", {**SMOKE, "max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ("limit", {**SMOKE, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 0}, "save_total_limit=0"),
    ("beta of SGD", {**SMOKE, "optim": "sgd", "adam_beta1": 2.0}, "adam_beta1=2.0"),
    ("option of AdamW", {**SMOKE, "optim_args": "speed=3"}, "optim_args 'speed'"),
    ("option of a constant rate", {**SMOKE, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, "'a'"),
]

RAISES: list[tuple[str, dict[str, Any], str]] = [  # the last entry: what raises here
    ("no model", {"model": None}, "checks.check_models"),
    ("two models", {"model": module(), "model_init": module}, "checks.check_models"),
    ("init of two", {"model_init": lambda a, b: None}, "run.build.call_model_init"),
    ("init of none", {"model_init": lambda: None}, "run.build.call_model_init"),
    ("no data", {"train_dataset": None}, "trainer.Trainer.get_train_dataloader"),
    ("empty data", {"train_dataset": []}, "checks.check_has_samples"),
    ("no batch", {"dataloader_drop_last": True, "per_device_train_batch_size": 64}, "checks.check_has_batches"),
    ("stream without length", {"train_dataset": Stream()}, "checks.check_datasets"),
    ("collator", {"data_collator": 5}, "checks.check_datasets"),
    ("no set to evaluate", {"eval_strategy": "epoch"}, "checks.check_datasets"),
    ("none at the start", {"eval_on_start": True}, "trainer.Trainer.get_eval_dataloader"),
    ("metrics by batch", {**EVAL, "batch_eval_metrics": True, "compute_metrics": accuracy}, "checks.check_metrics"),
    ("columns", {"train_dataset": datasets.Dataset.from_dict({"a": [1, 2]})}, "data.columns.remove_unused"),
    ("no dict", {"data_collator": lambda rows: torch.zeros(2, 6)}, "run.input_pipeline.raise_no_input"),
    ("empty batch", {"data_collator": lambda rows: {}}, "run.input_pipeline.raise_no_input"),
    ("no loss", {"data_collator": lambda rows: {"x": torch.zeros(2, 6)}}, "checks.raise_no_loss"),
    ("lengths", {"train_sampling_strategy": "group_by_length"}, "data.lengths.lengths_of"),
    (
        "two optimizers",
        {
            "optimizers": (torch.optim.SGD(module().parameters(), lr=0.1), None),
            "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1}),
        },
        "checks.check_optimizers",
    ),
    ("half weights", {"model": module().half(), "fp16": True}, "checks.check_trainable"),
    ("noise", {"neftune_noise_alpha": 5.0}, "patches.noisy_embeddings"),
    ("kernels", {"use_liger_kernel": True}, "patches.apply_liger_kernel"),
    ("optimizer", {"optim": "nope"}, "config.enums.ExplicitEnum._missing_"),
    ("schedule", {"lr_scheduler_type": "nope"}, "config.enums.ExplicitEnum._missing_"),
    ("option of a schedule", {"lr_scheduler_kwargs": {"a": 1}}, "optim.schedules._check_options"),
    ("missing option", {"lr_scheduler_type": "cosine_with_min_lr"}, "optim.schedules._check_options"),
    ("optim_args", {"optim_args": "speed"}, "optim.optim_args.parse_optim_args"),
    ("projection", {"optim": "galore_adamw"}, "optim.projection_targets.target_parameters"),
    ("unknown field", {"nope": 3}, "config.constructor.refuse"),
    ("unknown key", {"accelerator_config": {"nope": 1}}, "config.accelerator.AcceleratorConfig.from_dict"),
    ("accumulation", {"gradient_accumulation_steps": 2, "accelerator_config": {"gradient_accumulation_kwargs":
        {"num_steps": 4}}}, "config.resolve.micro_batches"),
    ("tracker", {"report_to": "nope"}, "trackers.registry.get_reporting_integration_callbacks"),
    ("resume of none", {"resume": True}, "run.resume.find_checkpoint"),
    ("resume of a missing one", {"resume": "nowhere"}, "checkpoint.store.verified"),
    ("both halves", {"fp16": True, "bf16": True}, "rules.one_precision"),
    ("both halves of evaluation", {"fp16_full_eval": True, "bf16_full_eval": True}, "rules.one_eval_precision"),
    ("tf32", {"tf32": True}, "rules.tf32_is_supported"),
    ("prefetch", {"dataloader_prefetch_factor": 2}, "rules.prefetch_needs_workers"),
    ("persistence", {"dataloader_persistent_workers": True}, "rules.persistence_needs_workers"),
    ("start method", {"dataloader_multiprocessing_context": "spawn"}, "rules.start_method_needs_workers"),
    ("logging 0", {"logging_steps": 0}, "rules.logging_interval"),
    ("eval 2.5", {**EVAL, "eval_strategy": "steps", "eval_steps": 2.5}, "rules.eval_interval"),
    ("save 2.5", {"save_strategy": "steps", "save_steps": 2.5}, "rules.save_interval"),
    ("best, no evaluation", {**BEST, "save_strategy": "steps"}, "rules.best_needs_evaluation"),
    ("best, other", {**EVAL, **BEST, "eval_strategy": "epoch", "save_strategy": "steps"},
        "rules.best_needs_matching_saves"),
    ("best, not a multiple", {**EVAL, **BEST, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
        "save_steps": 5}, "rules.best_saves_are_multiples"),
    ("best, no metric", {**EVAL, "eval_strategy": "epoch", "save_strategy": "best"},
        "rules.saving_the_best_needs_a_metric"),
    ("plateau", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "rules.schedule_needs_evaluation"),
    ("sets", {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "eval_dataset": {"a": data.vectors(4)}},
        "rules.best_metric_names_its_set"),
    ("metric", {**EVAL, **BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "f1"},
        "rules.best_metric_is_computed"),
    ("misspelt", {**EVAL, **BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "f1",
        "compute_metrics": accuracy}, "run.dry_run._find_metric"),
    ("parallelism", {"parallelism_config": SimpleNamespace(tp_size=0)}, "rules.sizes_are_accelerates"),
    ("batch of 0", {"per_device_train_batch_size": 0}, "config.constructor.refuse"),
    ("negative rate", {"learning_rate": -1.0}, "config.constructor.refuse"),
]  # fmt: skip

# Refused here alone: a sentence of docs/migrate.md, "What is refused", and the functions that it speaks of.
PROTECTED: list[tuple[str, tuple[str, ...]]] = [
    ("`compute_metrics` is given and the evaluation batches have no labels", ("evaluation.eval_loop.raise_no_labels",)),
    ("A word that a field does not know", ("config.constructor.refuse",)),
    ("A resume whose epoch cannot be continued", ("data.cursor", "data.positions", "data.streaming", "run.resume")),
    ("A checkpoint that is damaged", ("checkpoint", "run.resume.initial_state", "run.search")),
    ("Several processes whose weights would part", ("rules.updates_in_backward_stay_in_one_process",
        "rules.static_graph_sees_every_batch", "checks.check_ends_together", "rules.parts_on_one_disk",
        "rules.parts_keep_their_type")),
    ("An `output_dir` with the checkpoints of another run", ("run.checkpointing", "run.training", "checkpoint.lease")),
    ("20 steps in a row whose loss or gradient is not finite", ("guard.incidents",)),
    ("A name in the space of a search that is no field", ("search", "config.overrides")),
]  # fmt: skip
