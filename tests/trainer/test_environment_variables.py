"""Variables that a stale shell or a stranger leaves in the environment: a sentence that names them, or no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from trainwright.errors import ArgumentError

from .._support.small import make_trainer

STALE = [
    {"WORLD_SIZE": "x"},
    {"WORLD_SIZE": "2"},
    {"LOCAL_RANK": "0"},
    {"LOCAL_RANK": "-7"},
    {"RANK": "1"},
    {"MASTER_ADDR": "x", "MASTER_PORT": "y", "SLURM_STEP_NUM_TASKS": "many", "SLURM_PROCID": "0"},
    {"ACCELERATE_TORCH_DEVICE": "toaster"},
    {"ACCELERATE_MIXED_PRECISION": "fp7"},
    {"ACCELERATE_USE_CPU": "maybe"},
    {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "two"},
    {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_CLIPPING": "x"},
    {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "x"},
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "x"},
    {"ACCELERATE_DYNAMO_BACKEND": "__import__('os').abort()"},
    {"ACCELERATE_USE_FSDP": "1", "FSDP_SHARDING_STRATEGY": "x"},
]
SECRET = "".join(chr(ord("a") + i % 26) for i in range(40))
WITHOUT_EFFECT = {
    "MASTER_ADDR": "evil.example",
    "OMP_NUM_THREADS": "x",
    "CUDA_VISIBLE_DEVICES": "x;y",
    "PJRT_DEVICE": "x",
    "SLURM_JOB_ID": "1; touch injected",
    "TERM": "\x1b[2J",
    "TORCHELASTIC_USE_AGENT_STORE": "maybe",
    "TRAINWRIGHT_CONFIG": "x",
    "WANDB_MODE": "x",
    "KUBEFLOW_TRAINER_SERVER_TOKEN": "/etc/passwd",
    "HF_TOKEN": f"hf_{SECRET}",
    "WANDB_API_KEY": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
}


@pytest.fixture(autouse=True)
def _state_of_accelerate() -> object:
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("variables", STALE, ids=lambda variables: "-".join(variables))
def test_a_value_that_cannot_be_is_named(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AcceleratorState._reset_state(True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError) as raised:
        make_trainer(tmp_path)
    assert list(variables)[-1] in str(raised.value) or "SLURM_STEP_NUM_TASKS='many'" in str(raised.value)
    assert "launcher" in str(raised.value)


def test_others_have_no_effect_and_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WITHOUT_EFFECT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    make_trainer(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1).train()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not (tmp_path / "injected").exists()
    assert {"journal.jsonl", "training_args.json", "trainer_state.json"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
