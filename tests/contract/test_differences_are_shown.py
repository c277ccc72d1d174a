"""Each row of docs/migrate.md is shown by a test: a new row needs a line in SHOWN, or is in a table of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..compat.audit import DIFFERENT
from ..parity import fuzz_corrections

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "migrate.md"
SURFACE = "compat/test_published_surface.py"
SNIPPETS = "compat/test_snippets.py"
ERRORS = "test_trainer_errors.py"
CHANGED = "test_resume_changed.py"
EXACT = "test_resume_exact.py"
FORMS = "laws/test_result_form_laws.py"
LOSSES = "evaluation/test_loss_and_labels.py"
EXPERTS = "distributed/test_experts.py"
REPLACED = "laws/test_model_replaced.py"
GROUPS = "optim/test_groups_during_a_run.py"
UNUSUAL = "test_unusual_models.py"

# The beginning of a row -> a test, or an effect, that shows what is written of ours.
SHOWN = {
    "BERT, RoBERTa, T5": (
        "window/test_equal_to_the_full_batch.py::"
        "test_by_default_a_head_that_ignores_the_count_trains_on_the_mean_of_the_window"
    ),
    "an overridden `compute_loss`, a": "laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    "a `compute_loss_func` counts": "laws/test_loss_laws.py::test_a_loss_function_without_a_count_is_a_mean",
    "a module whose `forward` names": "laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    "a wrapper of a module": "laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    "`resume_from_checkpoint=True` takes": f"{CHANGED}::test_a_damaged_one_is_skipped_and_named_and_a_named_one_raises",
    "a changed learning rate": f"{CHANGED}::test_a_changed_learning_rate_takes_effect_at_the_schedules_position",
    "a resumed run keeps the intervals": f"{CHANGED}::test_intervals_passed_now_replace_those_of_the_checkpoint",
    "a resumed run draws other": f"{SURFACE}::test_a_resume_ends_with_the_weights_of_its_own_straight_run",
    "a dataset with `set_epoch`": "data/test_epochs.py::test_a_resumed_run_has_the_samples_of_its_epoch",
    "workers that persist keep": "data/test_epochs.py::test_a_dataset_within_another_is_told_too",
    "a resumed stream that has had": f"{EXACT}::test_a_stream_goes_on_where_it_was",
    "`auto_find_batch_size`": "effects/length_fields.py::batches_that_do_not_fit_are_cut",
    "`gradient_accumulation_steps` above 1": (
        "config/test_coerce.py::test_equal_numbers_of_accumulation_are_one_and_survive_a_round_trip"
    ),
    "with `dataloader_persistent_workers`": f"{SURFACE}::test_another_dataset_has_a_dataloader_of_its_own",
    "without `restore_callback_states": f"{EXACT}::test_patience_goes_on_counting",
    "`sortish_sampler=True`": "effects/generation_fields.py::samples_of_similar_length_are_trained_together",
    "**Accumulation in plain modules**": "effects/our_fields.py::a_micro_batch_with_fewer_labels_counts_less",
    "with `dispatch_batches=True`, tensor": (
        "distributed/test_laid_out.py::test_losses_norms_and_weights_are_those_of_one_process"
    ),
    "the column of `length_column_name`": "effects/data_fields.py::the_length_is_in_this_column",
    "if a stream ends": "parity/test_stream_tail.py::test_ours_trains_on_a_stream_as_on_the_same_data_with_a_length",
    "`dataloader_drop_last` drops": "evaluation/test_eval_loop.py::test_drop_last_drops_nothing_of_a_prediction",
    "`args.resume_from_checkpoint`": "effects/run_fields.py::training_goes_on_from_there",
    "a checkpoint of `save_only_model`": f"{ERRORS}::test_a_checkpoint_of_the_weights_alone",
    "with `predict_with_generate` and no length": (
        "evaluation/test_generation_batches.py::test_without_a_length_twenty_tokens_are_written"
    ),
    "with `predict_with_generate`, `eval_loss` is": (
        "parity/test_reproduce.py::test_the_loss_beside_generated_predictions"
    ),
    "a tensor as outputs": f"{FORMS}::test_every_row_has_its_prediction_and_label",
    "an overridden `compute_loss` that returns the loss alone": f"{LOSSES}::test_a_loss_alone_is_reported",
    "a loss that is computed outside": f"{FORMS}::test_every_row_has_its_prediction_and_label",
    "lists with an entry": f"{FORMS}::test_every_row_has_its_prediction_and_label",
    "an evaluation whose labels": f"{LOSSES}::test_a_target_of_another_name_is_named_once",
    "with a decoder-only model": "parity/test_prompts_are_kept.py::test_elsewhere_the_prompt_is_cut_off",
    "`label_smoothing_factor` or": "effects/optimizer_fields.py::the_target_is_spread",
    "SIGTERM ends": (
        "signals/test_signals.py::test_the_last_finished_step_is_saved_and_the_run_goes_on_as_if_nothing_had_happened"
    ),
    "a resumed stream is read again": (
        "data/test_stream_batching.py::test_a_resume_reads_no_more_than_a_look_ahead_again"
    ),
    "`compute_metrics` is not called": f"{ERRORS}::test_metrics_without_labels",
    "a misspelt": f"{ERRORS}::test_a_metric_that_no_evaluation_gives",
    "a metric that is an array": (
        "evaluation/test_metrics_of_any_kind.py::test_metrics_of_any_kind_train_and_are_named_before_step_1"
    ),
    "a step with NaN in loss or gradient": (
        "capabilities/guard/effects.py::a_step_that_is_not_finite_is_skipped_by_default"
    ),
    "with `max_grad_norm=0`, one gradient": (
        "parity/test_reproduce.py::test_an_infinite_gradient_that_is_only_measured"
    ),
    "early stopping ignores NaN": "callbacks/test_early_stopping.py::test_values_other_than_numbers_are_no_improvement",
    "`train()` in a callback": f"{ERRORS}::test_train_is_refused_inside_of_train",
    "a loss that is not a scalar": f"{ERRORS}::test_a_loss_of_another_kind_from_compute_loss",
    "a warm-up longer": "compat/test_refusals.py::test_it_trains_as_with_transformers_and_a_warning_says_the_words",
    "resuming with more or fewer": (
        "compat/test_refusals.py::test_a_resume_with_other_data_continues_as_with_transformers"
    ),
    "a bad sample": "data/test_bad_sample.py::test_the_sample_is_named",
    "keys in the text": "test_hostile_text.py::test_what_looks_like_a_key_is_masked",
    "32 argument names": f"{SNIPPETS}::test_every_older_name_can_be_read",
    "an empty stream": "loop/test_fit.py::test_an_empty_stream_is_an_error_before_step_1",
    "in a Kubeflow": "config/test_coerce.py::test_a_train_job_of_kubeflow_is_reported_to",
    "two live runs": "chaos/test_two_runs.py::test_a_second_process_is_refused_and_one_after_a_signal_is_not",
    "saving blocks": "effects/our_fields.py::a_save_is_behind_training_s_back_or_not",
    "without a terminal, or": "test_messages.py::test_a_run_says_each_thing_in_one_line",
    "`training_args.bin` in a saved model": f"{SNIPPETS}::test_the_arguments_beside_a_model_are_plain_values",
    "an override without": f"{SNIPPETS}::test_an_override_of_an_older_version_is_called_with_what_it_takes",
    "`save_safetensors`": f"{SNIPPETS}::test_weights_without_safetensors",
    "a callback that returns": f"{SNIPPETS}::test_a_callback_may_return_a_dict_of_flags",
    "`save_total_limit` counts": "test_run_cut_off.py::test_going_back_begins_another_run",
    "random draws of a collator or a dataset": f"{EXACT}::test_what_workers_draw_comes_back",
    "`model_init` together with": f"{ERRORS}::test_an_optimizer_for_a_model_that_is_yet_to_be_made",
    "`fp16=True` has": "effects/precision_fields.py::the_forward_pass_is_in_float16_and_the_loss_is_scaled",
    "a dict of datasets as": "data/test_mixture.py::test_a_union_trains_as_the_sources_one_after_the_other_do",
    "a callback's `on_save`": "checkpoint/test_changes.py::test_checkpoints_verify_with_what_a_listener_made_of_them",
    "a negative `global_step`": "chaos/hostile/test_hostile.py::test_a_record_of_another_shape_is_refused",
    "`cp_size` needs FSDP 2": (
        "laws/test_long_context_laws.py::test_losses_weights_and_evaluations_are_those_of_one_process"
    ),
    "with `sp_size` and ZeRO 1 or 2": (
        "laws/test_long_context_laws.py::test_losses_weights_and_evaluations_are_those_of_one_process"
    ),
    "`sequence_parallel_size` in DeepSpeed's": (
        "distributed/test_zero.py::test_shared_sequences_train_as_with_transformers"
    ),
    "a model that was loaded with `distributed_config`": (
        f"{EXPERTS}::test_a_run_resumes_with_experts_shared_out_otherwise"
    ),
    "an adapter on layers that tensor": (
        "distributed/test_adapters_of_parts.py::test_losses_norms_and_weights_are_those_of_one_process"
    ),
    "the auxiliary loss of a mixture": f"{EXPERTS}::test_losses_norms_weights_and_loads_are_those_of_one_process",
    "with tensor parallelism and accumulation": (
        f"{EXPERTS}::test_losses_norms_weights_and_loads_are_those_of_one_process"
    ),
    "`EarlyStoppingCallback` without": f"{ERRORS}::test_early_stopping_without_what_it_watches",
    "a pass that ends before the `len()`": "parity/test_stream_epochs.py::test_a_pass_that_has_ended_is_an_epoch",
    "`compute_metrics` is called by evaluations": (
        "laws/test_own_objects.py::test_metrics_are_computed_as_often_as_in_the_original"
    ),
    "`train_dataloader.dataset` of a stream": (
        "laws/test_own_objects.py::test_callbacks_and_calls_get_the_objects_that_were_passed"
    ),
    "`model_init`, `compute_metrics` or": "laws/test_callable_laws.py::test_model_init",
    "with FSDP 2, an `evaluate()`": "laws/test_order_process_laws.py::test_a_call_before_training_changes_nothing",
    "a model that is assigned": f"{REPLACED}::test_an_assigned_model_is_trained",
    "an optimizer that has no parameter": f"{REPLACED}::test_an_optimizer_with_nothing_of_the_model_is_refused",
    "`args.gradient_accumulation_steps`": f"{GROUPS}::test_another_accumulation_during_a_run_is_named",
    "an `os.chdir`": "test_working_directory.py::test_everything_is_written_to_one_directory",
    "parameters that are unfrozen": f"{GROUPS}::test_what_the_optimizer_lacks_is_named_once",
    "`optimizer.add_param_group` in a run": f"{GROUPS}::test_a_group_that_is_added_is_trained_by_the_schedule",
    "an override of `_save_checkpoint`": f"{UNUSUAL}::test_the_best_model_is_loaded_or_said_to_be_missing",
    "`get_extra_state()`": f"{UNUSUAL}::test_state_that_is_no_tensor_is_restored",
    "lazy modules": f"{UNUSUAL}::test_lazy_modules_are_trained_and_resumed",
    "sparse gradients": f"{UNUSUAL}::test_sparse_gradients_train_as_dense_ones",
    "a resume with an iterable": "data/test_loaders_in_turn.py::test_a_resume_continues_to_the_bit",
}


def rows() -> list[str]:
    """The rows of the table of the page, without their first bar, and the paragraphs that begin with a difference."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(("| ", "**"))]
    return [line.removeprefix("| ") for line in lines if not line.startswith("| transformers ")]


def in_a_table_of_tests(row: str) -> bool:
    """Whether a difference of the audit, or one that the drawn cases correct on the other side, has words of a row."""
    corrections = [one for one in vars(fuzz_corrections).values() if isinstance(one, fuzz_corrections.Correction)]
    return any(words in row for words in [*DIFFERENT.values(), *(one.row for one in corrections)])


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[:40])
def test_a_row_is_shown_by_a_test(row: str) -> None:
    assert any(row.startswith(beginning) for beginning in SHOWN) or in_a_table_of_tests(row)


@pytest.mark.parametrize(("beginning", "place"), SHOWN.items())
def test_a_line_of_the_table_names_a_row_and_a_test(beginning: str, place: str) -> None:
    assert sum(row.startswith(beginning) for row in rows()) == 1
    path, _, name = place.partition("::")
    assert re.search(rf"^def {name}\(", (TESTS / path).read_text(encoding="utf-8"), flags=re.MULTILINE), place
