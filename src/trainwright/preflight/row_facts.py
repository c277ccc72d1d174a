"""Rows of a trainer's data for the checks, and the code between the rows and the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from trainwright._types import DataLoaderLike
from trainwright.config.fields import get_value
from trainwright.config.resolve import joins_samples
from trainwright.data import columns
from trainwright.data.row_names import ONE_SOURCE, RowOrigin
from trainwright.distributed.device import get_kind
from trainwright.preflight.check_registry import CheckFacts
from trainwright.preflight.row_checks import label_entries
from trainwright.preflight.rows import Budget, Rows, fetch_rows, iterate_batches, names_by
from trainwright.preflight.tables import Table
from trainwright.run import input_pipeline
from trainwright.support import model_facts
from trainwright.support.hooks import is_overridden

AnyTrainer: TypeAlias = Any  # a Trainer, or a subclass of the user's: the class is above this package

# Examining a row takes 3 to 10 us, and the whole check may take at most a fiftieth of the run. A model of these sizes
# takes longer than 500 us per sample; for a smaller model, fewer rows are examined.
AT_START = Budget(rows=20_000, size_bytes=8_000_000)
LARGE_ON_CPU = 1_000_000  # parameters
LARGE_ON_ACCELERATOR = 100_000_000
LEAST_ROWS = 64
IN_FULL = Budget(rows=200_000, size_bytes=200_000_000, seconds=3.0)


def with_rows(trainer: AnyTrainer, facts: CheckFacts, dataloader: DataLoaderLike | None) -> CheckFacts:
    """Adds rows of the data to facts about a trainer.

    Args:
        trainer: trainer with the data.
        facts: facts to extend; if they are brief, only the first rows of the run are read, in its order.
        dataloader: loader of the training data, for the order of the rows; None if unknown.
    """
    if is_overridden(trainer, "get_train_dataloader", "_get_dataloader", "_remove_unused_columns"):
        return facts
    facts = replace(
        facts,
        collator=_name_collator(trainer.data_collator) if facts.model_gets_batches else None,
        taken=taken_entries(trainer),
    )
    budget = _budget_at_start(facts) if facts.is_brief else IN_FULL
    batches = _batches(trainer, facts, dataloader, budget)
    id_column = get_value(trainer.args, "id_column")
    find_name = names_by(trainer.train_dataset, ONE_SOURCE, id_column)
    rows = fetch_rows(trainer.train_dataset, budget, find_name=find_name, batches=batches, only_batches=facts.is_brief)
    if rows is None:
        return facts
    eval_rows: dict[str, Rows] = {}
    if trainer.eval_dataset is not None:
        of_sets = replace(budget, rows=max(budget.rows, LEAST_ROWS))
        eval_rows = dict(_eval_rows(trainer.eval_dataset, of_sets, id_column, is_brief=facts.is_brief))
    parts = {"training": rows, **eval_rows}
    tables = [table for part, of_part in parts.items() for table in _tables(facts, part, of_part)]
    return replace(facts, rows=rows, eval_rows=eval_rows or None, tables=tables or None)


def _budget_at_start(facts: CheckFacts) -> Budget:
    num = int(facts.plan.num_train_samples) if facts.plan is not None else 0
    if num > LEAST_ROWS:
        size = sum(parameter.numel() for parameter in facts.model.parameters())
        large = LARGE_ON_ACCELERATOR if get_kind(facts.device).is_accelerator else LARGE_ON_CPU
        num = max(int(num * min(size / large, 1.0)), LEAST_ROWS)
    return replace(AT_START, rows=min(num, AT_START.rows))


def _batches(
    trainer: AnyTrainer, facts: CheckFacts, dataloader: DataLoaderLike | None, budget: Budget
) -> Iterator[Sequence[int]] | None:
    """Returns the rows of a run's batches, in order; None if the order is unknown."""
    # Pieces of samples that share a row are not rows, and a curriculum decides its order during training.
    has_curriculum = getattr(trainer.train_dataset, "curriculum", None) is not None
    if dataloader is None or facts.plan is None or joins_samples(trainer.args) or has_curriculum:
        return None
    return iterate_batches(dataloader, min(facts.plan.max_steps, budget.rows) * facts.plan.micro_batches)


def _eval_rows(sets: Any, budget: Budget, id_column: str | None, *, is_brief: bool) -> Iterator[tuple[str, Rows]]:
    """Yields rows of each evaluation set by name; before a run, without sets that were checked as files."""
    for name, dataset in sets.items() if isinstance(sets, dict) else [("evaluation", sets)]:
        if str(name).startswith("train"):  # a score on training rows is intended
            continue
        if is_brief and isinstance(getattr(dataset, "origin", None), RowOrigin):  # compared when its files were read
            continue
        prefix = "eval" if dataset is sets else str(name)
        found = fetch_rows(dataset, budget, find_name=names_by(dataset, prefix, id_column))
        if found is not None:
            yield str(name), found


def _tables(facts: CheckFacts, part: str, rows: Rows) -> Iterator[Table]:
    """Yields the texts of rows as a table, if there are any; before a run only if labels are texts."""
    first = rows.item(0)
    texts = [name for name in rows.names if isinstance(first.get(name), str)]
    label = next((name for name in label_entries(facts, rows) if name in texts), None)
    if not texts or (facts.is_brief and label is None):
        return
    config = getattr(model_facts.core_model(facts.model), "config", None)
    is_number = label is not None and getattr(config, "num_labels", None) == 1
    yield Table(
        part=f"the {part} data",
        columns={name: partial(rows.column, name) for name in texts},
        find_name=rows.find_name,
        label=None if is_number else label,
        numbers=(label,) if is_number and label is not None else (),
    )


def _name_collator(collator: Any) -> str | None:
    """Returns the name of a transformers collator; None for any other."""
    name = getattr(collator, "__name__", type(collator).__name__)
    return name if columns.find_module(collator).startswith("transformers.") else None


def taken_entries(trainer: AnyTrainer) -> frozenset[str] | None:
    """Returns the entries of a sample that reach the model; None if all do, or the user's own collator gets them."""
    keeps_all = input_pipeline.keeps_all_columns(trainer.args, trainer.model, columns.read_class_columns(trainer))
    if keeps_all or columns.is_own(trainer.data_collator):
        return None
    trainer._set_signature_columns_if_needed()
    return frozenset(trainer._signature_columns)
