"""install() puts our names in transformers' place, all of them, and takes them away again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers
import transformers.trainer
import transformers.trainer_callback
import transformers.training_args

import trainwright
import trainwright.compat
from trainwright.errors import TrainwrightWarning

from .._support import forked


@pytest.mark.filterwarnings("ignore:trainwright.compat.install. came too late")
def test_names_are_ours_while_it_lasts_and_theirs_afterwards() -> None:
    before = transformers.Trainer
    with trainwright.compat.install() as installed:
        assert transformers.Trainer is trainwright.Trainer
        assert transformers.trainer.Trainer is trainwright.Trainer
        assert transformers.trainer_callback.TrainerCallback is trainwright.TrainerCallback
        assert transformers.training_args.TrainingArguments is trainwright.TrainingArguments
        assert "transformers.trainer.Trainer" in installed.replaced
        with trainwright.compat.install() as inner:
            assert inner is installed
        assert transformers.Trainer is trainwright.Trainer
    assert transformers.Trainer is before
    assert transformers.trainer.Trainer is before
    assert transformers.trainer_callback.TrainerCallback is not trainwright.TrainerCallback
    trainwright.compat.uninstall()


@pytest.mark.filterwarnings("ignore:trainwright.compat.install. came too late")
def test_nothing_else_of_transformers_changes() -> None:
    names = ("AutoModel", "PreTrainedModel", "AutoTokenizer", "DataCollatorWithPadding", "get_scheduler")
    before = [getattr(transformers, name) for name in names]
    with trainwright.compat.install():
        assert [getattr(transformers, name) for name in names] == before


def test_a_library_that_came_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    early = type(sys)("an_early_library")
    early.Trainer = transformers.Trainer
    monkeypatch.setitem(sys.modules, "an_early_library", early)
    with pytest.warns(TrainwrightWarning, match="too late for .*an_early_library"):
        trainwright.compat.install().undo()


@pytest.mark.filterwarnings("ignore:trainwright.compat.install. came too late")
def test_other_modules_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """None keeps a package from being imported; lazy packages put objects of their own there."""
    monkeypatch.setitem(sys.modules, "a_package_that_must_not_load", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "an_object", 7)  # type: ignore[arg-type]
    with trainwright.compat.install():
        assert transformers.Trainer is trainwright.Trainer


@pytest.mark.process
def test_a_script_runs_with_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, neighbour\nfrom transformers import Trainer\n"
        "print(Trainer.__module__, sys.argv[1:], neighbour.WORD, __name__)"
    )
    done = forked.run(["-m", "trainwright.compat", str(script), "--steps", "3"])
    assert done.stdout.strip() == "trainwright.trainer ['--steps', '3'] beside __main__"
    assert "names of transformers" in done.stderr


@pytest.mark.process
def test_a_script_that_is_missing_is_named() -> None:
    done = forked.run(["-m", "trainwright.compat", "no_such_script.py"])
    assert done.returncode == 1
    assert "no script 'no_such_script.py'" in done.stderr
    assert forked.run(["-m", "trainwright.compat"]).returncode == 2
