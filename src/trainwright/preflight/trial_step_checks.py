"""Checks by trial: a dry run of the evaluation, and a round trip of the weights."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from trainwright.checkpoint import weights
from trainwright.checkpoint.disk_space import weights_bytes
from trainwright.host import available_bytes
from trainwright.preflight.check_registry import FULL, check, some
from trainwright.preflight.facts import CheckFacts
from trainwright.preflight.finding import ERROR, NOTE, Finding

IN_MEMORY = Path("/dev/shm")  # where the system has it, a file there is in memory
COPIES = 3  # the file, what is read of it, and the model that takes it


@check(when=FULL, about="a batch can be made, and a step taken on it")
def first_step(facts: CheckFacts) -> Iterator[Finding]:
    if facts.failure is not None:
        yield Finding(
            "first_step", ERROR, facts.failure, "Training would end here; the error says what the data or model lack."
        )


@check(when=FULL, needs=("rehearse",), about="what an evaluation yields, by a dry one over a single batch")
def metrics(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.rehearse is not None
    try:
        names = list(facts.rehearse())
    except Exception as error:
        yield Finding(
            "metrics", ERROR, f"An evaluation would fail: {type(error).__name__}: {error}",
            "Mend compute_metrics, the labels of eval_dataset, or metric_for_best_model.",
        )  # fmt: skip
        return
    yield Finding("metrics", NOTE, f"An evaluation gives {some(sorted(names), 8)}.")


@check(when=FULL, about="weights that are saved and loaded again are the same")
def round_trip(facts: CheckFacts) -> Iterator[Finding]:
    size = weights_bytes(facts.model)
    if size * COPIES > available_bytes():
        raise MemoryError(f"no room for {COPIES} copies of the weights")
    lost, altered = _lost_and_altered(facts.model)
    for names, what in ((lost, "are not in the file"), (altered, "come back with other values")):
        if names:
            yield Finding(
                "round_trip", ERROR, f"{len(names)} weights {what} when the model is saved and loaded: {some(names)}.",
                "Look at what state_dict() and load_state_dict() of the model leave out or change; register tensors "
                "with register_parameter or register_buffer.",
            )  # fmt: skip


def _lost_and_altered(model: nn.Module) -> tuple[list[str], list[str]]:
    """Returns the names of weights that a round trip loses or changes, compared in a copy with values erased before."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        weights.save_weights(model, Path(folder))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(float("nan")) if parameter.is_floating_point() else parameter.zero_()
        missing = set(weights.load_weights(twin, Path(folder)).missing_keys)
    before, after = dict(model.named_parameters()), dict(twin.named_parameters())
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    trainable = {name for name, parameter in before.items() if parameter.requires_grad}
    if weights.is_adapter(model):  # the file holds the adapter alone; the base comes from where it came from
        differing = [name for name in differing if name in trainable]
    lost = [name for name in differing if name in missing or bool(torch.isnan(after[name]).any())]
    return lost, [name for name in differing if name not in lost]
