"""Models: pretrained, or from scratch, with a configuration that fits tokenizer and labels."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainwright._types import JSONObject
from trainwright.cli.tasks.source import ModelConfig, TaskSource, first_line
from trainwright.errors import did_you_mean


def load_config(
    material: TaskSource, tokenizer: PreTrainedTokenizerBase | None = None, **settings: object
) -> ModelConfig:
    """Loads or makes the model's configuration.

    Args:
        material: data and recipe.
        tokenizer: sets the size of the vocabulary and the special tokens.
        **settings: values that the data decide, such as the labels.

    Raises:
        RecipeError: there is none, its kind is not known, or the recipe sets what it does not have.
    """
    from transformers import AutoConfig

    model = material.recipe.model
    given = dict(model.config)
    if model.path is None:
        kind = given.pop("model_type")
        known = _default_config(material, kind)
        _check_names(material, given, known)
        return AutoConfig.for_model(kind, **{**settings, **_of_tokenizer(tokenizer, known), **given})
    try:
        config = AutoConfig.from_pretrained(model.path, revision=model.revision)
    except (OSError, ValueError, KeyError) as error:
        material.wrong(f"no model can be loaded from there: {first_line(error)}", "model", "path")
    _check_names(material, given, config)
    own = _of_tokenizer(tokenizer, config) if model.learn_tokenizer is not None else {}
    for name, value in {**settings, **own, **given}.items():
        setattr(config, name, value)
    return config


def load_model(material: TaskSource, config: ModelConfig) -> PreTrainedModel:
    """Loads the model with pretrained weights, or makes it from scratch."""
    import torch
    import transformers

    kind: Any = getattr(transformers, material.recipe.spec.model_class)
    model = material.recipe.model
    dtype = getattr(torch, model.dtype or "float32")
    try:
        if model.path is None or model.from_scratch:
            loaded: PreTrainedModel = kind.from_config(config, dtype=dtype)
        else:
            loaded = kind.from_pretrained(model.path, config=config, revision=model.revision, dtype=dtype)
        return loaded
    except (OSError, ValueError, RuntimeError) as error:
        material.wrong(f"{config.model_type} cannot be used for {material.recipe.task}: {first_line(error)}",
                       "model", "path" if model.path is not None else "config")  # fmt: skip


def _default_config(material: TaskSource, kind: str) -> ModelConfig:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING)
        material.wrong(f"transformers knows no model {kind!r}.{hint}", "model", "config", "model_type")
    return CONFIG_MAPPING[kind]()


def _check_names(material: TaskSource, given: JSONObject, config: ModelConfig) -> None:
    """Refuses names that the model does not read; a configuration takes any name without an error."""
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    problems = []
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            said = f"model.config.{name}: a {config.model_type} model has no such setting.{hint}"
            problems.append((("model", "config", name), said))
    material.tree.refuse(problems)


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase | None, config: ModelConfig) -> JSONObject:
    """Returns the size of the vocabulary and the special tokens of a tokenizer."""
    if tokenizer is None:
        return {}
    found: JSONObject = {"vocab_size": len(tokenizer)}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        found[name] = getattr(tokenizer, name)
    if config.is_encoder_decoder:
        first = tokenizer.bos_token_id
        found["decoder_start_token_id"] = tokenizer.pad_token_id if first is None else first
        found["forced_eos_token_id"] = found["forced_bos_token_id"] = None
    return found
