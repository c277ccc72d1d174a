"""Checks with one request that the Hub can be reached, because its client would retry for half a minute.

The functions return the problem and its cure, or None. Other errors of the Hub are described by the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import logging as client_logging

TIMEOUT_S = 10
# Files in the cache if a model, a tokenizer or an image processor was downloaded.
DESCRIPTIONS = ("config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
LOCAL = "neither a directory nor in the cache of downloads, and"
OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def without_retries() -> Iterator[None]:
    """Hides the client's lines about each of its tries; whether the last one failed is an error."""
    level = client_logging.get_verbosity()
    client_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        client_logging.set_verbosity(level)


@contextmanager
def offline(*modules: object) -> Iterator[None]:
    """Has the client, and modules of packages that have a switch of their own, ask caches only."""
    before = [(module, getattr(module, OFFLINE)) for module in (constants, *modules)]
    try:
        for module, _ in before:
            setattr(module, OFFLINE, True)
        yield
    finally:
        for module, value in before:
            setattr(module, OFFLINE, value)


def model_problem(name: str, revision: str | None = None) -> str | None:
    """Returns why a model that is not a directory cannot be asked of the Hub."""
    try:
        copies = [try_to_load_from_cache(name, file, revision=revision) for file in DESCRIPTIONS]
    except ValueError:  # not a name of the Hub
        return None
    if Path(name).exists() or any(isinstance(path, str) for path in copies):
        return None
    url = hf_hub_url(name, DESCRIPTIONS[0], revision=revision)
    why = _failure(lambda: get_hf_file_metadata(url, timeout=TIMEOUT_S))
    return None if why is None else f"{name} is {LOCAL} {why}. Name a directory, or a model that was downloaded before."


def dataset_problem(name: str) -> str | None:
    """Returns why a dataset cannot be asked of the Hub."""
    url = hf_hub_url(name, "README.md", repo_type="dataset")
    why = _failure(lambda: get_hf_file_metadata(url, timeout=TIMEOUT_S))
    return None if why is None else f"{name} is {LOCAL} {why}. Name files in data.train, or one downloaded before."


def account_problem(token: str | None) -> str | None:
    """Returns why nothing can be uploaded: no token, a token that the Hub refuses, or no connection."""
    refused: list[str] = []
    cure = "Log in with `hf auth login`, set HF_TOKEN, or give --token."

    def ask() -> None:
        try:
            HfApi().whoami(token=token)
        except LocalTokenNotFoundError:
            refused.append(f"an upload needs a token of the Hub, and none is set. {cure}")
        except HfHubHTTPError as error:
            if error.response.status_code in (401, 403):
                refused.append(f"the Hub refuses the token. {cure}")

    why = _failure(ask)
    if refused:
        return refused[0]
    return None if why is None else f"{why}."


def _failure(ask: Callable[[], object]) -> str | None:
    """Returns why a request got no answer; None if it got one, be it a refusal."""
    try:
        ask()
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set, so the Hub is not asked"
    except (HfHubHTTPError, ValueError):
        return None
    except Exception:  # the type depends on the HTTP client, which differs between versions of huggingface_hub
        return f"the Hub ({constants.ENDPOINT}) cannot be reached from this machine"
    return None
