"""Runs whose samples in quarantine change, and the samples that each epoch of them trained.

Run as a script of several processes it tells what each of them trained: `quarantined.py FOLDER WORKERS,...`, or with
`stream` in the place of the workers.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

import trainwright
from tests._support.two_processes import tell
from tests.contract import doubles

SIZE = 13
EPOCHS = 3
BAD = (2, 5)
KEPT = sorted(set(range(SIZE)) - set(BAD))


class Reads(trainwright.Trainer):
    """Notes the samples that it trains, by epoch."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.trained: dict[int, list[int]] = {}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        numbers = inputs.pop("number").tolist()
        inputs.pop("length", None)
        # As dropout draws; equally many in all processes, whose orders by length are drawn from the same generator.
        inputs["x"] = inputs["x"] + torch.randn(8, doubles.FEATURES)[: len(numbers)] * 0.01
        if getattr(inputs, "num_samples", 1) > 0:  # no batch that only stands in
            self.trained.setdefault(self._trainwright.run.progress.epoch, []).extend(numbers)
        return super().training_step(model, inputs, num_items_in_batch)


class Own(Sampler[int]):
    """Each row once, in an order that is drawn when an epoch begins."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class ReadsOwn(Reads):
    """With a sampler of its own."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Own()


class Acts(trainwright.TrainerCallback):
    """Puts samples into quarantine after one step, and stops after another."""

    def __init__(self, *, quarantine_at: int = 0, stop_at: int = 0) -> None:
        self.trainer: Any = None
        self._quarantine_at = quarantine_at
        self._stop_at = stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._quarantine_at:
            self.trainer.quarantine(BAD)
        if state.global_step == self._stop_at:
            control.should_training_stop = control.should_save = True


class Drawing(Dataset[dict[str, Any]]):
    """Rows with noise that is drawn when they are read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "x": self.rows[index]["x"] + torch.randn(doubles.FEATURES)}


class Stream(IterableDataset[dict[str, Any]]):
    """Rows in one order."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows


class Counted(Stream):
    """A stream that says how many rows it has."""

    def __len__(self) -> int:
        return len(self.rows)


def run(
    folder: Path,
    *,
    at: int = 0,
    stop: int = 0,
    resume: Any = None,
    bad: tuple[int, ...] = (),
    column: str | None = None,
    of: Callable[[list[dict[str, Any]]], Any] = list,
    cls: type[Reads] = Reads,
    **more: Any,
) -> Any:
    acts = Acts(quarantine_at=at, stop_at=stop)
    torch.manual_seed(11)
    rows = [{**row, "number": number} for number, row in enumerate(doubles.samples(SIZE))]
    settings = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": EPOCHS,
        "max_steps": -1,
        "logging_steps": 100,
        "remove_unused_columns": False,
        "seed": 7,
        **more,
    }
    one = acts.trainer = doubles.trainer(folder, cls, settings=settings, train_dataset=of(rows), callbacks=[acts])
    if bad:
        one.quarantine(bad, column)
    one.train(resume_from_checkpoint=resume)
    return one


def facts(one: Any) -> dict[str, Any]:
    rate = one.lr_scheduler.get_last_lr()[0]
    return {
        "trained": {str(epoch): numbers for epoch, numbers in one.trained.items()},
        "steps": [one.state.global_step, one.state.max_steps],
        "epoch": one.state.epoch,
        "rate": rate,
    }


def scenarios(folder: Path, *, sizes: tuple[int, ...] = (2, 3), **settings: Any) -> dict[str, dict[str, Any]]:
    """What is trained: samples are in quarantine before, from the middle of epoch 1 on, or since a run was stopped.

    Runs that are stopped resume in batches of these sizes.
    """
    found = {"before": facts(run(folder / "before", bad=BAD, **settings))}
    found["under way"] = facts(run(folder / "under-way", at=2, **settings))
    for name, act, bad in (("since", {}, BAD), ("under way, stopped", {"at": 1}, ()), ("same", {"bad": BAD}, ())):
        first = facts(run(folder / name, stop=2, **act, **settings))
        for size in sizes:
            new = {**settings, "per_device_train_batch_size": size}
            where = folder / name / "checkpoint-2"
            second = facts(run(folder / name, bad=bad, resume=str(where), **new))
            found[f"{name}, {size}"] = {**second, "first": first["trained"]["0"]}
    return found


