"""Drawn configurations train as with transformers' Trainer, or differ as docs/migrate.md says."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import trainwright

from .._support.small import REFERENCE, make_trainer
from . import fuzz_sides
from .fuzz import check, report, shrunk
from .fuzz_corrections import CACHE, CORRECTIONS, FINISHED, HALF_AFTER, INTERVALS, NON_FINITE, Correction
from .fuzz_sides import OURS, compare, quiet_and_clean
from .fuzz_table import BUNDLES, FIELDS, FIVE_TOKENS, LEFT_OUT, MODELS, ROWS, TABLE, Case, draw

MIGRATE = Path(__file__).parents[2] / "docs" / "migrate.md"


def unexplained(seeds: range) -> str:
    texts, _ = report(map(check, seeds))
    with warnings.catch_warnings():  # what the original left unclosed is collected now, not in a later test
        warnings.simplefilter("ignore")
        gc.collect()
    return "\n".join(texts)


@pytest.mark.framework
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_drawn_configurations_do_the_same_as_the_original(first: int) -> None:
    assert not unexplained(range(first, first + 10))


@pytest.mark.slow  # minutes: a hundred configurations, each trained on both sides
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_hundreds_of_drawn_configurations_do_the_same_as_the_original(first: int) -> None:
    assert not unexplained(range(first, first + 100))


def test_a_seed_draws_the_same_case_whatever_was_drawn_before() -> None:
    random.seed(3)
    before = [draw(seed) for seed in range(50)]
    assert [draw(seed) for seed in reversed(range(50))] == before[::-1]


def test_every_row_of_the_table_is_drawn() -> None:
    names = {name for seed in range(400) for name in draw(seed)}
    assert {row.name for row in TABLE} - names == set()


@pytest.mark.framework  # of the version that constraints.txt names
def test_every_argument_of_the_original_is_drawn_or_left_out_with_reason() -> None:
    bundled = {name for row in BUNDLES for value in row.values for name in value}
    drawn = bundled | {row.name for row in FIELDS}
    fields = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert drawn | LEFT_OUT.keys() == fields
    assert drawn & LEFT_OUT.keys() == set()
    assert len(drawn) >= 90


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.name)
def test_every_correction_is_a_row_of_the_documentation(correction: Correction) -> None:
    assert correction.row in MIGRATE.read_text(encoding="utf-8")


class SteeperFromStepTwo(trainwright.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        return loss * 1.0001 if self.state.global_step and self.args.weight_decay else loss


@pytest.mark.framework
def test_a_difference_is_found_and_its_case_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_sides, "OURS", replace(OURS, trainer=SteeperFromStepTwo))
    case = {"weight_decay": 0.3, "adam_beta2": 0.98, "data": "torch"}
    found = compare(case, Counter())
    assert found is not None
    assert found.fact == "log > 1 > loss"
    assert shrunk(case, found)[0] == {"weight_decay": 0.3}


REGRESSIONS: tuple[tuple[Case, Correction | None], ...] = (
    (  # seed 294
        {
            "resume": "last",
            "longer": True,
            "evaluation": {"eval_strategy": "steps", "eval_steps": 0.5},
            "saving": {"save_strategy": "steps", "save_steps": 0.5},
        },
        INTERVALS,
    ),
    (  # seed 285
        {"resume": "last", "length": {"max_steps": 7}, "saving": {"save_strategy": "epoch"}},
        FINISHED,
    ),
    ({"learning_rate": 1e30, "eval_data": "none"}, NON_FINITE),  # seed 320
    ({"data": "stream", "samples": 3, "dataloader_drop_last": True}, None),  # its only batch is not full
    (  # seed 1726
        {
            "model": "t5",
            "ragged": True,
            "label_smoothing_factor": 0.1,
            "bf16_full_eval": True,
            "eval_data": "none",
            "length": {"max_steps": 1},
            "generation": {"predict_with_generate": True, "generation_max_length": 6},
        },
        HALF_AFTER,
    ),
    (  # seed 267: a sum in half precision is divided by a number of items in float32
        {
            "model": "vit",
            "length": {"num_train_epochs": 1},
            "gradient_accumulation_steps": 2,
            "fp16_full_eval": True,
            "optimizer": {"optim": "sgd", "optim_args": "momentum=0.9"},
        },
        None,
    ),
    ({"model": "gpt2", "dropout": 0.2, "model_init": True, "weight_decay": 0.3}, CACHE),  # seed 339
)


@pytest.mark.framework
@pytest.mark.parametrize(("case", "correction"), REGRESSIONS, ids=lambda value: getattr(value, "name", ""))
def test_a_difference_found_once_is_repaired_or_documented(case: Case, correction: Correction | None) -> None:
    used: Counter[Correction] = Counter()
    assert compare(case, used) is None
    assert correction is None or used[correction]


@pytest.mark.framework
@pytest.mark.parametrize("reproduces", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_model_init_makes_again_trains_as_with_the_original(name: str, reproduces: bool) -> None:
    case = {"model": name, "dropout": 0.2, "model_init": True, "use_cache": name != "gpt2", "length": {"max_steps": 1}}
    generation = {"generation": {"generation_config": FIVE_TOKENS}} if name == "t5" else {}
    assert compare(case | generation, Counter(), reproduces=reproduces) is None


@pytest.mark.framework
@pytest.mark.parametrize("reproduces", [False, True])
@pytest.mark.parametrize("order", [None, "sequential", "group_by_length"])
@pytest.mark.parametrize("accelerator", [None, *ROWS["accelerator_config"].values], ids=str)
def test_a_resume_within_a_later_epoch_trains_as_with_the_original(
    accelerator: dict[str, Any] | None, order: str | None, reproduces: bool
) -> None:
    case = {
        "model": "bert",
        "ragged": True,
        "length": {"max_steps": 7},
        "saving": {"save_strategy": "steps", "save_steps": 5},
        "resume": "first",
        "accelerator_config": accelerator,
        "train_sampling_strategy": order,
    }
    drawn = {name: value for name, value in case.items() if value is not None}
    assert compare(drawn, Counter(), reproduces=reproduces) is None


class Fails(transformers.TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.framework
def test_an_original_that_ends_by_an_error_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), quiet_and_clean():
        make_trainer(tmp_path, REFERENCE, callbacks=[Fails()], skip_memory_metrics=False).train()
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)
