"""The published surface, frozen: a name or a parameter that is missing here has vanished for somebody."""

# Signatures that also take what older versions are called with; their frozen form is in METHODS.
TAKES_MORE = {
    "train": "(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None, *, model_path=None)",
    "get_batch_samples": "(self, epoch_iterator, num_batches, device=None)",
    "_maybe_log_save_evaluate": (
        "(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time=None, learning_rate=None)"
    ),
}

# Without annotations. Two names are not in transformers 5.23 any more: prediction_loop and num_tokens.
PUBLIC_METHODS = {
    "train": "(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)",
    "evaluate": "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')",
    "predict": "(self, test_dataset, ignore_keys=None, metric_key_prefix='test')",
    "evaluation_loop": (
        "(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix='eval')"
    ),
    "prediction_loop": (
        "(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix='eval')"
    ),
    "prediction_step": "(self, model, inputs, prediction_loss_only, ignore_keys=None)",
    "training_step": "(self, model, inputs, num_items_in_batch=None)",
    "compute_loss": "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    "compute_loss_context_manager": "(self)",
    "autocast_smart_context_manager": "(self, cache_enabled=True)",
    "get_train_dataloader": "(self)",
    "get_eval_dataloader": "(self, eval_dataset=None)",
    "get_test_dataloader": "(self, test_dataset)",
    "num_examples": "(self, dataloader)",
    "num_tokens": "(train_dl, max_steps=None)",
    "get_batch_samples": "(self, epoch_iterator, num_batches, device)",
    "create_optimizer_and_scheduler": "(self, num_training_steps)",
    "create_optimizer": "(self, model=None)",
    "create_scheduler": "(self, num_training_steps, optimizer=None)",
    "get_optimizer_cls_and_kwargs": "(args, model=None)",
    "get_decay_parameter_names": "(self, model)",
    "set_initial_training_values": "(self, args, dataloader)",
    "get_total_train_batch_size": "(self, args)",
    "get_sp_size": "(self)",
    "get_cp_size": "(self)",
    "get_tp_size": "(self)",
    "create_accelerator_and_postprocess": "(self)",
    "save_model": "(self, output_dir=None, _internal_call=False)",
    "save_state": "(self)",
    "log": "(self, logs, start_time=None)",
    "log_metrics": "(self, split, metrics)",
    "save_metrics": "(self, split, metrics, combined=True)",
    "metrics_format": "(metrics)",
    "store_flos": "(self)",
    "floating_point_ops": "(self, inputs)",
    "get_learning_rates": "(self)",
    "get_num_trainable_parameters": "(self)",
    "get_optimizer_group": "(self, param=None)",
    "init_hf_repo": "(self, token=None, private=None)",
    "create_model_card": (
        "(self, language=None, license=None, tags=None, model_name=None, finetuned_from=None, tasks=None, "
        "dataset_tags=None, dataset=None, dataset_args=None)"
    ),
    "push_to_hub": (
        "(self, commit_message='End of training', blocking=True, token=None, revision=None, private=None, **kwargs)"
    ),
    "hyperparameter_search": (
        "(self, hp_space=None, compute_objective=None, n_trials=20, direction='minimize', backend=None, "
        "hp_name=None, **kwargs)"
    ),
    "call_model_init": "(self, trial=None)",
    "add_callback": "(self, callback)",
    "pop_callback": "(self, callback)",
    "remove_callback": "(self, callback)",
    "is_local_process_zero": "(self)",
    "is_world_process_zero": "(self)",
    "end": "(self)",
}

