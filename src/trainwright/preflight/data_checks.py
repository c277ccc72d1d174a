"""Checks of the data: dropped columns and labels."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from trainwright.preflight.check_registry import BATCH, FULL, check, some
from trainwright.preflight.facts import CheckFacts
from trainwright.preflight.finding import ERROR, NOTE, WARNING, Finding

LIKE_LABELS = ("target", "targets", "class", "classes", "y", "answer", "score", "category", "tags")


@check(when=FULL, needs=("columns", "taken"), about="columns that are dropped, and why")
def columns(facts: CheckFacts) -> Iterator[Finding]:
    dropped = [name for name in facts.columns or () if name not in (facts.taken or ())]
    if not dropped:
        return
    model = type(facts.model).__name__
    lacks_labels = not any(name in facts.label_names for name in facts.columns or ())
    for name in dropped:
        absent = [one for one in facts.taken or () if one not in (facts.columns or ())]
        close = difflib.get_close_matches(name, absent, n=1, cutoff=0.85)
        meant = close[0] if close else "labels" if lacks_labels and name.lower() in LIKE_LABELS else None
        if meant is not None:
            yield Finding(
                "columns", WARNING, f"The column {name!r} is dropped: {model}.forward does not take it.",
                f"Rename it to {meant!r} if that is what it is.",
            )  # fmt: skip
            return
    yield Finding("columns", NOTE, f"Dropped, as {model}.forward does not take them: {some(dropped, 8)}.")


@check(when=BATCH, needs=("batches",), about="labels among the entries of a batch")
def labels(facts: CheckFacts) -> Iterator[Finding]:
    batch = facts.batches[0] if facts.batches else {}
    if not facts.label_names or facts.can_return_loss or not facts.loss_is_the_models:
        return
    found = [name for name in facts.label_names if batch.get(name) is not None]
    if not found:
        yield Finding(
            "labels", ERROR, f"No label in the first batch ({some(batch, 8)}); the model's are called "
            f"{', '.join(facts.label_names)}.",
            "Give the samples an entry of that name, set label_names, or bring a data_collator that makes it.",
        )  # fmt: skip
    elif not facts.is_brief:
        yield Finding("labels", NOTE, f"Found in the first batch: {', '.join(found)}.")
