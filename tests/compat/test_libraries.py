"""Other libraries on Trainwright: the same trainings under transformers and under `install()`.

Each side is one process that runs every case; nothing of those libraries is changed but by `install()`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SIDE = Path(__file__).with_name("side.py")
# Case: the library, its class, what is trained.
CASES = {
    "trl_sft": ("trl", "SFTTrainer", "plain"),
    "trl_sft_packing": ("trl", "SFTTrainer", "packed"),
    "trl_sft_completion_only": ("trl", "SFTTrainer", "loss of the completions only"),
    "trl_sft_peft": ("trl", "SFTTrainer", "LoRA"),
    "trl_sft_resumed": ("trl", "SFTTrainer", "resumed in the middle"),
    "trl_dpo": ("trl", "DPOTrainer", "preferences"),
    "trl_reward": ("trl", "RewardTrainer", "preferences"),
    "trl_kto": ("trl", "KTOTrainer", "labelled completions"),
    "trl_grpo": ("trl", "GRPOTrainer", "generated completions and a reward, with an evaluation"),
    "trl_rloo": ("trl", "RLOOTrainer", "generated completions and a reward, with an evaluation"),
    "sentence_transformers_two_datasets": (
        "sentence-transformers",
        "SentenceTransformerTrainer",
        "two datasets, two losses",
    ),
    "cross_encoder": ("sentence-transformers", "CrossEncoderTrainer", "pairs with a label"),
    "setfit_few_shots": ("setfit", "Trainer", "few texts, the best model loaded, then the head"),
    "setfit_early_stopping": ("setfit", "Trainer", "few texts, stopped early"),
    "setfit_default_arguments": ("setfit", "Trainer", "without arguments"),
    "peft_lora_with_the_plain_trainer": ("peft", "LoRA in the plain `Trainer`", "classification"),
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "libraries.md"
MARKS = ("<!-- written by tests/compat/test_libraries.py -->\n", "<!-- end -->")
# transformers weighs a batch's loss by its samples, and this package by the labels that count (docs: evaluation).
TOKENS_ARE_WEIGHED = {name for name in CASES if name.startswith("trl_sft")}

pytestmark = pytest.mark.timeout(1000)  # the first test waits for all trainings of both sides


def start(side: str, out: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    env.pop("WORLD_SIZE", None)
    command = [sys.executable, str(SIDE), side, str(out), *CASES]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sides")
    running = {side: start(side, folder / f"{side}.json") for side in ("ours", "theirs")}
    for side, process in running.items():
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, f"{side}: {errors[-3000:]}"
    return {side: json.loads((folder / f"{side}.json").read_text()) for side in running}


@pytest.mark.slow
def test_the_sides_differ_only_in_the_trainer(sides: dict[str, dict[str, Any]]) -> None:
    assert sides["ours"]["base"] == "trainwright.trainer.Trainer"
    assert sides["theirs"]["base"] == "transformers.trainer.Trainer"
    assert sides["ours"]["versions"] == sides["theirs"]["versions"]


def table(sides: dict[str, dict[str, Any]]) -> str:
    """What was found, for docs/libraries.md."""
    versions = sides["ours"]["versions"]
    cases: dict[tuple[str, ...], list[str]] = {}
    for case, (library, kind, what) in CASES.items():
        ours = sides["ours"][case]
        theirs = sides["theirs"][case]
        same = "equal" if ours.get("weights") == theirs.get("weights") else "differ"
        name = f"`{kind}`" if "`" not in kind else kind
        found = (f"{library} {versions[library]}", name, same, told(case, ours, theirs))
        cases.setdefault(found, []).append(what)
    rows = ["| library | class | training | weights, bit for bit | logs |", "|---|---|---|---|---|"]
    for (library, name, same, logs), trained in cases.items():
        rows.append(f"| {library} | {name} | {'; '.join(trained)} | {same} | {logs} |")
    return "\n".join([*rows, "", f"Under transformers {versions['transformers']}."]) + "\n\n"


def told(case: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How the logs compare, in a word."""
    pairs = [
        (mine[name], other[name], name)
        for mine, other in zip(ours["logs"], theirs["logs"], strict=True)
        for name in other
    ]
    evaluated = [name.startswith("eval") and name.endswith("loss") for _, _, name in pairs]
    if any(mine != other for (mine, other, _), is_eval in zip(pairs, evaluated, strict=True) if not is_eval):
        return "differ"
    close = all(mine == pytest.approx(other, rel=1e-6) for mine, other, _ in pairs)
    return "equal" if close else "equal but `eval_loss`"


@pytest.mark.slow
def test_the_page_says_what_was_found(sides: dict[str, dict[str, Any]]) -> None:
    """With WRITE_DOCS=1 it is written."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    said, after = rest.split(MARKS[1])
    if os.environ.get("WRITE_DOCS"):
        said = "\n" + table(sides)
        PAGE.write_text(before + MARKS[0] + said + MARKS[1] + after, encoding="utf-8")
    assert said.strip() == table(sides).strip()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_training(case: str, sides: dict[str, dict[str, Any]]) -> None:
    ours = sides["ours"][case]
    theirs = sides["theirs"][case]
    assert "error" not in theirs, theirs["error"]
    assert "error" not in ours, ours["error"]
    for what in theirs.keys() - {"logs"}:  # weights, files, and what a case adds
        assert ours[what] == theirs[what], what
    assert len(ours["logs"]) == len(theirs["logs"])
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if name.endswith("loss") and name.startswith("eval"):
                rough = case in TOKENS_ARE_WEIGHED
                assert mine[name] == pytest.approx(value, rel=0.01 if rough else 1e-6), name
            else:
                assert mine[name] == value, name
