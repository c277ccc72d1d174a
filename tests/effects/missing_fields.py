"""Checks of the fields whose feature this version does not have: they are refused, not ignored."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from trainwright.config import rules
from trainwright.errors import NotYetError

from .bench import Bench
from .table import companion, shows

ASKED: dict[str, Any] = {
    "parallelism_config": ParallelismConfig(),
    "push_to_hub": True,
}


def a_feature_that_is_not_there_is_refused(bench: Bench, *, name: str) -> None:
    """The message names the field, and says what to do meanwhile."""
    with pytest.raises(NotYetError, match=rf"(?s){name}=.* is not there yet\. [A-Z].+\."):
        bench.trainer(**{name: ASKED[name]})


for _name in ASKED:
    shows(_name)(partial(a_feature_that_is_not_there_is_refused, name=_name))


def _needs_the_hub(bench: Bench, **settings: Any) -> None:
    ((name, value),) = settings.items()
    written = bench.args(**settings).to_dict()[name]
    assert written == ("<HUB_TOKEN>" if name == "hub_token" else value)
    assert rules.idle(bench.args(**settings)) == [f"{name} has no effect without push_to_hub."]
    assert rules.idle(bench.args()) == []


@companion("hub_model_id", "it names the repository, and push_to_hub is not there yet")
def no_repository_is_made(bench: Bench) -> None:
    _needs_the_hub(bench, hub_model_id="me/model")


@companion("hub_strategy", "it says when to upload, and push_to_hub is not there yet")
def nothing_is_uploaded_at_any_time(bench: Bench) -> None:
    _needs_the_hub(bench, hub_strategy="end")


@companion("hub_token", "it opens the repository, and push_to_hub is not there yet")
def no_token_is_used_or_written_out(bench: Bench) -> None:
    _needs_the_hub(bench, hub_token="hf_secret")
    trainer = bench.train(hub_token="hf_secret", save_strategy="epoch")
    assert "hf_secret" not in str(trainer.args) + repr(trainer.args) + trainer.args.to_json_string()


@companion("hub_private_repo", "it is about a new repository, and push_to_hub is not there yet")
def no_repository_is_private(bench: Bench) -> None:
    _needs_the_hub(bench, hub_private_repo=True)


@companion("hub_always_push", "it is about uploads, and push_to_hub is not there yet")
def no_upload_is_under_way(bench: Bench) -> None:
    _needs_the_hub(bench, hub_always_push=True)


@companion("hub_revision", "it names the branch, and push_to_hub is not there yet")
def no_branch_is_uploaded_to(bench: Bench) -> None:
    _needs_the_hub(bench, hub_revision="dev")
