"""Files of settings that are none: a pipe is not waited for, a huge file is not read, and each error names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainingArguments
from trainwright.cli.recipe.recipe_reader import read_tree
from trainwright.config import deepspeed_config
from trainwright.config.parser import HfArgumentParser as Parser
from trainwright.hub.model_card import CardContent, write_card

pytestmark = pytest.mark.timeout(60)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        # a hole: it takes no place on the disk
        file.truncate(10 << 30)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "ten gigabytes": huge,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\xff"),
}
READERS: dict[str, Callable[[Path], object]] = {
    "a recipe": lambda path: read_tree(path),
    "a YAML file": lambda path: Parser(TrainingArguments).parse_yaml_file(path),
    "a JSON file": lambda path: Parser(TrainingArguments).parse_json_file(path),
    "a file of arguments": lambda path: Parser(TrainingArguments).parse_args_into_dataclasses(
        [], args_filename=str(path)
    ),
    "accelerator_config": lambda path: TrainingArguments(str(path.parent / "out"), accelerator_config=str(path)),
    "fsdp_config": lambda path: TrainingArguments(str(path.parent / "out"), fsdp=True, fsdp_config=str(path)),
    "deepspeed": lambda path: deepspeed_config.read(str(path)),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_file_that_is_none_is_refused_by_its_name(make: Any, reader: Any, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    make(path)
    with pytest.raises(ValueError, match=r"settings\.yaml"):
        reader(path)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_card_that_is_none_is_kept(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "README.md")
    assert not write_card(tmp_path, CardContent(model_name="model"))
