"""The card of a merged export: a whole model, whose card is not the one that peft writes for an adapter."""

from __future__ import annotations

from pathlib import Path

from trainwright._types import TRAINER_STATE_NAME, TRAINING_ARGS_JSON_NAME, JSONObject
from trainwright.cli.tasks.trained_tokens import find_recorded
from trainwright.hub.model_card import (
    CARD_NAME,
    SETTINGS,
    CardContent,
    evaluations,
    find_license,
    is_repository,
    is_untouched,
    last_results,
    versions,
    write_card,
)
from trainwright.journal.record import JOURNAL_NAME, read_findings
from trainwright.support.door import read_json, read_settings

MAX_STATE = 1 << 30  # bytes of the state of a run, with its history
VERSIONS = "### Framework versions"  # the heading below which peft adds its version to any card


def write_merged_card(source: Path, partial: Path, *, model_name: str, base: str) -> None:
    """Writes the card of a merged model. One that a person wrote keeps its text.

    Args:
        source: directory of the checkpoint, or of the run, with the adapter.
        partial: directory of the merged model, with the card of the adapter if there was one.
        model_name: title of the card.
        base: the model that the adapter was trained on: a name of the Hub, or a directory, which is not named.
    """
    path = partial / CARD_NAME
    text = read_settings(path) if path.is_file() else ""
    if text and not is_untouched(text) and not _is_template(text):
        _describe_whole_model(path)
        return
    path.unlink(missing_ok=True)
    history = evaluations(_read(source / TRAINER_STATE_NAME).get("log_history") or [])
    saved = _read(source / TRAINING_ARGS_JSON_NAME)
    journal = find_recorded(source, JOURNAL_NAME)
    base_model = base if is_repository(base) else None
    facts = CardContent(
        model_name=model_name,
        base_model=base_model,
        license=None if base_model is None else find_license(base_model, token=None),
        results=last_results(history),
        history=history,
        settings={name: saved[name] for name in SETTINGS if name in saved},
        versions=versions(),
        findings=[] if journal is None else [one["text"] for one in read_findings(journal)],
    )
    write_card(partial, facts)


def _read(path: Path) -> JSONObject:
    return read_json(path, max_bytes=MAX_STATE) if path.is_file() else {}


def _is_template(text: str) -> bool:
    """Returns whether a card is the empty one of huggingface_hub, which peft writes with every adapter."""
    from huggingface_hub import ModelCard, ModelCardData

    empty = ModelCard.from_template(ModelCardData()).text
    own = ModelCard(text, ignore_metadata_errors=True).text
    return bool(own.partition(VERSIONS)[0].split() == empty.partition(VERSIONS)[0].split())


def _describe_whole_model(path: Path) -> None:
    """Removes what makes the card of a person that of an adapter: its library, its tags, a base on this disk."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(path, ignore_metadata_errors=True)
    card.data.library_name = "transformers"
    tags = [tag for tag in card.data.tags or () if tag != "lora" and not tag.startswith("base_model:")]
    card.data.tags = tags or None
    if not is_repository(card.data.base_model):
        card.data.base_model = None
    card.save(path)
