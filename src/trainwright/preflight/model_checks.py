"""Checks of the model (its parameters; trials of a step, an evaluation and a round trip) and of the environment."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from trainwright._types import counted
from trainwright.checkpoint import weights
from trainwright.checkpoint.async_writer import weights_bytes
from trainwright.config import resolve
from trainwright.config.enums import word
from trainwright.distributed.device import get_kind
from trainwright.evaluation.outputs import find_target_names, quote_names
from trainwright.preflight.check_registry import CheckFacts, check
from trainwright.support import model_facts
from trainwright.support.findings import Finding, error, note, some, warning
from trainwright.support.host import available_bytes
from trainwright.support.metric_order import order_metrics
from trainwright.support.optimizer_facts import keeps_small_updates
from trainwright.support.tensor_tree import storage_place
from trainwright.support.units import count_text, duration_text, size_text


@check(when="start", about="parameters that are NaN or infinite")
def finite_parameters(facts: CheckFacts) -> Iterator[Finding]:
    named = [(n, p) for n, p in facts.model.named_parameters() if p.is_floating_point() and p.device.type != "meta"]
    if facts.max_elements is not None and sum(p.numel() for _, p in named) > facts.max_elements:
        return
    bad = [name for name, parameter in _suspects(named) if not torch.isfinite(parameter).all()]
    if bad:
        yield error(
            f"{counted(len(bad), 'parameter')} with NaN or infinity: {some(bad)}.",
            "Load the weights again; weights missing in the checkpoint may never have been initialised.",
        )


def _suspects(named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters with a non-finite sum, which include all with non-finite values, in one read-back."""
    with torch.no_grad():
        sums = [p.detach().sum(dtype=torch.float32).to(named[0][1].device) for _, p in named]
        if not sums:
            return []
        flags = torch.isfinite(torch.stack(sums)).tolist()
    return [one for one, is_finite in zip(named, flags, strict=True) if not is_finite]