def check(told: list[dict[str, dict[str, Any]]]) -> None:
    """Every process has told what it trained: together each sample once in an epoch, but for those left out."""
    num = len(told)
    for name, one in told[0].items():
        sizes = 2 * num if name in ("before", "under way") else int(name[-1]) * num
        trained = {epoch: Counter(n for each in told for n in each[name]["trained"].get(epoch, [])) for epoch in "012"}
        per_epoch = -(-len(KEPT) // sizes)
        assert one["epoch"] == EPOCHS, name
        assert one["steps"][0] == one["steps"][1], name
        assert one["rate"] == 0.0, name  # the schedule ends with the run
        for epoch in "12":
            assert trained[epoch] == Counter(KEPT), (name, epoch)
        before = Counter(n for each in told for n in each[name].get("first", []))
        whole = trained["0"] + before
        if name == "under way":  # after two steps
            before = Counter(n for each in told for n in each[name]["trained"]["0"][:4])
            trained["0"] -= before
        if name == "before":
            assert whole == Counter(KEPT)
            assert one["steps"][0] == EPOCHS * per_epoch
        else:
            rest = -(-len(set(KEPT) - set(before)) // sizes)
            assert one["steps"][0] == 2 + rest + 2 * per_epoch, name
            assert not set(BAD) & set(trained["0"]), name
            assert {n: whole[n] for n in KEPT if n in trained["0"]} == dict.fromkeys(trained["0"], 1), name
            assert set(whole) >= set(KEPT), name


def with_lengths(rows: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(
        [{**row, "x": row["x"].tolist(), "length": row["number"] // 3 + 1} for row in rows]
    )


# Orders that can be computed, with fewer batches then; and orders that are drawn, whose batches get smaller.
KINDS: dict[str, dict[str, Any]] = {
    "drawing": {"of": Drawing},
    "sequence": {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2},
    "by length": {"train_sampling_strategy": "group_by_length", "of": with_lengths},
    "own": {"cls": ReadsOwn},
    "own, one by one": {"cls": ReadsOwn, "per_device_train_batch_size": 1},
}


def rest_of_epochs(folder: Path, kind: str, *, stops: tuple[int, ...] = (4,), **settings: Any) -> dict[str, Any]:
    """What is trained where samples come into quarantine after step 2, and again where such runs are stopped."""
    more = {**KINDS[kind], **settings}
    whole = run(folder / "whole", at=2, **more)
    found = facts(whole)
    for stop in stops:
        first = run(folder / str(stop), at=2, stop=stop, **more)
        second = run(folder / str(stop), resume=True, **more)
        trained = {epoch: first.trained.get(epoch, []) + second.trained.get(epoch, []) for epoch in range(EPOCHS)}
        assert trained == whole.trained, (kind, stop)
        assert doubles.same(doubles.weights(second), doubles.weights(whole)), (kind, stop)
        assert {**facts(second), "trained": None} == {**found, "trained": None}, (kind, stop)
    return found


def check_rest(told: list[dict[str, Any]], kind: str) -> None:
    """Together the processes have trained each sample once in an epoch, but for those in quarantine."""
    size = KINDS[kind].get("per_device_train_batch_size", 2)
    accumulated = KINDS[kind].get("gradient_accumulation_steps", 1)
    size *= len(told)
    num_first = 2 * accumulated * size // len(told)
    first = Counter(n for each in told for n in each["trained"]["0"][:num_first])
    rest = Counter(n for each in told for n in each["trained"]["0"][num_first:])
    assert not set(BAD) & set(rest), kind
    assert rest == Counter(set(KEPT) - set(first)), kind
    for epoch in "12":
        assert Counter(n for each in told for n in each["trained"][epoch]) == Counter(KEPT), (kind, epoch)
    batches = -(-len(KEPT) // size)
    rest_batches = -(-rest.total() // size)
    if KINDS[kind].get("of") is with_lengths or "cls" in KINDS[kind]:
        batches = -(-SIZE // size)
        rest_batches = -(-SIZE // size) - 2 * accumulated
    steps = 2 - (-rest_batches // accumulated) + 2 * -(-batches // accumulated)
    assert told[0]["steps"] == [steps, steps], kind
    assert told[0]["epoch"] == EPOCHS, kind
    assert told[0]["rate"] == 0.0, kind  # the schedule ends with the run


def streams(folder: Path) -> dict[str, dict[str, Any]]:
    """What is trained of a stream: left out from the beginning, the same stopped and resumed, and since step 1."""
    more: dict[str, Any] = {"of": Counted, "num_train_epochs": 2}
    whole = run(folder / "whole", bad=BAD, **more)
    run(folder / "stopped", bad=BAD, stop=1, **more)
    resumed = run(folder / "stopped", resume=True, **more)
    assert doubles.same(doubles.weights(resumed), doubles.weights(whole))
    found = {"whole": whole, "resumed": resumed, "way": run(folder / "way", at=1, **more)}
    run(folder / "since", stop=1, **more)
    found["since"] = run(folder / "since", bad=BAD, resume=True, **more)
    return {name: facts(one) for name, one in found.items()}


if __name__ == "__main__":
    if sys.argv[2] == "stream":
        tell(**streams(Path(sys.argv[1])))
        sys.exit()
    for workers in sys.argv[2].split(","):
        here = Path(sys.argv[1]) / workers
        settings = {"dataloader_num_workers": int(workers)}
        tell(**{workers: scenarios(here, sizes=(3,), **settings)})
        for kind in KINDS if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ():
            tell(**{f"{kind} {workers}": rest_of_epochs(here / kind, kind, **settings)})
