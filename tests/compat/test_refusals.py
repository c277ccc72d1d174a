"""What transformers trains, ours trains to the same weights; what ours refuses, transformers or the docs refuse too."""

from __future__ import annotations

import copy
import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.errors import LegacyNameWarning

from .._support.small import OURS, REFERENCE, Side, StopAt, data, differing, make_trainer, module
from ..parity.sides import Outcome
from .refusals import CALLS, PROTECTED, RAISES, TRAINS, Attempt

pytestmark = pytest.mark.framework
DOCS = Path(__file__).parents[2] / "docs" / "migrate.md"


@contextmanager
def same_process() -> Iterator[None]:
    """Arguments of the original set variables of the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(side: Side, folder: Path, parts: dict[str, Any]) -> Outcome:
    parts = {"log_level": "warning", **parts}
    resume = parts.pop("resume", None)
    if not {"model", "model_init"} & parts.keys():
        parts["model"] = module(0.0)
    if isinstance(parts.get("model"), torch.nn.Module):
        parts["model"] = copy.deepcopy(parts["model"])
    if (sampler := parts.pop("sampler", None)) is not None:
        parts["cls"] = type("Own", (side.trainer,), {"_get_train_sampler": lambda self, dataset=None: sampler})
    with same_process():
        trainer = make_trainer(folder / side.name, side, **parts)
        return side.train(trainer, **({} if resume is None else {"resume_from_checkpoint": resume}))


@pytest.mark.parametrize(("name", "parts", "words"), TRAINS, ids=[row[0] for row in TRAINS])
def test_it_trains_as_with_transformers_and_a_warning_says_the_words(
    name: str, parts: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = run(REFERENCE, tmp_path, parts)
    caplog.clear()
    ours = run(OURS, tmp_path, parts)
    assert differing(ours.weights, theirs.weights) == {}
    assert (ours.global_step, ours.log) == (theirs.global_step, theirs.log)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("trainwright")]
    assert any(all(word in message for word in words.split()) for message in said) if words else said == [], said


@pytest.mark.parametrize(("name", "parts", "where"), RAISES, ids=[row[0] for row in RAISES])
def test_the_original_raises_too(name: str, parts: dict[str, Any], where: str, tmp_path: Path) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 -- of whatever kind the original raises
        run(REFERENCE, tmp_path, parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyNameWarning)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run(OURS, tmp_path, parts)
    assert type(caught.value).__module__.startswith(("trainwright", "builtins"))
    places = places_of(caught.value)
    is_collected = where.startswith(("rules.", "config.")) and "config.rules.stages.refuse" in places
    assert where in places or is_collected  # the problems of the arguments are told together


@pytest.mark.parametrize(("name", "attempt", "where"), CALLS, ids=[row[0] for row in CALLS])
def test_the_original_raises_at_the_same_call(name: str, attempt: Attempt, where: str, tmp_path: Path) -> None:
    with same_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception):  # noqa: B017, PT011 -- of whatever kind the original raises
            attempt(REFERENCE, tmp_path)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            attempt(OURS, tmp_path)
    assert where in places_of(caught.value)


def places_of(error: BaseException | None) -> set[str]:
    """The functions of ours through which an error and those behind it came."""
    found = set()
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = str(frame.f_globals.get("__name__", ""))
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            found.add(f"{module}.{name}".removeprefix("trainwright."))
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("sentence", [sentence for sentence, _ in PROTECTED])
def test_what_is_refused_here_alone_is_in_the_docs(sentence: str) -> None:
    assert sentence in DOCS.read_text(encoding="utf-8").partition("## What is refused")[2].replace("\n  ", " ")


@pytest.mark.parametrize(("stop", "size"), [(3, 30), (3, 20), (7, 40), (5, 10)])
def test_a_resume_with_other_data_continues_as_with_transformers(stop: int, size: int, tmp_path: Path) -> None:
    outcomes = []
    for side in (OURS, REFERENCE):
        folder = tmp_path / side.name
        settings = {"max_steps": 20, "log_level": "error"}
        make_trainer(folder, side, model=module(0.0), callbacks=[StopAt(stop)], **settings).train()
        second = make_trainer(folder, side, model=module(0.0), train_dataset=data.vectors(size), **settings)
        outcomes.append(side.train(second, resume_from_checkpoint=str(folder / f"checkpoint-{stop}")))
    ours, theirs = outcomes
    assert differing(ours.weights, theirs.weights) == {}
    assert ours.log == theirs.log