@check(when="start", needs=("optimizer",), about="trainable parameters that no rate trains")
def in_the_optimizer(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.optimizer is not None  # `needs` it
    held = {id(p) for group in facts.optimizer.param_groups for p in group["params"]}
    trainable = [(name, p) for name, p in facts.model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trainable if id(p) not in held]
    if trainable and len(missing) == len(trainable):
        yield error(
            "The optimizer holds no parameter of this model: nothing will be learnt.",
            "Make it from model.parameters() after the model has its final form, or let the trainer make it.",
        )
    elif missing:
        yield warning(
            f"{counted(len(missing), 'trainable parameter')} not in the optimizer, so not trained: {some(missing)}.",
            "Put them into a group, or freeze them with requires_grad_(False) to save their gradients.",
        )
    # A schedule may begin at 0, so what counts is from where it starts; a schedule of the user may set any rate later.
    rates = [group.get("initial_lr", group.get("lr")) for group in facts.optimizer.param_groups]
    if rates and all(rate == 0 for rate in rates) and not facts.has_own_schedule:
        yield warning("The learning rate is 0, so no weight changes.", "Set learning_rate.")
    if not trainable:
        said = "No parameter is trainable: all have requires_grad=False."
        cure = "Unfreeze the head, or add an adapter."
        if getattr(facts.model, "peft_config", None):
            cure = (
                "Load the adapter with PeftModel.from_pretrained(model, path, is_trainable=True), or make a new one "
                "with inference_mode=False."
            )
        yield error(said, cure)


@check(when="start", about="embeddings that should be tied and are not")
def tied(facts: CheckFacts) -> Iterator[Finding]:
    core = model_facts.core_model(facts.model)
    if not getattr(getattr(core, "config", None), "tie_word_embeddings", False):
        return
    if not (hasattr(core, "get_input_embeddings") and hasattr(core, "get_output_embeddings")):
        return
    ends = [getattr(end, "weight", None) for end in (core.get_input_embeddings(), core.get_output_embeddings())]
    there = [end for end in ends if isinstance(end, torch.Tensor)]
    if len(there) == 2 and storage_place(there[0]) != storage_place(there[1]):
        yield warning(
            "config.tie_word_embeddings is True, but input and output embeddings are two tensors: "
            "they will drift apart, and from_pretrained will keep only one.",
            "Call model.tie_weights() after changing either, or set config.tie_word_embeddings=False.",
        )


@check(when="step", needs=("step",), about="trainable parameters that got no gradient in the first step")
def gradients(facts: CheckFacts) -> Iterator[Finding]:
    names = facts.step.without_gradient if facts.step is not None else ()
    if not names:
        return
    routed = all("expert" in name for name in names)  # a step may route no token to some experts
    yield Finding(
        "note" if routed else "warning",
        f"{counted(len(names), 'trainable parameter')} got no gradient in the first step: {some(names)}.",
        "If forward does not use them, freeze them with requires_grad_(False); otherwise, look for a detach() in "
        "between.",
    )


IN_MEMORY = Path("/dev/shm")  # files there are in memory, if the system has this folder
COPIES = 3  # the file, its contents when read, and the model that loads them


@check(when="full", about="a batch can be made, and a step taken on it")
def first_step(facts: CheckFacts) -> Iterator[Finding]:
    if facts.failure is not None:
        yield error(facts.failure, "Training would end here; see the error for the cause in the data or the model.")


@check(when="full", needs=("rehearse",), about="the results of a dry evaluation over a single batch")
def metrics(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.rehearse is not None
    try:
        names = list(facts.rehearse())
    except Exception as failure:
        yield error(
            f"An evaluation would fail: {type(failure).__name__}: {failure}",
            "Fix compute_metrics, the labels of eval_dataset, or metric_for_best_model.",
        )
        return
    if names:
        yield note(f"An evaluation returns {some(order_metrics(sorted(names)), 8)}.")
        return
    targets = find_target_names(facts.batches[0], facts.label_names) if facts.batches else []
    cure = "Name the entries of a batch that are labels with label_names=[...], or return a loss without labels."
    if targets:
        cure = f"If {', '.join(targets)} is the target, set label_names={quote_names(targets)}."
    yield warning("An evaluation returns no loss and no metric: its batches have no labels by a known name.", cure)


@check(when="full", about="weights that are saved and loaded again are the same")
def round_trip(facts: CheckFacts) -> Iterator[Finding]:
    size = weights_bytes(facts.model)
    if size * COPIES > available_bytes():
        raise MemoryError(f"no room for {COPIES} copies of the weights")
    lost, altered = _lost_and_altered(facts.model)
    for names, what in ((lost, "not in the file"), (altered, "with other values than before")):
        if names:
            yield error(
                f"A model that is saved and loaded has {counted(len(names), 'weight')} {what}: {some(names)}.",
                "Check state_dict() and load_state_dict() of the model for dropped or changed entries; register "
                "tensors with register_parameter or register_buffer.",
            )


def _lost_and_altered(model: nn.Module) -> tuple[list[str], list[str]]:
    """Returns the names of weights that a round trip loses or changes, compared in a copy with erased values."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        weights.save_weights(model, Path(folder))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(float("nan")) if parameter.is_floating_point() else parameter.zero_()
        missing = set(weights.load_weights(twin, Path(folder)).missing_keys)
    before = dict(model.named_parameters())
    after = dict(twin.named_parameters())
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    trainable = {name for name, parameter in before.items() if parameter.requires_grad}
    if weights.is_adapter(model):  # the file holds only the adapter; the base model is loaded from its own source
        differing = [name for name in differing if name in trainable]
    lost = [name for name in differing if name in missing or bool(torch.isnan(after[name]).any())]
    return lost, [name for name in differing if name not in lost]


@check(when="start", needs=("folder",), about="output_dir can be written to")
def directory(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.folder is not None
    there = next(path for path in (facts.folder, *facts.folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there.is_dir() else "is a file"
        yield error(f"output_dir={str(facts.folder)!r}: {there} {what}.", "Choose another one.")


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
    kept = saves if keep is None else min(saves, keep + 1)  # the newest exists before the oldest is deleted
    each = size_text(facts.checkpoint_bytes)
    needed = facts.checkpoint_bytes * kept
    if needed > facts.free_bytes:
        yield warning(
            f"{counted(kept, 'checkpoint')} of about {each} to be kept, {size_text(needed)}; "
            f"{size_text(facts.free_bytes)} are free at {facts.folder}.",
            "Set save_total_limit, save less often, or save_only_model=True.",
        )
    elif not facts.is_brief:
        yield note(f"{counted(kept, 'checkpoint')} of about {each} will be kept.")


def _num_saves(facts: CheckFacts) -> int:
    plan = facts.plan
    strategy = word(facts.args.save_strategy)
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
        cure = "Run `hf auth login`, set HF_TOKEN, or pass hub_token."
        yield error("No token is set, and push_to_hub=True needs one.", cure)


def _updated_in_place(facts: CheckFacts, dtype: torch.dtype) -> int:
    """Returns the number of weights of a type that the optimizer updates, and whose small updates are lost."""
    optimizer = facts.optimizer
    if optimizer is None or keeps_small_updates(optimizer):
        return 0
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(parameter) for parameter in facts.model.parameters()}
    return sum(p.numel() for p in held if p.dtype is dtype and p.requires_grad and id(p) in own)


@check(when="start", about="number formats of weights, arithmetic and hardware")
def precision(facts: CheckFacts) -> Iterator[Finding]:
    mixed = facts.args.mixed_precision
    sizes = Counter[torch.dtype]()
    for parameter in facts.model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    if mixed == "bf16" and facts.supports_bf16 is False:
        yield error(f"bf16=True, and {facts.device} does not compute in bf16.", "Use fp16=True.")
    if mixed == "fp16" and facts.device.type == "cpu":
        yield warning("fp16=True on a CPU: slow, and it loses small gradients.", "Use bf16=True.")
    if sizes[torch.float16]:
        yield warning(
            f"{sizes[torch.float16]} trainable weights are fp16: small updates round to nothing, "
            "and gradients underflow without a scaled loss.",
            "Load the model with dtype=torch.float32 and set bf16=True or fp16=True.",
        )
    if sizes[torch.float64]:
        said = f"{sizes[torch.float64]} trainable weights are float64: twice the memory, and slow."
        yield warning(said, "Use model.float(), unless you need float64.")
    in_place = _updated_in_place(facts, torch.bfloat16)
    if in_place:
        yield warning(
            f"{count_text(in_place)} weights are trained in bf16 and updated in place: an update below 1/256 of a "
            "weight rounds to nothing.",
            "Keep fp32 master weights: load the model with dtype=torch.float32 and set bf16=True. Where memory does "
            "not allow that, optim='adamw_bf16' makes up for the rounding.",
        )
    elif sizes[torch.bfloat16] and not facts.is_brief:
        yield note(
            f"{sizes[torch.bfloat16]} trainable weights are bf16: an update below 1/256 of a weight is rounded away, "
            "unless the optimizer or the backend makes up for it.",
            "Keep the weights in fp32 and set bf16=True where memory allows.",
        )
    if mixed == "no" and get_kind(facts.device).is_accelerator and facts.supports_bf16 and not facts.is_brief:
        yield note("This GPU computes in bf16 several times as fast.", "Try bf16=True.")


@check(when="start", needs=("plan",), about="the effective batch, and whether the data fill it")
def effective_batch(facts: CheckFacts) -> Iterator[Finding]:
    plan = facts.plan
    assert plan is not None
    if not plan.has_open_end and plan.num_examples and plan.batches_per_epoch < plan.micro_batches:
        yield warning(
            f"An optimizer step should take {plan.micro_batches} batches, but an epoch has only "
            f"{plan.batches_per_epoch}: {counted(plan.num_examples, 'sample')} a step instead of "
            f"{plan.total_batch_size}.",
            "Lower gradient_accumulation_steps, or add data.",
        )
    elif not facts.is_brief:
        length = "until the data end" if plan.has_open_end else counted(plan.max_steps, "step")
        yield note(f"{counted(plan.total_batch_size, 'sample')} a step, {length}.")


@check(when="full", needs=("plan", "step"), about="how long it will take")
def time_left(facts: CheckFacts) -> Iterator[Finding]:
    plan = facts.plan
    seconds = facts.step.seconds if facts.step is not None else None
    if plan is None or plan.has_open_end or seconds is None:
        return
    total = plan.max_steps * seconds
    limit = resolve.checkpoint(facts.args).max_train_s
    if limit is not None and total > limit:
        yield warning(
            f"{counted(plan.max_steps, 'step')} of {seconds:.3g} s: {duration_text(total)}, but "
            f"max_train_time ends the run after {duration_text(limit)}, near step {int(limit / seconds)}.",
            "Raise max_train_time, or plan to resume.",
        )
        return
    length = f"About {duration_text(total)} for {counted(plan.max_steps, 'step')} of {seconds:.3g} s"
    yield note(f"{length}, without evaluations and saves.")
