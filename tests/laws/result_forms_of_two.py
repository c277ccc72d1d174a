"""Predicts with results of every form, in as many processes as there are: `result_forms_of_two.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.laws.result_forms import LABELS, OF_PROCESSES, OUTPUTS, named, trainer_of

FOLDER = Path(sys.argv[1])


def rows(value: Any, read: Any, *, concat: bool) -> list[int]:
    return [int(row) for part in ([value] if concat else value) for row in read(part)]


for case in OF_PROCESSES:
    place, form, labels = case
    for size in (1, 3, 4):
        for settings in ({}, {"eval_do_concat_batches": False}, {"eval_use_gather_object": True}):
            trainer = trainer_of(place, form, labels, FOLDER, per_device_eval_batch_size=size, **settings)
            found = trainer.predict(trainer.eval_dataset)
            concat = settings.get("eval_do_concat_batches", True)
            read = OUTPUTS[form][1]
            told: dict[str, Any] = {"loss": found.metrics.get("test_loss")}
            told["predictions"] = rows(found.predictions, read, concat=concat)
            told["labels"] = rows(found.label_ids, LABELS[labels][1], concat=concat)
            tell(**{named(case, size, settings): told})
