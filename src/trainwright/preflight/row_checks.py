"""Checks of single rows of the data: labels, lengths, and evaluation rows in the training data. Each names the rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from torch import nn

from trainwright._types import counted, has_length
from trainwright.config.resolve import joins_samples
from trainwright.data.identity import fingerprint
from trainwright.preflight.check_registry import CheckFacts, check
from trainwright.preflight.rows import Rows, quoted, shown_rows
from trainwright.support import model_facts
from trainwright.support.findings import Finding, error

STACKS = "default_data_collator"
# Collators that keep labels unchanged, and collators that keep the lengths of rows.
KEEPS_LABELS = (
    STACKS,
    "DefaultDataCollator",
    "DataCollatorWithPadding",
    "DataCollatorForTokenClassification",
    "DataCollatorForSeq2Seq",
)
KEEPS_LENGTHS = (*KEEPS_LABELS, "DataCollatorForLanguageModeling", "DataCollatorWithFlattening")
POSITIONS = re.compile(r"(^|\.)(position_embeddings?|embed_positions|wpe)$")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
MOST_NAMED = 10  # rows that a finding lists for programs
MOST_PAIRS = 3  # pairs of equal rows that it shows
MOST_COMPARED = 1000  # rows that are read completely and compared by content
MUCH_HELD_OUT = 0.01  # share of the evaluation rows; a few short texts may well be repeated


def list_names(rows: Rows, places: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of the first rows."""
    return tuple(rows.find_name(place) for place in places[:MOST_NAMED])


def num_classes(model: nn.Module) -> int | None:
    """Returns the number of classes of a label, for models that are known to be classifiers."""
    core = model_facts.core_model(model)
    name = type(core).__name__
    config = getattr(core, "config", None)
    if name.endswith(CLASSIFIERS):
        is_choice = getattr(config, "problem_type", None) in (None, "single_label_classification")
        number = getattr(config, "num_labels", None)
        return number if is_choice and number is not None and number > 1 else None
    head = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    return None if weight is None else int(weight.shape[0])


def gets_collator_batches(facts: CheckFacts) -> bool:
    """Returns whether a model of transformers gets batches unchanged and its own loss is trained: its errors are known.

    No hook of a user or of another library is between the collator and the model, or between the model and its loss.
    """
    core = model_facts.core_model(facts.model)
    is_known = type(core).__module__.startswith("transformers.") and "forward" not in vars(core)
    return is_known and facts.loss_is_the_models and facts.model_gets_batches


def reads_only_text(model: nn.Module) -> bool:
    """Returns whether a model's inputs are token ids alone: no image or sound takes the place of a token."""
    core = model_facts.core_model(model)
    config = getattr(core, "config", None)
    others = ("vision_config", "audio_config", "text_config", "vision_tower", "image_token_id")
    is_text = getattr(core, "main_input_name", None) == "input_ids"
    return is_text and not any(getattr(config, name, None) is not None for name in others)


def fails_beyond_classes(facts: CheckFacts) -> bool:
    """Returns whether a label beyond the classes certainly ends the run, by an IndexError of torch's cross-entropy.

    It does in a transformers classifier that gets the labels unchanged; a language model may never use the first label.
    """
    kind = type(model_facts.core_model(facts.model))
    return kind.__name__.endswith(CLASSIFIERS) and gets_collator_batches(facts)


def classes_cure(model: nn.Module) -> str:
    """Returns what to change if a label has no class: a language model's labels are tokens."""
    if type(model_facts.core_model(model)).__name__.endswith(CLASSIFIERS):
        return "Load the model with the right num_labels, or number the labels from 0 (and mask with -100)."
    return (
        "Make the labels with the tokenizer of this model, or enlarge it first: "
        "model.resize_token_embeddings(len(tokenizer)). Mask labels that should not count with -100."
    )


@check(when="start", needs=("rows",), about="labels that the model has no class for, anywhere in the data")
def classes(facts: CheckFacts) -> Iterator[Finding]:
    assert facts.rows is not None  # `needs` it
    if facts.collator not in KEEPS_LABELS or not facts.loss_is_the_models:
        return
    limit = num_classes(facts.model)
    if limit is None:
        return
    for part, rows in (("training", facts.rows), *(facts.eval_rows or {}).items()):
        wrong = dict(found for name in label_entries(facts, rows) for found in rows.outside(name, limit))
        if not wrong:
            continue
        places = list(wrong)
        values = ", ".join(map(str, dict.fromkeys(wrong[place] for place in places[:MOST_NAMED])))
        have = "row has a label" if len(wrong) == 1 else "rows have labels"
        is_read = rows is facts.rows and rows.batches is not None
        yield error(
            f"{rows.what}{len(wrong)} {part} {have} beyond the classes of the model, which scores 0 to {limit - 1}: "
            f"{values} in {shown_rows(rows, places, facts.processing_class)}.",
            classes_cure(facts.model),
            rows=list_names(rows, places),
            ends_run=is_read and fails_beyond_classes(facts),
        )


