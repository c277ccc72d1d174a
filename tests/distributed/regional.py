"""Two processes that train with compiled blocks and without: `regional.py FOLDER KIND`, for test_regional.py."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests._support.two_processes import tell
from tests.distributed.layouts import MODEL, in_parts, trainer_of, whole
from torch._dynamo.backends.registry import register_backend

FOLDER = Path(sys.argv[1])
KIND = sys.argv[2]
GRAPHS: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    GRAPHS.append(len(inputs))
    return graph.forward


def outcome(name: str, **settings: Any) -> dict[str, Any]:
    """Losses of a training in parts, its evaluation, and the entries of its checkpoint."""
    if KIND.startswith("zero"):
        settings["deepspeed"] = {"zero_optimization": {"stage": int(KIND[-1])}, "train_batch_size": "auto"}
    elif KIND == "fsdp":
        settings |= {"fsdp": True, "fsdp_config": {"fsdp_version": 2}}
    model = in_parts(FOLDER / MODEL, tp_size=2) if KIND == "tensor parallel" else whole(FOLDER / MODEL)
    replicas = 1 if KIND == "tensor parallel" else 2
    trainer = trainer_of(
        model,
        FOLDER / f"{KIND}_{name}",
        replicas=replicas,
        max_steps=4,
        save_strategy="steps",
        save_steps=4,
        **settings,
    )
    trainer.train()
    log = trainer.state.log_history
    names = [path.name for path in (FOLDER / f"{KIND}_{name}" / "checkpoint-4").iterdir()]
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
        "evaluated": trainer.evaluate()["eval_loss"],
        "files": sorted(names),
    }


warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`")
register_backend(counting, name="trainwright_counting")
plain = outcome("plain")
compiled = outcome("compiled", torch_compile="regional", torch_compile_backend="trainwright_counting")
tell(plain=plain, compiled=compiled, graphs=len(GRAPHS))