UNDERSCORE_METHODS = {
    "_get_train_sampler": "(self, train_dataset=None)",
    "_get_eval_sampler": "(self, eval_dataset)",
    "_get_dataloader": (
        "(self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None)"
    ),
    "_remove_unused_columns": "(self, dataset, description=None)",
    "_set_signature_columns_if_needed": "(self)",
    "_get_collator_with_removed_columns": "(self, data_collator, description=None)",
    "_prepare_inputs": "(self, inputs)",
    "_prepare_input": "(self, data)",
    "_get_num_items_in_batch": "(self, batch_samples, device)",
    "_inner_training_loop": (
        "(self, batch_size=None, args=None, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)"
    ),
    "_run_epoch": (
        "(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, "
        "steps_trained_in_current_epoch)"
    ),
    "_prepare_for_training": "(self, max_steps, train_dataloader, resume_from_checkpoint)",
    "_init_training_state": (
        "(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)"
    ),
    "_finalize_training": "(self, trial, num_train_samples, start_time)",
    "_maybe_log_save_evaluate": (
        "(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None)"
    ),
    "_evaluate": "(self, trial, ignore_keys_for_eval, skip_scheduler=False)",
    "_save": "(self, output_dir=None, state_dict=None)",
    "_save_checkpoint": "(self, model, trial)",
    "_save_optimizer_and_scheduler": "(self, output_dir)",
    "_load_optimizer_and_scheduler": "(self, checkpoint)",
    "_save_rng_state": "(self, output_dir)",
    "_load_rng_state": "(self, checkpoint)",
    "_save_scaler": "(self, output_dir)",
    "_load_scaler": "(self, checkpoint)",
    "_load_from_checkpoint": "(self, resume_from_checkpoint, model=None)",
    "_load_best_model": "(self)",
    "_load_callback_state": "(self)",
    "_determine_best_metric": "(self, metrics, trial)",
    "_push_from_checkpoint": "(self, checkpoint_folder)",
    "_finish_current_push": "(self)",
    "_wrap_model": "(self, model, training=True, dataloader=None)",
    "_move_model_to_device": "(self, model, device)",
    "_clip_grad_norm": "(self, model)",
    "_get_grad_norm": "(self, model, grad_norm=None)",
    "_get_learning_rate": "(self)",
    "_track_num_input_tokens": "(self, inputs)",
    "_get_output_dir": "(self, trial)",
    "_hp_search_setup": "(self, trial)",
    "_report_to_hp_search": "(self, trial, step, metrics)",
    "_tune_save_checkpoint": "(self, checkpoint_dir)",
    "_issue_warnings_after_load": "(self, load_result)",
}

CONSTRUCTOR = (
    "model",
    "args",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "model_init",
    "compute_loss_func",
    "compute_metrics",
    "callbacks",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics",
)

CLASS_ATTRIBUTES = {"loss_is_scaled_for_ga": None}

ATTRIBUTES = (
    "model",
    "model_wrapped",
    "args",
    "accelerator",
    "optimizer",
    "lr_scheduler",
    "state",
    "control",
    "callback_handler",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "tokenizer",
    "compute_metrics",
    "compute_loss_func",
    "preprocess_logits_for_metrics",
    "model_init",
    "label_names",
    "label_smoother",
    "can_return_loss",
    "model_accepts_loss_kwargs",
    "current_gradient_accumulation_steps",
    "is_in_train",
    "is_model_parallel",
    "place_model_on_device",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "gather_function",
    "hub_model_id",
    "hp_search_backend",
    "current_flos",
    "optimizer_cls_and_kwargs",
    "deepspeed",
    "push_in_progress",
    "_signature_columns",
    "_train_batch_size",
    "_eval_dataloaders",
    "_memory_tracker",
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_created_lr_scheduler",
)

STATE = (
    "epoch",
    "global_step",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "num_train_epochs",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
    "stateful_callbacks",
)
CONTROL = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_prediction_step",
    "on_predict",
    "on_save",
    "on_push_begin",
    "on_epoch_end",
    "on_train_end",
)
EVENTS_OF_OURS = ("on_exception", "on_incident")
METRICS = {
    "train": (
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "total_flos",
        "train_loss",
        "epoch",
    ),
    "eval": ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"),
    "test": ("test_loss", "test_runtime", "test_samples_per_second", "test_steps_per_second"),
}
FILES = (
    "config.json",
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
    "training_args.json",
    "manifest.json",
)
