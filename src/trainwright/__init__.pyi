from trainwright._types import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    has_length,
)
from trainwright.callbacks.base import TrainerCallback
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
)
from trainwright.callbacks.preemption import (
    CheckpointManager,
    JITCheckpointCallback,
)
from trainwright.callbacks.progress import (
    DEFAULT_CALLBACKS,
    DEFAULT_PROGRESS_CALLBACK,
    PrinterCallback,
    ProgressCallback,
)
from trainwright.checkpoint.store import get_last_checkpoint
from trainwright.compat.helpers import (
    DistributedSamplerWithLoop,
    EvalLoopContainer,
    IterableDatasetShard,
    ShardSampler,
    distributed_broadcast_scalars,
    distributed_concat,
    find_executable_batch_size,
    load_sharded_checkpoint,
    nested_truncate,
    number_of_arguments,
    rotate_checkpoints,
    sort_checkpoints,
    torch_distributed_zero_first,
)
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.arguments import (
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from trainwright.config.enums import (
    DebugOption,
    FSDPOption,
    HPSearchBackend,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from trainwright.config.parser import (
    DataClassType,
    HfArg,
    HfArgumentParser,
    make_choice_type_function,
    string_to_bool,
)
from trainwright.data.balanced_batches import BatchRebalanceSampler
from trainwright.data.columns import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    RemoveColumnsCollator,
    default_data_collator,
)
from trainwright.data.length_sampler import (
    DistributedLengthGroupedSampler,
    LengthGroupedSampler,
    get_length_grouped_indices,
)
from trainwright.data.seeding import (
    enable_full_determinism,
    seed_worker,
    set_seed,
)
from trainwright.distributed.world import ParallelMode
from trainwright.evaluation.outputs import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
    denumpify_detensorize,
    metrics_format,
)
from trainwright.loss_normalization import LabelSmoother
from trainwright.optim.factory import is_optimizer_factory
from trainwright.optim.own_optimizers import (
    LayerWiseDummyOptimizer,
    LayerWiseDummyScheduler,
)
from trainwright.optim.parameter_groups import (
    check_target_module_exists,
    get_parameter_names,
)
from trainwright.optim.schedules import (
    Adafactor,
    AdafactorSchedule,
    GreedyLR,
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    get_greedy_schedule,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_reduce_on_plateau_schedule,
    get_scheduler,
    get_wsd_schedule,
)
from trainwright.patches import (
    activate_neftune,
    apply_liger_kernel,
)
from trainwright.search.backends import (
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
    is_optuna_available,
    is_ray_available,
    is_ray_tune_available,
)
from trainwright.search.base import (
    BestRun,
    default_compute_objective,
)
from trainwright.seq2seq_trainer import Seq2SeqTrainer
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.throughput import speed_metrics
from trainwright.state.trainer_state import (
    ExportableState,
    TrainerControl,
    TrainerState,
)
from trainwright.tensor_tree import (
    find_batch_size,
    nested_concat,
    nested_detach,
    nested_numpify,
    numpy_pad_and_concatenate,
    torch_pad_and_concatenate,
)
from trainwright.trackers.base import rewrite_logs
from trainwright.trackers.clearml import ClearMLCallback
from trainwright.trackers.comet import CometCallback
from trainwright.trackers.dvclive import DVCLiveCallback
from trainwright.trackers.mlflow import (
    DagsHubCallback,
    MLflowCallback,
)
from trainwright.trackers.neptune import NeptuneCallback
from trainwright.trackers.platforms import (
    AzureMLCallback,
    CodeCarbonCallback,
    FlyteCallback,
    KubeflowCallback,
)
from trainwright.trackers.registry import (
    get_reporting_integration_callbacks,
    is_azureml_available,
    is_clearml_available,
    is_codecarbon_available,
    is_comet_available,
    is_dagshub_available,
    is_dvclive_available,
    is_flyte_deck_standard_available,
    is_flytekit_available,
    is_kubeflow_available,
    is_mlflow_available,
    is_neptune_available,
    is_swanlab_available,
    is_tensorboard_available,
    is_trackio_available,
    is_wandb_available,
)
from trainwright.trackers.swanlab import SwanLabCallback
from trainwright.trackers.tensorboard import TensorBoardCallback
from trainwright.trackers.trackio import TrackioCallback
from trainwright.trackers.wandb import WandbCallback
from trainwright.trainer import Trainer

__version__: str

__all__ = [
    "DEFAULT_CALLBACKS",
    "DEFAULT_PROGRESS_CALLBACK",
    "FSDP_MODEL_NAME",
    "OPTIMIZER_NAME",
    "PREFIX_CHECKPOINT_DIR",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TRAINER_STATE_NAME",
    "TRAINING_ARGS_NAME",
    "AcceleratorConfig",
    "Adafactor",
    "AdafactorSchedule",
    "AzureMLCallback",
    "BatchRebalanceSampler",
    "BestRun",
    "CallbackHandler",
    "CheckpointManager",
    "ClearMLCallback",
    "CodeCarbonCallback",
    "CometCallback",
    "DVCLiveCallback",
    "DagsHubCallback",
    "DataClassType",
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DebugOption",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "DistributedLengthGroupedSampler",
    "DistributedSamplerWithLoop",
    "EarlyStoppingCallback",
    "EvalLoopContainer",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "FSDPOption",
    "FlyteCallback",
    "GreedyLR",
    "HPSearchBackend",
    "HfArg",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "IterableDatasetShard",
    "JITCheckpointCallback",
    "KubeflowCallback",
    "LabelSmoother",
    "LayerWiseDummyOptimizer",
    "LayerWiseDummyScheduler",
    "LengthGroupedSampler",
    "MLflowCallback",
    "NeptuneCallback",
    "OptimizerNames",
    "ParallelMode",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "RemoveColumnsCollator",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "ShardSampler",
    "SwanLabCallback",
    "TensorBoardCallback",
    "TrackioCallback",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerMemoryTracker",
    "TrainerState",
    "TrainingArguments",
    "WandbCallback",
    "__version__",
    "activate_neftune",
    "apply_liger_kernel",
    "check_target_module_exists",
    "default_compute_objective",
    "default_data_collator",
    "default_hp_space_optuna",
    "default_hp_space_ray",
    "default_hp_space_wandb",
    "denumpify_detensorize",
    "distributed_broadcast_scalars",
    "distributed_concat",
    "enable_full_determinism",
    "find_batch_size",
    "find_executable_batch_size",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "get_greedy_schedule",
    "get_inverse_sqrt_schedule",
    "get_last_checkpoint",
    "get_length_grouped_indices",
    "get_linear_schedule_with_warmup",
    "get_parameter_names",
    "get_polynomial_decay_schedule_with_warmup",
    "get_reduce_on_plateau_schedule",
    "get_reporting_integration_callbacks",
    "get_scheduler",
    "get_wsd_schedule",
    "has_length",
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
    "is_optimizer_factory",
    "is_optuna_available",
    "is_ray_available",
    "is_ray_tune_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_trackio_available",
    "is_wandb_available",
    "load_sharded_checkpoint",
    "make_choice_type_function",
    "metrics_format",
    "nested_concat",
    "nested_detach",
    "nested_numpify",
    "nested_truncate",
    "number_of_arguments",
    "numpy_pad_and_concatenate",
    "rewrite_logs",
    "rotate_checkpoints",
    "seed_worker",
    "set_seed",
    "sort_checkpoints",
    "speed_metrics",
    "string_to_bool",
    "torch_distributed_zero_first",
    "torch_pad_and_concatenate",
]
