"""Each correction of the original's numbers, by name. `reproduce="transformers"` takes all of them back.

The parts of docs/migrate.md that say what `reproduce` restores are written from this record, by
tests/contract/test_behaviour.py with WRITE_DOCS=1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trainwright.config.fields import get_value


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourDifference:
    """One difference from the original, as docs/migrate.md describes it.

    Attributes:
        original: behaviour of transformers.
        ours: behaviour of a run without `reproduce`.
        title: start of its paragraph under "Numbers that differ"; "" makes it a row of the table instead.
    """

    original: str
    ours: str
    title: str = ""


_DRAWS_OF_A_RESUME = BehaviourDifference(
    original="a resumed run draws other numbers if a collator draws, or in a later epoch if samples are grouped by "
    "length or shuffled with `use_seedable_sampler=False`",
    ours="the weights of the uninterrupted run",
)
_PASSES_OF_A_RESUME = BehaviourDifference(
    original="a resumed stream that has had more than one pass reads other samples",
    ours="the weights of the uninterrupted run",
)
_DROP_LAST = BehaviourDifference(
    original="`dataloader_drop_last` drops samples of evaluations and predictions, but none of a training stream",
    ours="it drops the last batch of training data; of a stream, unless it is the only one",
)
_NOT_FINITE = BehaviourDifference(
    title="A loss that is not finite",
    original="is logged as 0.0 by transformers.",
    ours="It is counted and named at the next log, and is never the best.",
)


def _corrects(*differences: BehaviourDifference) -> bool:
    """Declares a field of `Behaviour` that documents itself by these differences."""
    return field(default=True, metadata={"differences": differences})


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Behaviour of a run that differs from the original.

    Each field names the behaviour that holds if it is True.
    """

    counts_predicted_tokens: bool = _corrects(
        BehaviourDifference(
            title="Causal models without a declared loss type",
            original="(GPT-2 is one): transformers divides the loss of S tokens by S though S\N{MINUS SIGN}1 are "
            "predicted, so loss and gradient are too small.",
            ours="The loss is the model's own.",
        )
    )
    evaluation_restores_random_states: bool = _corrects(
        BehaviourDifference(
            title="Evaluating draws no random numbers.",
            original="In transformers it does, so a run with dropout that evaluates ends with other weights.",
            ours="Training draws the same numbers with and without evaluations.",
        )
    )
    reports_nonfinite_losses: bool = _corrects(_NOT_FINITE)
    # `best_metric` of the state; the original sets an infinite one before the first comparison
    best_metric_starts_as_none: bool = _corrects(_NOT_FINITE)
    averages_eval_loss_over_items: bool = _corrects(
        BehaviourDifference(
            title="`eval_loss`",
            original="is a mean over batches in transformers, and moves by up to 3 % with the batch size.",
            ours="It is the mean over items.",
        )
    )
    averages_means_over_window: bool = _corrects(
        BehaviourDifference(
            original="BERT, RoBERTa, T5, classifiers on Llama, ... return a mean although they receive the number "
            "of items: loss and gradients grow with `gradient_accumulation_steps` and the number of processes",
            ours="the mean over micro-batches and processes, as one batch gives; `loss_weighting` changes it",
        ),
        BehaviourDifference(
            original="an overridden `compute_loss`, a `compute_loss_func` or a module with `**kwargs` counts as "
            "divided by `num_items_in_batch`, used or not: a mean grows in the same way",
            ours="the first step of several micro-batches or processes computes one loss again with twice the "
            "number. Half as large: it is divided. Unchanged: it is a mean, and averaged as above. Anything else: a "
            "warning, and the original's sum. `loss_is_scaled_for_ga` and `model_accepts_loss_kwargs` settle it",
        ),
        BehaviourDifference(
            original='a `compute_loss_func` counts as divided by the number of items even without "labels" to '
            "count: its means are added up",
            ours="without a number it is a mean",
        ),
    )
    gives_items_by_name: bool = _corrects(
        BehaviourDifference(
            original="a module whose `forward` names `num_items_in_batch` and has no `**kwargs` is not given it",
            ours="it is",
        )
    )
    resume_applies_new_settings: bool = _corrects(
        BehaviourDifference(
            original="a changed learning rate is ignored on a resume, and the schedule of a longer run jumps",
            ours="the new value takes effect",
        )
    )
    resume_recomputes_intervals: bool = _corrects(
        BehaviourDifference(
            original="a resumed run keeps the intervals of its checkpoint, whatever you pass",
            ours="the intervals that you pass",
        )
    )
    resume_of_finished_run_takes_no_step: bool = _corrects(
        BehaviourDifference(
            original="a resume of a run that has done all its steps may train one more",
            ours="it trains none",
        )
    )
    resume_is_no_start_to_evaluate: bool = _corrects(
        BehaviourDifference(
            original="with `eval_on_start`, each resume evaluates once more, which counts for early stopping",
            ours="only a new run evaluates at its start",
        )
    )
    resume_continues_at_data_position: bool = _corrects(_DRAWS_OF_A_RESUME, _PASSES_OF_A_RESUME)
    resumed_stream_must_reach_position: bool = _corrects(_PASSES_OF_A_RESUME)
    keeps_eval_loader_per_dataset: bool = _corrects(
        BehaviourDifference(
            original="with `dataloader_persistent_workers`, `evaluate(other_dataset)` evaluates the first dataset",
            ours="the given one",
        )
    )
    resume_restores_callbacks: bool = _corrects(
        BehaviourDifference(
            original="without `restore_callback_states_from_checkpoint`, early stopping counts from 0 after a resume",
            ours="callbacks continue with their saved counters and your settings",
        )
    )
    sortish_sampler_groups_by_length: bool = _corrects(
        BehaviourDifference(
            original="`sortish_sampler=True` has no effect",
            ours="samples of similar length go together",
        )
    )
    trains_incomplete_window: bool = _corrects(
        BehaviourDifference(
            original="if a stream ends within a window of `gradient_accumulation_steps`, or a sampler before its "
            "`len()`, its gradients stay for the next pass",
            ours="a step on the last window",
        )
    )
    ended_pass_is_an_epoch: bool = _corrects(
        BehaviourDifference(
            original="a pass that ends before the `len()` of its stream is logged as a part of an epoch",
            ours="as a whole epoch",
        )
    )
    evaluates_incomplete_batch: bool = _corrects(_DROP_LAST)
    drop_last_applies_to_streams: bool = _corrects(_DROP_LAST)
    limits_every_generated_batch: bool = _corrects(
        BehaviourDifference(
            original="with `predict_with_generate` and no length, the first batch has 21 tokens and all others 20",
            ours="all have 20",
        )
    )
    removes_prompts_from_predictions: bool = _corrects(
        BehaviourDifference(
            original="with a decoder-only model, predictions of `Seq2SeqTrainer` begin with the input, and "
            "continue after an answer in it",
            ours="the model gets the prompt, and predictions are its continuation; unchanged under `install()`, and "
            "if a subclass overrides `prediction_step`",
        )
    )
    generating_evaluations_use_compute_loss: bool = _corrects(
        BehaviourDifference(
            original="with `predict_with_generate`, `eval_loss` is the model's own, even if you compute another loss, "
            "and label smoothing does not shift the labels of a causal model",
            ours="it is the loss that is trained",
        )
    )
    evaluates_in_dataset_order: bool = _corrects(
        BehaviourDifference(
            original="with `group_by_length`, predictions come in an order drawn at random",
            ours="in the order of the data",
        )
    )
    weighs_eval_batches_by_rows: bool = _corrects(
        BehaviourDifference(
            original='with `include_for_metrics=["loss"]` and `Seq2SeqTrainer`, your own dataloader or some streams, '
            "a loss for each place in the batches",
            ours="for each sample",
        )
    )
    skips_nonfinite_steps: bool = _corrects(
        BehaviourDifference(
            original="a step with NaN in loss or gradient makes all weights NaN",
            ours='the step is skipped, and named at the next log; `on_nonfinite="ignore"` updates',
        )
    )
    measured_gradients_stay: bool = _corrects(
        BehaviourDifference(
            original="with `max_grad_norm=0`, one gradient that is not finite makes all gradients NaN",
            ours="gradients stay as they are",
        )
    )
    early_stopping_counts_nan_before_first_best: bool = _corrects(
        BehaviourDifference(
            original="early stopping ignores NaN until the first number",
            ours="NaN and None do not count as an improvement",
        )
    )
    reads_length_column_before_removal: bool = _corrects(
        BehaviourDifference(
            original="the column of `length_column_name` is used only if the model takes it, or with "
            "`remove_unused_columns=False`",
            ours="always",
        )
    )
    sends_seed_and_epoch_to_workers: bool = _corrects(
        BehaviourDifference(
            original="random draws in a worker process depend on the number of workers, and differ after a resume",
            ours="each batch has its own seed",
        ),
        BehaviourDifference(
            original="workers that persist keep the epoch in which they were started",
            ours="they get each epoch",
        ),
    )
    evaluation_restores_precision: bool = _corrects(
        BehaviourDifference(
            original="`evaluate()` or `predict()` with `bf16_full_eval` leaves the model in half precision",
            ours="the weights are as before",
        )
    )
    rehearses_evaluation: bool = _corrects(
        BehaviourDifference(
            original="`compute_metrics` is called by evaluations alone",
            ours="with `eval_strategy`, also once before step 1, with one batch, to find mistakes",
        )
    )
    configures_new_models: bool = _corrects(
        BehaviourDifference(
            original="with `model_init`, `generation_config` is lost when training begins",
            ours="each new model has it",
        ),
        BehaviourDifference(
            original="with `model_init`, the model that is trained has its own `use_cache`",
            ours="that of the arguments",
        ),
    )
    autocasts_fp16_on_cpu: bool = _corrects(
        BehaviourDifference(
            original="`fp16=True` has no effect on the CPU",
            ours="autocast to fp16, with a loss scaler",
        )
    )


def differences() -> list[BehaviourDifference]:
    """Returns each difference that `reproduce` restores once, in the order of the page."""
    of_fields = (one.metadata["differences"] for one in fields(Behaviour))
    return list(dict.fromkeys(difference for declared in of_fields for difference in declared))


OURS = Behaviour()
ORIGINAL = Behaviour(**{one.name: False for one in fields(Behaviour)})


def get_behaviour(args: object) -> Behaviour:
    """Returns the original's behaviour for `reproduce="transformers"`, and ours for other arguments."""
    return ORIGINAL if get_value(args, "reproduce") == "transformers" else OURS
