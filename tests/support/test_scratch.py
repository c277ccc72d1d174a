"""Directories for temporary files: those of runs that are gone are removed, and no others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from trainwright.support import scratch


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def gone() -> str:
    """Returns the number of a process that is not there: no system counts so far."""
    return "99999999"


def named(temporary: Path, owner: tuple[str, ...], *, purpose: str = "evaluation") -> Path:
    folder = temporary / f"trainwright-{purpose}-{'-'.join(owner)}-abcdefgh"
    folder.mkdir()
    (folder / "trainer.pt").write_text("model and data")
    return folder


def test_folder_is_for_this_user_alone_and_has_owner_in_its_name(temporary: Path) -> None:
    folder = scratch.make_scratch_folder("evaluation")
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.name.split("-")[2:-1] == list(scratch._owner())
    assert scratch.make_scratch_folder("evaluation") != folder
    assert folder.is_dir(), "its process is alive"


def test_folders_of_processes_that_are_gone_are_removed(temporary: Path, gone: str) -> None:
    host, boot, namespace, pid = scratch._owner()
    swept = [
        named(temporary, (host, boot, namespace, gone)),
        named(temporary, (host, "01234567", namespace, pid)),  # before the machine was started again
        named(temporary, (host, "01234567", "89abcdef", pid)),
    ]
    kept = [
        named(temporary, (host, boot, namespace, pid)),
        named(temporary, (host, boot, "89abcdef", gone)),  # of another container, where the process may be alive
        named(temporary, ("01234567", boot, namespace, gone)),  # of another machine
        named(temporary, (host, boot, namespace, gone), purpose="other"),
        named(temporary, (host, boot, namespace, "x" + gone)),
        named(temporary, (host, boot, namespace, "9" * 50)),
        named(temporary, (host, boot, namespace, "²")),
        named(temporary, (boot, namespace, gone)),
    ]
    scratch.sweep_scratch_folders("evaluation")
    assert not any(folder.exists() for folder in swept)
    assert all((folder / "trainer.pt").exists() for folder in kept)


def test_a_link_with_such_a_name_is_not_followed(temporary: Path, tmp_path: Path, gone: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "work").write_text("mine")
    owner = (*scratch._owner()[:3], gone)
    (temporary / f"trainwright-evaluation-{'-'.join(owner)}-linkedxx").symlink_to(victim, target_is_directory=True)
    inner = named(temporary, owner)
    (inner / "link").symlink_to(victim, target_is_directory=True)
    scratch.sweep_scratch_folders("evaluation")
    assert not inner.exists()
    assert (victim / "work").read_text() == "mine"


def test_folders_of_other_users_stay(temporary: Path, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = named(temporary, (*scratch._owner()[:3], gone))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    scratch.sweep_scratch_folders("evaluation")
    assert folder.is_dir()
