"""Checks of the first loss: finite, and near the loss of a random guess."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from trainwright import model_facts
from trainwright.preflight.check_registry import STEP, check
from trainwright.preflight.facts import CheckFacts
from trainwright.preflight.finding import ERROR, WARNING, Finding
from trainwright.preflight.token_checks import num_classes

FAR = 2.0  # times what chance gives, and one more: a model that knows nothing is near 1
FAR_FROM_THE_MEAN = 100.0  # times the variance of the labels


@check(when=STEP, needs=("step",), about="the first loss is a number")
def finite_loss(facts: CheckFacts) -> Iterator[Finding]:
    loss = facts.step.loss if facts.step is not None else None
    if loss is not None and not math.isfinite(loss):
        yield Finding(
            "finite_loss", ERROR, f"The loss of the first step is {loss}.",
            "Look for inputs or labels that are not finite, a logarithm or division in the loss, or fp16 that "
            "overflows (bf16=True has the range of fp32).",
        )  # fmt: skip


@check(when=STEP, needs=("step",), about="the first loss is near what chance gives, or better")
def loss_near_chance(facts: CheckFacts) -> Iterator[Finding]:
    loss = facts.step.loss if facts.step is not None else None
    if loss is None or not math.isfinite(loss) or not facts.loss_is_the_models:
        return
    classes = num_classes(facts.model)
    if classes is not None and loss > FAR * math.log(classes) + 1:
        yield Finding(
            "loss_near_chance", WARNING, f"The first loss is {loss:.3g}; guessing among {classes} gives "
            f"{math.log(classes):.3g}.",
            "Look whether labels and inputs belong together (shifted twice? another tokenizer?), and at how the head "
            "is initialised.",
        )  # fmt: skip
    spread = _variance_of_labels(facts)
    if spread and loss > FAR_FROM_THE_MEAN * spread:
        yield Finding(
            "loss_near_chance", WARNING, f"The first loss is {loss:.3g}; always answering the mean of the labels "
            f"gives {spread:.3g}.",
            "Bring the labels near 0 and 1 (subtract their mean, divide by their spread).",
        )  # fmt: skip


def _variance_of_labels(facts: CheckFacts) -> float | None:
    """Returns the squared error of always predicting the mean, for regressions by models of transformers."""
    config = getattr(model_facts.core_model(facts.model), "config", None)
    labels = facts.batches[0].get("labels") if facts.batches else None
    if getattr(config, "num_labels", None) != 1 or not isinstance(labels, torch.Tensor) or labels.numel() < 2:
        return None
    return float(labels.float().var())
