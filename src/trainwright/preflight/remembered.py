"""Measurements of `speed="auto"` from earlier runs: small JSON files in the user's cache directory.

A file is named by a digest of everything that its numbers depend on: model, machine, versions, settings and shapes.
It holds times only; each run proves again that a lever computes the same. A file is written atomically, so runs may
share the directory; a file that cannot be read, or has entries other than numbers, is ignored.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from trainwright._types import JSONObject, json_value, write_text
from trainwright.config.fields import get_value
from trainwright.distributed.device import find_name
from trainwright.journal.record import installed
from trainwright.preflight.padding import StepCost
from trainwright.support.door import read_json
from trainwright.support.host import num_cpus
from trainwright.support.model_facts import core_model
from trainwright.support.patches import read_attention

logger = logging.getLogger(__name__)

MAX_BYTES = 65536  # a file of ours is far smaller
# Names in a configuration that record the origin of a model, or are set by its first forward pass.
ORIGINS = ("_name_or_path", "name_or_path", "transformers_version", "id2label", "label2id", "problem_type")
SETTINGS = (
    "activation_checkpointing",
    "attn_implementation",
    "bf16",
    "dataloader_num_workers",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "loss_kernel",
    "optim",
    "per_device_train_batch_size",
    "tf32",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Known measurements of one model on one machine."""

    cost: StepCost | None = None  # a micro-batch without levers
    ratios: dict[str, float] = field(default_factory=dict)  # by lever: relative time of a step with it


class Memory:
    """Measurements of what these facts describe, of earlier runs and of this one.

    Attributes:
        known: those of earlier runs.
        ratios: of this run, by lever.
    """

    def __init__(self, facts: JSONObject) -> None:
        self._facts = facts
        self._digest = compute_digest(facts)
        self.known = read(self._digest)
        self.ratios: dict[str, float] = {}

    def write(self, cost: StepCost) -> None:
        """Keeps the measurements of this run for later ones."""
        write(self._digest, Measured(cost, self.ratios), self._facts)


def folder() -> Path:
    """Returns the directory of the files: `trainwright/speed` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright" / "speed"


def compute_digest(facts: JSONObject) -> str:
    """Returns the name of the measurements that depend on these facts."""
    return xxhash.xxh3_128(json.dumps(json_value(facts), sort_keys=True).encode()).hexdigest()


def collect_facts(model: nn.Module, args: Any, device: torch.device, shapes: JSONObject) -> JSONObject:
    """Returns everything that the time of a step depends on; `shapes` are the shapes of the batches."""
    core: Any = core_model(model)
    to_dict = getattr(getattr(core, "config", None), "to_dict", dict)
    parameters = [(name, [*p.shape], str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    name = find_name(device) or _processor()
    return {
        "model": f"{type(core).__module__}.{type(core).__qualname__}",
        "config": {key: value for key, value in to_dict().items() if key not in ORIGINS},
        "parameters": xxhash.xxh3_64(json.dumps(parameters).encode()).hexdigest(),
        "attention": read_attention(core),
        "machine": [device.type, name, num_cpus(), torch.get_num_threads(), args.world_size],
        "versions": [installed(package) for package in ("torch", "transformers", "trainwright")],
        "settings": {name: str(get_value(args, name)) for name in SETTINGS if hasattr(args, name)},
        "shapes": shapes,
    }


def read(digest: str) -> Measured:
    """Returns the measurements of this name; empty ones if none can be read."""
    try:
        found = read_json(folder() / f"{digest}.json", max_bytes=MAX_BYTES)
        cost = found.get("cost")
        return Measured(
            cost=None if cost is None else StepCost(*(_seconds(cost[name]) for name in StepCost.__slots__)),
            ratios={str(name): _seconds(value) for name, value in found["ratios"].items()},
        )
    except FileNotFoundError:
        return Measured()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        logger.debug("The measurements %s are ignored: %s", digest, error)
        return Measured()


def write(digest: str, measured: Measured, facts: JSONObject) -> None:
    """Adds measurements under this name; a directory that cannot be written is not an error."""
    before = read(digest)
    ratios = before.ratios | measured.ratios
    cost = measured.cost or before.cost
    entries = {"cost": None if cost is None else asdict(cost), "ratios": ratios, "of": json_value(facts)}
    text = json.dumps(entries, indent=1)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_text(folder() / f"{digest}.json", text)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        logger.debug("The measurements were not kept: %s", error)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a duration")
    return float(value)


def _processor() -> str:
    """Returns the name of the processor, as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def find_shapes(widths: Mapping[str, float]) -> JSONObject:
    """Returns sizes rounded to quarters of a power of two: similar data share their measurements."""
    return {name: 0 if value <= 0 else round(4 * math.log2(value)) for name, value in widths.items()}
