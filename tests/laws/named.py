"""Runs whose rows tell what they are: a row of content c consists of the token c, and its loss depends on c alone.

So a ledger shows whether a loss is credited to the right row, and a batch whether a row in quarantine was trained,
whatever has become of the data. As a script of several processes it draws cases by seeds: `named.py FOLDER FIRST LAST`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset
from transformers import DataCollatorForTokenClassification, LlamaConfig, LlamaForCausalLM

from tests._support.small import data, make_trainer
from tests._support.two_processes import tell
from trainwright import Trainer
from trainwright.cli.ledger import LedgerTable, answer, exclude
from trainwright.errors import DataError

VOCABULARY = 128
Contents = dict[str, list[int]]  # source -> contents of its rows
KINDS = ("list", "table", "split", "subset", "mixture", "stream", "mixture of streams")
CHANGES = ("add", "remove", "move", "edit", "shuffle", "add source", "remove source", "reorder sources")


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@dataclass
class Case:
    """A drawn case: data, a change of it, and how it is read."""

    kind: str
    before: Contents
    after: Contents
    settings: dict[str, Any]
    seed: int

    def data(self, contents: Contents) -> Any:
        """The training data with some contents."""
        rows = {name: list(map(row, values)) for name, values in contents.items()}
        if self.kind == "mixture":
            return rows
        if self.kind == "mixture of streams":
            return {name: values if number % 2 else Stream(values) for number, (name, values) in by_name(rows)}
        (whole,) = rows.values()
        if self.kind == "stream":
            return Stream(whole)
        if self.kind == "list":
            return whole
        kept = random.Random(self.seed).sample(range(len(whole)), k=len(whole) - len(whole) // 4)
        if kept == [
            *range(kept[0], kept[0] + len(kept))
        ]:  # `datasets` keeps no trace of the row with which these begin
            kept.reverse()
        if self.kind == "subset":
            return Subset(whole, kept)  # type: ignore[arg-type]
        table = datasets.Dataset.from_list(whole)
        return table.select(kept) if self.kind == "split" else table

    def trained_on(self, contents: Contents) -> set[int]:
        """Contents of the rows that this data has after the hold-out."""
        rows = self.data(contents)
        parts = rows.values() if isinstance(rows, dict) else [rows]
        return {one["input_ids"][0] for part in parts for one in part}


def by_name(rows: dict[str, Any]) -> Iterator[tuple[int, tuple[str, Any]]]:
    """The sources in their order, each with a number that its name decides."""
    return ((sum(map(ord, name)), (name, values)) for name, values in rows.items())


def row(content: int) -> dict[str, list[int]]:
    tokens = [content] * (2 + content % 4)
    return {"input_ids": tokens, "labels": tokens}


def drawn(seed: int, *, workers: int = 0) -> Case:
    """Draws a case: the changes are those that its kind of data can be followed through."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    fresh = iter(range(1, VOCABULARY))
    is_mixture = kind.startswith("mixture")
    names = rng.sample("abcd", k=rng.randint(2, 3)) if is_mixture else ["train"]
    before = {name: [next(fresh) for _ in range(rng.randint(5, 9))] for name in names}
    after = {name: list(values) for name, values in before.items()}
    streams = {name for number, (name, _) in by_name(before) if not number % 2 and kind == "mixture of streams"}
    for _ in range(rng.randint(0, 6)):
        change(
            after, rng.choice(CHANGES), rng, fresh, fixed=set(after) if kind == "stream" else streams, mixed=is_mixture
        )
    settings: dict[str, Any] = {"gradient_accumulation_steps": rng.choice([1, 2]), "dataloader_num_workers": workers}
    settings |= rng.choice(
        [
            {},
            {},
            {"packing": "best_fit", "packing_length": 12},
            {"max_tokens_per_batch": 16, "per_device_train_batch_size": 8},
        ]
    )
    return Case(kind, before, after, settings, seed)


