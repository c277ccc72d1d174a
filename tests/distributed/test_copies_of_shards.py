"""Four processes: two copies of a model, each in two parts (`dp_replicate_size=2`, `dp_shard_size=2`, FSDP)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import run
from .cases import outcome, trainer_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]
WINDOW = "counted, accumulated"

SCRIPT = """
import logging
import os
import sys
from accelerate import ParallelismConfig
from tests._support.two_processes import tell
from tests.distributed.cases import trainer_of
from tests.distributed.shards import judged_parts, outcome_of_parts

logging.getLogger("trainwright").setLevel("ERROR")
sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
trainer = trainer_of("counted, accumulated", sys.argv[1], 4, fsdp=True, parallelism_config=sizes)
tell(**outcome_of_parts(trainer), judged=judged_parts(trainer))
tell(held=sum(part.to_local().numel() for part in trainer.model.state_dict().values()))

rank = int(os.environ["RANK"])
os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))  # as on two nodes
trainer = trainer_of("counted, accumulated", sys.argv[1], 4, fsdp="hybrid_shard")
tell(hybrid=outcome_of_parts(trainer))
tell(held_hybrid=sum(part.to_local().numel() for part in trainer.model.state_dict().values()))
"""


def test_copies_of_a_sharded_model_train_as_one_process_does(tmp_path: Path) -> None:
    done = run(SCRIPT, str(tmp_path), folder=tmp_path, processes=4, timeout_s=200)
    trainer = trainer_of(WINDOW, tmp_path / "one", 1)
    alone = outcome(trainer)
    predicted = trainer.predict(trainer.eval_dataset).predictions
    for told in done.told:
        losses, others = ([e["loss"] for e in one["log"] if "loss" in e] for one in (told, alone))
        assert losses == pytest.approx(others, rel=1e-5)
        for name, values in alone["weights"].items():
            assert told["weights"][name] == pytest.approx(values, rel=1e-5, abs=2e-7)
        assert len(told["judged"]["predictions"]) == len(predicted)
        for name, values in alone["weights"].items():
            assert told["hybrid"]["weights"][name] == pytest.approx(values, rel=1e-5, abs=2e-7)
    for held in ("held", "held_hybrid"):
        assert sum(told[held] for told in done.told) == 2 * (3 * 4 + 4)  # not four times
