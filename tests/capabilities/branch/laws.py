"""The rows of `branch` in the laws of capabilities; `laws/members.py` says what each is."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from trainwright import Trainer
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME

from ..._support.small import StopAt
from ...contract import doubles
from ...laws.members import Member

HANGS = "reads files of a directory before step 1"
HOSTILE = "capabilities/branch/test_branch_laws.py::test_a_damaged_checkpoint_is_no_origin"


def from_a_trunk(trainer: Any) -> None:
    """Lets the run begin at the first step of another one with the same settings, samples in quarantine and items."""
    folder = Path(trainer.args.output_dir)
    args = copy.copy(trainer.args)
    args.output_dir = str(folder.with_name(f"{folder.name}-trunk"))
    args.checkpoint_mirror = None  # is refused for a branch of its run
    args.eval_strategy = "no"
    args.eval_async = False
    args.save_strategy = "steps"
    trunk = Trainer(doubles.model(), args, train_dataset=copy.deepcopy(trainer.train_dataset), callbacks=[StopAt(1)])
    trunk.checkpoint_items.update(copy.deepcopy(trainer.checkpoint_items))
    if (folder / QUARANTINE_NAME).is_file():
        Path(args.output_dir).mkdir(exist_ok=True)
        shutil.copy(folder / QUARANTINE_NAME, args.output_dir)
    trunk.train()
    trainer.args.branch_from = f"{args.output_dir}/checkpoint-1"


MEMBERS = {"branch": Member("branch", prepare=from_a_trunk)}
OURS = ("",)
