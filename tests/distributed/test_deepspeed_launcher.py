"""The `deepspeed` command starts a script as its users write them, and it trains as under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .._support.engines import needs
from .._support.two_processes import Done, free_port, run

pytestmark = [needs("deepspeed"), pytest.mark.process, pytest.mark.timeout(700), pytest.mark.slow]

SCRIPT = """
import sys

from tests._support.two_processes import tell
from tests.parity import data, models

from trainwright import HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(models.seeded(models.bert), args, train_dataset=data.texts(17))
trainer.train()
trainer.save_model()
weights = trainer._trainwright.services.engine.whole_weights(trainer.model)
weights = trainer.model.state_dict() if weights is None else weights
engine = getattr(trainer._trainwright.services.engine, "_train_engine", None)
tell(
    weights={name: value.double().flatten().tolist() for name, value in weights.items()},
    losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    world=[args.world_size, args.process_index, args.local_process_index, args.local_rank, args.parallel_mode.name],
    given=[one for one in sys.argv if "local_rank" in one],
    trained_by=type(trainer.deepspeed).__name__,
    clipping=engine and engine.gradient_clipping(),
    optimizer=type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
)
"""
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False},
}
SETTINGS = {
    "--use_cpu": "true",
    "--report_to": "none",
    "--disable_tqdm": "true",
    "--save_strategy": "no",
    "--log_level": "error",
    "--max_steps": "3",
    "--per_device_train_batch_size": "2",
    "--learning_rate": "1e-2",
    "--gradient_accumulation_steps": "2",
    "--logging_steps": "1",
    "--seed": "5",
}


def launched(folder: Path, *launcher: str, stage: int | None = 2, max_grad_norm: float | None = None) -> Done:
    options = [word for pair in SETTINGS.items() for word in pair]
    if max_grad_norm is not None:
        options += ["--max_grad_norm", str(max_grad_norm)]
    if stage is not None:
        path = folder / "zero.json"
        path.write_text(json.dumps({**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}))
        options += ["--deepspeed", str(path)]
    return run(
        SCRIPT,
        "--output_dir",
        str(folder / "out"),
        *options,
        folder=folder,
        launcher=launcher or None,
        timeout_s=250,
        environment={"DS_ACCELERATOR": "cpu"},
    )


def by_deepspeed(*options: str) -> tuple[str, ...]:
    return ("deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()), *options)


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return launched(tmp_path_factory.mktemp("torchrun"))


CASES: dict[str, tuple[tuple[str, ...], int | None]] = {
    "stage 2": ((), 2),
    "without ZeRO and without an option for the rank": (("--no_local_rank",), None),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_under_torchrun(case: str, torchrun: Done, tmp_path: Path) -> None:
    options, stage = CASES[case]
    done = launched(tmp_path, *by_deepspeed(*options), stage=stage)
    for rank, told in enumerate(done.told):
        names_rank = "--no_local_rank" not in options
        assert told["given"] == ([f"--local_rank={rank}"] if names_rank else [])
        assert told["world"] == [2, rank, rank, rank if names_rank else -1, "DISTRIBUTED"]
        assert told["trained_by"] == ("DeepSpeedEngine" if stage else "NoneType")
        assert told["losses"] == pytest.approx(torchrun.told[0]["losses"], rel=1e-5)
    mine = done.told[0]["weights"]
    other = torchrun.told[0]["weights"]
    assert mine.keys() == other.keys()
    for name, values in mine.items():
        assert values == pytest.approx(other[name], rel=1e-4, abs=2e-6), name
    assert (tmp_path / "out/model.safetensors").is_file()


PLUGIN = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: 'no'
num_machines: 1
num_processes: 2
deepspeed_config:
  zero_stage: 2
  gradient_clipping: 0.05
  gradient_accumulation_steps: 1
  offload_optimizer_device: {device}
  offload_param_device: none
  zero3_init_flag: false
"""


def test_the_plugin_of_accelerate_launch_trains_with_its_values(tmp_path: Path) -> None:
    """Clipping is the plugin's; accumulation, whose field has a default in every such file, is the arguments'."""
    (tmp_path / "accelerate.yaml").write_text(PLUGIN.format(device="none"))
    command = (
        "accelerate.commands.launch",
        "--config_file",
        str(tmp_path / "accelerate.yaml"),
        "--main_process_port",
        str(free_port()),
    )
    done = launched(tmp_path, *command, stage=None)
    other = tmp_path / "torchrun"
    other.mkdir()
    by_file = launched(other, max_grad_norm=0.05)
    assert done.told[0]["clipping"] == 0.05
    assert done.told[0]["losses"] == pytest.approx(by_file.told[0]["losses"], rel=1e-5)
    for name, values in done.told[0]["weights"].items():
        assert values == pytest.approx(by_file.told[0]["weights"][name], rel=1e-4, abs=2e-6), name


def test_offloaded_states_are_updated_by_deepspeeds_cpu_adam(torchrun: Done, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        pytest.skip(f"DeepSpeed's CPU Adam cannot be built on this machine: {error}")
    (tmp_path / "accelerate.yaml").write_text(PLUGIN.replace("0.05", "1.0").format(device="cpu"))
    command = (
        "accelerate.commands.launch",
        "--config_file",
        str(tmp_path / "accelerate.yaml"),
        "--main_process_port",
        str(free_port()),
    )
    done = launched(tmp_path, *command, stage=None)
    assert done.told[0]["optimizer"] == "DeepSpeedCPUAdam"
    assert torchrun.told[0]["optimizer"] == "AdamW"
    assert done.told[0]["losses"] == pytest.approx(torchrun.told[0]["losses"], rel=1e-3)
