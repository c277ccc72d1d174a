"""Every published hook is reached by an ordinary run, and at its moment: a subclass counts."""

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright

from . import doubles
from .counting import Record, counting_callback, counting_trainer
from .surface import EVENTS, PUBLIC_METHODS, UNDERSCORE_METHODS

# Called by the user, or by whoever the user is: nothing in a run calls them.
FOR_THE_USER = {
    *("get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group", "num_tokens", "prediction_loop"),
    *("log_metrics", "save_metrics", "metrics_format", "save_state", "end", "pop_callback", "remove_callback"),
    "add_callback",  # the original's constructor calls it too, for its progress bar, on a half-made instance
}
# Not called unless something of theirs is asked for: uploads are in tests/hub.
LATER = {
    *("init_hf_repo", "create_model_card", "push_to_hub", "_push_from_checkpoint"),
    *("hyperparameter_search", "_tune_save_checkpoint"),  # tests/search
}
REACHED = (PUBLIC_METHODS.keys() | UNDERSCORE_METHODS.keys()) - FOR_THE_USER - LATER


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Four steps of two micro-batches with evaluation and saves, a second trainer that resumes, evaluates, predicts."""
    import datasets

    found = Record()
    output_dir = tmp_path_factory.mktemp("reached")
    settings = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "include_num_input_tokens_seen": "all",
    }
    for resume in (None, str(output_dir / "checkpoint-2")):
        trainer = doubles.trainer(
            output_dir,
            counting_trainer(found),
            settings=settings,
            model_init=lambda: doubles.model(),
            train_dataset=datasets.Dataset.from_list(doubles.samples(40)),  # columns are removed from it
            eval_dataset=doubles.samples(8),  # and from each sample of this, by the collator
            callbacks=[counting_callback(found)],
        )
        trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.predict(doubles.samples(8))
    return found


@pytest.mark.parametrize("hook", sorted(REACHED))
def test_a_hook_is_reached(hook: str, record: Record) -> None:
    assert record.count_of(hook) > 0


@pytest.mark.parametrize("event", [event for event in EVENTS if event != "on_push_begin"])
def test_an_event_is_fired(event: str, record: Record) -> None:
    assert record.count_of(event) > 0


def test_a_hook_is_reached_as_often_as_its_moment_comes(record: Record) -> None:
    """Two runs: four steps, then the two after the checkpoint; two micro-batches each."""
    per_step = 6
    per_micro_batch = 12
    for hook in ("get_batch_samples", "_get_num_items_in_batch"):
        assert record.count_of(hook) >= per_step
    for hook in (
        "_clip_grad_norm",
        "_get_grad_norm",
        "on_step_begin",
        "on_step_end",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_substep_end",
    ):
        assert record.count_of(hook) == per_step, hook
    for hook in ("training_step", "floating_point_ops", "_track_num_input_tokens"):
        assert record.count_of(hook) == per_micro_batch, hook
    assert record.count_of("compute_loss") == per_micro_batch + record.count_of("prediction_step")
    assert record.count_of("_maybe_log_save_evaluate") >= per_step
    assert record.count_of("_save_checkpoint") == record.count_of("on_save") == 3
    assert record.count_of("_evaluate") == record.count_of("_determine_best_metric") == 3
    assert record.count_of("evaluate") == 4
    assert record.count_of("evaluation_loop") == 5
    once_a_run = (
        *("train", "_inner_training_loop", "_init_training_state", "_prepare_for_training", "_finalize_training"),
        *("get_train_dataloader", "_get_train_sampler", "set_initial_training_values", "_hp_search_setup"),
        *("create_optimizer_and_scheduler", "_load_best_model", "_finish_current_push", "on_train_begin"),
        "on_train_end",
    )
    assert {hook: record.count_of(hook) for hook in once_a_run} == dict.fromkeys(once_a_run, 2)
    once_a_resume = ("_load_from_checkpoint", "_load_rng_state", "_load_callback_state")
    assert {hook: record.count_of(hook) for hook in once_a_resume} == dict.fromkeys(once_a_resume, 1)


def in_order(names: list[str], record: list[str]) -> bool:
    """Whether the names are met in this order, others between them."""
    rest = iter(record)
    return all(name in rest for name in names)


def test_one_step_is_walked_in_the_order_of_the_design(record: Record) -> None:
    micro_batch = [
        "training_step",
        "_prepare_inputs",
        "_prepare_input",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "compute_loss",
    ]
    window = [
        "get_batch_samples",
        "_get_num_items_in_batch",
        "on_step_begin",
        *micro_batch,
        "on_substep_end",
        *micro_batch,
    ]
    update = [
        "_clip_grad_norm",
        "_get_grad_norm",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "_get_learning_rate",
        "on_step_end",
        "_maybe_log_save_evaluate",
        "log",
        "on_log",
    ]
    assert in_order([*window, *update], record.first_step()), record.first_step()
    assert record.first_step().count("training_step") == 2


def test_a_run_is_walked_in_the_order_of_the_design(record: Record) -> None:
    set_up = [
        "train",
        "_inner_training_loop",
        "get_train_dataloader",
        "_get_dataloader",
        "_get_train_sampler",
        "set_initial_training_values",
        "_init_training_state",
        "_prepare_for_training",
        "create_optimizer_and_scheduler",
        "create_optimizer",
        "get_decay_parameter_names",
        "create_scheduler",
        "on_train_begin",
        "on_epoch_begin",
        "_run_epoch",
        "get_batch_samples",
        "training_step",
    ]
    saves = [
        "_maybe_log_save_evaluate",
        "_evaluate",
        "evaluate",
        "get_eval_dataloader",
        "evaluation_loop",
        "prediction_step",
        "on_prediction_step",
        "on_evaluate",
        "_determine_best_metric",
        "_save_checkpoint",
        "save_model",
        "_save",
        "_save_optimizer_and_scheduler",
        "_save_rng_state",
        "on_save",
    ]
    ends = ["on_epoch_end", "_finalize_training", "store_flos", "log", "_load_best_model", "on_train_end"]
    assert in_order([*set_up, *saves, *ends], record)
    resumes = [
        "_load_from_checkpoint",
        "_inner_training_loop",
        "_init_training_state",
        "_load_callback_state",
        "_prepare_for_training",
        "_load_optimizer_and_scheduler",
        "_run_epoch",
        "_load_rng_state",
        "training_step",
    ]
    assert in_order(resumes, record[record.index("_load_from_checkpoint") :])


def test_weights_that_do_not_fit_are_told_to_their_hook(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Hears(trainwright.Trainer):
        def _issue_warnings_after_load(self, load_result: Any) -> None:
            heard.append(load_result)

    doubles.trainer(tmp_path, settings={"save_strategy": "steps", "save_steps": 2, "max_steps": 2}).train()
    larger = doubles.model()
    larger.more = torch.nn.Linear(2, 2)
    doubles.trainer(tmp_path, Hears, model=larger)._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert set(heard[0].missing_keys) == {"more.weight", "more.bias"}
    assert list(heard[0].unexpected_keys) == []


def test_without_a_trial_the_hooks_of_a_search_do_nothing(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    assert trainer._hp_search_setup(None) is None
    assert trainer._report_to_hp_search(None, 1, {"eval_loss": 1.0}) is None
    assert trainer._finish_current_push() is None
