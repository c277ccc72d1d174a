"""Launchers: accelerate's with a file and with flags, and Slurm's. torchrun is what all the other tests here use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .._support.two_processes import as_forks, finish, free_port, launch, run
from .cases import outcome, trainer_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCRIPT = """
import sys
from tests._support.two_processes import tell
from tests.distributed.cases import outcome, trainer_of

trainer = trainer_of("means", sys.argv[1], 2, max_steps=2, num_train_epochs=3, logging_steps=2)
tell(
    **outcome(trainer),
    mixed=trainer.args.mixed_precision,
    world=[trainer.args.world_size, trainer.accelerator.num_processes, str(trainer.accelerator.distributed_type)],
    wrapped=type(trainer.model_wrapped).__name__,
)
"""

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 2
machine_rank: 0
gpu_ids: all
main_process_ip: localhost
main_process_port: {port}
rdzv_backend: static
same_network: true
use_cpu: false
"""


def by_file(folder: Path) -> list[str]:
    path = folder / "accelerate.yaml"
    path.write_text(CONFIG.format(port=free_port()))
    return ["--config_file", str(path)]


def by_flags(folder: Path) -> list[str]:
    return [
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "bf16",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        str(free_port()),
    ]


@pytest.mark.parametrize("how", [by_file, pytest.param(by_flags, marks=pytest.mark.slow)], ids=lambda how: how.__name__)
def test_accelerate_launch_sets_the_world_and_the_precision(how: Callable[[Path], list[str]], tmp_path: Path) -> None:
    launcher = ("accelerate.commands.launch", *how(tmp_path))
    done = run(as_forks(SCRIPT, tmp_path), str(tmp_path), folder=tmp_path, launcher=launcher, timeout_s=140)
    for told in done.told:
        assert told["mixed"] == "bf16"
        assert told["world"][:2] == [2, 2]
        assert told["wrapped"] == "DistributedDataParallel"
        assert told["step"] == 2
    assert done.told[0]["weights"] == done.told[1]["weights"]


SHARDED = """
import sys
from tests._support.two_processes import tell
from tests.distributed.cases import trainer_of
from tests.distributed.shards import outcome_of_parts

trainer = trainer_of("means", sys.argv[1], 2, max_steps=2, logging_steps=2)
told = outcome_of_parts(trainer)
plugin = trainer.accelerator.state.fsdp_plugin
kinds = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
tell(**told, mixed=trainer.args.mixed_precision, kinds=kinds)
tell(flags=[trainer.is_fsdp_enabled, plugin.fsdp_version, str(plugin.state_dict_type)])
sizes = trainer.accelerator.parallelism_config
tell(shards=sizes and sizes.dp_shard_size)
"""

OF_PARTS = """
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

SIZES = """
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 1
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixed", "tolerance", "sizes"),
    [("no", 1e-5, ""), ("bf16", 2e-2, ""), ("no", 1e-5, SIZES)],
    ids=["no", "bf16", "sizes"],
)
def test_a_configuration_of_accelerate_shards_the_model(
    mixed: str, tolerance: float, sizes: str, tmp_path: Path
) -> None:
    """Nothing in the arguments says so. Weights and their updates stay in fp32."""
    path = tmp_path / "accelerate.yaml"
    text = CONFIG.format(port=free_port()).replace("MULTI_GPU", "FSDP").replace("bf16", f"'{mixed}'")
    path.write_text(text + OF_PARTS + sizes)
    launcher = ("accelerate.commands.launch", "--config_file", str(path))
    done = run(SHARDED, str(tmp_path), folder=tmp_path, launcher=launcher, timeout_s=140)
    alone = outcome(trainer_of("means", tmp_path, 1, max_steps=2, logging_steps=2))
    for told in done.told:
        assert (told["mixed"], told["kinds"]) == (mixed, ["torch.float32"])
        assert told["flags"] == [True, 2, "StateDictType.SHARDED_STATE_DICT"]
        assert told["shards"] == (2 if sizes else None)
        assert told["log"][0]["loss"] == pytest.approx(alone["log"][0]["loss"], rel=tolerance)
        for name, values in alone["weights"].items():
            assert told["weights"][name] == pytest.approx(values, rel=tolerance, abs=2e-7 if mixed == "no" else 2e-2)


UNDER_SLURM = """
import sys
from tests._support.two_processes import tell
from tests.distributed.cases import outcome, trainer_of

trainer = trainer_of("means", sys.argv[1], 2, max_steps=2, logging_steps=2)
args = trainer.args
tell(**outcome(trainer), world=[args.process_index, args.world_size, args.local_process_index],
     wrapped=type(trainer.model_wrapped).__name__)
trainer.end()
"""


@pytest.mark.slow
def test_tasks_of_slurm_are_one_run(tmp_path: Path) -> None:
    """Started as srun starts them: each by itself, with variables of Slurm's and where to meet."""
    (tmp_path / "script.py").write_text(UNDER_SLURM)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "SLURM_STEP_NUM_TASKS": "2"}
    tasks = []
    for task in ("0", "1"):
        folder = tmp_path / task  # each tells its own, since it is told no RANK
        folder.mkdir()
        mine = {**meeting, "SLURM_PROCID": task, "SLURM_LOCALID": task, "SLURM_STEP_NUM_NODES": "1"}
        tasks.append(
            launch(tmp_path / "script.py", str(tmp_path / "run"), folder=folder, launcher=(), environment=mine)
        )
    done = [finish(task, tmp_path / str(number), timeout_s=140) for number, task in enumerate(tasks)]
    assert [one.code for one in done] == [0, 0], "\n".join(one.out[-3000:] for one in done)
    told = [next(told for told in one.told if told) for one in done]
    assert [one["world"] for one in told] == [[0, 2, 0], [1, 2, 1]]
    assert [one["wrapped"] for one in told] == ["DistributedDataParallel"] * 2
    assert told[0]["weights"] == told[1]["weights"]
    alone = outcome(trainer_of("means", tmp_path, 1, max_steps=2, logging_steps=2))
    assert told[0]["log"][0]["loss"] == pytest.approx(alone["log"][0]["loss"], rel=1e-5)
