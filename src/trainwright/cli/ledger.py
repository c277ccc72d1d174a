"""Questions about the ledger of a run: which samples have the largest losses, came never, or came again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from trainwright._types import LEDGER_NAME, JSONObject
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data.ledger import read_table
from trainwright.errors import ArgumentError, DataError, did_you_mean

QUESTIONS = ("top", "never", "repeated", "by-source", "text")
SHOWN = ("sample", "id", "source", "row", "visits", "tokens", "mean_loss", "last_loss", "last_step")
LONGEST = 60  # characters of a text in a table


def answer(run: Path, question: str, *, number: int, data: Path | None) -> list[JSONObject]:
    """Returns rows of a run's ledger, at most `number` of them, with their text where `data` or the recipe has it.

    top: largest mean loss first. never: no visit. repeated: more visits than the sample with the fewest, most first.
    by-source: one row for each source. text: in the order of the data. Raises ArgumentError for another question, and
    DataError where there is no ledger.
    """
    if question not in QUESTIONS:
        raise ArgumentError(f"{question!r} is not one of: {', '.join(QUESTIONS)}.{did_you_mean(question, QUESTIONS)}")
    table, about = read_table(ledger_file(run))
    columns: dict[str, Any] = {name: table[name].to_numpy() for name in table.column_names}
    if question == "by-source":
        return [_of_source(name, columns) for name in dict.fromkeys(columns["source"].tolist())]
    if question == "never":
        found = [{"sample": one} for one in _never(columns["sample"], about, number)]
    else:
        rows = _chosen(question, columns)[:number]
        found = [
            {
                name: columns[name][row].item() if hasattr(columns[name][row], "item") else columns[name][row]
                for name in SHOWN
                if name in columns
            }
            for row in rows
        ]
    if about["sources"] and None in about["sources"].values():  # samples are no rows of a file
        text_of = None
    else:
        text_of = _texts(run, data, about["num_samples"])
    return [{**one, "text": text_of(one["sample"])} for one in found] if text_of else found


def ledger_file(run: Path) -> Path:
    """The ledger of an output directory, of its newest checkpoint, or of a checkpoint; or the file itself."""
    if run.is_file():
        return run
    store = CheckpointStore(run)
    newest = [store.path(step) for step in store.steps()[-1:]]
    for folder in (run, *newest):
        path = Checkpoint(folder).entry("ledger").path
        if path is not None:
            return path
    raise DataError(f"{run} has no {LEDGER_NAME}; train with ledger=True.")


def _chosen(question: str, columns: JSONObject) -> Sequence[int]:
    visits = columns["visits"]
    loss = columns["mean_loss"]
    if question == "top":
        return [row for row in np.argsort(-loss, kind="stable").tolist() if not np.isnan(loss[row])]
    if question == "repeated":
        order = np.argsort(-visits, kind="stable")
        return order[visits[order] > visits.min(initial=1)].tolist()  # type: ignore[no-any-return]
    return range(len(visits))


def _never(samples: Any, about: JSONObject, number: int) -> list[int]:
    num = about["num_samples"]
    if num is None:
        raise DataError("The ledger is of a stream without a length, so samples that never came are not known.")
    seen = set(samples.tolist())
    return list(islice((sample for sample in range(num) if sample not in seen), number))


def _of_source(name: str, columns: JSONObject) -> JSONObject:
    part = columns["source"] == name
    tokens = int(columns["tokens"][part].sum())
    return {
        "source": name,
        "samples": int(part.sum()),
        "visits": int(columns["visits"][part].sum()),
        "tokens": tokens,
        "mean_loss": float(columns["loss_sum"][part].sum()) / tokens if tokens else None,
    }


def _texts(run: Path, data: Path | None, num_samples: int | None) -> Callable[[int], str] | None:
    """Returns a function that gives the text of a sample, from a file in the order of training or a recipe's data.

    None where the recipe's rows are not the samples: texts that were cut into blocks are others.
    """
    from trainwright.cli.tasks import recipe_run, source

    has_recipe = (run / recipe_run.RECIPE_NAME).is_file()
    if data is not None:
        from trainwright.cli.recipe.schema import DataPart

        rows: Any = list(source.read_rows(data, DataPart()))
        if num_samples not in (None, len(rows)):
            cure = " The run's own file names its data: leave --data out." if has_recipe else ""
            raise DataError(f"The ledger is of {num_samples} samples, and {data} has {len(rows)} rows.{cure}")
    elif has_recipe:
        material = source.load(*recipe_run.read_run(run, ()))
        rows = (
            list(chain.from_iterable(material.by_source().values())) if material.recipe.data.sources else material.train
        )
        if num_samples not in (None, len(rows)):
            return None
    else:
        return None

    def text_of(sample: int) -> str:
        if sample >= len(rows):
            raise DataError(f"Sample {sample} of the ledger is not among the {len(rows)} rows of {data or run}.")
        row = rows[sample]
        texts = [value for value in row.values() if isinstance(value, str)]
        return " | ".join(texts) if texts else json.dumps(row, default=str, ensure_ascii=False)

    return text_of


def lines(found: Sequence[JSONObject]) -> list[str]:
    """Returns the rows as a table for the terminal."""
    if not found:
        return ["No sample."]
    names = list(found[0])
    cells = [names, *([_cell(one[name]) for name in names] for one in found)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."
