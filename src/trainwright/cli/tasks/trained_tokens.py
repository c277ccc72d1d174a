"""The special tokens that an adapter was trained with, for the base model that it is put on again.

An adapter's directory has no settings of the model. The run recorded them (`generation_config.json` beside its
`config.json`), or its tokenizer has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright._types import PREFIX_CHECKPOINT_DIR
from trainwright.checkpoint.weights import GENERATION_NAME
from trainwright.support.patches import follow_tokenizer

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_recorded(checkpoint: Path, name: str) -> Path | None:
    """Returns a file with settings of a model: in a directory, or in the run that a checkpoint is of."""
    places = [checkpoint]
    whole = checkpoint.absolute()
    if whole.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
        places.append(whole.parent)
    return next((one / name for one in places if (one / name).is_file()), None)


def restore_tokens(model: Any, checkpoint: Path) -> None:
    """Sets the special tokens of a base model, of transformers, to those that an adapter was trained with.

    Args:
        model: the base model; its configuration and its generation change in place.
        checkpoint: directory with the adapter, and with the tokenizer if the run had one.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file has no settings or no tokenizer.
    """
    from transformers import AutoTokenizer, GenerationConfig

    recorded = find_recorded(checkpoint, GENERATION_NAME)
    if recorded is not None and getattr(model, "generation_config", None) is not None:
        model.generation_config = GenerationConfig.from_pretrained(recorded.parent)
    if not any((checkpoint / name).is_file() for name in TOKENIZER_FILES):
        return
    kind: Any = AutoTokenizer
    tokenizer = kind.from_pretrained(checkpoint, trust_remote_code=False)
    follow_tokenizer(model, tokenizer)
    generation = getattr(model, "generation_config", None)
    if recorded is None and generation is not None and getattr(tokenizer, "chat_template", None) is not None:
        # Loads the readers of data.
        from trainwright.cli.tasks.chat import end_tokens

        before = generation.eos_token_id
        known = before if isinstance(before, list) else [before]
        generation.eos_token_id = list(
            dict.fromkeys(one for one in (*end_tokens(tokenizer), *known) if one is not None)
        )
