"""What comes from outside is a value of a narrow type or a ValueError, and no name leads out of our own directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.support.door import OwnFolder, RelativeName, parse_json, parse_number, parse_step, read_json

OUTSIDE = [
    "",
    "/",
    "/home/x",
    "..",
    "a/../b",
    "a//b",
    "a/",
    "./a",
    "a/.",
    "C:x",
    "a\\b",
    "a\nb",
    "a\x1bb",
    "a\u202eb",
    "\ud800",
]


@pytest.mark.parametrize(
    "value", [*OUTSIDE, "x" * 2000, 7, None, ["a"], b"a"], ids=lambda value: ascii(value).replace("/", "|")
)
def test_what_is_no_name_below_a_directory(value: object) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        RelativeName.parse(value)


@pytest.mark.parametrize("value", ["a", "checkpoint-10", "checkpoint-10/model.safetensors", "..a", "ä b", "a:b/c:d"])
def test_names(value: str) -> None:
    if ":" in value.split("/")[0]:
        value = value.replace(":", "_", 1)
    assert RelativeName.parse(value) == value
    if "/" in value:
        with pytest.raises(ValueError, match="is not a name"):
            RelativeName.parse(value, parts=1)


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None, 2**60, 10**5000], ids=type)
def test_steps(value: object) -> None:
    with pytest.raises(ValueError, match="is not a step"):
        parse_step(value)
    assert parse_step(3) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "3", None, 10**5000, 2.0], ids=type)
def test_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        parse_number(value, least=0.0, most=1.0)
    assert parse_number(1, least=0.0, most=1.0) == 1.0


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b"9" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b"\xff", b"", b"{", b'"\\ud800'],
    ids=["deep", "digits", "digit", "bytes", "nothing", "half", "text"],
)
def test_hostile_json_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(content)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(tmp_path / "file", max_bytes=1000)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "pipe", max_bytes=1000)
    with pytest.raises((ValueError, OSError), match=r"."):
        OwnFolder(tmp_path).open(RelativeName("pipe"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    place = tmp_path / "victim"
    (place / "deep").mkdir(parents=True)
    (place / "file").write_text("precious")
    (place / "deep/file").write_text("precious")
    return place


def is_whole(victim: Path) -> bool:
    files = (victim / "file", victim / "deep/file")
    return [path.read_text() for path in files] == ["precious"] * 2


ACTIONS: dict[str, Callable[[OwnFolder, RelativeName], Any]] = {
    "remove": lambda own, name: own.remove(name),
    "write": lambda own, name: own.open(name, "wb"),
    "append": lambda own, name: own.open(name, "ab"),
    "make": lambda own, name: own.make_folder(name),
    "unlink": lambda own, name: own.unlink(name),
    "put": lambda own, name: own.put(name, b"new"),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["link", "link/file", "link/deep", "own/link", "own/link/file", "file"])
def test_links_are_not_followed(name: str, action: str, victim: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "own").mkdir(parents=True)
    (root / "link").symlink_to(victim)
    (root / "own/link").symlink_to(victim)
    (root / "file").symlink_to(victim / "file")
    is_removed_link = action in ("remove", "unlink", "put") and not name.endswith(("link/file", "link/deep"))
    if is_removed_link:
        ACTIONS[action](OwnFolder(root), RelativeName.parse(name))
        assert not (root / name).is_symlink()
    else:
        with pytest.raises(OSError, match=r"."):
            ACTIONS[action](OwnFolder(root), RelativeName.parse(name))
    assert is_whole(victim)


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(victim: Path, tmp_path: Path) -> None:
    """Thousands of removals while another thread exchanges the folder for a link: the victim keeps its files."""
    root = tmp_path / "root"
    root.mkdir()
    is_over = threading.Event()

    def exchange() -> None:
        (root / "beside").symlink_to(victim)
        while not is_over.is_set():
            (root / "own").mkdir(exist_ok=True)
            (root / "own").rename(root / "away")
            (root / "beside").rename(root / "own")
            (root / "own").rename(root / "beside")
            (root / "away").rename(root / "own")

    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    for _ in range(3000):
        for name in ("own/deep", "own/file"):
            try:
                OwnFolder(root).remove(RelativeName(name))
            except OSError:
                continue
    is_over.set()
    thread.join(30)
    assert is_whole(victim)


def test_what_is_ours_is_written_read_and_removed(tmp_path: Path) -> None:
    own = OwnFolder(tmp_path)
    with own.open(RelativeName("a/b/c"), "wb") as file:
        file.write(b"one")
    with own.open(RelativeName("a/b/c"), "ab") as file:
        file.write(b" two")
    with own.open(RelativeName("a/b/c")) as file:
        assert file.read() == b"one two"
    with pytest.raises(FileExistsError):
        own.open(RelativeName("a/b/c"), "xb")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert own.names() == ["a"]
    assert own.is_folder(RelativeName("a/b"))
    assert not own.is_folder(RelativeName("link"))
    assert own.make_folder(RelativeName("a/d")).is_dir()
    own.remove(RelativeName("a"))
    own.remove(RelativeName("a"))
    assert own.names() == []
