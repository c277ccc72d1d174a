"""Environment of a run: versions, commit, hardware, data, arguments without tokens. Read once, at its start."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata

import psutil
import torch

from trainwright._types import JSONObject
from trainwright.config.protocol import Arguments
from trainwright.config.summary import differing

PACKAGES = ("trainwright", "torch", "transformers", "accelerate", "datasets", "peft", "numpy", "safetensors")
SECRETS = ("token", "secret", "password", "api_key", "apikey")


def environment(device: torch.device) -> JSONObject:
    """Returns versions, commit and hardware."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := installed(name)) is not None},
        "commit": commit(os.getcwd()),
        "device": device_name(device),
        "cpus": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "script": sys.argv[0] if sys.argv else "",
    }


def process() -> JSONObject:
    """Returns host, id and start of this process, so that a reader of the journal can tell whether it still runs."""
    own = psutil.Process()
    return {"host": socket.gethostname(), "pid": own.pid, "began": own.create_time()}


@functools.cache  # the packages of a process do not change; reading their metadata takes milliseconds
def installed(package: str) -> str | None:
    """Returns the version of an installed package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # the code of a process is what it was when the process began
def commit(folder: str) -> str | None:
    """Returns the commit of the directory of the start, with a mark if files differ from it; None if unknown."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return f"{head}, with changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: str, *words: str) -> str:
    command = ["git", "-C", folder, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()


def device_name(device: torch.device) -> str:
    """Returns the name of a device, with that of its hardware where it is a GPU."""
    if getattr(device, "type", "cpu") == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def arguments(args: Arguments) -> JSONObject:
    """Returns all arguments as plain values, with marks in the place of tokens."""
    return without_secrets(args.to_dict())


def changed_arguments(args: Arguments) -> JSONObject:
    """Returns the arguments that differ from the defaults."""
    try:
        return without_secrets(dict(differing(args)))
    except TypeError:  # arguments of another package: its defaults are not known
        return {}


def without_secrets(values: JSONObject) -> JSONObject:
    """Replaces values whose names mean a secret by a mark."""
    return {
        name: f"<{name.upper()}>" if isinstance(value, str) and any(word in name.lower() for word in SECRETS)
        else without_secrets(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }  # fmt: skip


def data_summary(dataset: object) -> JSONObject:
    """Returns kind, size and columns of a dataset, without reading a sample."""
    if dataset is None:
        return {}
    if isinstance(dataset, dict):
        return {str(name): data_summary(part) for name, part in dataset.items()}
    summary: JSONObject = {"type": f"{type(dataset).__module__}.{type(dataset).__name__}"}
    try:
        summary["samples"] = len(dataset)  # type: ignore[arg-type]
    except (TypeError, AttributeError, NotImplementedError):
        summary["samples"] = None
    for name in ("column_names", "_fingerprint"):
        value = getattr(dataset, name, None)
        if isinstance(value, (list, str)):
            summary[name.strip("_")] = value
    return summary
