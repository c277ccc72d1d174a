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
        original=(
            "a dataset with `set_epoch` gets no epoch on a resume, nor with several processes; evaluating it sets it "
            "back to 0"
        ),
        ours="it gets each epoch of training",
        shown_by="data/test_epochs.py::test_a_resumed_run_has_the_samples_of_its_epoch",
    ),
    Row(
        original=(
            "resuming in another memory format (`channels_last`) gives a fused optimizer the moments of other weights"
        ),
        ours="each moment stays with its weight",
        shown_by="checkpoint/test_training_state.py::test_a_model_may_be_resumed_in_another_memory_format",
    ),
    Row(
        original="weights that `save_pretrained` renames (ViT) are loaded neither on a resume nor as the best model",
        ours="they are loaded",
        shown_by="",
    ),
    Row(
        original=(
            "`auto_find_batch_size`: if a batch does not fit, training starts again with smaller batches, and fewer "
            "samples in a step"
        ),
        ours=(
            "the micro-batch is cut and its gradients are accumulated: the same steps and samples. If clipping or a "
            "callback runs out of memory, the step or the callback is tried again; within the optimizer's update the "
            "run ends, since some weights may be updated already"
        ),
        shown_by="effects/length_fields.py::batches_that_do_not_fit_are_cut",
    ),
    Row(
        original=(
            "`gradient_accumulation_steps` above 1 with `num_steps` in `accelerator_config` is refused, even if the "
            "two are equal"
        ),
        ours="equal numbers are accepted",
        shown_by="config/test_coerce.py::test_equal_numbers_of_accumulation_are_one_and_survive_a_round_trip",
    ),
    Row(
        original="`args.resume_from_checkpoint` is left to the script",
        ours="`train()` without an argument resumes from it",
        shown_by="effects/run_fields.py::training_goes_on_from_there",
    ),
    Row(
        original=(
            "`restore_callback_states_from_checkpoint` puts a new object for a restored callback at the end of the list"
        ),
        ours="your callback gets its state and keeps its place",
        shown_by="",
    ),
    Row(
        original="a checkpoint of `save_only_model` is resumed with a new optimizer and schedule",
        ours="an error: load the model from the folder, or resume a whole checkpoint",
        shown_by="trainer/test_trainer_errors.py::test_a_checkpoint_of_the_weights_alone",
    ),
    Row(
        original="predictions that are one number a batch (a second loss, say) have no dimension after a single batch",
        ours="always one dimension",
        shown_by="",
    ),
    Row(
        original=(
            "a wrapper of a module (`forward(*args, **kwargs)`) is given `num_items_in_batch`, a `TypeError` if the "
            "module does not take it"
        ),
        ours="only if the module takes it",
        shown_by="laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    ),
    Row(
        original=(
            "outputs of an overridden `compute_loss` lose the first row of every batch if they are a tensor, the "
            "first output if they are a tuple without a loss"
        ),
        ours="only a loss is taken out; dataclasses are read like dicts",
        shown_by="laws/test_result_form_laws.py::test_every_row_has_its_prediction_and_label",
    ),
    Row(
        original=(
            "an overridden `compute_loss` that returns the loss alone, despite `return_outputs=True`, ends the "
            "evaluation in a `TypeError`"
        ),
        ours="the loss is reported, without predictions; with `compute_metrics`, an error names `return_outputs`",
        shown_by="evaluation/test_loss_and_labels.py::test_a_loss_alone_is_reported",
    ),
    Row(
        original=(
            "a loss computed outside of a `forward` without labels needs `label_names` for `eval_loss`, or is a "
            "`TypeError`"
        ),
        ours="the entry `labels` of a batch counts, also if `forward` takes any keyword",
        shown_by="laws/test_result_form_laws.py::test_every_row_has_its_prediction_and_label",
    ),
    Row(
        original=(
            "lists with an entry for each sample (boxes, texts, spans) are merged by place: 10 images in batches of "
            "4 leave 4 mixed entries"
        ),
        ours="they are appended; lists of layers are joined by place",
        shown_by="laws/test_result_form_laws.py::test_every_row_has_its_prediction_and_label",
    ),
    Row(
        original="labels under a name that `forward` does not show, such as `y`, give an evaluation without a loss",
        ours="the same, with a warning that gives the `label_names` to set",
        shown_by="evaluation/test_loss_and_labels.py::test_a_target_of_another_name_is_named_once",
    ),
    Row(
        original=(
            "`label_smoothing_factor` or `activation_checkpointing` with a module that is not a model of "
            "transformers ends in an `AttributeError`"
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
        ours="it fails before step 1, with the names that exist",
        shown_by="trainer/test_trainer_errors.py::test_a_metric_that_no_evaluation_gives",
    ),
    Row(
        original="a metric that is an array ends the run at the next save",
        ours="it is named before step 1, and not recorded",
        shown_by="evaluation/test_metrics_of_any_kind.py::test_metrics_of_any_kind_train_and_are_named_before_step_1",
    ),
    Row(
        original="`train()` in a callback starts a second training; `evaluate` in `compute_metrics` recurses",
        ours="both are refused",
        shown_by="trainer/test_trainer_errors.py::test_train_is_refused_inside_of_train",
    ),
    Row(
        original="a loss that is not a scalar tensor with a gradient raises torch's own error",
        ours="the error names the value and the cure",
        shown_by="trainer/test_trainer_errors.py::test_a_loss_of_another_kind_from_compute_loss",
    ),
    Row(
        original="a warm-up longer than the run, or an interval that is never reached, is accepted silently",
        ours="the same, with a warning that names both fields",
        shown_by="compat/test_refusals.py::test_it_trains_as_with_transformers_and_a_warning_says_the_words",
    ),
    Row(
        original="resuming with more or fewer samples gives no warning",
        ours="the same, with a warning about skipped and repeated samples",
        shown_by="compat/test_refusals.py::test_a_resume_with_other_data_continues_as_with_transformers",
    ),
    Row(
        original=(
            "the `dataset` of a stream's dataloader on several processes (`dispatch_batches=False`), and the "
            "`collate_fn` that drops columns, are wrappers: attributes that a callback sets are lost"
        ),
        ours="`dataset` is your object; attributes set on the `collate_fn` reach your collator",
        shown_by="laws/test_own_objects.py::test_callbacks_and_calls_get_the_objects_that_were_passed",
    ),
    Row(
        original=(
            "`model_init`, `compute_metrics` or `forward` without a readable signature is a `ValueError`; a "
            "`model_init` with `*args` is refused"
        ),
        ours="they are called",
        shown_by="laws/test_callable_laws.py::test_model_init",
    ),
    Row(
        original="a bad sample raises its own error",
        ours="the same error, with a note: index or position, epoch, worker, odd values",
        shown_by="data/test_bad_sample.py::test_the_sample_is_named",
    ),
    Row(
        original="a callback's `on_save`, or code after `super()._save_checkpoint()`, may change a checkpoint",
        ours="the same; its manifest is updated ([Checkpoints](resume.md#when-your-code-or-you-change-a-checkpoint))",
        shown_by="checkpoint/test_changes.py::test_checkpoints_verify_with_what_a_listener_made_of_them",
    ),
    Row(
        original=(
            "with FSDP 2, an `evaluate()` before `train()` changes the training, and between two ends in a `KeyError`"
        ),
        ours="evaluations do not change the training",
        shown_by="laws/test_order_process_laws.py::test_a_call_before_training_changes_nothing",
    ),
    Row(
        original="a model assigned to `trainer.model` stays on its device, and is not trained after a first `train()`",
        ours=(
            "the next call takes it over, with a new optimizer and schedule and new `label_names`, unless they are "
            "yours"
        ),
        shown_by="laws/test_model_replaced.py::test_an_assigned_model_is_trained",
    ),
    Row(
        original="an optimizer without a parameter of the model trains nothing, silently",
        ours="an error before step 1; some of the parameters are enough",
        shown_by="laws/test_model_replaced.py::test_an_optimizer_with_nothing_of_the_model_is_refused",
    ),
    Row(
        original="a negative `global_step` in `trainer_state.json` is taken",
        ours="the checkpoint is refused",
        shown_by="chaos/hostile/test_hostile.py::test_a_record_of_another_shape_is_refused",
    ),
    Row(
        original="keys in the text of an error are logged",
        ours="journal, report and the package's own log messages show `***`",
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
        ours="the directory stays; hooks and `state.best_model_checkpoint` get the absolute path",
        shown_by="trainer/test_working_directory.py::test_everything_is_written_to_one_directory",
    ),
    Row(
        original="parameters that are unfrozen or added after the optimizer was made are not trained, silently",
        ours="the same, with a warning that names them and `optimizer.add_param_group`",
        shown_by="optim/test_groups_during_a_run.py::test_what_the_optimizer_lacks_is_named_once",
    ),
    Row(
        original="`optimizer.add_param_group` in a run with a schedule of lambdas ends in a `ValueError` of `zip()`",
        ours="the group follows the schedule of the first group, and is restored on a resume",
        shown_by="optim/test_groups_during_a_run.py::test_a_group_that_is_added_is_trained_by_the_schedule",
    ),
    Row(
        original=(
            "an override of `_save_checkpoint` that saves the model alone makes `load_best_model_at_end` ineffective"
        ),
        ours="`checkpoint-<best step>` is loaded if it has weights; otherwise a warning",
        shown_by="trainer/test_unusual_models.py::test_the_best_model_is_loaded_or_said_to_be_missing",
    ),
    Row(
        original="`get_extra_state()` with a value other than a tensor ends in an error at the first save",
        ours=(
            "plain values are saved in `extra_state.pt` and restored on a resume and with the best model, not by "
            "`from_pretrained`; others are refused before step 1"
        ),
        shown_by="trainer/test_unusual_models.py::test_state_that_is_no_tensor_is_restored",
    ),
    Row(
        original="lazy modules (`nn.LazyLinear`) end in a `ValueError` before step 1",
        ours="they are trained",
        shown_by="trainer/test_unusual_models.py::test_lazy_modules_are_trained_and_resumed",
    ),
    Row(
        original="sparse gradients (`nn.Embedding(sparse=True)`) end in an error",
        ours="they are measured, clipped and trained; an optimizer that cannot is named before step 1",
        shown_by="trainer/test_unusual_models.py::test_sparse_gradients_train_as_dense_ones",
    ),
    Row(
        original="a resume with an iterable of your own in place of a DataLoader fails or draws other batches",
        ours="the weights of the uninterrupted run, by its `state_dict` or by reading again",
        shown_by="data/test_loaders_in_turn.py::test_a_resume_continues_to_the_bit",
    ),
    Row(
        original="two live runs in one `output_dir` replace each other's checkpoints",
        ours="the second is refused, or waits (`output_dir_wait_s`)",
        shown_by="chaos/test_two_runs.py::test_a_second_process_is_refused_and_one_after_a_signal_is_not",
    ),
    Row(
        original="a changed `generation_config` with sampling values but no `do_sample` ends the run at its first save",
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
            '`cp_size` needs FSDP 2 and "sdpa", refuses sliding windows and masks, and attends to packed rows as one '
            "text; `sp_size` needs DeepSpeed"
        ),
        ours=(
            "both work with whole models, FSDP 2, ZeRO and models in parts (`tp_size`, `ep_size`), on any device, "
            "with any mask ([Context parallelism](parallelism.md#long-sequences-cp_size-and-sp_size))"
        ),
        shown_by="laws/test_long_context_laws.py::test_losses_weights_and_evaluations_are_those_of_one_process",
    ),
    Row(
        original=(
            "with `sp_size` and ZeRO 1 or 2, gradient norms are `sp_size` times too large: `max_grad_norm` clips too "
            "early"
        ),
        ours="gradient norms equal those of one process",
        shown_by="laws/test_long_context_laws.py::test_losses_weights_and_evaluations_are_those_of_one_process",
    ),
    Row(
        original="`sequence_parallel_size` in DeepSpeed's configuration has no effect without `parallelism_config`",
        ours="it is `sp_size` ([Sequence parallelism](parallelism.md#with-deepspeed))",
        shown_by="distributed/test_zero.py::test_shared_sequences_train_as_with_transformers",
    ),
    Row(
        original="a model loaded with `distributed_config` saves no state to resume from",
        ours="its checkpoints are resumed, with other sizes too",
        shown_by="distributed/test_experts.py::test_a_run_resumes_with_experts_shared_out_otherwise",
    ),
    Row(
        original=(
            "with tensor parallelism and accumulation, norms of heads (Qwen3 and others) get earlier gradients "
            "several times"
        ),
        ours="once: weights equal those of one process",
        shown_by="distributed/test_experts.py::test_losses_norms_weights_and_loads_are_those_of_one_process",
    ),
    Row(
        original=(
            "an adapter on layers that tensor parallelism cuts by rows (`o_proj`, `down_proj`) ends in an error "
            "about shapes"
        ),
        ours="it is trained",
        shown_by="distributed/test_adapters_of_parts.py::test_losses_norms_and_weights_are_those_of_one_process",
    ),
    Row(
        original="the auxiliary loss of a mixture of experts grows with processes and accumulation",
        ours="it is averaged over the micro-batches",
        shown_by="distributed/test_experts.py::test_losses_norms_weights_and_loads_are_those_of_one_process",
    ),
    Row(
        original=(
            "with `dispatch_batches=True`, a resume within a later epoch continues in the order of the first: some "
            "samples are trained twice, others never"
        ),
        ours="in the order of the interrupted epoch",
        shown_by="",
    ),
    Row(
        original="with `dispatch_batches=True` and tensor parallelism, all replicas train on the same batches",
        ours="on different batches, since each process reads for itself, with a warning",
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
        original=(
            "without a terminal, or with `disable_tqdm=True`, a log is printed as a dict, without the plan of the run"
        ),
        ours="the plan, and a line `step=10/75 loss=0.457 ...`; `disable_tqdm` drops the bar alone",
        shown_by="trainer/test_messages.py::test_a_run_says_each_thing_in_one_line",
    ),
    Row(
        original="`training_args.bin` in a saved model has your Hub token",
        ours="it has none, opens without this package, and is never read; `training_args.json` is for people",
        shown_by="compat/test_snippets.py::test_the_arguments_beside_a_model_are_plain_values",
    ),
    Row(
        original="an override without `num_items_in_batch` (`compute_loss`, `training_step`): `TypeError`",
        ours="called with what it takes; its losses are averaged over the micro-batches",
        shown_by="compat/test_snippets.py::test_an_override_of_an_older_version_is_called_with_what_it_takes",
    ),
    Row(
        original="`save_safetensors` is gone",
        ours="False writes `pytorch_model.bin`",
        shown_by="compat/test_snippets.py::test_weights_without_safetensors",
    ),
    Row(
        original="a callback that returns a dict, as documented, ends the run",
        ours="its flags are set; another value is an error that names the callback",
        shown_by="compat/test_snippets.py::test_a_callback_may_return_a_dict_of_flags",
    ),
    Row(
        original="without progress bars, the result of `train()` has no `total_flos` in `metrics`",
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
            "a run of `max_steps` without a full batch for `dataloader_drop_last` has `sys.maxsize` epochs in its state"
        ),
        ours="the number of steps that were asked for",
        shown_by="",
    ),
    Row(
        original=(
            '`include_for_metrics=["inputs"]` without `compute_metrics` is a `KeyError` if the batches have no '
            "`input_ids`"
        ),
        ours="the inputs are not collected",
        shown_by="",
    ),
    Row(
        original="`compute_metrics` is silently not called if the evaluation batches have no labels",
        ours="the same, with a warning that names the keys",
        shown_by="trainer/test_trainer_errors.py::test_metrics_without_labels",
    ),
    Row(
        original="`Seq2SeqTrainer` takes no `optimizer_cls_and_kwargs`",
        ours="it does",
        shown_by="",
    ),
    Row(
        original="`model_init` together with `optimizers` ends in a `RuntimeError`",
        ours="in a `ValueError`",
        shown_by="trainer/test_trainer_errors.py::test_an_optimizer_for_a_model_that_is_yet_to_be_made",
    ),
    Row(
        original="of two errors in one configuration, another may be found first",
        ours="errors of the arguments come first, together",
        shown_by="",
    ),
    Row(
        original="with `include_num_input_tokens_seen`, the last log and the result have no `train_tokens_per_second`",
        ours="they have it, for the whole run",
        shown_by="",
    ),
    Row(
        original="`neftune_noise_alpha` with a module that has no `get_input_embeddings` ends in an `AttributeError`",
        ours="in a `ValueError` that names both",
        shown_by="",
    ),
    Row(
        original=(
            "`EarlyStoppingCallback` without a metric or without evaluations ends in an `AssertionError` or "
            "`AttributeError`"
        ),
        ours="in a `ValueError` that names the argument to set",
        shown_by="trainer/test_trainer_errors.py::test_early_stopping_without_what_it_watches",
    ),
    Row(
        original="`EarlyStoppingCallback` also counts evaluations after training",
        ours="only evaluations during training count",
        shown_by="callbacks/test_early_stopping.py::test_an_evaluation_after_training_is_not_counted",
    ),
    Row(
        original="`save_metrics` writes `NaN` and `Infinity`, which JSON does not have",
        ours='it writes text: `"nan"`, `"inf"`',
        shown_by="cli/test_json.py::test_no_command_writes_json_that_only_python_reads",
    ),
    Row(
        original="a dict of datasets as `train_dataset` ends in a `KeyError`",
        ours="its datasets are trained on together ([Mixtures](advanced/samples.md#mixtures))",
        shown_by="capabilities/mixture/test_mixture.py::test_a_union_trains_as_the_sources_one_after_the_other_do",
    ),
)
