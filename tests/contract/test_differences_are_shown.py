"""Each row of docs/migrate.md is shown by a test that its record names, or is in a table of the tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..compat.audit import DIFFERENT
from ..parity import fuzz_corrections
from .differences import STAYING

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "migrate.md"

# The beginning of a row that `reproduce` restores -> a test, or an effect, that shows what is written of ours.
SHOWN = {
    "BERT, RoBERTa, T5": (
        "window/test_equal_to_the_full_batch.py::test_by_default_head_that_ignores_count_trains_on_mean_of_the_window"
    ),
    "an overridden `compute_loss`, a": "laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    "a `compute_loss_func` counts": "laws/test_loss_laws.py::test_a_loss_function_without_a_count_is_a_mean",
    "a module whose `forward` names": "laws/test_loss_laws.py::test_a_step_is_the_batch_of_all_its_micro_batches",
    "a changed learning rate": (
        "resume/test_resume_changed.py::test_a_changed_learning_rate_takes_effect_at_the_schedules_position"
    ),
    "a resumed run keeps the intervals": (
        "resume/test_resume_changed.py::test_intervals_passed_now_replace_those_of_the_checkpoint"
    ),
    "a resumed run draws other": (
        "compat/test_published_surface.py::test_a_resume_ends_with_the_weights_of_its_own_straight_run"
    ),
    "workers that persist keep": "data/test_epochs.py::test_a_dataset_within_another_is_told_too",
    "a resumed stream that has had": "resume/test_resume_exact.py::test_a_stream_goes_on_where_it_was",
    "with `dataloader_persistent_workers`": (
        "compat/test_published_surface.py::test_another_dataset_has_a_dataloader_of_its_own"
    ),
    "without `restore_callback_states": "resume/test_resume_exact.py::test_patience_goes_on_counting",
    "`sortish_sampler=True`": "effects/generation_fields.py::samples_of_similar_length_are_trained_together",
    "**Accumulation in plain modules**": "effects/our_fields.py::a_micro_batch_with_fewer_labels_counts_less",
    "the column of `length_column_name`": "effects/data_fields.py::the_length_is_in_this_column",
    "if a stream ends": "parity/test_stream_tail.py::test_ours_trains_on_stream_as_on_the_same_data_with_a_length",
    "`dataloader_drop_last` drops": "evaluation/test_eval_loop.py::test_drop_last_drops_nothing_of_a_prediction",
    "with `predict_with_generate` and no length": (
        "evaluation/test_generation_batches.py::test_without_a_length_twenty_tokens_are_written"
    ),
    "with `predict_with_generate`, `eval_loss` is": (
        "parity/test_reproduce.py::test_the_loss_beside_generated_predictions"
    ),
    "with a decoder-only model": "parity/test_prompts_are_kept.py::test_elsewhere_the_prompt_is_cut_off",
    "a step with NaN in loss or gradient": (
        "capabilities/guard/effects.py::a_step_that_is_not_finite_is_skipped_by_default"
    ),
    "with `max_grad_norm=0`, one gradient": "parity/test_reproduce.py::test_an_infinite_gradient_that_is_only_measured",
    "early stopping ignores NaN": "callbacks/test_early_stopping.py::test_values_other_than_numbers_are_no_improvement",
    "random draws in a worker process": "resume/test_resume_exact.py::test_what_workers_draw_comes_back",
    "`fp16=True` has": "effects/precision_fields.py::the_forward_pass_is_in_float16_and_the_loss_is_scaled",
    "a pass that ends before the `len()`": "parity/test_stream_epochs.py::test_a_pass_that_has_ended_is_an_epoch",
    "`compute_metrics` is called by evaluations": (
        "laws/test_own_objects.py::test_metrics_are_computed_as_often_as_in_the_original"
    ),
} | {row.original: row.shown_by for row in STAYING if row.shown_by}


START = "<!-- written by tests/contract/test_differences_are_shown.py -->\n"
END = "<!-- end -->"


def test_the_page_says_what_the_record_says() -> None:
    """With WRITE_DOCS=1 it is written."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    said, _, after = rest.partition(END)
    lines = ["| transformers | Trainwright |", "|---|---|", *(f"| {row.original} | {row.ours} |" for row in STAYING)]
    expected = "\n" + "\n".join(lines) + "\n\n"
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(before + START + expected + END + after, encoding="utf-8")
        said = expected
    assert said == expected


def rows() -> list[str]:
    """The rows of the table of the page, without their first bar, and the paragraphs that begin with a difference."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(("| ", "**"))]
    return [line.removeprefix("| ") for line in lines if not line.startswith("| transformers ")]


def in_a_table_of_tests(row: str) -> bool:
    """Whether a difference of the audit, or one that the drawn cases correct on the other side, has words of a row."""
    corrections = [one for one in vars(fuzz_corrections).values() if isinstance(one, fuzz_corrections.Correction)]
    return any(words in row for words in [*DIFFERENT.values(), *(one.row for one in corrections)])


def test_each_row_is_shown_by_a_test() -> None:
    unknown = [row for row in rows() if not row.startswith((*SHOWN,))]
    assert [row for row in unknown if not in_a_table_of_tests(row)] == []


def test_each_line_of_the_table_names_one_row() -> None:
    page = rows()
    found = {beginning: sum(row.startswith(beginning) for row in page) for beginning in SHOWN}
    assert found == dict.fromkeys(SHOWN, 1)


def test_each_line_of_the_table_names_a_test() -> None:
    places = [place.partition("::") for place in SHOWN.values()]
    sources = {path: (TESTS / path).read_text(encoding="utf-8") for path, _, _ in places}
    assert [(path, name) for path, _, name in places if not re.search(rf"(?m)^def {name}\(", sources[path])] == []
