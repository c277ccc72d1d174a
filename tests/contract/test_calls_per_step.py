"""A ceiling on the Python calls of a step, and of a batch of an evaluation: counted, not timed, so it holds anywhere.

A tiny MLP on a list dataset, in the steady state. Beside it a loop written by hand, with a DataLoader, AdamW, clipping
and LambdaLR, is counted for the record, and printed: `pytest -s`.
"""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainwright

from .._support import forked
from . import doubles

WARM_UP = 10
COUNTED = 50
COUNTS = "counts.json"
CEILINGS = [  # what, fewer than which nothing was counted, the ceiling
    ("step", 100, 427),  # by hand 292
    ("own data", 100, 439),  # a dataset class and a collator of the user's own
    ("log", 20, 150),  # of a console line, a journal entry and the events; 150 us are promised
    ("micro-batch", 50, 150),  # each further one of a step; by hand 74
    ("evaluation", 30, 130),  # a batch
]


class Counter:
    """Calls of Python functions while it is on."""

    def __init__(self) -> None:
        self.python = 0

    def start(self) -> None:
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.python += 1


class CountsSteps(trainwright.TrainerCallback):
    def __init__(self) -> None:
        self.counter = Counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            self.counter.start()
        elif state.global_step == WARM_UP + COUNTED:
            self.counter.stop()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(doubles.FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class OwnData(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def own_collator(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in ("x", "labels")}


def by_trainwright(
    output_dir: Path, accumulation: int, *, logging_steps: int = 10, wrap: Callable[[Any], Any] = list, **more: Any
) -> Counter:
    counts = CountsSteps()
    trainer = doubles.trainer(
        output_dir,
        settings={
            "max_steps": WARM_UP + COUNTED + 2,
            "logging_steps": logging_steps,
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 8,
        },
        model=doubles.model(Mlp),
        train_dataset=wrap(doubles.samples(8 * accumulation * (WARM_UP + COUNTED + 4))),
        callbacks=[counts],
        **more,
    )
    trainer.train()
    return counts.counter


def by_hand(accumulation: int) -> Counter:
    from transformers import default_data_collator

    model = doubles.model(Mlp)
    counter = Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 1000)
    data = doubles.samples(8 * accumulation * (WARM_UP + COUNTED + 2))
    total = torch.zeros(())
    step = 0
    for i, batch in enumerate(DataLoader(data, batch_size=8, shuffle=True, collate_fn=default_data_collator)):
        loss = model(**batch)["loss"] / accumulation
        loss.backward()
        total += loss.detach()
        if (i + 1) % accumulation:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            print(total.item() / 10)
            total.zero_()
        if step == WARM_UP:
            counter.start()
        elif step == WARM_UP + COUNTED:
            counter.stop()
    return counter


def by_evaluation(output_dir: Path) -> float:
    """Returns the calls of one more batch."""
    trainer = doubles.trainer(output_dir, settings={"per_device_eval_batch_size": 8}, model=doubles.model(Mlp))
    data = {number: doubles.samples(8 * number) for number in (2, 2 + COUNTED)}
    calls = {}
    for number, samples in data.items():
        trainer.evaluate(samples)
        counter = Counter()
        counter.start()
        trainer.evaluate(samples)
        counter.stop()
        calls[number] = counter.python
    return (calls[2 + COUNTED] - calls[2]) / COUNTED


def main(folder: Path) -> None:
    """Counts everything and writes it down, as calls for one step, log, micro-batch and batch."""
    one = by_trainwright(folder, 1)
    four = by_trainwright(folder, 4)
    own = by_trainwright(folder, 1, wrap=OwnData, data_collator=own_collator)
    often, seldom = (by_trainwright(folder, 1, logging_steps=steps) for steps in (1, WARM_UP + COUNTED + 2))
    counts = {
        "step": one.python / COUNTED,
        "by hand": by_hand(1).python / COUNTED,
        "own data": own.python / COUNTED,
        "log": (often.python - seldom.python) / COUNTED,
        "micro-batch": (four.python - one.python) / COUNTED / 3,
        "4 by hand": by_hand(4).python / COUNTED,
        "evaluation": by_evaluation(folder),
    }
    (folder / COUNTS).write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Counted in a process of its own: other tests leave levels of loggers and caches behind."""
    folder = tmp_path_factory.mktemp("calls")
    done = forked.run(["-m", __name__, str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = json.loads((folder / COUNTS).read_text())
    print({what: round(number) for what, number in found.items()})
    return found


@pytest.mark.process
@pytest.mark.parametrize(("what", "at_least", "ceiling"), CEILINGS)
def test_calls_stay_under_the_ceiling(counts: dict[str, float], what: str, at_least: int, ceiling: int) -> None:
    assert at_least < counts[what] <= ceiling


class CountsWalks(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.walks = 0

    def parameters(self, recurse: bool = True) -> Any:
        self.walks += 1
        return super().parameters(recurse)


class NotesWalks(trainwright.TrainerCallback):
    def __init__(self) -> None:
        self.after_step: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after_step.append(model.walks)
        assert all(parameter.grad is None for parameter in model.layers.parameters())


def test_a_step_walks_through_the_model_once(tmp_path: Path) -> None:
    """To clip; its gradients are cleared without a second walk, which takes a percent of a language model's step."""
    notes = NotesWalks()
    settings = {"max_steps": 4, "logging_steps": 4, "per_device_train_batch_size": 8}
    data = doubles.samples(32)
    model = doubles.model(CountsWalks)
    doubles.trainer(tmp_path, settings=settings, model=model, train_dataset=data, callbacks=[notes]).train()
    _, *later = notes.after_step
    assert [after - before for before, after in itertools.pairwise(later)] == [1, 1]


def test_the_counter_counts() -> None:
    counter = Counter()

    def called() -> None: ...

    calls: list[Callable[[], None]] = [called] * 7
    counter.start()
    for call in calls:
        call()
    counter.stop()
    assert counter.python == 7 + 1  # stop() itself is the last


if __name__ == "__main__":
    main(Path(sys.argv[1]))
