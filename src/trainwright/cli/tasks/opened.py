"""A trained model, opened where its checkpoint is: whole, in parts of several processes, or an adapter on its base.

Nothing is merged and nothing is written but temporary files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from trainwright.checkpoint.weights import export_model, weight_files
from trainwright.cli.tasks.export import ADAPTER_CONFIG_NAME, CONFIG_NAME, Model, has_adapter, load_adapted
from trainwright.cli.tasks.models import quiet_transformers
from trainwright.cli.tasks.source import first_line
from trainwright.cli.tasks.trained_tokens import TOKENIZER_FILES
from trainwright.engine import sharded_state
from trainwright.errors import CheckpointError
from trainwright.support.door import read_json


def open_trained(source: Path, *, scratch: Path, weights: str = "trained", bits: str | None = None) -> Model:
    """Returns a model as it was trained, in the types of its weights.

    Args:
        source: directory of a checkpoint, or with a model or an adapter.
        scratch: directory for temporary files.
        weights: "trained" or "average".
        bits: "4bit" or "8bit" for the base of an adapter that was trained so.

    Raises:
        CheckpointError: the model cannot be loaded, or has no average.
    """
    if has_adapter(source):
        model = load_adapted(source, bits=bits)
    else:
        place = source
        if not weight_files(place) and sharded_state.has_weights(place):
            place = scratch / "whole"
            export_model(source, place, parts=sharded_state)
        try:
            model, missing, _ = load_whole(place)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"The model in {source} cannot be loaded: {first_line(error)}") from error
        if missing:
            raise CheckpointError(f"{source} lacks weights of its model: {', '.join(sorted(missing)[:4])}.")
    if weights == "average":
        from trainwright.capabilities.averages.saved import read_average

        model.load_state_dict(read_average(source), strict=False)
    return model.eval()


class Loaded(NamedTuple):
    """A model from its files."""

    model: Model
    missing: set[str]  # weights of the model that are in no file
    unexpected: set[str]  # tensors in the files that the model does not use


def load_whole(folder: Path) -> Loaded:
    """Loads a whole model by the class that its configuration names."""
    import transformers

    kinds = read_json(folder / CONFIG_NAME, max_bytes=1 << 24).get("architectures")
    kind: Any = getattr(transformers, str((kinds or ["AutoModel"])[0]))
    with quiet_transformers():
        model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True, trust_remote_code=False)
    return Loaded(model, set(info["missing_keys"]), set(info["unexpected_keys"]))


def open_tokenizer(source: Path) -> Any:
    """Returns the tokenizer that was saved with a model; for an adapter without one, that of its base.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    kind: Any = AutoTokenizer
    place: str | Path = source
    if has_adapter(source) and not any((source / name).is_file() for name in TOKENIZER_FILES):
        place = str(read_json(source / ADAPTER_CONFIG_NAME, max_bytes=1 << 20)["base_model_name_or_path"])
    try:
        return kind.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"No tokenizer can be loaded from {place}: {first_line(error)}") from error
