"""Two processes whose callbacks and overrides change written checkpoints: `changed_together.py FOLDER`."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tests._support.small import make_trainer
from tests._support.two_processes import tell
from tests.checkpoint.test_changes import SAVING, Change, Changes, add_notes, halve, overriding

from trainwright import TrainerCallback
from trainwright.checkpoint.manifest import Manifest, describe_files, find_problem
from trainwright.checkpoint.store import CheckpointStore

RANK = int(os.environ["RANK"])
FSDP = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}}
SHARDED = {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
ADDED = {"added": 1.0, "step": 1}


def edit_record(folder: Path) -> None:
    """Another record and another file, where weights lie in the shards of all processes."""
    path = folder / "trainer_state.json"
    record = json.loads(path.read_text())
    record["log_history"].append(ADDED)
    path.write_text(json.dumps(record))
    add_notes(folder)


class InOneProcess(TrainerCallback):
    """Beside the changes of one process, the other one has a callback that changes nothing."""


def changing(rank: int, change: Change) -> TrainerCallback:
    return Changes(change) if rank == RANK else InOneProcess()


def by_main_process(folder: Path, change: Change, **settings: Any) -> Any:
    return make_trainer(folder, callbacks=[changing(0, change)], **settings)


def by_other_process(folder: Path, change: Change, **settings: Any) -> Any:
    return make_trainer(folder, callbacks=[changing(1, change)], **settings)


def by_override(folder: Path, change: Change, **settings: Any) -> Any:
    def change_in_main_process(at: Path) -> None:
        if RANK == 0:
            change(at)

    return make_trainer(folder, cls=overriding("_save_checkpoint", change_in_main_process), **settings)


WAYS: dict[str, Callable[..., Any]] = {"main": by_main_process, "other": by_other_process, "override": by_override}
ENGINES: dict[str, tuple[dict[str, Any], Change]] = {
    "ddp": ({}, halve),
    "fsdp": (FSDP, halve),
    "sharded": (SHARDED, edit_record),
}


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.model.state_dict()
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state.items()}


def outcome(folder: Path, way: str, engine: str, *, save_async: bool) -> dict[str, Any]:
    settings, change = ENGINES[engine]
    WAYS[way](folder, change, save_async=save_async, **SAVING, **settings).train()
    store = CheckpointStore(folder)
    manifests = [(Manifest.read(store.path(step)), store.path(step)) for step in store.steps()]
    resumed = make_trainer(folder, max_steps=6, **settings)
    resumed.train(resume_from_checkpoint=True)
    newest = store.path(6)
    if change is halve:
        saved = safetensors.torch.load_file(newest / "model.safetensors")
        weights = whole_weights(resumed)
        takes = weights.keys() == saved.keys() and all(torch.equal(weights[name], one) for name, one in saved.items())
    else:
        takes = ADDED in resumed.state.log_history
    return {
        "steps": store.steps(),
        "problems": [find_problem(path) for _, path in manifests],
        "lists": [manifest is not None and manifest.files == describe_files(path) for manifest, path in manifests],
        "resume takes the change": takes,
    }


if __name__ == "__main__":
    for engine in ENGINES:
        for way in WAYS:
            for save_async in (False, True)[: 1 if way == "override" else 2]:  # it looks when `super()` returns
                name = f"{engine} {way} {'behind' if save_async else 'at once'}"
                tell(**{name: outcome(Path(sys.argv[1]) / name, way, engine, save_async=save_async)})
