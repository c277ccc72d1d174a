"""The differences from transformers that `reproduce` leaves as they are, each with the test that shows it.

docs/migrate.md has them, written by test_differences_are_shown.py with WRITE_DOCS=1.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One row of the page."""

    original: str
    ours: str
    # a test or an effect that shows what is written of ours; empty if a difference of the audit, or a correction of the
    # drawn cases, has the words of the row
    shown_by: str


STAYING: tuple[Row, ...] = (
    Row(
        original="`resume_from_checkpoint=True` takes a half-written checkpoint and fails",
        ours="takes the newest that verifies",
        shown_by="resume/test_resume_changed.py::test_a_damaged_one_is_skipped_and_named_and_a_named_one_raises",
    ),
    Row(
        original="a dataset with `set_epoch` gets no epoch on a resume, nor with several processes",
        ours="each epoch",
        shown_by="data/test_epochs.py::test_a_resumed_run_has_the_samples_of_its_epoch",
    ),
    Row(
        original="a resume in another memory format (`channels_last`) mixes up the moments of a fused optimizer",
        ours="each moment stays with its weight",
        shown_by="checkpoint/test_training_state.py::test_a_model_may_be_resumed_in_another_memory_format",
    ),
    Row(
        original="weights that `save_pretrained` renames (ViT) are loaded neither on a resume nor as the best model",
        ours="they are loaded",
        shown_by="",
    ),
    Row(
        original="`auto_find_batch_size` starts again with smaller batches, and fewer samples in a step",
        ours="micro-batches are cut and accumulated: the same steps and samples",
        shown_by="effects/length_fields.py::batches_that_do_not_fit_are_cut",
    ),
    Row(
        original="`gradient_accumulation_steps` above 1 and an equal `num_steps` in `accelerator_config` are refused",
        ours="accepted",
        shown_by="config/test_coerce.py::test_equal_numbers_of_accumulation_are_one_and_survive_a_round_trip",
    ),
    Row(
        original="`args.resume_from_checkpoint` is left to the script",
        ours="`train()` without an argument resumes from it",
        shown_by="effects/run_fields.py::training_goes_on_from_there",
    ),
    Row(
        original="`restore_callback_states_from_checkpoint` puts a new object for a restored callback at the end",
        ours="your callback keeps its place",
        shown_by="",
    ),
    Row(
        original="a checkpoint of `save_only_model` is resumed with a new optimizer and schedule",
        ours="an error",
        shown_by="trainer/test_trainer_errors.py::test_a_checkpoint_of_the_weights_alone",
    ),
    Row(
        original="predictions that are one number a batch have no dimension after a single batch",
        ours="always one",
        shown_by="",
    ),
    Row(
        original="a wrapper (`forward(*args, **kwargs)`) is given `num_items_in_batch`, which its module may not take",
        ours="only if the module takes it",
        shown_by="laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    ),
    Row(
        original=(
            "an evaluation mixes up lists with an entry for each sample (boxes, texts), and drops the first row of a "
            "tensor of outputs"
        ),
        ours="every sample has its prediction",
        shown_by="laws/test_result_form_laws.py::test_every_row_has_its_prediction_and_label",
    ),
    Row(
        original="an overridden `compute_loss` that ignores `return_outputs=True` ends the evaluation",
        ours="the loss is reported (with `compute_metrics`, an error)",
        shown_by="evaluation/test_loss_and_labels.py::test_a_loss_alone_is_reported",
    ),
    Row(
        original="a loss computed outside of a `forward` without labels needs `label_names` for `eval_loss`",
        ours="the entry `labels` of a batch is enough",
        shown_by="laws/test_result_form_laws.py::test_every_row_has_its_prediction_and_label",
    ),
    Row(
        original="labels under a name that `forward` does not show, such as `y`, give an evaluation without a loss",
        ours="the same, with a warning",
        shown_by="evaluation/test_loss_and_labels.py::test_a_target_of_another_name_is_named_once",
    ),
    Row(
        original=(
            "`label_smoothing_factor` or `activation_checkpointing` with a module that is not a model of transformers "
            "is an error"
        ),
        ours="they work",
        shown_by="effects/optimizer_fields.py::the_target_is_spread",
    ),
    Row(
        original="SIGTERM ends without a save",
        ours="the last finished step is saved; exit code 143",
        shown_by="signals/test_signals.py::test_the_last_finished_step_is_saved_and_the_resume_is_exact",
    ),
    Row(
        original="a resumed stream is read again",
        ours="it continues from its own state if it has one",
        shown_by="data/test_stream_batching.py::test_a_resume_reads_no_more_than_a_look_ahead_again",
    ),
    Row(
        original="a misspelt `metric_for_best_model` fails at the first evaluation",
        ours="before step 1",
        shown_by="trainer/test_trainer_errors.py::test_a_metric_that_no_evaluation_gives",
    ),
    Row(
        original="a metric that is an array ends the run at the next save",
        ours="it is named before step 1",
        shown_by="evaluation/test_metrics_of_any_kind.py::test_metrics_of_any_kind_train_and_are_named_before_step_1",
    ),
    Row(
        original="`train()` in a callback starts a second training; `evaluate` in `compute_metrics` recurses",
        ours="both are refused",
        shown_by="trainer/test_trainer_errors.py::test_train_is_refused_inside_of_train",
    ),
    Row(
        original="a loss that is not a scalar tensor with a gradient raises torch's own error",
        ours="an error that names the cure",
        shown_by="trainer/test_trainer_errors.py::test_a_loss_of_another_kind_from_compute_loss",
    ),
    Row(
        original="a warm-up longer than the run, or an interval that is never reached, is accepted",
        ours="the same, with a warning",
        shown_by="compat/test_refusals.py::test_it_trains_as_with_transformers_and_a_warning_says_the_words",
    ),
    Row(
        original="a resume with more or fewer samples gives no warning",
        ours="a warning about skipped and repeated samples",
        shown_by="compat/test_refusals.py::test_a_resume_with_other_data_continues_as_with_transformers",
    ),
    Row(
        original=(
            "the `dataset` of a stream's dataloader on several processes, and the `collate_fn` that drops columns, are "
            "wrappers: attributes that a callback sets are lost"
        ),
        ours="they reach your objects",
        shown_by="laws/test_own_objects.py::test_callbacks_and_calls_get_the_objects_that_were_passed",
    ),
    Row(
        original=(
            "`model_init`, `compute_metrics` or `forward` without a readable signature, and a `model_init` with "
            "`*args`, are refused"
        ),
        ours="they are called",
        shown_by="laws/test_callable_laws.py::test_model_init",
    ),
    Row(
        original="a bad sample raises its own error",
        ours="the same error, with a note that names the sample",
        shown_by="data/test_bad_sample.py::test_the_sample_is_named",
    ),
    Row(
        original="a callback's `on_save`, or code after `super()._save_checkpoint()`, may change a checkpoint",
        ours="the same; its manifest is updated ([Checkpoints](resume.md#when-your-code-or-you-change-a-checkpoint))",
        shown_by="checkpoint/test_changes.py::test_checkpoints_verify_with_what_a_listener_made_of_them",
    ),
    Row(
        original=(
            "with FSDP 2, an `evaluate()` before `train()` changes the training; between two, it ends in a `KeyError`"
        ),
        ours="it changes nothing",
        shown_by="laws/test_order_process_laws.py::test_a_call_before_training_changes_nothing",
    ),
    Row(
        original="a model assigned to `trainer.model` stays on its device, and is not trained after a first `train()`",
        ours="the next call takes it over, with a new optimizer and schedule unless they are yours",
        shown_by="laws/test_model_replaced.py::test_an_assigned_model_is_trained",
    ),
    Row(
        original="an optimizer without a parameter of the model trains nothing",
        ours="an error before step 1",
        shown_by="laws/test_model_replaced.py::test_an_optimizer_with_nothing_of_the_model_is_refused",
    ),
    Row(
        original="a negative `global_step` in `trainer_state.json` is taken",
        ours="the checkpoint is refused",
        shown_by="chaos/hostile/test_hostile.py::test_a_record_of_another_shape_is_refused",
    ),
    Row(
        original="keys in the text of an error are logged",
        ours="journal, report and own log messages show `***`",
        shown_by="support/test_hostile_text.py::test_what_looks_like_a_key_is_masked",
    ),
    Row(
        original="32 argument names of older versions: `TypeError`",
        ours="translated, or the error names the replacement",
        shown_by="compat/test_snippets.py::test_every_older_name_can_be_read",
    ),
    Row(
        original="an empty stream trains 0 steps; a stream that is used up before `max_steps` ends silently",
        ours="an error; the last step is saved",
        shown_by="loop/test_fit.py::test_an_empty_stream_is_an_error_before_step_1",
    ),
    Row(
        original='in a Kubeflow TrainJob, `report_to=None` becomes `[None, "kubeflow"]`',
        ours='`["kubeflow"]`',
        shown_by="config/test_coerce.py::test_a_train_job_of_kubeflow_is_reported_to",
    ),
    Row(
        original="a callback may set `args.gradient_accumulation_steps` for the next epoch",
        ours="the value at the start holds, with a warning",
        shown_by="optim/test_groups_during_a_run.py::test_another_accumulation_during_a_run_is_named",
    ),
    Row(
        original="an `os.chdir` in a run moves its relative `output_dir`: checkpoints are lost",
        ours="the directory stays",
        shown_by="trainer/test_working_directory.py::test_everything_is_written_to_one_directory",
    ),
    Row(
        original="parameters that are unfrozen or added after the optimizer was made are not trained",
        ours="the same, with a warning",
        shown_by="optim/test_groups_during_a_run.py::test_what_the_optimizer_lacks_is_named_once",
    ),
    Row(
        original="`optimizer.add_param_group` in a run with a schedule of lambdas is an error",
        ours="the group follows the schedule of the first",
        shown_by="optim/test_groups_during_a_run.py::test_a_group_that_is_added_is_trained_by_the_schedule",
    ),
    Row(
        original=(
            "an override of `_save_checkpoint` that saves the model alone makes `load_best_model_at_end` ineffective"
        ),
        ours="`checkpoint-<best step>` is loaded, or a warning says that it has no weights",
        shown_by="trainer/test_unusual_models.py::test_the_best_model_is_loaded_or_said_to_be_missing",
    ),
    Row(
        original="`get_extra_state()` with a value other than a tensor is an error at the first save",
        ours="plain values are saved and restored, but not by `from_pretrained`",
        shown_by="trainer/test_unusual_models.py::test_state_that_is_no_tensor_is_restored",
    ),
    Row(
        original="lazy modules (`nn.LazyLinear`) are refused",
        ours="they are trained",
        shown_by="trainer/test_unusual_models.py::test_lazy_modules_are_trained_and_resumed",
    ),
    Row(
        original="sparse gradients (`nn.Embedding(sparse=True)`) end in an error",
        ours="they are trained, if the optimizer can",
        shown_by="trainer/test_unusual_models.py::test_sparse_gradients_train_as_dense_ones",
    ),
    Row(
        original="a resume with your own iterable in place of a DataLoader fails or draws other batches",
        ours="the weights of the uninterrupted run",
        shown_by="data/test_loaders_in_turn.py::test_a_resume_continues_to_the_bit",
    ),
    Row(
        original="two live runs in one `output_dir` replace each other's checkpoints",
        ours="the second is refused, or waits (`output_dir_wait_s`)",
        shown_by="chaos/test_two_runs.py::test_a_second_process_is_refused_and_one_after_a_signal_is_not",
    ),
    Row(
        original="a changed `generation_config` with sampling values but no `do_sample` cannot be saved",
        ours="it is saved",
        shown_by="cli/test_export_proof.py::test_a_base_with_sampling_values_alone_is_tuned_saved_and_exported",
    ),
    Row(
        original="saving blocks training",
        ours="a copy in memory is written while training continues",
        shown_by="effects/our_fields.py::a_save_is_behind_training_s_back_or_not",
    ),
    Row(
        original=(
            '`cp_size` needs FSDP 2 and "sdpa" without masks, and attends to packed rows as one text; `sp_size` needs '
            "DeepSpeed, and its gradient norms are too large with ZeRO 1 and 2"
        ),
        ours=(
            "both work with whole models, FSDP 2, ZeRO and models in parts, with any mask and the norms of one "
            "process ([Context parallelism](parallelism.md#long-sequences-cp_size-and-sp_size))"
        ),
        shown_by="laws/test_long_context_laws.py::test_losses_weights_and_evaluations_are_those_of_one_process",
    ),
    Row(
        original="`sequence_parallel_size` in DeepSpeed's configuration has no effect without `parallelism_config`",
        ours="it is `sp_size` ([Sequence parallelism](parallelism.md#with-deepspeed))",
        shown_by="distributed/test_zero.py::test_shared_sequences_train_as_with_transformers",
    ),
    Row(
        original="a model loaded with `distributed_config` saves no state to resume from",
        ours="its checkpoints are resumed",
        shown_by="distributed/test_experts.py::test_a_run_resumes_with_experts_shared_out_otherwise",
    ),
    Row(
        original="with tensor parallelism and accumulation, norms of heads (Qwen3) get earlier gradients several times",
        ours="once",
        shown_by="distributed/test_experts.py::test_losses_norms_weights_and_loads_are_those_of_one_process",
    ),
    Row(
        original="an adapter on layers that tensor parallelism cuts by rows (`o_proj`) is an error",
        ours="it is trained",
        shown_by="distributed/test_adapters_of_parts.py::test_losses_norms_and_weights_are_those_of_one_process",
    ),
    Row(
        original="the auxiliary loss of a mixture of experts grows with processes and accumulation",
        ours="it is averaged",
        shown_by="distributed/test_experts.py::test_losses_norms_weights_and_loads_are_those_of_one_process",
    ),
    Row(
        original="with `dispatch_batches=True`, a resume within a later epoch continues in the order of the first",
        ours="in the order of the interrupted epoch",
        shown_by="",
    ),
    Row(
        original="with `dispatch_batches=True` and tensor parallelism, all replicas train on the same batches",
        ours="on different batches, with a warning",
        shown_by="distributed/test_laid_out.py::test_losses_norms_and_weights_are_those_of_one_process",
    ),
    Row(
        original="the first `evaluate` adds `eval_model_preparation_time`",
        ours="it does not",
        shown_by="",
    ),
    Row(
        original="`trainer.optimizer` is accelerate's wrapper after `train()`",
        ours="`trainer.optimizer` is the optimizer itself",
        shown_by="",
    ),
    Row(
        original="without a terminal, or with `disable_tqdm=True`, a log is printed as a dict",
        ours="as a line `step=10/75 loss=0.457 ...`, after the plan of the run",
        shown_by="trainer/test_messages.py::test_a_run_says_each_thing_in_one_line",
    ),
    Row(
        original="`training_args.bin` in a saved model has your Hub token",
        ours="it has none, and is never read; `training_args.json` is for people",
        shown_by="compat/test_snippets.py::test_the_arguments_beside_a_model_are_plain_values",
    ),
    Row(
        original="an override of `compute_loss` or `training_step` without `num_items_in_batch` is a `TypeError`",
        ours="it gets what it takes, and its losses are averaged",
        shown_by="compat/test_snippets.py::test_an_override_of_an_older_version_is_called_with_what_it_takes",
    ),
    Row(
        original="`save_safetensors` is gone",
        ours="False writes `pytorch_model.bin`",
        shown_by="compat/test_snippets.py::test_weights_without_safetensors",
    ),
    Row(
        original="a callback that returns a dict, as documented, ends the run",
        ours="its flags are set",
        shown_by="compat/test_snippets.py::test_a_callback_may_return_a_dict_of_flags",
    ),
    Row(
        original="without progress bars, the result of `train()` has no `total_flos`",
        ours="it has it",
        shown_by="",
    ),
    Row(
        original="`save_total_limit` counts and deletes all checkpoints in the folder",
        ours="only those of this run",
        shown_by="resume/test_run_cut_off.py::test_going_back_begins_another_run",
    ),
    Row(
        original=(
            "a run of `max_steps` without a full batch (`dataloader_drop_last`) has `sys.maxsize` epochs in its state"
        ),
        ours="the number of steps that were asked for",
        shown_by="",
    ),
    Row(
        original='`include_for_metrics=["inputs"]` without `compute_metrics` may be a `KeyError`',
        ours="the inputs are not collected",
        shown_by="",
    ),
    Row(
        original="`compute_metrics` is not called if the evaluation batches have no labels",
        ours="the same, with a warning",
        shown_by="trainer/test_trainer_errors.py::test_metrics_without_labels",
    ),
    Row(
        original="`Seq2SeqTrainer` takes no `optimizer_cls_and_kwargs`",
        ours="it does",
        shown_by="",
    ),
    Row(
        original="`model_init` together with `optimizers` ends in a `RuntimeError`",
        ours="a `ValueError`",
        shown_by="trainer/test_trainer_errors.py::test_an_optimizer_for_a_model_that_is_yet_to_be_made",
    ),
    Row(
        original="of two errors in one configuration, another may be found first",
        ours="those of the arguments come first",
        shown_by="",
    ),
    Row(
        original="with `include_num_input_tokens_seen`, the last log and the result have no `train_tokens_per_second`",
        ours="they have it",
        shown_by="",
    ),
    Row(
        original="`neftune_noise_alpha` with a module that has no `get_input_embeddings` is an `AttributeError`",
        ours="a `ValueError`",
        shown_by="",
    ),
    Row(
        original=(
            "`EarlyStoppingCallback` without a metric or without evaluations is an `AssertionError` or `AttributeError`"
        ),
        ours="a `ValueError`",
        shown_by="trainer/test_trainer_errors.py::test_early_stopping_without_what_it_watches",
    ),
    Row(
        original="`EarlyStoppingCallback` also counts evaluations after training",
        ours="it does not",
        shown_by="callbacks/test_early_stopping.py::test_an_evaluation_after_training_is_not_counted",
    ),
    Row(
        original="`save_metrics` writes `NaN` and `Infinity`, which are not JSON",
        ours='`"nan"` and `"inf"`',
        shown_by="cli/test_json.py::test_no_command_writes_json_that_only_python_reads",
    ),
    Row(
        original="a dict of datasets as `train_dataset` is a `KeyError`",
        ours="they are trained on together ([Mixtures](advanced/samples.md#mixtures))",
        shown_by="capabilities/mixture/test_mixture.py::test_a_union_trains_as_the_sources_one_after_the_other_do",
    ),
)
