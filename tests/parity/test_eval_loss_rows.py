"""With `reproduce="transformers"`, a batch's loss counts for as many rows as with the original, from any source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import trainwright

from . import data, models
from .fuzz_sides import PLAIN, REPRODUCING

NUM_SAMPLES = 6


class SizedStream(data.Stream):
    def __len__(self) -> int:
        return NUM_SAMPLES


def collate(items: list[data.Item]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


ITEMS = data.vectors(NUM_SAMPLES)
UNEQUAL = [[0, 1, 2], [3, 4], [5]]


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(ITEMS, collate_fn=collate, **settings)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Source:
    """Where the batches of an evaluation come from: a dataset, or what `get_eval_dataloader` returns."""

    dataset: Any = None
    get: Callable[[Any], Any] | None = None
    accelerator: dict[str, Any] = field(default_factory=dict)


APART = {"dispatch_batches": False}
SOURCES = {
    "dataset": Source(ITEMS),
    "stream": Source(data.Stream(ITEMS)),
    "stream read apart": Source(data.Stream(ITEMS), accelerator=APART),
    "stream with a length": Source(SizedStream(ITEMS)),
    "stream with a length read apart": Source(SizedStream(ITEMS), accelerator=APART),
    "dataloader": Source(get=lambda trainer: loader(batch_size=4)),
    "smaller dataloader": Source(get=lambda trainer: loader(batch_size=2)),
    "batch sampler": Source(get=lambda trainer: loader(batch_sampler=UNEQUAL)),
    "list of batches": Source(get=lambda trainer: [collate(ITEMS[:4]), collate(ITEMS[4:])]),
    "prepared dataloader": Source(get=lambda trainer: trainer.accelerator.prepare(loader(batch_size=4))),
    "prepared batch sampler": Source(get=lambda trainer: trainer.accelerator.prepare(loader(batch_sampler=UNEQUAL))),
}


def evaluated(module: Any, arguments: Any, source: Source, folder: Path, include: list[str]) -> dict[str, float]:
    class Reads(module.Trainer):  # type: ignore[misc, name-defined]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return super().get_eval_dataloader(eval_dataset) if source.get is None else source.get(self)

    settings: dict[str, Any] = {"accelerator_config": dict(source.accelerator)} if source.accelerator else {}
    args = arguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_eval_batch_size=4,
        include_for_metrics=include,
        **settings,
    )
    trainer = Reads(
        model=models.seeded(models.ReturnsDict),
        args=args,
        eval_dataset=ITEMS if source.dataset is None else source.dataset,
        compute_metrics=lambda prediction: {"losses": float("nan" if not include else len(prediction.losses))},
    )
    metrics = trainer.evaluate()
    return {name: metrics[name] for name in ("eval_loss", "eval_losses")}


@pytest.mark.framework
@pytest.mark.parametrize("include", [[], ["loss"]], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_the_loss_of_a_batch_counts_for_as_many_rows(name: str, include: list[str], tmp_path: Path) -> None:
    theirs, ours = (
        evaluated(module, side.arguments, SOURCES[name], tmp_path, include)
        for module, side in ((transformers, PLAIN), (trainwright, REPRODUCING))
    )
    assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
