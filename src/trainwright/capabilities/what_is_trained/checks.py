"""Checks of what is trained: the loss of chats and of padding, the reach of adapters, and almost everything frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from trainwright._types import Batch, counted
from trainwright.capabilities.what_is_trained.parameters import AdapterReach, read_parameters, trains_norms_alone
from trainwright.capabilities.what_is_trained.roles import ASSISTANT, USER, marks_answers
from trainwright.capabilities.what_is_trained.section import WhatIsTrained, read_section
from trainwright.capabilities.what_is_trained.tokens import read_tokens
from trainwright.support.findings import Check, Finding, error, note, some, warning
from trainwright.support.units import count_text

MOST_OF_QUESTIONS = 0.5  # share of the users' tokens that count, from which the loss is on all of a chat
LEAST_TOKENS = 8  # of a role, before its share says anything


class Facts(Protocol):
    """The facts of the check-up that are read here; `CheckFacts` has them."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def processing_class(self) -> object: ...

    @property
    def batches(self) -> Sequence[Batch] | None: ...

    @property
    def found_by(self) -> frozenset[str]: ...

    @property
    def is_brief(self) -> bool: ...


def look_at_chats(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if the loss is on every token of a chat, or on no token of an answer."""
    tokens = read_tokens(facts.batches or (), facts.model, facts.processing_class)
    if tokens is None or not tokens.is_chat or tokens.trained == 0:  # none at all: `masked_labels`
        return
    answers = tokens.find_role(ASSISTANT)
    questions = tokens.find_role(USER)
    if answers.trained == 0 and answers.tokens:
        yield error(
            f"No token of an answer counts for the loss: {answers.tokens} tokens of the assistant, and "
            f"{tokens.trained} others that count.",
            f"Mask the labels of all but the answers with -100. {_answers_cure(facts.processing_class)}",
        )
    elif questions.tokens >= LEAST_TOKENS and questions.trained > MOST_OF_QUESTIONS * questions.tokens:
        yield warning(
            f"The loss is on every token of the chats: {questions.trained} of {questions.tokens} tokens of the user "
            f"count beside {answers.trained} of {answers.tokens} of the assistant, so the model learns to write "
            "questions too.",
            f"To train answers alone: {_answers_cure(facts.processing_class)}",
        )


def _answers_cure(processing_class: Any) -> str:
    with_marks = (
        "assistant_only_loss=True in TRL's SFTConfig, or apply_chat_template(..., return_assistant_tokens_mask=True)"
    )
    if marks_answers(processing_class):
        return f"{with_marks}, which the chat template's {{% generation %}} marks allow."
    return (
        f"{with_marks}; this chat template has no {{% generation %}} marks around the answers, which both need, so add "
        "them."
    )


def look_at_padding(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if padding counts for the loss."""
    tokens = read_tokens(facts.batches or (), facts.model, facts.processing_class)
    if tokens is not None and tokens.trained_padding:
        total = tokens.trained + tokens.trained_padding
        yield warning(
            f"{tokens.trained_padding} of the {total} tokens that count for the loss in the first step are padding "
            f"({tokens.trained_padding / total:.0%}): the model learns to write padding.",
            "Set their labels to -100: DataCollatorForLanguageModeling(tokenizer, mlm=False) and "
            "DataCollatorForSeq2Seq(tokenizer) do.",
        )


def look_at_adapter(facts: Facts) -> Iterator[Finding]:
    """Yields findings about what an adapter does not reach, or should not."""
    reach = read_parameters(facts.model).adapter if hasattr(facts.model, "peft_config") else None
    if reach is not None:
        yield from _find_mismatches(reach)
        yield from _find_experts(reach)
        if reach.tied and "tied" not in facts.found_by:
            yield warning(
                f"Input and output embeddings are tied, but the adapter has only {reach.tied[0]}: the two drift apart, "
                "and a merged model keeps one of them.",
                "Set ensure_weight_tying=True in the adapter's configuration, or name both, or load the model with "
                "tie_word_embeddings=False.",
            )


def _find_mismatches(reach: AdapterReach) -> Iterator[Finding]:
    for entry, names in (("target_modules", reach.unmatched), ("modules_to_save", reach.unsaved)):
        if names:
            are = "is" if len(names) == 1 else "are"
            yield warning(
                f"{some(names)} of {entry} {are} no module of the model, so nothing is trained there.",
                "Correct the names; model.named_modules() lists them.",
            )


def _find_experts(reach: AdapterReach) -> Iterator[Finding]:
    if reach.changes_routers_alone:
        yield warning(
            f"The adapter changes {counted(len(reach.routers), 'router')} of experts ({some(reach.routers, 2)}) and "
            "nothing else: a router chooses experts, and learns nothing itself.",
            "Name the layers that should learn in target_modules: q_proj, k_proj, v_proj and o_proj for attention; "
            "gate_proj, up_proj and down_proj, or target_parameters, for MLPs and experts.",
        )
    elif reach.routers and not reach.is_router_named:
        yield warning(
            f"The adapter changes {counted(len(reach.routers), 'router')} of experts ({some(reach.routers, 2)}), for "
            "which it was not asked by name: routing may collapse in a fine-tuning.",
            "List target_modules without the router instead of 'all-linear', or name it with the module around it "
            "(target_parameters=['mlp.gate.weight']) if it should be trained.",
        )
    if reach.fused_experts:
        seen = (
            f"The adapter reaches no expert of {counted(len(reach.fused_experts), 'layer')} "
            f"({some(reach.fused_experts, 2)}): they are parameters, and target_modules names modules."
        )
        cure = "To train them, add target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']."
        yield warning(seen, cure) if reach.wants_all else note(seen, cure)


def look_at_frozen(facts: Facts) -> Iterator[Finding]:
    """Yields a finding if norms are all that is trained."""
    if not trains_norms_alone(facts.model):  # found out at once for all other models
        return
    found = read_parameters(facts.model)
    if len(found.kinds) > 1:
        yield warning(
            f"Only norms are trained: {count_text(found.trained)} of {count_text(found.parameters)} parameters; "
            "everything else has requires_grad=False.",
            "Unfreeze what should learn before the trainer is made, or add an adapter.",
        )


def make_section(facts: Facts) -> WhatIsTrained | None:
    """Returns the section of a check-up's report; None if this is no language model."""
    return read_section(facts.batches or (), facts.model, facts.processing_class)


CHECKS = (
    Check(
        name="chat_loss",
        when="batch",
        needs=("batches",),
        about="the loss of a chat: on every token, or on no answer",
        look=look_at_chats,
    ),
    Check(
        name="padding_loss",
        when="batch",
        needs=("batches",),
        about="padding that counts for the loss of a language model",
        look=look_at_padding,
    ),
    Check(
        name="adapter_reach",
        when="start",
        needs=(),
        about="modules and experts that an adapter was to reach and does not, routers that it changes, tied embeddings",
        look=look_at_adapter,
    ),
    Check(name="frozen", when="start", needs=(), about="whether norms are all that is trained", look=look_at_frozen),
)
