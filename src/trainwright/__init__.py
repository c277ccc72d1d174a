"""Trainwright: training and evaluation of PyTorch models, with the API of Hugging Face's Trainer.

    from trainwright import Trainer, TrainingArguments

Names are loaded when they are first used (PEP 562), so importing the package loads neither torch nor transformers.
"""

# ruff: noqa: E402 -- the path is right before anything is looked up on it
from __future__ import annotations

import sys

# `python -m trainwright` puts the working directory first on the path: a `logging.py` or `typer.py` that lies there
# would run in place of the real one. `-m` is the first argument only until Python has found the module to run; the
# words after it are the last ones of the command.
_is_searched = sys.argv[:1] == ["-m"] and not sys.flags.safe_path
if _is_searched and sys.orig_argv[-len(sys.argv)] in ("trainwright", "-mtrainwright"):
    del sys.path[0]

import functools
import gc
import importlib
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trainwright import capability_table
from trainwright.support import log_handler

__version__ = "0.3.0"

# Module -> public names that live in it; those of a capability are in its row.
_HOMES: dict[str, tuple[str, ...]] = {
    "trainwright.trainer": ("Trainer",),
    "trainwright.seq2seq_trainer": ("Seq2SeqTrainer",),
    "trainwright.config.arguments": ("Seq2SeqTrainingArguments", "TrainingArguments"),
    "trainwright.config.accelerator": ("AcceleratorConfig",),
    "trainwright.config.enums": (
        "DebugOption",
        "FSDPOption",
        "HPSearchBackend",
        "HubStrategy",
        "IntervalStrategy",
        "OptimizerNames",
        "SaveStrategy",
        "SchedulerType",
    ),
    "trainwright.distributed.world": ("ParallelMode",),
    "trainwright.config.parser": (
        "DataClassType",
        "HfArg",
        "HfArgumentParser",
        "make_choice_type_function",
        "string_to_bool",
    ),
    "trainwright.callbacks.base": ("TrainerCallback",),
    "trainwright.callbacks.dispatch": ("CallbackHandler",),
    "trainwright.callbacks.flow": ("DefaultFlowCallback", "EarlyStoppingCallback"),
    "trainwright.callbacks.notebook": ("NotebookProgressCallback",),
    "trainwright.callbacks.preemption": ("CheckpointManager", "JITCheckpointCallback"),
    "trainwright.callbacks.progress": (
        "DEFAULT_CALLBACKS",
        "DEFAULT_PROGRESS_CALLBACK",
        "PrinterCallback",
        "ProgressCallback",
    ),
    "trainwright.trackers.base": ("rewrite_logs",),
    "trainwright.trackers.registry": (
        "get_reporting_integration_callbacks",
        "is_azureml_available",
        "is_clearml_available",
        "is_codecarbon_available",
        "is_comet_available",
        "is_dagshub_available",
        "is_dvclive_available",
        "is_flyte_deck_standard_available",
        "is_flytekit_available",
        "is_kubeflow_available",
        "is_mlflow_available",
        "is_neptune_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_trackio_available",
        "is_wandb_available",
    ),
    "trainwright.trackers.platforms": (
        "AzureMLCallback",
        "CodeCarbonCallback",
        "DagsHubCallback",
        "FlyteCallback",
        "KubeflowCallback",
        "MLflowCallback",
        "WandbCallback",
    ),
    "trainwright.trackers.services": (
        "ClearMLCallback",
        "CometCallback",
        "DVCLiveCallback",
        "NeptuneCallback",
        "SwanLabCallback",
        "TensorBoardCallback",
        "TrackioCallback",
    ),
    "trainwright.state.trainer_state": ("ExportableState", "TrainerControl", "TrainerState"),
    "trainwright.evaluation.outputs": (
        "EvalLoopOutput",
        "EvalPrediction",
        "PredictionOutput",
        "TrainOutput",
        "denumpify_detensorize",
        "metrics_format",
    ),
    "trainwright.state.throughput": ("speed_metrics",),
    "trainwright.state.memory_tracker": ("TrainerMemoryTracker",),
    "trainwright.compat.helpers": (
        "DistributedLengthGroupedSampler",
        "DistributedSamplerWithLoop",
        "EvalLoopContainer",
        "IterableDatasetShard",
        "ShardSampler",
        "activate_neftune",
        "default_hp_space_optuna",
        "default_hp_space_ray",
        "default_hp_space_wandb",
        "distributed_broadcast_scalars",
        "distributed_concat",
        "find_executable_batch_size",
        "is_optuna_available",
        "is_ray_available",
        "is_ray_tune_available",
        "load_sharded_checkpoint",
        "nested_truncate",
        "number_of_arguments",
        "rotate_checkpoints",
        "sort_checkpoints",
        "torch_distributed_zero_first",
    ),
    "trainwright.support.patches": ("apply_liger_kernel",),
    "trainwright.support.tensor_tree": (
        "find_batch_size",
        "nested_concat",
        "nested_detach",
        "nested_numpify",
        "numpy_pad_and_concatenate",
        "torch_pad_and_concatenate",
    ),
    "trainwright.search.base": ("BestRun", "default_compute_objective"),
    "trainwright.loop.extension": ("Decision", "Extension", "MicroBatch", "StepFacts"),
    "trainwright.support.loss_normalization": ("LabelSmoother", "LossOutput"),
    "trainwright.optim.parameter_groups": ("check_target_module_exists", "get_parameter_names"),
    "trainwright.optim.factory": ("is_optimizer_factory",),
    "trainwright.optim.own_optimizers": ("LayerWiseDummyOptimizer", "LayerWiseDummyScheduler"),
    "trainwright.optim.schedules": (
        "Adafactor",
        "AdafactorSchedule",
        "GreedyLR",
        "get_constant_schedule",
        "get_constant_schedule_with_warmup",
        "get_cosine_schedule_with_warmup",
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
        "get_greedy_schedule",
        "get_inverse_sqrt_schedule",
        "get_linear_schedule_with_warmup",
        "get_polynomial_decay_schedule_with_warmup",
        "get_reduce_on_plateau_schedule",
        "get_scheduler",
        "get_wsd_schedule",
    ),
    "trainwright.data.seeding": ("enable_full_determinism", "seed_worker", "set_seed"),
    "trainwright.data.length_sampler": ("LengthGroupedSampler", "get_length_grouped_indices"),
    "trainwright.data.balanced_batches": ("BatchRebalanceSampler",),
    "trainwright.data.columns": (
        "DataCollatorForLanguageModeling",
        "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification",
        "DataCollatorWithFlattening",
        "DataCollatorWithPadding",
        "DefaultDataCollator",
        "RemoveColumnsCollator",
        "default_data_collator",
    ),
    "trainwright.checkpoint.store": ("get_last_checkpoint",),
    "trainwright._types": (
        "FSDP_MODEL_NAME",
        "OPTIMIZER_NAME",
        "PREFIX_CHECKPOINT_DIR",
        "SCALER_NAME",
        "SCHEDULER_NAME",
        "TRAINER_STATE_NAME",
        "TRAINING_ARGS_NAME",
        "has_length",
    ),
    **capability_table.PUBLIC_NAMES,
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
# From transformers too.
_GONE = dict.fromkeys(("ShardedDDPOption", "default_hp_space_sigopt"), "trainwright.compat.helpers")

# Import paths of transformers that are modules of this package too: with the public names above, then transformers'
# own.
ORIGINAL_PATHS = (
    "data.data_collator",
    "debug_utils",
    "deepspeed",
    "hf_argparser",
    "hyperparameter_search",
    "integrations",
    "integrations.deepspeed",
    "integrations.fsdp",
    "integrations.integration_utils",
    "integrations.liger",
    "integrations.neftune",
    "integrations.peft",
    "integrations.tpu",
    "modelcard",
    "optimization",
    "pytorch_utils",
    "trainer",
    "trainer_callback",
    "trainer_jit_checkpoint",
    "trainer_optimizer",
    "trainer_pt_utils",
    "trainer_seq2seq",
    "trainer_utils",
    "training_args",
    "training_args_seq2seq",
    "utils",
    "utils.notebook",
)
# Paths of earlier versions of transformers, and where their names are now.
_MOVED = {"deepspeed": "integrations.deepspeed"}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name) or _GONE.get(name)
    if module is None:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}")
    if module not in sys.modules:
        _import_lightly(module)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def _import_lightly(module: str) -> None:
    """Imports a module with fewer garbage collections of its many new objects, and none of older objects.

    Modules are not garbage, and scanning torch's takes a tenth of the import time; without any collection, the
    process's memory would grow by 1%. Afterwards the new objects are moved to the oldest generation, unless the user
    has frozen objects.
    """
    limits = gc.get_threshold()
    gc.set_threshold(10_000, 1_000, 1_000)
    try:
        importlib.import_module(module)
    finally:
        gc.set_threshold(*limits)
        if gc.isenabled() and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()


