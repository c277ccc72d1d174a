"""Weights in several files, loaded under the original's name for it; those of a trainer are in `weights.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch.nn.modules.module import _IncompatibleKeys

from trainwright._types import read_json
from trainwright.checkpoint.weights import MAX_INDEX_BYTES, SAFE_WEIGHTS_INDEX_NAME

if TYPE_CHECKING:
    from torch import nn

OLDER_INDEX = "pytorch_model.bin.index.json"


def load_sharded_checkpoint(
    model: nn.Module, folder: str | Path, strict: bool = True, prefer_safe: bool = True
) -> _IncompatibleKeys:
    """Loads the weights that lie in several files beside an index, one file after the other.

    Raises:
        ValueError: there is no index.
        RuntimeError: with `strict`, the index and the model do not name the same weights; nothing was loaded.
    """
    indices = [path for name in (SAFE_WEIGHTS_INDEX_NAME, OLDER_INDEX) if (path := Path(folder) / name).is_file()]
    if not indices:
        raise ValueError(f"{folder} has no index of weights ({SAFE_WEIGHTS_INDEX_NAME} or {OLDER_INDEX}).")
    index = indices[0] if prefer_safe else indices[-1]
    files = read_json(index, max_bytes=MAX_INDEX_BYTES)["weight_map"]
    names = model.state_dict().keys()
    missing, unexpected = [n for n in names if n not in files], [n for n in files if n not in names]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{folder} does not fit {type(model).__name__}. Missing: {', '.join(missing) or 'none'}. "
            f"Unexpected: {', '.join(unexpected) or 'none'}. strict=False loads what fits."
        )
    for name in sorted(set(files.values())):
        model.load_state_dict(_weights_in(Path(folder) / Path(name).name), strict=False)
    return _IncompatibleKeys(missing, unexpected)


def _weights_in(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
