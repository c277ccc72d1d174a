"""Ray Train starts two workers that train together; each save reaches it with its metrics and the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .._support.engines import needs
from .._support.subprocesses import run_python

pytestmark = [needs("ray"), pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = """
import json
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER = Path(sys.argv[1])


def work(config):
    from tests.distributed.cases import trainer_of
    from trainwright.callbacks.ray_train import RayTrainReport

    trainer = trainer_of("means", FOLDER / "run", 2, save_strategy="epoch")
    trainer.add_callback(RayTrainReport())
    trainer.train()
    told = {"world": trainer.args.world_size, "loss": trainer.state.log_history[0]["loss"]}
    (FOLDER / f"worker{trainer.args.process_index}.json").write_text(json.dumps(told))


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
result = TorchTrainer(work, scaling_config=scaling, run_config=RunConfig(storage_path=str(FOLDER / "ray"))).fit()
files = sorted(path.name for path in Path(result.checkpoint.path).iterdir())
(FOLDER / "result.json").write_text(json.dumps({"step": result.metrics["step"], "files": files}))
ray.shutdown()
"""


def test_two_workers_train_together_and_report(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run_python(str(script), str(tmp_path), cwd=tmp_path, timeout_s=300, RAY_USAGE_STATS_ENABLED="0")
    workers = [json.loads((tmp_path / f"worker{rank}.json").read_text()) for rank in range(2)]
    assert workers[0] == workers[1]
    assert workers[0]["world"] == 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step"] == 6
    assert {"model.safetensors", "optimizer.pt", "manifest.json"} <= set(result["files"])