@check(when="start", needs=("rows",), about="labels and token ids that are texts in the rows")
def texts_as_numbers(facts: CheckFacts) -> Iterator[Finding]:
    rows = facts.rows
    assert rows is not None
    if facts.collator not in KEEPS_LABELS:
        return
    first = rows.item(0)
    for name in (*label_entries(facts, rows), "input_ids"):
        value = first.get(name)
        if not isinstance(value, str) or (facts.taken is not None and name not in facts.taken):
            continue
        if name == "input_ids":
            cure = "Tokenize the texts: dataset.map(lambda row: tokenizer(row['text'], truncation=True))."
        else:
            cure = model_facts.TEXT_LABELS
        # The collators that only stack leave out a text of any other name.
        is_stacked = facts.collator in (STACKS, "DefaultDataCollator") and name not in ("label", "label_ids")
        yield error(
            f"{name!r} is a text in {rows.find_name(0)}: {quoted(value)}, but a model takes numbers.",
            cure,
            rows=list_names(rows, [0]),
            ends_run=rows.batches is not None and not is_stacked,
        )
        return


def label_entries(facts: CheckFacts, rows: Rows) -> list[str]:
    """Returns the entries of rows that are labels, or become labels in the collator."""
    names = {*facts.label_names, *(("label", "label_ids") if "labels" in facts.label_names else ())}
    return [name for name in rows.names if name in names]


@check(when="start", needs=("rows",), about="samples that differ in length, and no collator that pads them")
def ragged(facts: CheckFacts) -> Iterator[Finding]:
    rows = facts.rows
    assert rows is not None
    if facts.collator != STACKS or joins_samples(facts.args) or facts.args.train_batch_size == 1:
        return
    # The collator drops an entry that is None or a string in the first sample.
    taken = [name for name in rows.names if name != "label" and (facts.taken is None or name in facts.taken)]
    for name in taken:
        sizes = rows.sizes(name)
        usual = Counter(sizes)
        if len(usual) == 1:
            continue
        pair = _unequal_in_batch(rows, sizes) if rows.batches is not None else _unequal(sizes)
        if pair is None:
            continue
        first, second = pair
        where = "are in one batch" if rows.batches is not None else "may come into one batch"
        yield Finding(
            "error" if rows.batches is not None else "warning",
            f"{rows.what}samples differ in length: {name!r} has {_said(sizes[first])} in {rows.find_name(first)} and "
            f"{_said(sizes[second])} in {rows.find_name(second)}, which {where}, but nothing pads them.",
            "Pass processing_class=tokenizer (one with a pad token), or a data_collator that pads.",
            rows=list_names(rows, pair),
            ends_run=rows.batches is not None,
        )
        return


def _said(size: Hashable) -> str:
    return counted(size, "element") if isinstance(size, int) else f"the shape {size}"


def _unequal(sizes: Sequence[Hashable]) -> tuple[int, int] | None:
    """Returns the first position that has a size, and the first with a different size."""
    sized = [place for place, size in enumerate(sizes) if size is not None]
    other = next((place for place in sized if sizes[place] != sizes[sized[0]]), None)
    return None if other is None else (sized[0], other)


def _unequal_in_batch(rows: Rows, sizes: Sequence[Hashable]) -> tuple[int, int] | None:
    """Returns two rows of one batch, the first in training, that have different sizes."""
    places = {number: place for place, number in enumerate(rows.numbers)}
    for batch in rows.batches or ():
        found = [places[number] for number in batch]
        pair = _unequal([sizes[place] for place in found])
        if pair is not None:
            return found[pair[0]], found[pair[1]]
    return None


def count_positions(model: nn.Module) -> int | None:
    """Returns the number of positions that a model was made for."""
    config = getattr(model_facts.core_model(model), "config", None)
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found <= 0:
        return None
    return min(found, learned_positions(model) or found)


def learned_positions(model: nn.Module) -> int | None:
    """Returns the rows of the embedding of positions, beyond which a lookup fails; None if positions are computed.

    Where one of them is for padding, as in RoBERTa, positions begin after it.
    """
    sizes = [
        one.num_embeddings - (0 if one.padding_idx is None or type(one) is not nn.Embedding else one.padding_idx + 1)
        for name, one in model_facts.core_model(model).named_modules()
        if isinstance(one, nn.Embedding) and POSITIONS.search(name)
    ]
    return max(sizes, default=None)


def too_long(
    facts: CheckFacts, evidence: str, *, longest: int, rows: tuple[str, ...] = (), is_read: bool = True
) -> Finding:
    """Returns the finding of a row with more tokens than the model has positions.

    Args:
        facts: facts about the run.
        evidence: what was found.
        longest: tokens of the longest row.
        rows: names of the rows.
        is_read: the run trains these rows, so a lookup that fails ends it.
    """
    learned = learned_positions(facts.model)
    limit = count_positions(facts.model)
    cure = f"Truncate samples to {limit} tokens (truncation=True, max_length={limit})."
    fails = learned is not None and longest > learned and gets_collator_batches(facts)
    is_error = learned is not None
    return Finding("error" if is_error else "warning", evidence, cure, rows=rows, ends_run=fails and is_read)


