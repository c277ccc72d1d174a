"""Checks of the data: columns, labels, tokens and padding of the first batches, and the first loss."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch
from torch import nn

from trainwright._types import IGNORE_INDEX, Batch, counted
from trainwright.config.resolve import joins_samples
from trainwright.preflight.check_registry import CheckFacts, check
from trainwright.preflight.row_checks import (
    CLASSIFIERS,
    classes_cure,
    count_positions,
    fails_beyond_classes,
    gets_collator_batches,
    num_classes,
    reads_only_text,
    too_long,
)
from trainwright.support import model_facts
from trainwright.support.findings import Finding, error, note, some, warning

INPUTS = ("input_ids", "inputs_embeds", "encoder_outputs")
OF_SEQUENCES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
MOST_SHOWN = 3  # values of labels that a finding names
LIKE_LABELS = ("target", "targets", "class", "classes", "y", "answer", "score", "category", "tags")


@check(when="full", needs=("columns", "taken"), about="columns that are dropped, and why")
def columns(facts: CheckFacts) -> Iterator[Finding]:
    dropped = [name for name in facts.columns or () if name not in (facts.taken or ())]
    if not dropped:
        return
    model = type(facts.model).__name__
    lacks_labels = not any(name in facts.label_names for name in facts.columns or ())
    for name in dropped:
        absent = [one for one in facts.taken or () if one not in (facts.columns or ())]
        close = difflib.get_close_matches(name, absent, n=1, cutoff=0.85)
        if close:
            meant = close[0]
        elif lacks_labels and name.lower() in LIKE_LABELS:
            meant = "labels"
        else:
            meant = None
        if meant is not None:
            yield warning(
                f"The column {name!r} is dropped: {model}.forward does not take it.",
                f"Rename it to {meant!r} if that is its meaning.",
            )
            return
    yield note(f"Dropped, as {model}.forward does not take them: {some(dropped, 8)}.")


@check(when="batch", needs=("batches",), about="token ids in a batch for a model that reads them")
def inputs(facts: CheckFacts) -> Iterator[Finding]:
    batch = facts.batches[0] if facts.batches else {}
    if not reads_only_text(facts.model) or not facts.model_gets_batches:
        return
    given = [batch.get(name) for name in INPUTS]
    if any(isinstance(value, torch.Tensor) for value in given) or not len(batch):
        return
    texts = [name for name in batch if isinstance(batch[name], (list, tuple)) and _are_texts(batch[name])]
    if texts or all(value is None for value in given):
        what = f"{texts[0]!r} is still a text" if texts else f"it has {some(map(repr, batch))}"
        yield error(
            f"The first batch has no token ids: {what}, and {type(facts.model).__name__} takes input_ids.",
            "Tokenize the texts before: dataset.map(lambda row: tokenizer(row['text'], truncation=True)), or in the "
            "data_collator.",
            ends_run=gets_collator_batches(facts),
        )


def _are_texts(values: Sequence[object]) -> bool:
    return len(values) > 0 and all(isinstance(value, str) for value in values)


@check(when="batch", needs=("batches",), about="labels among the entries of a batch")
def labels(facts: CheckFacts) -> Iterator[Finding]:
    batch = facts.batches[0] if facts.batches else {}
    if not facts.label_names or facts.can_return_loss or not facts.loss_is_the_models or "inputs" in facts.found_by:
        return
    found = [name for name in facts.label_names if batch.get(name) is not None]
    of_model = model_facts.find_label_names(facts.model)
    if not found:
        yield error(
            f"No label in the first batch ({some(batch, 8)}); the model's are called {', '.join(facts.label_names)}.",
            f"{model_facts.label_cure(facts.model)} If the labels have another name, set label_names.",
            ends_run=gets_collator_batches(facts) and not any(name in batch for name in of_model),
        )


@check(when="batch", needs=("batches",), about="labels of a classifier that are fractions or floats")
def label_types(facts: CheckFacts) -> Iterator[Finding]:
    core = model_facts.core_model(facts.model)
    config = getattr(core, "config", None)
    number = getattr(config, "num_labels", 1) if type(core).__name__.endswith(CLASSIFIERS) else 1
    # A forward pass with floats makes a problem of several labels of a model that has none yet; that fails too.
    if number == 1 or getattr(config, "problem_type", None) == "regression" or not gets_collator_batches(facts):
        return
    for batch in facts.batches or ():
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            continue
        is_table = labels.dim() == 2 and labels.shape[1] == number and type(core).__name__.endswith(OF_SEQUENCES)
        if is_table and not labels.is_floating_point():
            yield error(
                f"The labels are whole numbers in rows of {number}, one for each class of "
                f"{type(facts.model).__name__}, whose loss of several labels takes floats.",
                "For several labels convert them: [float(one) for one in row['labels']], with "
                'problem_type="multi_label_classification". For one label give the number of its class.',
                ends_run=fails_beyond_classes(facts),
            )
            return
        if not labels.is_floating_point() or labels.dim() != 1:
            continue
        shown = ", ".join(f"{value:g}" if value % 1 else f"{value:.1f}" for value in labels[:MOST_SHOWN].tolist())
        yield error(
            f"The labels are floats ({shown}), but {type(facts.model).__name__} chooses one of {number} classes, which "
            "whole numbers name.",
            "Convert them: df['label'].astype(int), or dataset.cast_column('label', Value('int64')). To learn a "
            "number, load the model with num_labels=1.",
            ends_run=fails_beyond_classes(facts),
        )
        return


MUCH_PADDING = 0.5
MUCH_MASKED = 0.97  # a masked language model masks 0.85 of its labels
MANY_ROWS = 0.1
NO_LIMIT = 10**6  # a tokenizer without a limit reports 1e30


def masks_at_random(model: nn.Module) -> bool:
    """Returns whether a model fills in words, which its collator hides anew each time."""
    return type(model_facts.core_model(model)).__name__.endswith(("ForMaskedLM", "ForPreTraining"))


@check(when="batch", needs=("batches",), about="the share of labels that are masked (-100), and rows without any other")
def masked_labels(facts: CheckFacts) -> Iterator[Finding]:
    labels = [one for batch in facts.batches or () for one in _label_ids(facts, batch)]
    total = sum(one.numel() for one in labels)
    if total == 0:
        return
    masked = sum(int(one.eq(IGNORE_INDEX).sum()) for one in labels)
    if masked == total:
        yield error(
            f"All {total} labels of the first step are {IGNORE_INDEX}: its loss is meaningless.",
            "Check where labels are masked: the response template may not be found, the chat template may have no "
            "{% generation %} marks around answers, or the prompt may fill the row.",
        )
        return
    rows = [one.flatten(1).eq(IGNORE_INDEX).all(dim=1) for one in labels if one.dim() > 1]
    num_rows = sum(len(one) for one in rows)
    empty = sum(int(one.sum()) for one in rows)
    if masked / total > MUCH_MASKED:
        yield warning(
            f"{masked / total:.1%} of the labels of the first step are masked.",
            "Shorten prompts, or raise the length at which samples are cut.",
        )
    elif num_rows and empty / num_rows >= MANY_ROWS and not masks_at_random(facts.model):
        have = "has" if empty == 1 else "have"
        yield warning(
            f"{empty} of {counted(num_rows, 'row')} of the first step {have} no label that counts.",
            "Remove such samples: they cost time and teach nothing.",
        )


@check(when="batch", needs=("batches",), about="the share of tokens that are padding")
def padding(facts: CheckFacts) -> Iterator[Finding]:
    masks = [mask for batch in facts.batches or () if (mask := _mask(batch)) is not None]
    total = sum(mask.numel() for mask in masks)
    if total == 0:
        return
    share = 1 - sum(int(mask.ne(0).sum()) for mask in masks) / total
    if share > MUCH_PADDING:
        packs = ", or packing='best_fit' with packing_length=..." if model_facts.is_causal_lm(facts.model) else ""
        yield warning(
            f"{share:.0%} of the tokens of the first step are padding.",
            "Pad to the longest of a batch, not to a fixed length; then max_tokens_per_batch=... in place of "
            f"per_device_train_batch_size, or train_sampling_strategy='group_by_length'{packs}.",
        )


@check(
    when="batch", needs=("batches",), about="rows that were cut at the longest length, and rows too long for the model"
)
def truncation(facts: CheckFacts) -> Iterator[Finding]:
    lengths = [length for batch in facts.batches or () for length in _row_lengths(batch)]
    positions = count_positions(facts.model)
    if not lengths or "long_rows" in facts.found_by:
        return
    if positions is not None and max(lengths) > positions:
        name = type(facts.model).__name__
        longest = max(lengths)
        said = f"A row has {counted(longest, 'token')}, but {name} was made for {positions}."
        yield too_long(facts, said, longest=longest)
        return
    limit = getattr(facts.processing_class, "model_max_length", None)
    limit = min(limit if limit is not None and limit < NO_LIMIT else NO_LIMIT, positions or NO_LIMIT)
    cut = sum(length >= limit for length in lengths)
    if not joins_samples(facts.args) and cut / len(lengths) >= MANY_ROWS:
        have = "has" if cut == 1 else "have"
        yield warning(
            f"{cut} of {counted(len(lengths), 'row')} of the first step {have} all of {limit} tokens: probably cut.",
            "Split long texts into several samples, or make sure that the relevant part comes first.",
        )


@check(
    when="batch",
    needs=("batches", "processing_class"),
    about="pad token = end token, and every end masked with the padding",
)
def pad_is_eos(facts: CheckFacts) -> Iterator[Finding]:
    pad, eos = (getattr(facts.processing_class, f"{name}_token_id", None) for name in ("pad", "eos"))
    if pad is None or pad != eos:
        return
    ends = masked = 0
    for batch in facts.batches or ():
        ids = batch.get("input_ids")
        labels = batch.get("labels")
        mask = _mask(batch)
        if not isinstance(ids, torch.Tensor) or not isinstance(labels, torch.Tensor) or ids.shape != labels.shape:
            continue
        is_end = ids.eq(eos) if mask is None else ids.eq(eos) & mask.ne(0)
        ends += int(is_end.sum())
        masked += int((is_end & labels.eq(IGNORE_INDEX)).sum())
    if ends and masked == ends:
        yield warning(
            f"pad and end are the same token ({eos}), and all {ends} ends of the first step are "
            "masked with the padding: the model will not learn to stop.",
            "Give the tokenizer a separate pad token, and the model a row for it (resize_token_embeddings).",
        )


@check(when="batch", needs=("batches",), about="token ids and labels against the rows of the embedding and the classes")
def vocabulary(facts: CheckFacts) -> Iterator[Finding]:
    rows = _input_rows(facts.model)
    is_said = False
    for name in ("input_ids", "decoder_input_ids"):
        wrong = _outside([b.get(name) for b in facts.batches or ()], rows)
        if wrong is not None:
            is_said = True
            yield error(
                f"{name} holds {wrong}, but the model has embeddings for 0 to {rows - 1}.",  # type: ignore[operator]
                "Use the tokenizer that belongs to the model, or model.resize_token_embeddings(len(tokenizer)).",
                ends_run=gets_collator_batches(facts) and reads_only_text(facts.model),
            )
    if is_said and not type(model_facts.core_model(facts.model)).__name__.endswith(CLASSIFIERS):
        return  # labels of a language model are the same tokens
    number = num_classes(facts.model)
    labels = [one for batch in facts.batches or () for one in _label_ids(facts, batch)] if number else []
    wrong = _outside([one[one.ne(IGNORE_INDEX)] for one in labels], number)
    if wrong is not None and "classes" not in facts.found_by:
        yield error(
            f"A label is {wrong}, but the model scores 0 to {number - 1}.",  # type: ignore[operator]
            classes_cure(facts.model),
            ends_run=fails_beyond_classes(facts),
        )


def _label_ids(facts: CheckFacts, batch: Batch) -> list[torch.Tensor]:
    return [batch[name] for name in facts.label_names if _is_whole(batch.get(name))]


def _is_whole(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() > 0


def _mask(batch: Batch) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _row_lengths(batch: Batch) -> list[int]:
    """Returns the lengths of samples by their positions, which restart with each sample if several share a row."""
    mask = _mask(batch)
    ids = batch.get("input_ids")
    positions = batch.get("position_ids")
    if isinstance(ids, torch.Tensor) and isinstance(positions, torch.Tensor) and ids.shape == positions.shape:
        return _lengths_by_position(positions, mask)
    if mask is not None:
        return [int(length) for length in mask.ne(0).sum(dim=1).tolist()]
    return [ids.shape[1]] * ids.shape[0] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else []


def _lengths_by_position(positions: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    lengths = []
    for row in range(len(positions)):
        kept = positions[row] if mask is None else positions[row][mask[row].ne(0)]
        is_first = torch.ones_like(kept, dtype=torch.bool)
        is_first[1:] = kept[1:] <= kept[:-1]
        starts = [*is_first.nonzero().flatten().tolist(), len(kept)]
        lengths += [end - start for start, end in itertools.pairwise(starts)]
    return lengths


def _input_rows(model: nn.Module) -> int | None:
    core = model_facts.core_model(model)
    try:
        embedding = core.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _outside(tensors: Sequence[object], limit: int | None) -> int | None:
    """Returns the first value below 0 or not below the limit."""
    for tensor in tensors:
        if limit is not None and _is_whole(tensor) and tensor.numel():
            low, high = (int(one) for one in torch.stack(torch.aminmax(tensor)).tolist())
            if low < 0 or high >= limit:
                return low if low < 0 else high
    return None


FAR = 2.0  # multiple of the loss of guessing, plus one: an untrained model is near 1
FAR_FROM_THE_MEAN = 100.0  # multiple of the variance of the labels


@check(when="step", needs=("step",), about="the first loss is a number")
def finite_loss(facts: CheckFacts) -> Iterator[Finding]:
    loss = facts.step.loss if facts.step is not None else None
    if loss is not None and not math.isfinite(loss):
        yield error(
            f"The loss of the first step is {loss}.",
            "Look for inputs or labels that are not finite, a logarithm or division in the loss, or fp16 "
            "overflow (bf16=True has the range of fp32).",
        )


@check(when="step", needs=("step",), about="the first loss is near that of guessing, or better")
def loss_near_chance(facts: CheckFacts) -> Iterator[Finding]:
    loss = facts.step.loss if facts.step is not None else None
    if loss is None or not math.isfinite(loss) or not facts.loss_is_the_models:
        return
    classes = num_classes(facts.model)
    if classes is not None and loss > FAR * math.log(classes) + 1:
        yield warning(
            f"The first loss is {loss:.3g}; guessing among {classes} gives {math.log(classes):.3g}.",
            "Check whether labels and inputs match (shifted twice? another tokenizer?), and how the head "
            "is initialised.",
        )
    spread = _compute_label_variance(facts)
    if spread and loss > FAR_FROM_THE_MEAN * spread:
        yield warning(
            f"The first loss is {loss:.3g}; always answering the mean of the labels gives {spread:.3g}.",
            "Standardize the labels (subtract their mean, divide by their spread).",
        )


def _compute_label_variance(facts: CheckFacts) -> float | None:
    """Returns the squared error of always predicting the mean, for regressions by models of transformers."""
    config = getattr(model_facts.core_model(facts.model), "config", None)
    labels = facts.batches[0].get("labels") if facts.batches else None
    if getattr(config, "num_labels", None) != 1 or not isinstance(labels, torch.Tensor) or labels.numel() < 2:
        return None
    return float(labels.float().var())
