"""The names that `trainwright` itself offers."""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


DONE = names(
    """
    Trainer TrainingArguments Seq2SeqTrainer Seq2SeqTrainingArguments HfArgumentParser TrainerCallback TrainerState
    TrainerControl ExportableState EvalPrediction EvalLoopOutput PredictionOutput TrainOutput IntervalStrategy
    SaveStrategy SchedulerType OptimizerNames HubStrategy FSDPOption ParallelMode HPSearchBackend set_seed
    enable_full_determinism get_last_checkpoint speed_metrics default_data_collator DefaultDataCollator
    DataCollatorWithPadding DataCollatorForLanguageModeling DataCollatorForSeq2Seq
    DataCollatorForTokenClassification DataCollatorWithFlattening get_scheduler LabelSmoother AcceleratorConfig
    DefaultFlowCallback ProgressCallback PrinterCallback EarlyStoppingCallback PREFIX_CHECKPOINT_DIR
    TRAINER_STATE_NAME TRAINING_ARGS_NAME OPTIMIZER_NAME SCHEDULER_NAME SCALER_NAME CallbackHandler
    DistributedLengthGroupedSampler BatchRebalanceSampler
    LengthGroupedSampler get_length_grouped_indices RemoveColumnsCollator seed_worker has_length nested_detach
    nested_numpify find_batch_size get_parameter_names is_optimizer_factory GreedyLR Adafactor AdafactorSchedule
    TrainerMemoryTracker metrics_format DebugOption HfArg make_choice_type_function string_to_bool DataClassType
    check_target_module_exists LayerWiseDummyOptimizer LayerWiseDummyScheduler get_linear_schedule_with_warmup
    get_cosine_schedule_with_warmup get_constant_schedule get_constant_schedule_with_warmup
    get_inverse_sqrt_schedule get_polynomial_decay_schedule_with_warmup
    get_cosine_with_hard_restarts_schedule_with_warmup get_reduce_on_plateau_schedule
    get_cosine_with_min_lr_schedule_with_warmup get_cosine_with_min_lr_schedule_with_warmup_lr_rate get_wsd_schedule
    get_greedy_schedule EvalLoopContainer nested_concat nested_truncate denumpify_detensorize
    distributed_concat distributed_broadcast_scalars
    numpy_pad_and_concatenate torch_pad_and_concatenate sort_checkpoints rotate_checkpoints
    TensorBoardCallback WandbCallback MLflowCallback CometCallback TrackioCallback ClearMLCallback NeptuneCallback
    DVCLiveCallback CodeCarbonCallback SwanLabCallback DagsHubCallback FlyteCallback AzureMLCallback
    KubeflowCallback get_reporting_integration_callbacks is_tensorboard_available is_wandb_available
    is_mlflow_available is_comet_available is_trackio_available is_clearml_available is_neptune_available
    is_dvclive_available is_codecarbon_available is_swanlab_available is_dagshub_available is_flytekit_available
    is_flyte_deck_standard_available is_azureml_available is_kubeflow_available
    FSDP_MODEL_NAME load_sharded_checkpoint DEFAULT_CALLBACKS DEFAULT_PROGRESS_CALLBACK DistributedSamplerWithLoop
    ShardSampler IterableDatasetShard find_executable_batch_size number_of_arguments torch_distributed_zero_first
    activate_neftune apply_liger_kernel
    BestRun default_compute_objective default_hp_space_optuna default_hp_space_ray default_hp_space_wandb
    is_optuna_available is_ray_available is_ray_tune_available
    JITCheckpointCallback CheckpointManager
    """
)

PUBLIC = names(
    """
    Trainer TrainingArguments Seq2SeqTrainer Seq2SeqTrainingArguments HfArgumentParser
    TrainerCallback TrainerState TrainerControl ExportableState
    EvalPrediction EvalLoopOutput PredictionOutput TrainOutput BestRun
    IntervalStrategy SaveStrategy SchedulerType OptimizerNames HubStrategy FSDPOption ParallelMode HPSearchBackend
    set_seed enable_full_determinism get_last_checkpoint speed_metrics
    default_compute_objective default_hp_space_optuna default_hp_space_ray default_hp_space_wandb
    default_data_collator DefaultDataCollator DataCollatorWithPadding DataCollatorForLanguageModeling
    DataCollatorForSeq2Seq DataCollatorForTokenClassification DataCollatorWithFlattening
    get_scheduler LabelSmoother AcceleratorConfig
    DefaultFlowCallback ProgressCallback PrinterCallback EarlyStoppingCallback
    """
)

HELPERS = names(
    """
    PREFIX_CHECKPOINT_DIR TRAINER_STATE_NAME TRAINING_ARGS_NAME OPTIMIZER_NAME SCHEDULER_NAME SCALER_NAME
    FSDP_MODEL_NAME get_last_checkpoint sort_checkpoints rotate_checkpoints load_sharded_checkpoint
    DEFAULT_CALLBACKS DEFAULT_PROGRESS_CALLBACK CallbackHandler ExportableState
    JITCheckpointCallback CheckpointManager

    LengthGroupedSampler DistributedLengthGroupedSampler DistributedSamplerWithLoop BatchRebalanceSampler ShardSampler
    IterableDatasetShard get_length_grouped_indices RemoveColumnsCollator seed_worker has_length

    EvalLoopContainer nested_concat nested_detach nested_numpify nested_truncate find_batch_size distributed_concat
    distributed_broadcast_scalars denumpify_detensorize numpy_pad_and_concatenate torch_pad_and_concatenate

    LabelSmoother get_parameter_names check_target_module_exists is_optimizer_factory
    LayerWiseDummyOptimizer LayerWiseDummyScheduler GreedyLR Adafactor AdafactorSchedule get_scheduler
    get_linear_schedule_with_warmup get_cosine_schedule_with_warmup get_constant_schedule
    get_constant_schedule_with_warmup get_inverse_sqrt_schedule get_polynomial_decay_schedule_with_warmup
    get_cosine_with_hard_restarts_schedule_with_warmup get_reduce_on_plateau_schedule
    get_cosine_with_min_lr_schedule_with_warmup get_cosine_with_min_lr_schedule_with_warmup_lr_rate
    get_wsd_schedule get_greedy_schedule

    find_executable_batch_size TrainerMemoryTracker speed_metrics metrics_format number_of_arguments
    torch_distributed_zero_first AcceleratorConfig DebugOption activate_neftune apply_liger_kernel

    TensorBoardCallback WandbCallback MLflowCallback CometCallback TrackioCallback ClearMLCallback NeptuneCallback
    DVCLiveCallback CodeCarbonCallback SwanLabCallback DagsHubCallback FlyteCallback AzureMLCallback KubeflowCallback
    get_reporting_integration_callbacks
    is_tensorboard_available is_wandb_available is_mlflow_available is_comet_available is_trackio_available
    is_clearml_available is_neptune_available is_dvclive_available is_codecarbon_available is_swanlab_available
    is_dagshub_available is_flytekit_available is_flyte_deck_standard_available is_azureml_available
    is_kubeflow_available is_optuna_available is_ray_available is_ray_tune_available

    HfArg make_choice_type_function string_to_bool DataClassType
    """
)
