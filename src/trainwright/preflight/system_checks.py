"""Checks of the environment: output directory, disk, token of the Hub, precision of the hardware, length of the run."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator

import torch

from trainwright.config import resolve
from trainwright.preflight.check_registry import CheckFacts, Finding, check
from trainwright.preflight.memory.memory_plan import in_words


@check(when="start", needs=("folder",), about="output_dir can be written to")
def directory(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.folder is not None
    there = next(path for path in (facts.folder, *facts.folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there.is_dir() else "is a file"
        yield Finding("error", f"output_dir={str(facts.folder)!r}: {there} {what}.", "Choose another one.")


@check(
    when="start",
    needs=("folder", "checkpoint_bytes", "free_bytes", "plan"),
    about="room for the checkpoints to be kept",
)
def disk(facts: CheckFacts) -> Iterator[Finding]:
    saves = _num_saves(facts)
    if not saves or facts.checkpoint_bytes is None or facts.free_bytes is None:
        return
    keep = resolve.checkpoint(facts.args).keep_last
    kept = saves if keep is None else min(saves, keep + 1)  # the newest is there before the oldest goes
    each, needed = in_words(facts.checkpoint_bytes), facts.checkpoint_bytes * kept
    if needed > facts.free_bytes:
        yield Finding(
            "warning", f"{kept} checkpoints of about {each} each are to be kept, {in_words(needed)}; "
            f"{in_words(facts.free_bytes)} are free at {facts.folder}.",
            "Set save_total_limit, save less often, or save_only_model=True.",
        )  # fmt: skip
    elif not facts.is_brief:
        yield Finding("note", f"{kept} checkpoints of about {each} each will be kept.")


def _num_saves(facts: CheckFacts) -> int:
    plan, strategy = facts.plan, str(getattr(facts.args.save_strategy, "value", facts.args.save_strategy))
    if plan is None or plan.has_open_end or strategy not in ("steps", "epoch"):
        return 0 if strategy == "no" else 1
    if strategy == "epoch":
        return plan.num_epochs
    every = facts.args.save_steps
    return int(plan.max_steps // (every if every >= 1 else max(math.ceil(every * plan.max_steps), 1)))


@check(when="start", about="a token for the hub, where something is to be uploaded")
def hub_token(facts: CheckFacts) -> Iterator[Finding]:
    if not facts.args.push_to_hub or facts.args.hub_token:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        yield Finding(
            "error", "push_to_hub=True, and there is no token for the hub.",
            "Run `hf auth login`, set HF_TOKEN, or pass hub_token.",
        )  # fmt: skip


@check(when="start", about="number formats: of the weights, of the arithmetic, and what the hardware has")
def precision(facts: CheckFacts) -> Iterator[Finding]:
    mixed = facts.args.mixed_precision
    sizes = Counter[torch.dtype]()
    for parameter in facts.model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    if mixed == "bf16" and facts.supports_bf16 is False:
        yield Finding("error", f"bf16=True, and {facts.device} does not compute in bf16.", "Use fp16=True.")
    if mixed == "fp16" and facts.device.type == "cpu":
        yield Finding("warning", "fp16=True on a CPU: slow, and it loses small gradients.", "Use bf16=True.")
    if sizes[torch.float16]:
        yield Finding(
            "warning", f"{sizes[torch.float16]} trainable weights are fp16: small updates round to nothing, "
            "and gradients underflow without a scaled loss.",
            "Load the model with dtype=torch.float32 and set bf16=True or fp16=True.",
        )  # fmt: skip
    if sizes[torch.float64]:
        yield Finding(
            "warning", f"{sizes[torch.float64]} trainable weights are float64: twice the memory, and slow.",
            "model.float(), unless you need it.",
        )  # fmt: skip
    if sizes[torch.bfloat16] and not facts.is_brief:
        yield Finding(
            "note", f"{sizes[torch.bfloat16]} trainable weights are bf16: an update below 1/256 of a weight "
            "is rounded away.",
            "Keep the weights in fp32 and set bf16=True where memory allows.",
        )  # fmt: skip
    if mixed == "no" and facts.device.type == "cuda" and facts.supports_bf16 and not facts.is_brief:
        yield Finding("note", "This GPU computes in bf16 several times as fast.", "Try bf16=True.")


@check(when="start", needs=("plan",), about="the effective batch, and whether the data fill it")
def effective_batch(facts: CheckFacts) -> Iterator[Finding]:
    plan = facts.plan
    assert plan is not None
    if not plan.has_open_end and plan.num_examples and plan.batches_per_epoch < plan.micro_batches:
        yield Finding(
            "warning", f"An optimizer step is to take {plan.micro_batches} batches, and an epoch has "
            f"{plan.batches_per_epoch}: steps are of {plan.num_examples} samples, not {plan.total_batch_size}.",
            "Lower gradient_accumulation_steps, or add data.",
        )  # fmt: skip
    elif not facts.is_brief:
        length = "until the data end" if plan.has_open_end else f"{plan.max_steps} steps"
        yield Finding("note", f"{plan.total_batch_size} samples a step, {length}.")


@check(when="full", needs=("plan", "step"), about="how long it will take")
def time_left(facts: CheckFacts) -> Iterator[Finding]:
    plan, seconds = facts.plan, facts.step.seconds if facts.step is not None else None
    if plan is None or plan.has_open_end or seconds is None:
        return
    total, limit = plan.max_steps * seconds, resolve.checkpoint(facts.args).max_train_s
    if limit is not None and total > limit:
        yield Finding(
            "warning", f"{plan.max_steps} steps of {seconds:.3g} s take {_duration(total)}, and "
            f"max_train_time ends the run after {_duration(limit)}, near step {int(limit / seconds)}.",
            "Raise max_train_time, or plan to resume.",
        )  # fmt: skip
        return
    yield Finding(
        "note", f"About {_duration(total)} for {plan.max_steps} steps of {seconds:.3g} s, without "
        "evaluations and saves.",
    )  # fmt: skip


def _duration(seconds: float) -> str:
    unit, name = next(
        (one for one in ((86400, "days"), (3600, "hours"), (60, "minutes")) if seconds >= one[0]), (1, "s")
    )
    return f"{seconds / unit:.3g} {name}"
