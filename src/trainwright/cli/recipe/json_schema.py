"""JSON schema of a configuration file, for editors that complete and check it."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

from trainwright._types import JSONObject
from trainwright.cli.recipe import early_stopping
from trainwright.cli.recipe.recipe_reader import NESTED, OPTIONAL, PARTS
from trainwright.cli.recipe.schema import METRICS_HELP, TASKS
from trainwright.cli.recipe.yaml_tree import Path
from trainwright.config.arguments import Seq2SeqTrainingArguments
from trainwright.config.deprecated import OLD_NAMES
from trainwright.config.fields import CHOICES

KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def json_schema() -> JSONObject:
    """Returns the JSON schema of a configuration file of any task."""
    parts = {name: _describe_part(kind, (name,)) for name, kind in (PARTS | OPTIONAL).items()}
    task = {"description": "What is trained.", "enum": list(TASKS)}
    metrics = {"description": METRICS_HELP, "type": ["string", "array", "null"], "items": {"type": "string"}}
    source = {"path": {"type": "string"}, "name": {"type": "string"}, "share": {"type": ["number", "string"]}}
    items = {"type": "object", "additionalProperties": False, "required": ["path"], "properties": source}
    parts["data"] |= {"type": ["object", "array"], "items": items}
    parts["data"]["properties"]["sources"]["items"] = items
    for name in OPTIONAL:
        parts[name]["type"] = ["object", "null"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of trainwright",
        "type": "object",
        "required": ["task", "data"],
        "additionalProperties": False,
        "properties": {"task": task, **parts, "metrics": metrics, "training": _describe_training()},
    }


def _describe_part(kind: type, path: Path) -> JSONObject:
    hints = get_type_hints(kind)
    properties = {}
    for one in dataclasses.fields(kind):
        nested = NESTED.get((*path, one.name))
        about = {"description": one.metadata["help"]}
        if nested is not None:
            properties[one.name] = {**_describe_part(nested, (*path, one.name)), "type": ["object", "null"], **about}
            continue
        found = {**_describe_type(hints[one.name]), **about}
        if one.metadata["choices"] is not None:
            found = {"enum": [*one.metadata["choices"], *([None] if _takes_none(hints[one.name]) else [])], **about}
        if one.metadata["low"] is not None:
            found["minimum"] = one.metadata["low"]
        properties[one.name] = found
    about = {"description": (kind.__doc__ or "").partition("\n")[0]}
    return {"type": "object", "additionalProperties": False, "properties": properties, **about}


def _describe_training() -> JSONObject:
    """The fields of the arguments; a string is accepted for any value, since TrainingArguments converts it."""
    hints = get_type_hints(Seq2SeqTrainingArguments)
    properties = {}
    for one in dataclasses.fields(Seq2SeqTrainingArguments):
        if one.init:
            choices = [choice for choice in CHOICES.get(one.name, ()) if choice is not None]
            found = {"examples": choices} if choices else _describe_type(hints[one.name], also="string")
            properties[one.name] = {**found, "description": one.metadata.get("help", "")}
    for name, help in early_stopping.ENTRIES.items():
        properties[name] = {
            "type": ["integer" if name == early_stopping.PATIENCE else "number", "null"],
            "description": help,
        }
    older = {name: {"deprecated": True} for name in OLD_NAMES if name not in properties}
    about = "Any field of TrainingArguments."
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {**properties, **older},
        "description": about,
    }


def _takes_none(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _describe_type(hint: Any, *, also: str | None = None) -> JSONObject:
    """Returns the JSON types for a type hint; {} if one of its types has no JSON type."""
    members = get_args(hint) if get_origin(hint) not in (list, dict, tuple) and get_args(hint) else (hint,)
    names = [KINDS.get(get_origin(member) or member) for member in members]
    if None in names:
        return {}
    kinds = list(dict.fromkeys([*names, *([also] if also else [])]))
    return {"type": kinds[0] if len(kinds) == 1 else kinds}
