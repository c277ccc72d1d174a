"""An upload of a checkpoint has the files of the model, and none that only a resume needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright import Extension
from trainwright.hub import outbox

from ..loop.test_window_law import LAST, make

OF_THE_MODEL = {"model.safetensors", "training_args.bin", "training_args.json"}


class Counts(Extension):
    name = "counts"

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is resumed")


def test_states_of_extensions_stay_out_of_an_upload(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.add_extension(Counts())
    trainer.train()
    checkpoint = tmp_path / f"checkpoint-{LAST}"
    all_files = set(outbox.files_below(checkpoint))
    assert {"ledger.parquet", "checkpoint_items.pt", "extension_states.pt", "recorded_metrics.json"} <= all_files
    assert set(outbox.files_below(checkpoint, without=outbox.NOT_OF_THE_MODEL)) == OF_THE_MODEL
