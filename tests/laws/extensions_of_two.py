"""An extension of a user in two processes, over a resume: `extensions_of_two.py FOLDER`. The test beside it judges."""

import sys
from typing import Any

from tests._support.two_processes import tell
from tests.contract import doubles
from trainwright import Extension, MicroBatch


class Saw(Extension):
    """The samples that this process trained."""

    name = "saw"

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.loaded: list[int] = []

    def micro_batch(self, batch: MicroBatch) -> None:
        self.samples += [round(float(label) * 16) for label in batch.inputs["labels"]]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]
        self.loaded = list(state["samples"])


def trained(*, steps: int, **how: Any) -> Saw:
    settings = {"per_device_train_batch_size": 2, "max_steps": steps, "save_strategy": "steps", "save_steps": 2}
    trainer = doubles.trainer(sys.argv[1], settings=settings, train_dataset=doubles.samples(16))
    extension = Saw()
    trainer.add_extension(extension)
    trainer.train(**how)
    return extension


if __name__ == "__main__":
    before = trained(steps=2)
    after = trained(steps=4, resume_from_checkpoint=True)
    tell(before=before.samples, loaded=after.loaded, seen=after.samples)
