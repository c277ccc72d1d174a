"""Special tokens: a model's configuration follows the tokenizer that prepares its data."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainwright._types import is_instance_of

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def align_special_tokens(model: nn.Module, processing_class: object) -> dict[str, int]:
    """Sets pad, bos and eos of a model's configuration to the tokenizer's, where the tokenizer has them.

    Further end tokens that the configuration lists stay. Returns what was changed. Not undone after training: the
    saved model must know the tokens it was trained with.
    """
    tokenizer = _tokenizer_of(processing_class)
    settings: Any = getattr(model, "config", None)  # of the user's model
    if tokenizer is None or not hasattr(settings, "get_text_config"):
        return {}
    configs = [settings.get_text_config(), getattr(model, "generation_config", None)]
    changed = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name, None)
        if token is None:
            continue
        for config, keeps_several in zip(configs, (False, True), strict=True):
            if config is not None and _align(config, name, token, keeps_several=keeps_several):
                changed[name] = token
    if changed:
        logger.warning("The model's special tokens now follow the tokenizer's: %s.", changed)
    return changed


def _align(config: object, name: str, token: int, *, keeps_several: bool) -> bool:
    """Sets one token; an eos entry that is (or may become) a list keeps its other members."""
    before = getattr(config, name, None)
    listed = before if isinstance(before, list) else [before]
    if token in listed:
        return False
    if name == "eos_token_id" and (keeps_several or isinstance(before, list)):
        setattr(config, name, [token, *(t for t in listed if t is not None)])
    else:
        setattr(config, name, token)
    return True


def _tokenizer_of(processing_class: object) -> object:
    if is_instance_of(processing_class, "transformers.processing_utils", "ProcessorMixin"):
        return getattr(processing_class, "tokenizer", None)
    if is_instance_of(processing_class, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase"):
        return processing_class
    return None
