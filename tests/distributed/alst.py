"""Two processes that share sequences under DeepSpeed, with one trainer and with the other: `alst.py FOLDER`."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from tests._support.two_processes import tell
from tests.laws.long_context import VOCAB, llama
from tests.parity.models import seeded
from tests.parity.sides import OURS, REFERENCE

FOLDER = Path(sys.argv[1])
LENGTH = 12
ASKED = ParallelismConfig(
    sp_backend="deepspeed",
    sp_size=2,
    sp_handler=DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    ),
)


def rows() -> list[dict[str, Any]]:
    ids = torch.randint(3, VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": row, "position_ids": torch.arange(LENGTH)} for row in ids]


def trained(side: Any, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    always = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    asked = settings.pop("deepspeed", {})
    trainer = side.make(
        seeded(llama), FOLDER / name, {**always, **settings, "deepspeed": {**config, **asked}}, train_dataset=rows()
    )
    trainer.train()
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = {n: p.detach().double().flatten().tolist() for n, p in trainer.model.named_parameters()}
    log = [
        (entry["loss"], entry["grad_norm"], entry["epoch"]) for entry in trainer.state.log_history if "loss" in entry
    ]
    return {"weights": weights, "log": log}


logging.getLogger("trainwright").setLevel("ERROR")
warnings.simplefilter("ignore")  # of transformers and DeepSpeed, about what torch names otherwise by now
deepspeed.init_distributed("gloo")  # on a CPU, accelerate does it too late for DeepSpeed's groups
tell(ours=trained(OURS, "ours", {"parallelism_config": ASKED}))
tell(in_its_own_words=trained(OURS, "own", {"deepspeed": {"sequence_parallel_size": 2}}))
tell(theirs=trained(REFERENCE, "theirs", {"parallelism_config": ASKED}))  # last: it changes torch's attention for all
