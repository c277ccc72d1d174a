"""`trainwright ledger`: samples by loss and visits, with their texts, for a person, a program and the quarantine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainwright.capabilities.ledger.table import LEDGER_NAME, Ledger, as_table, identity_columns, write_table
from trainwright.capabilities.quarantine.file import Named, Quarantined, read_quarantine
from trainwright.data.identity import SampleId, Seen, fingerprint

from ...cli.commands import SMALL, call, done, small


def write_ledger(folder: Path) -> None:
    """Six samples of the sources a and b; 0, 1 and 3 have visits."""
    ledger = Ledger()
    one = np.ones(1, np.int64)
    for step, (sample, loss) in enumerate([(0, 0.5), (3, 2.0), (1, 0.25), (3, 4.0)], start=1):
        ledger.add(np.array([sample]), step=one * step, visits=one, tokens=one, loss_sum=np.array([loss]))
    names = [SampleId("a", 0), SampleId("a", 1), SampleId("b", 1)]
    contents = [fingerprint(row(number)) for number in (0, 1, 3)]
    about = {"step": 4, "num_samples": 6, "sources": {"a": 2, "b": 4}, "is_mean": False, "probes": {}}
    folder.mkdir(exist_ok=True)
    write_table(as_table(ledger.noted(), identity_columns(names, contents), about), folder / LEDGER_NAME)


def row(number: int) -> dict[str, str]:
    return {"text": f"text {number}", "label": "x"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_ledger(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(6)))
    return tmp_path


def test_each_question_is_answered(folder: Path) -> None:
    def asked(*words: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(done("ledger", str(folder), *words, "--json"))
        return found

    assert [(one["sample"], one["mean_loss"], one["visits"]) for one in asked("top", "-n", "2")] == [
        (3, 3.0, 2),
        (0, 0.5, 1),
    ]
    assert [one["sample"] for one in asked("never")] == [2, 4, 5]
    assert [(one["name"], one["sample"], one["source"]) for one in asked("repeated")] == [("b[1]", 3, "b")]
    assert [(one["source"], one["samples"], one["mean_loss"]) for one in asked("by-source")] == [
        ("a", 2, 0.375),
        ("b", 1, 3.0),
    ]
    data = str(folder / "data.jsonl")
    assert [one["text"] for one in asked("text", "--data", data)] == ["text 0 | x", "text 1 | x", "text 3 | x"]
    assert [one["text"] for one in asked("never", "--data", data)] == ["text 2 | x", "text 4 | x", "text 5 | x"]


def test_rows_are_printed_and_the_quarantine_takes_their_names(folder: Path) -> None:
    shown = done("ledger", str(folder), "-n", "1", "--data", str(folder / "data.jsonl"), "--quarantine", str(folder))
    head = ["name", "source", "visits", "tokens", "mean_loss", "last_loss", "last_step", "text"]
    assert shown.splitlines()[0].split() == head
    assert "text 3" in shown
    assert read_quarantine(folder).entries == (Named(SampleId("b", 1), Seen(fingerprint(row(3)), 4)),)


def test_rows_that_were_never_seen_have_numbers_in_the_quarantine_beside_the_sizes_of_the_data(folder: Path) -> None:
    done("ledger", str(folder), "never", "--quarantine", str(folder))
    assert read_quarantine(folder) == Quarantined((2, 4, 5), {"a": 2, "b": 4})


def test_two_runs_are_compared_by_the_identity_of_their_rows(folder: Path) -> None:
    names = [SampleId("b", 5), SampleId("a", 0), SampleId("new", 0)]
    contents = [fingerprint(row(number)) for number in (3, 9, 7)]
    ledger = Ledger()
    ones = np.ones(3, np.int64)
    ledger.add(np.arange(3), step=ones, visits=ones, tokens=ones, loss_sum=np.array([1.0, 1.0, 1.0]))
    about = {"step": 4, "num_samples": 9, "sources": {"new": 1, "a": 2, "b": 6}, "probes": {}}
    other = folder / "other"
    other.mkdir()
    write_table(as_table(ledger.noted(), identity_columns(names, contents), about), other / LEDGER_NAME)
    found = json.loads(done("ledger", "diff", str(folder), str(other), "--json"))
    (same,) = found.pop("rows")
    assert (same["name"], same["name_second"], same["change"]) == ("b[1]", "b[5]", 1.0 - 3.0)
    assert found == {"num_matched": 1, "changed": ["a[0]"], "only_first": ["a[1]"], "only_second": ["new[0]"]}
    shown = done("ledger", "diff", str(folder), str(other))
    assert "1 row in both." in shown
    assert "1 row only in the second run: new[0]" in shown
    assert "ledger diff RUN OTHER" in call("ledger", "diff", str(folder)).output
    assert "one argument too many" in call("ledger", str(folder), "top", str(other)).output


def test_what_cannot_be_answered_is_said(folder: Path) -> None:
    assert "is not one of: top, never" in call("ledger", str(folder), "best").output
    refused = call("ledger", str(folder / "elsewhere"))
    assert refused.exit_code == 2
    assert "train with ledger=True" in refused.output
    assert "lists sources" in call("ledger", str(folder), "by-source", "--quarantine", str(folder)).output


@pytest.mark.costly  # trains three times
def test_the_ledgers_list_excludes_the_lines_it_shows_after_others_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The story of a user who reads the ledger, removes lines of the CSV, and trains again."""
    small(tmp_path, SMALL + "  ledger: true\n  num_train_epochs: 1\n  max_steps: -1\n".replace("  max_steps: -1\n", ""))
    lines = (tmp_path / "table.csv").read_text().splitlines()
    numbered = [lines[0], *(f"row {number} {line}" for number, line in enumerate(lines[1:], start=2))]
    (tmp_path / "table.csv").write_text("\n".join(numbered) + "\n")
    monkeypatch.chdir(tmp_path)
    done("train", "config.yaml")
    listed = json.loads(done("ledger", "run", "-n", "4", "--json"))
    done("ledger", "run", "-n", "4", "--quarantine", "second")
    texts = {one["text"].split(" | ")[0] for one in listed}
    for one in listed:  # the name is the line of the file that an editor shows
        file, _, line = one["name"].partition(":")
        assert file == "table.csv"
        assert numbered[int(line) - 1].startswith(f"row {line} ")
        assert one["text"].split(" | ")[0] == numbered[int(line) - 1].rpartition(",")[0]
    bad = [int(one["name"].partition(":")[2]) for one in listed]
    removed = [line for line in range(2, max(bad)) if line not in bad][:6]
    assert removed
    kept = [text for line, text in enumerate(numbered, start=1) if line not in removed]
    (tmp_path / "table.csv").write_text("\n".join(kept) + "\n")
    again = call("train", "config.yaml", "--set", "training.output_dir=second", "--set", "data.eval_share=0.1")
    assert again.exit_code == 0, again.output
    seen = json.loads(done("ledger", "second", "text", "-n", "99", "--json"))
    assert not texts & {one["text"].split(" | ")[0] for one in seen}
    assert "Rows in quarantine have moved: table.csv:" in caplog.text
    with_split = done("ledger", "second", "text", "-n", "99", "--data", "table.csv", "--json")
    assert json.loads(with_split) == seen, "the original file has the rows of the split"
