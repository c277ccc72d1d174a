"""What the tutorials show besides Python: the Slurm script runs, the files of the README train and answer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainwright.cli.recipe.recipe_reader import checked, read_tree

from ..cli.commands import done, small
from ..cli.proved import make_base

ROOT = Path(__file__).parents[2]
USE = "docs/use_the_model.md"

# Stands in for Slurm's srun: two tasks on this machine, with the variables that Slurm sets.
SRUN = """#!/bin/bash
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=7 "$@" &
    pids="$pids $!"
done
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""


def block(page: str, language: str, containing: str = "") -> str:
    """The first block of a language on a page that has a text in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return next(one for one in found if containing in one)


@pytest.mark.process
@pytest.mark.slow  # two processes that import torch
@pytest.mark.timeout(300)
def test_the_slurm_script_trains_in_its_tasks_and_requeues_after_the_signal(tmp_path: Path) -> None:
    script = block("docs/distributed.md", "bash", "#SBATCH")
    train = block("docs/distributed.md", "python")
    (tmp_path / "train.py").write_text(
        train.replace('TrainingArguments(\n    "', 'TrainingArguments(\n    use_cpu=True, output_dir="')
    )
    (tmp_path / "job.sh").write_text(script)
    tools = {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\n[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> requeued\n',
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "SLURM_JOB_NODELIST": "n1"}
    environment = {**os.environ, **given, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "x 2 processes" in done.stdout
    assert (tmp_path / "runs" / "cluster" / "checkpoint-16").is_dir()
    assert not (tmp_path / "requeued").exists()
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 138\n")
    stopped = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=60)
    assert stopped.returncode == 138
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "7"]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/converse.md"])
def test_files_of_the_command_line_have_known_entries(page: str, tmp_path: Path) -> None:
    text = block(page, "yaml", "columns" if page == "README.md" else "")
    value = yaml.safe_load(text)
    (tmp_path / "reviews.csv").write_text("review,stars\nfine,5\npoor,1\n")
    (tmp_path / "conversations.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "config.yaml").write_text(text)
    recipe = checked(read_tree(tmp_path / "config.yaml"), tmp_path)
    assert recipe.task == value["task"]
    assert set(value["training"]) <= set(recipe.training)


QUICK = ("--set", "training.num_train_epochs=1", "--set", "training.use_cpu=true", "--set", "training.bf16=false")


@pytest.mark.costly
def test_the_chat_of_the_readme_trains_answers_and_is_proved(tmp_path: Path) -> None:
    """With a model of a few thousand weights in place of the named one."""
    base = make_base(tmp_path, steps=2)
    rows = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    chats = [(("user", row["question"]), ("assistant", row["answer"])) for row in rows]
    lines = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in chats]
    (tmp_path / "conversations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = block("README.md", "yaml", "task: chat").replace("Qwen/Qwen3-0.6B, dtype: bfloat16", str(base))
    (tmp_path / "chat.yaml").write_text(text.replace("eval_share: 0.05", "eval_share: 0.5"))
    commands = block("README.md", "console", "trainwright chat runs/assistant")
    for command in ("check", "train"):
        assert f"$ trainwright {command} chat.yaml" in commands
        done(command, "chat.yaml", *QUICK)
    assert json.loads(done("chat", "runs/assistant", "--once", "say green", "--json"))["answer"] is not None
    export = re.search(r"^\$ trainwright (export .*)$", commands, flags=re.MULTILINE)
    assert export is not None
    shown = done(*export[1].split())
    for line in commands.partition(export[0])[2].splitlines():
        assert not line or line.split()[0] in [one.split()[0] for one in shown.splitlines()], line
    assert f"trainwright {export[1]}\n" == block(USE, "", "--prove"), "the same command as on the page"
    assert (tmp_path / "assistant" / "README.md").is_file()
    ask = shlex.split(block(USE, "", "chat assistant").splitlines()[0])
    assert done(*ask[1:]).strip()


@pytest.mark.costly
def test_the_table_of_the_readme_trains_to_predictions(tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / "reviews.csv").write_text((tmp_path / "table.csv").read_text().replace("text,label", "review,stars"))
    text = block("README.md", "yaml", "task: text-classification")
    tiny = "model: {config: {model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    tiny += "intermediate_size: 32}, learn_tokenizer: {vocab_size: 64}}"
    (tmp_path / "config.yaml").write_text(re.sub(r"^model:.*$", tiny, text, flags=re.MULTILINE))
    done("train", "config.yaml", "--set", "training.use_cpu=true")
    (tmp_path / "new.csv").write_text("review\nA moving and funny film.\n")
    predict = shlex.split(block(USE, "", "predict runs/reviews").splitlines()[1])
    assert f"$ {shlex.join(predict)}\n" in block("README.md", "console", "trainwright predict")
    done(*predict[1:])
    assert (
        (tmp_path / "predictions.csv").read_text().splitlines()[0].startswith("review,predicted_label,predicted_score")
    )


def test_each_command_to_use_a_model_is_run_or_marked_as_not_run() -> None:
    sections = (ROOT / USE).read_text(encoding="utf-8").split("\n## ")[1:]
    unmarked = [
        section.splitlines()[0]
        for section in sections
        if "```" in section and not re.search(r"^\*(Run|Not run) by our tests.*\*", section, re.MULTILINE)
    ]
    assert unmarked == []
