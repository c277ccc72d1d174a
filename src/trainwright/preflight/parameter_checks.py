"""Checks of the parameters: non-finite values, missing in the optimizer, broken ties, missing gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from trainwright import model_facts
from trainwright.preflight.check_registry import START, STEP, check, some
from trainwright.preflight.facts import CheckFacts
from trainwright.preflight.finding import ERROR, NOTE, WARNING, Finding


@check(when=START, about="parameters that are NaN or infinite")
def finite_parameters(facts: CheckFacts) -> Iterator[Finding]:
    named = [(n, p) for n, p in facts.model.named_parameters() if p.is_floating_point() and p.device.type != "meta"]
    if facts.max_elements is not None and sum(p.numel() for _, p in named) > facts.max_elements:
        return
    bad = [name for name, parameter in _suspects(named) if not torch.isfinite(parameter).all()]
    if bad:
        yield Finding(
            "finite_parameters", ERROR, f"{len(bad)} parameters hold NaN or infinity: {some(bad)}.",
            "Load the weights again; those that the checkpoint lacked may never have been initialised.",
        )  # fmt: skip


def _suspects(named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters whose sum is not finite, all with non-finite values among them, in one read-back."""
    with torch.no_grad():
        sums = [p.detach().sum(dtype=torch.float32).to(named[0][1].device) for _, p in named]
        if not sums:
            return []
        flags = torch.isfinite(torch.stack(sums)).tolist()
    return [one for one, is_finite in zip(named, flags, strict=True) if not is_finite]


@check(when=START, needs=("optimizer",), about="trainable parameters that the optimizer does not have")
def in_the_optimizer(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.optimizer is not None  # `needs` it
    held = {id(p) for group in facts.optimizer.param_groups for p in group["params"]}
    trainable = [(name, p) for name, p in facts.model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trainable if id(p) not in held]
    if trainable and len(missing) == len(trainable):
        yield Finding(
            "in_the_optimizer", ERROR, "The optimizer holds no parameter of this model: nothing will be learnt.",
            "Make it of model.parameters() after the model has its final form, or let the trainer make it.",
        )  # fmt: skip
    elif missing:
        yield Finding(
            "in_the_optimizer", WARNING,
            f"{len(missing)} trainable parameters are not in the optimizer and stay as they are: {some(missing)}.",
            "Put them into a group, or freeze them with requires_grad_(False) to save their gradients.",
        )  # fmt: skip
    if not trainable:
        yield Finding(
            "in_the_optimizer", ERROR, "No parameter is trainable: all have requires_grad=False.",
            "Unfreeze the head, or add an adapter.",
        )  # fmt: skip


@check(when=START, about="embeddings that should be tied and are not")
def tied(facts: CheckFacts) -> Iterator[Finding]:
    core = model_facts.core_model(facts.model)
    if not getattr(getattr(core, "config", None), "tie_word_embeddings", False):
        return
    if not (hasattr(core, "get_input_embeddings") and hasattr(core, "get_output_embeddings")):
        return
    ends = [getattr(end, "weight", None) for end in (core.get_input_embeddings(), core.get_output_embeddings())]
    if all(isinstance(end, torch.Tensor) for end in ends) and ends[0].data_ptr() != ends[1].data_ptr():  # type: ignore[union-attr]
        yield Finding(
            "tied", WARNING, "config.tie_word_embeddings is True, and input and output embeddings are two tensors: "
            "they will drift apart, and from_pretrained will keep only one.",
            "Call model.tie_weights() after changing either, or set config.tie_word_embeddings=False.",
        )  # fmt: skip


@check(when=STEP, needs=("step",), about="trainable parameters that got no gradient in the first step")
def gradients(facts: CheckFacts) -> Iterator[Finding]:
    names = facts.step.without_gradient if facts.step is not None else ()
    if not names:
        return
    routed = all("expert" in name for name in names)  # a step may give some experts no token
    yield Finding(
        "gradients", NOTE if routed else WARNING,
        f"{len(names)} trainable parameters got no gradient in the first step: {some(names)}.",
        "If forward does not use them, freeze them with requires_grad_(False); else look for a detach() on their way.",
    )  # fmt: skip