def change(now: Contents, what: str, rng: random.Random, fresh: Iterator[int], *, fixed: set[str], mixed: bool) -> None:
    """Changes contents in place; sources in `fixed` keep their rows, as streams do, whose rows have only places."""
    free = [name for name in now if name not in fixed and len(now[name]) > 4]  # so that two can be excluded
    if what == "add source" and mixed:
        others = dict(now)
        now.clear()
        now.update({rng.choice("uvwxyz") + str(len(others)): [next(fresh) for _ in range(4)], **others})
    elif what == "remove source" and mixed and len(now) > 2:
        del now[rng.choice(list(now))]
    elif what == "reorder sources":
        others = dict(reversed(now.items()))
        now.clear()
        now.update(others)
    elif free:
        rows = now[rng.choice(free)]
        place = rng.randrange(len(rows))
        if what == "add":
            rows.insert(place, next(fresh))
        elif what == "remove":
            del rows[place]
        elif what == "move":
            content = rows.pop(place)
            other = now[rng.choice([name for name in now if name not in fixed])]
            other.insert(rng.randint(0, len(other)), content)
        elif what == "edit":
            rows[place] = next(fresh)
        elif what == "shuffle":
            rng.shuffle(rows)


def model() -> Any:
    """A model whose logits are the same for all inputs, and differ for all labels."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    made = LlamaForCausalLM(config)
    made.lm_head = torch.nn.Linear(4, VOCABULARY)
    with torch.no_grad():
        made.lm_head.weight.zero_()
        made.lm_head.bias.copy_(torch.linspace(0.0, 12.0, VOCABULARY))
    return made


LOSSES = -torch.log_softmax(torch.linspace(0.0, 12.0, VOCABULARY), 0).numpy()


def read_content(loss: float) -> int:
    """The content of a row by its loss."""
    found = int(np.abs(LOSSES - loss).argmin())
    assert abs(LOSSES[found] - loss) < 1e-3, "this is a mean over several rows"
    return found


class Notes(Trainer):
    """Notes the contents that are trained."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        vars(self).setdefault("trained", set()).update(inputs["input_ids"].flatten().tolist())
        return super().training_step(model, inputs, num_items_in_batch)


def trainer(folder: Path, case: Case, contents: Contents, *, resume: bool = False, **settings: Any) -> Any:
    is_stream = "stream" in case.kind
    length = {"max_steps": 12} if is_stream else {"num_train_epochs": 1, "max_steps": -1}
    shared = {"per_device_train_batch_size": 2, "learning_rate": 0.0, "save_strategy": "no", "ledger": True}
    one = make_trainer(
        folder,
        cls=Notes,
        model=model(),
        train_dataset=case.data(contents),
        data_collator=DataCollatorForTokenClassification(data.tokenizer(), padding="longest"),
        **{**shared, **length, "logging_steps": 100, "journal": False, **case.settings, **settings},
    )
    one.train(resume_from_checkpoint=resume or None)
    return one


def check_ledger(folder: Path, contents: Contents) -> None:
    """Each row of the ledger has the loss of the row that the user finds by its name."""
    table = LedgerTable.read(folder)
    assert len(table.names)
    for place, name in enumerate(table.names):
        assert read_content(table.columns["mean_loss"][place]) == contents[name.source][name.row], str(name)
        assert str(name) == f"{name.source}[{name.row}]"


def check(folder: Path, case: Case) -> None:
    """Trains, excludes rows of the ledger, changes the data, and trains again: from a checkpoint, and from nothing."""
    first = trainer(folder, case, case.before, save_strategy="steps", save_steps=2)
    is_main = first.is_world_process_zero()
    if is_main:
        check_ledger(folder, case.before)
    excluded: set[int] = set()
    forms_stream = "stream" in case.kind and {"packing", "max_tokens_per_batch"} & set(case.settings)
    if not forms_stream:  # which has no numbers to exclude by
        listed = answer(folder, "top", number=2, data=None)
        excluded = {case.before[one["source"]][one["row"]] for one in listed}
        if is_main:
            exclude(folder, folder, listed)
    first.accelerator.wait_for_everyone()
    try:
        resumed = trainer(folder, case, case.after, resume=True)
    except DataError:  # a position in other data is refused; the ledger must not be wrong where it is not
        resumed = None
    if resumed is not None and is_main:
        check_ledger(folder, case.after)
    again = trainer(folder, case, case.after)
    trained = vars(again)["trained"] - {0}
    if resumed is not None:
        trained |= vars(resumed).get("trained", set()) - {0}
    assert not trained & excluded, "a row in quarantine was trained"
    if first.args.world_size == 1 and "stream" not in case.kind:
        assert vars(again)["trained"] - {0} == case.trained_on(case.after) - excluded, "a healthy row was left out"
    if is_main:
        check_ledger(folder, case.after)


if __name__ == "__main__":
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        check(Path(sys.argv[1]) / str(number), drawn(number))
    tell(done=int(sys.argv[3]) - int(sys.argv[2]))
