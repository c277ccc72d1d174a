"""Captures the gradients of a step, also in new processes, which run this module and not the user's script."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from trainwright._types import JSONObject
from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.errors import ProcessFailedError
from trainwright.state.trainer_state import TrainerControl, TrainerState

Tensors = Mapping[str, torch.Tensor]


class GradientCapture(TrainerCallback):
    """Keeps the gradients of the first step, as the optimizer is about to get them."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        if not self.gradients and model is not None:
            named = model.named_parameters()
            self.gradients = {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}


def gap(one: Tensors, other: Tensors) -> float:
    """Returns the largest difference, as a share of the largest value; infinite where the names differ."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    largest = max(float(value.abs().max()) for value in one.values() if value.numel())
    difference = max(float((value - other[name]).abs().max()) for name, value in one.items() if value.numel())
    return difference / largest if largest > 0 else difference


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Returns the names of tensors that are not bit-identical."""
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets all dropout of a model to 0 in place, since its draws depend on the split into batches."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = isinstance(value, float) and (
                "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            )
            if is_rate:
                setattr(module, name, 0.0)
    return model


TIMEOUT_S = 180.0
GRADIENTS = "gradients.safetensors"


def gradients_of(recipe: JSONObject, *, num_processes: int, timeout_s: float = TIMEOUT_S) -> dict[str, torch.Tensor]:
    """The gradients of the first step of a trainer that so many processes make by a recipe.

    Args:
        recipe: "trainer" and "arguments" are classes, "settings" and "parts" what they are called with.

    Raises:
        ProcessFailedError: a process failed, or took too long.
    """
    text = pickle.dumps(recipe)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _start(rank, num_processes, port, folder) for port in [_free_port()] for rank in range(num_processes)
        ]
        try:
            for process in processes:
                assert process.stdin is not None
                with process.stdin:
                    process.stdin.write(text)
            for process in processes:
                process.wait(timeout_s)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:
            for process in processes:
                _end(process)
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                lines = (Path(folder) / f"{rank}.log").read_text(errors="replace").strip().splitlines()
                raise ProcessFailedError(lines[-1] if lines else f"process {rank} ended with {process.returncode}")
        return safetensors.torch.load_file(Path(folder) / GRADIENTS)


def _start(rank: int, num_processes: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    world = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    env = {**os.environ, **{name: str(value) for name, value in world.items()}}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    with open(Path(folder) / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainwright.preflight.prove.launcher", folder],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True,
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def main() -> None:
    folder = Path(sys.argv[1])
    # From the process that started this one, through a pipe that nobody else can write to.
    recipe: JSONObject = pickle.load(sys.stdin.buffer)
    keeper = GradientCapture()
    args = recipe["arguments"](**{**recipe["settings"], "output_dir": str(folder / "run")})
    trainer = recipe["trainer"](args=args, callbacks=[keeper], **recipe["parts"])
    trainer.train()
    if os.environ["RANK"] == "0":
        safetensors.torch.save_file({n: g.contiguous() for n, g in keeper.gradients.items()}, folder / GRADIENTS)
    trainer.end()


if __name__ == "__main__":
    main()