def __dir__() -> list[str]:
    return __all__


def _at_original_path(path: str, name: str) -> Any:
    """Returns a name from a module of `ORIGINAL_PATHS`: ours, or else the one in transformers."""
    if name in _HOME_OF or name in _GONE:
        return __getattr__(name)
    if not name.startswith("__"):
        try:
            return getattr(importlib.import_module(f"transformers.{_MOVED.get(path, path)}"), name)
        except (ModuleNotFoundError, AttributeError):
            pass
    raise AttributeError(f"module 'trainwright.{path}' has no attribute {name!r}")


def _at_former_path(path: str, name: str) -> Any:
    """Returns a name from where a module of a capability is now."""
    if name.startswith("__"):
        raise AttributeError(f"module 'trainwright.{path}' has no attribute {name!r}")
    return getattr(importlib.import_module(capability_table.FORMER_MODULES[path]), name)


class _OriginalPaths:
    """Finds the modules of `ORIGINAL_PATHS` that have no file, former paths of modules, and the packages around them.

    It is asked last, when no other finder knows an import.
    """

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, path_there = fullname.partition(".")
        known = (*ORIGINAL_PATHS, *capability_table.FORMER_MODULES)
        is_package = any(path.startswith(f"{path_there}.") for path in known)
        if package != __name__ or not (is_package or path_there in known):
            return None
        return ModuleSpec(fullname, _OriginalPaths, is_package=is_package)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leaves the module to Python."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        path = module.__name__.partition(".")[2]
        if path in capability_table.FORMER_MODULES:
            module.__getattr__ = functools.partial(_at_former_path, path)  # type: ignore[method-assign]
        elif path in ORIGINAL_PATHS:
            module.__getattr__ = functools.partial(_at_original_path, path)  # type: ignore[method-assign]


sys.meta_path.append(_OriginalPaths)  # type: ignore[arg-type]
log_handler.install()