@check(when="start", needs=("rows",), about="rows longer than the model was made for, anywhere in the data")
def long_rows(facts: CheckFacts) -> Iterator[Finding]:
    limit = count_positions(facts.model)
    if limit is None or joins_samples(facts.args) or facts.collator not in KEEPS_LENGTHS:
        return
    assert facts.rows is not None
    for part, rows in (("training", facts.rows), *(facts.eval_rows or {}).items()):
        sizes = rows.sizes("input_ids") if "input_ids" in rows.names else []
        lengths = {place: size for place, size in enumerate(sizes) if isinstance(size, int)}
        places = sorted((p for p, length in lengths.items() if length > limit), key=lambda p: -lengths[p])
        if places:
            have = "row has" if len(places) == 1 else "rows have"
            yield too_long(
                facts,
                f"{rows.what}{len(places)} {part} {have} more than the {limit} tokens that "
                f"{type(facts.model).__name__} was made for, up to {lengths[places[0]]}: "
                f"{shown_rows(rows, places, facts.processing_class)}.",
                longest=lengths[places[0]],
                rows=list_names(rows, places),
                is_read=rows is facts.rows and rows.batches is not None,
            )


@check(when="start", needs=("rows", "eval_rows"), about="evaluation rows that are in the training data")
def held_out(facts: CheckFacts) -> Iterator[Finding]:
    train = facts.rows
    assert train is not None
    assert facts.eval_rows is not None
    for part, rows in facts.eval_rows.items():
        labels = label_entries(facts, rows)
        there = [name for name in rows.names if name in train.names and name not in labels]
        names = [name for name in there if facts.taken is None or name in facts.taken]
        for finding in rows_in_both(train, rows, names, part=part, processing_class=facts.processing_class):
            if finding.severity != "note" or not facts.is_brief:
                yield finding


def rows_in_both(
    train: Rows, rows: Rows, names: Sequence[str], *, part: str, processing_class: object = None
) -> Iterator[Finding]:
    """Yields a finding if evaluation rows are in the training data: a note if they are few.

    Args:
        train: rows of the training data.
        rows: rows of an evaluation set.
        names: entries that identify a row, such as its text, but not its label.
        part: name of the evaluation set.
        processing_class: decodes tokens, for the sample shown.
    """
    same = _same_rows(train, rows, names) if names else _Same(0)
    if not same.found:
        return
    share = len(same.found) / same.num_compared
    places = list(same.found)
    are = "row is" if len(places) == 1 else "rows are"
    cure = "Remove them from one of the two: a score on training rows says nothing about new rows."
    if len(places) >= 2 * MOST_NAMED and len(set(same.found.values())) * 2 < len(places):
        cure = f"Many of them are identical: check the texts, and their tokens. {cure}"
    yield Finding(
        "warning" if share >= MUCH_HELD_OUT else "note",
        f"{rows.what}{len(places)} of {same.num_compared} {part} {are} in the training data too, {share:.1%}: "
        f"{_pairs(train, rows, same)}. The first: {shown_rows(rows, places[:1], processing_class)}.",
        cure,
        rows=list_names(rows, places),
    )


def _pairs(train: Rows, rows: Rows, same: _Same) -> str:
    """Names evaluation rows with the matching training rows, and how many training rows were compared."""
    places = list(same.found)
    pairs = [f"{rows.find_name(place)} is {train.find_name(same.found[place])}" for place in places[:MOST_PAIRS]]
    more = f" and {len(places) - MOST_PAIRS} more" if len(places) > MOST_PAIRS else ""
    seen = "" if len(train) == train.num_rows else f" ({len(train)} of {train.num_rows} training rows compared)"
    return ", ".join(pairs) + more + seen


class _Same:
    """Evaluation rows with the matching training row, by position, out of the number compared."""

    def __init__(self, num_compared: int) -> None:
        self.num_compared = num_compared
        self.found: dict[int, int] = {}


def _same_rows(train: Rows, rows: Rows, names: Sequence[str]) -> _Same:
    """Finds evaluation rows with the same entries `names` as a training row: by a quick key, then by content."""
    first = rows.item(0)
    # A text or a list distinguishes rows better than a number.
    long_ones = (name for name in names if has_length(first.get(name)))
    telling = next(long_ones, names[0])
    wanted = rows.keys(telling)
    of_key: dict[Hashable, list[int]] = {key: [] for key in wanted}
    for place, key in enumerate(train.keys(telling)):
        if key in of_key:
            of_key[key].append(place)
    candidates = [place for place, key in enumerate(wanted) if of_key[key]]
    is_cut = len(candidates) > MOST_COMPARED
    if is_cut:
        candidates = candidates[:MOST_COMPARED]
    same = _Same(candidates[-1] + 1 if is_cut else len(rows))
    contents: dict[int, int] = {}
    for place in candidates:
        content = fingerprint({name: rows.item(place).get(name) for name in names})
        for other in of_key[wanted[place]][:MOST_NAMED]:
            if other not in contents:
                contents[other] = fingerprint({name: train.item(other).get(name) for name in names})
            if contents[other] == content:
                same.found[place] = other
                break
    return same
