"""Evaluates in as many processes as there are, and tells what came of it: `evaluations.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchmetrics
from tests._support.two_processes import tell
from tests.laws.evaluations import BATCH_SIZES, KINDS, NUM, digest, trainer_of
from tests.parity.models import CLASSES
from tests.parity.sides import OURS, REFERENCE
from transformers import trainer_pt_utils

import trainwright

FOLDER = Path(sys.argv[1])


class Counts:
    """A streaming metric that does not know of other processes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: list[float] = []

    def update(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.rows += (predictions.argmax(-1) == references).float().tolist()

    def compute(self) -> dict[str, float]:
        return {"mean": float(np.mean(self.rows)), "num": float(len(self.rows))}


for kind in KINDS:
    results: dict[str, Any] = {}
    for size in BATCH_SIZES:
        trainer = trainer_of(kind, OURS, FOLDER, per_device_eval_batch_size=size)
        found = trainer.predict(trainer.eval_dataset)
        results[str(size)] = digest(found)
    # transformers, in the same processes: its loss differs, its predictions do not
    theirs = trainer_of(kind, REFERENCE, FOLDER, per_device_eval_batch_size=3)
    found = theirs.predict(theirs.eval_dataset)
    tell(**{kind: results, f"{kind} of transformers": digest(found)})

for name, metric in {
    "counts": Counts(),
    "torchmetrics": torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro"),
}.items():
    metrics = trainer_of("module", OURS, FOLDER, compute_metrics=metric, per_device_eval_batch_size=3).evaluate()
    tell(**{name: {key: value for key, value in metrics.items() if "second" not in key and "runtime" not in key}})

seen: list[Any] = []


def look(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    parts = (prediction.predictions, prediction.label_ids, prediction.losses)
    seen.append([len(part) for part in parts])
    return {"num": float(sum(sizes[0] for sizes in seen))} if compute_result else {}


rank = dist.get_rank()
value = {"a": (torch.full((2, 3), rank), torch.tensor(rank))}
for name, module in {"ours": trainwright, "theirs": trainer_pt_utils}.items():
    both = module.distributed_concat(value, 3)
    numbers = module.distributed_broadcast_scalars([rank, 1.5], device=torch.device("cpu"))
    tell(**{f"concat of {name}": [[part.tolist() for part in both["a"]], numbers.tolist()]})

more = {"include_for_metrics": ["loss", "inputs"], "batch_eval_metrics": True, "per_device_eval_batch_size": 3}
tell(by_batch=[trainer_of("module", OURS, FOLDER, compute_metrics=look, **more).evaluate()["eval_num"], seen])


def detected(logits: Any, labels: Any) -> Any:
    """One entry for each sample, of a length of its own."""
    return [{"box": row[: 1 + int(row.argmax())]} for row in logits]


boxes = trainer_of(
    "module",
    OURS,
    FOLDER,
    compute_metrics=None,
    preprocess_logits_for_metrics=detected,
    eval_use_gather_object=True,
    eval_do_concat_batches=False,
    per_device_eval_batch_size=3,
)
found = boxes.predict(boxes.eval_dataset)
tell(objects=[[box["box"].tolist() for box in batch] for batch in found.predictions], num=NUM)
