"""Tasks of pairs: TRL's losses on our trainer, to the bit, with our resume, names of rows and ledger."""

from __future__ import annotations

import json
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.tasks import pair_trainers
from trainwright.cli.tasks.source import load
from trainwright.cli.tasks.task_trainer import make_named_pair_trainer, make_objects

from .._support.subprocesses import run_python
from .commands import call, done, start
from .proved import WORDS, make_base

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
]

ROWS = [
    {
        "prompt": f"say {WORDS[number % 4]}",
        "chosen": f" {WORDS[number % 4]} it is {'it ' * (number % 3)}",
        "rejected": f" {WORDS[(number + 1) % 4]} say {'say ' * (number % 5)}",
    }
    for number in range(32)
]
RECIPE = """\
task: preference
model: {path: base}
data: {train: pairs.jsonl, eval: some.jsonl, max_length: 32}
training: {output_dir: run, max_steps: 12, learning_rate: 1e-2, per_device_train_batch_size: 4, use_cpu: true,
  gradient_accumulation_steps: 2, logging_steps: 1, save_steps: 4, eval_strategy: steps, eval_steps: 6, bf16: false}
"""
LORA = f"{RECIPE}lora: {{r: 4, alpha: 8, target_modules: [q_proj, v_proj]}}\n"
# What a person would write with TRL alone.
SCRIPT = """\
import json, random, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

rows = [json.loads(line) for line in open("pairs.jsonl")]
some = [json.loads(line) for line in open("some.jsonl")]
task, lora = sys.argv[1], len(sys.argv) > 2
settings = dict(
    output_dir="theirs", max_steps=12, learning_rate=1e-2, per_device_train_batch_size=4, use_cpu=True, max_length=32,
    gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", eval_strategy="steps", eval_steps=6,
    bf16=False, report_to="none",
)
adapter = None
if lora:
    from peft import LoraConfig

    kind = "CAUSAL_LM" if task == "preference" else "SEQ_CLS"
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=kind)
if task == "preference":
    model = AutoModelForCausalLM.from_pretrained("base")
    kind, config = DPOTrainer, DPOConfig(**settings)
else:
    import transformers

    transformers.set_seed(42)
    model = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
    kind, config = RewardTrainer, RewardConfig(**settings)
trainer = kind(
    model,
    args=config,
    train_dataset=Dataset.from_list(random.Random(0).sample(rows, k=len(rows))),
    eval_dataset=Dataset.from_list(random.Random(0).sample(some, k=len(some))),
    processing_class=AutoTokenizer.from_pretrained("base"),
    peft_config=adapter,
)
assert type(trainer).__mro__[2].__module__ == "transformers.trainer"
trainer.train()
trainer.save_model("theirs")
json.dump(trainer.state.log_history, open("theirs/logs.json", "w"))
"""
LIMIT_S = 300


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model and pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    make_base(folder, steps=10)
    return folder


@pytest.fixture(scope="module")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task, of one step."""
    found = {}
    for task in ("preference", "reward"):
        folder = tmp_path_factory.mktemp(task)
        done("train", str(write(folder, place, RECIPE.replace("preference", task))), "--max_steps", "1")
        found[task] = folder / "run"
    return found


def write(folder: Path, place: Path, text: str = RECIPE, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Writes pairs and a recipe into a directory that has the model too."""
    folder.mkdir(exist_ok=True)
    if not (folder / "base").exists():
        (folder / "base").symlink_to(place / "base")
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:8]))
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def logs(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [entry for entry in history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in ("epoch", "num_tokens")} for entry in kept]


@pytest.mark.process
@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("task", ["preference", "reward"])
def test_weights_and_losses_are_those_of_a_script_of_trl(
    task: str, lora: bool, ledger: bool, place: Path, tmp_path: Path
) -> None:
    text = (LORA if lora else RECIPE).replace("task: preference", f"task: {task}")
    done("train", str(write(tmp_path, place, text)), *(("--ledger", "true") if ledger else ()))
    (tmp_path / "script.py").write_text(SCRIPT)
    run_python(str(tmp_path / "script.py"), task, *(["lora"] if lora else []), cwd=tmp_path, timeout_s=LIMIT_S)
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    ours, theirs = (load_file(tmp_path / folder / name) for folder in ("run", "theirs"))
    assert ours.keys() == theirs.keys()
    assert [one for one in ours if not ours[one].equal(theirs[one])] == []
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    found = logs(state["log_history"])
    wanted = logs(json.loads((tmp_path / "theirs" / "logs.json").read_text()))
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in wanted]
    assert found[0]["grad_norm"] == wanted[0]["grad_norm"]


@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize("text", [RECIPE, LORA, RECIPE.replace("preference", "reward")], ids=["full", "lora", "reward"])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(text: str, place: Path, tmp_path: Path) -> None:
    text = text.replace("max_steps: 12", "max_steps: 60")
    broken = write(tmp_path / "broken", place, text).parent
    process = start("train", "config.yaml", folder=broken)
    until = time.monotonic() + LIMIT_S
    while not (broken / "run" / "checkpoint-8").exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            pytest.fail(process.communicate()[1])
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (broken / "run" / "trainer_state.json").exists()
    shown = done("resume", str(broken / "run"))
    assert "resumes" in shown
    whole = write(tmp_path / "whole", place, text)
    done("train", str(whole))
    name = "adapter_model.safetensors" if "lora" in text else "model.safetensors"
    assert (broken / "run" / name).read_bytes() == (whole.parent / "run" / name).read_bytes()


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_pairs_that_are_flipped_are_found_by_the_ledger_and_put_into_quarantine(
    task: str, place: Path, tmp_path: Path
) -> None:
    flipped = (5, 17, 30)
    rows = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if number in flipped else row
        for number, row in enumerate(ROWS)
    ]
    text = RECIPE.replace("task: preference", f"task: {task}").replace("max_steps: 12", "num_train_epochs: 6")
    path = write(tmp_path, place, text, rows)
    done("train", str(path), "--ledger", "true")
    found = json.loads(done("ledger", str(tmp_path / "run"), "top", "-n", "3", "--json"))
    assert sorted(row["name"] for row in found) == sorted(f"pairs.jsonl:{number + 1}" for number in flipped)
    assert all("say" in row["text"] for row in found)
    other = tmp_path / "second"
    done("ledger", str(tmp_path / "run"), "top", "-n", "3", "--quarantine", str(other))
    done("train", str(path), "--output_dir", str(other), "--ledger", "true")
    again = json.loads(done("ledger", str(other), "top", "-n", "40", "--json"))
    assert len(again) == 29
    losses = [row["mean_loss"] for row in again]
    assert max(losses) < found[-1]["mean_loss"]


def test_messages_are_written_by_the_template(place: Path, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in ROWS
    ]
    shown = done("train", str(write(tmp_path, place, RECIPE, rows)), "--max_steps", "2")
    assert "pairs of messages" in shown
    as_text = done(
        "train",
        str(write(tmp_path, place)),
        "--max_steps",
        "2",
        "--set",
        "data.chat_template=plain",
        "--output_dir",
        str(tmp_path / "named"),
    )
    assert "pairs of messages" in as_text
    lines = [
        json.loads(line)
        for line in done(
            "predict", str(tmp_path / "run"), "--data", str(tmp_path / "some.jsonl"), "--json"
        ).splitlines()
    ]
    assert [sorted(line) for line in lines] == [["answer", "row"]] * 8
    assert json.loads(done("chat", str(tmp_path / "run"), "--once", "say red", "--json"))["answer"] is not None


def test_a_trained_preference_is_evaluated_against_the_model_before(place: Path, tmp_path: Path) -> None:
    done("train", str(write(tmp_path, place, LORA)))
    recorded = json.loads((tmp_path / "run" / "all_results.json").read_text())
    words = ("eval", str(tmp_path / "run"), "--data", str(tmp_path / "some.jsonl"), "--json")
    found = json.loads(done(*words, "--output", str(tmp_path / "page.html")))
    assert found["metrics"]["loss"] == pytest.approx(recorded["eval_loss"], rel=1e-4)
    assert found["metrics"]["rewards/accuracies"] == recorded["eval_rewards/accuracies"]
    assert len(found["hardest"]) == 8


def test_a_merged_adapter_is_exported_and_a_proof_is_refused(place: Path, tmp_path: Path) -> None:
    done("train", str(write(tmp_path, place, LORA)), "--max_steps", "2")
    words = ("export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge")
    refused = call(*words, "--prove")
    assert refused.exit_code == 2
    assert "was trained on pairs (task: preference). Export it without --prove." in " ".join(refused.output.split())
    done(*words)
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_a_reward_scores_pairs_and_single_answers(place: Path, tmp_path: Path) -> None:
    done("train", str(write(tmp_path, place, RECIPE.replace("preference", "reward"))), "--num_train_epochs", "4")
    run = str(tmp_path / "run")
    found = [
        json.loads(line) for line in done("predict", run, "--data", str(tmp_path / "some.jsonl"), "--json").splitlines()
    ]
    assert sum(line["margin"] > 0 for line in found) >= 6
    single = [{"prompt": row["prompt"], "text": row["chosen"]} for row in ROWS[:8]]
    (tmp_path / "single.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in single))
    scores = [
        json.loads(line)
        for line in done("predict", run, "--data", str(tmp_path / "single.jsonl"), "--json").splitlines()
    ]
    assert [line["score"] for line in scores] == pytest.approx([line["chosen"] for line in found], rel=1e-4)
    words = ("eval", run, "--data", str(tmp_path / "some.jsonl"), "--json", "--output", str(tmp_path / "page.html"))
    assert json.loads(done(*words))["metrics"]["accuracy"] >= 0.75


@pytest.mark.parametrize(
    ("task", "first"),
    [
        ("preference", "eval_loss, eval_rewards/accuracies, eval_rewards/margins, "),
        ("reward", "eval_accuracy, eval_loss, eval_margin, "),
    ],
)
def test_a_check_promises_the_metrics_that_training_reports(task: str, first: str, place: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "run", place, RECIPE.replace("preference", task))
    found = json.loads(call("check", str(path), "--json").stdout)
    (shown,) = (one["evidence"] for one in found["findings"] if one["check"] == "metrics")
    assert shown.startswith(f"An evaluation returns {first}")


def test_the_metrics_of_the_task_come_before_what_trl_counts(runs: dict[str, Path]) -> None:
    shown = done("runs", str(runs["preference"].parent))
    assert "rewards/accuracies" in shown
    assert "rewards/margins" in shown
    assert "entropy" not in shown
    shown = done("runs", str(runs["reward"].parent))
    assert "accuracy" in shown
    assert "margin" in shown
    assert "num_tokens" not in shown


@pytest.mark.parametrize(("multiple", "shown"), [(None, False), (8, True)])
def test_a_padding_of_trl_is_in_the_plan_if_it_pads(
    multiple: int | None, shown: bool, place: Path, tmp_path: Path
) -> None:
    words = [] if multiple is None else ["--pad_to_multiple_of", str(multiple)]
    plan = json.loads(done("train", str(write(tmp_path / "run", place)), "--dry-run", "--json", *words))["plan"]
    assert ("pad_to_multiple_of=8" in str(plan.get("settings"))) == shown
    assert plan.get("own") == (
        ["pad_to_multiple_of: as DPOConfig declares it, not as Trainwright does"] if shown else None
    )
    assert "pad_to_multiple_of=None" not in str(plan)


def test_without_trl_it_is_said_first(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_trainers, "find_spec", lambda name: None)
    result = call("train", str(write(tmp_path, place)))
    assert result.exit_code == 2
    assert "task: preference needs the package trl: pip install trl" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "say red", "chosen": " red", "rejected": ""}, "the column rejected has no text"),
        ({"prompt": "say red", "chosen": None, "rejected": " x"}, "the column chosen has no text"),
    ],
)
def test_a_pair_without_an_answer_is_named(row: dict[str, Any], said: str, place: Path, tmp_path: Path) -> None:
    result = call("train", str(write(tmp_path, place, RECIPE, [*ROWS, row])))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "pairs.jsonl:33" in result.output


def test_pairs_of_equal_answers_are_a_warning(place: Path, tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "say red", "chosen": " red", "rejected": " red"}]
    shown = done("train", str(write(tmp_path, place, RECIPE, rows)), "--dry-run")
    assert "both answers are equal in 1 pair of train, which teach nothing" in " ".join(shown.split())


def test_pairs_with_one_prompt_are_held_out_together(place: Path, tmp_path: Path) -> None:
    path = write(tmp_path, place, RECIPE.replace("eval: some.jsonl", "eval_share: 0.3"))
    recipe = checked(read_tree(path), tmp_path)
    material = load(recipe, read_tree(path))
    prompts = [{row["prompt"] for row in rows} for rows in (material.train, material.eval)]
    assert len(material.eval) == 8
    assert not prompts[0] & prompts[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("metrics=a:b",), "metrics have no effect in preference"),
        (("task=causal-lm",), "preference has no effect in causal-lm"),
        (("preference.loss_type=dpo",), "'dpo' is not one of sigmoid"),
        (("preference.reference=./nowhere",), "preference.reference: there is no"),
        (("preference.beta=0",), "preference.beta: 0 must be above 0"),
        (("preference.beta=0", "preference.loss_type=ipo"), "preference.beta: 0 must be above 0"),
        (
            ("preference.label_smoothing=0.3",),
            "preference.label_smoothing has no effect with loss_type sigmoid; it belongs to robust, exo_pair",
        ),
        (("preference.label_smoothing=0.5", "preference.loss_type=robust"), "0.5 must be below 0.5"),
        (("preference.loss_type=exo_pair",), "preference.label_smoothing: 0.0 must be above 0 and below 1"),
        (("training.eval_async=true",), "training.eval_async is impossible in preference"),
    ],
)
def test_what_has_no_meaning_is_refused(change: tuple[str, ...], said: str, place: Path, tmp_path: Path) -> None:
    path = write(tmp_path, place, f"{RECIPE}preference: {{beta: 0.2}}\n")
    result = call("train", str(path), *(word for one in change for word in ("--set", one)))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_prompt_is_continued_as_in_training(place: Path, tmp_path: Path) -> None:
    done("train", str(write(tmp_path, place)), "--max_steps", "1")
    path = write(tmp_path, place)
    run = tmp_path / "run"
    given: list[list[list[int]]] = []

    def generate(self: Any, **inputs: Any) -> Any:
        given.append(inputs["input_ids"].tolist())
        return inputs["input_ids"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.LlamaForCausalLM.generate", generate)
        done("predict", str(run), "--data", str(tmp_path / "some.jsonl"), "--batch-size", "1", "--json")
    tree = read_tree(path)
    recipe = checked(tree, tmp_path)
    material = load(recipe, tree)
    args = pair_trainers.make_arguments(recipe, recipe.training)
    trainer = make_named_pair_trainer(material, args, make_objects(material, args))
    trained = dict(zip((row["prompt"] for row in material.eval), trainer.eval_dataset["prompt_ids"], strict=True))
    assert [rows[0] for rows in given] == [trained[row["prompt"]] for row in ROWS[:8]]


@pytest.mark.parametrize(
    ("num_words", "limit", "num_kept", "num_new"),
    [
        # the limit is data.max_length: of 1 + 6 tokens, the text closes with another, which is not asked for
        (6, 7, 7, 6),
        (6, 6, 6, 6),
        # the limit is the 64 positions of the model
        (57, 64, 58, 6),
        (60, 64, 61, 3),
        (80, 64, 58, 6),
    ],
)
def test_a_prompt_up_to_the_limit_is_continued_whole(
    num_words: int, limit: int, num_kept: int, num_new: int, runs: dict[str, Path], tmp_path: Path
) -> None:
    run = runs["preference"]
    tokenizer = AutoTokenizer.from_pretrained(run)
    words = [WORDS[number % 4] for number in range(num_words)]
    (tmp_path / "new.jsonl").write_text(
        "".join(f"{json.dumps({'prompt': text})}\n" for text in (" ".join(words), "say"))
    )
    given: list[Any] = []

    def generate(self: Any, **inputs: Any) -> Any:
        given.append((inputs["input_ids"][0].tolist(), inputs["max_new_tokens"]))
        return inputs["input_ids"]

    data = ("--data", str(tmp_path / "new.jsonl"), "--set", f"data.max_length={limit}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.LlamaForCausalLM.generate", generate)
        done("predict", str(run), *data, "--max-new-tokens", "6", "--json")
    ids = tokenizer(" ".join(words))["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    kept = [ids[0], *ids[1:-1][1 - num_kept :]]
    assert len(kept) == num_kept
    assert given[0] == (kept, num_new)


MESSAGE = [{"role": "user", "content": "say red"}]


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("reward", {"prompt": "a", "chosen": "b", "rejected": None}, "the column rejected has no text"),
        ("reward", {"prompt": "a", "chosen": "b"}, "the column rejected has no text"),
        ("reward", {"prompt": "a", "chosen": "", "rejected": "b"}, "the column chosen has no text"),
        ("reward", {"prompt": "a", "chosen": 5, "rejected": "b"}, "the column chosen has 5, which is not text"),
        ("reward", {"prompt": None, "chosen": "a", "rejected": "b"}, "the column prompt has no text"),
        ("reward", {"prompt": MESSAGE, "chosen": "a", "rejected": "b"}, "the column prompt has [{'role': 'user'"),
        ("preference", {"prompt": None}, "the column prompt has no text"),
        ("preference", {"prompt": 7}, "the column prompt has 7, which is not text"),
    ],
)
def test_a_row_without_an_answer_gets_no_prediction(
    task: str, row: dict[str, Any], said: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in (*ROWS[:2], row)))
    result = call("predict", str(runs[task]), "--data", str(tmp_path / "rows.jsonl"), "--json")
    assert result.exit_code != 0
    assert f"rows.jsonl:3: {said}" in " ".join(result.output.split())


@pytest.mark.parametrize("cell", [None, 5, "", [{"role": "assistant", "content": "red"}]])
def test_a_single_answer_that_is_no_text_gets_no_score(cell: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": "say red", "text": " red"}, {"prompt": "say red", "text": cell}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    result = call("predict", str(runs["reward"]), "--data", str(tmp_path / "rows.jsonl"), "--json")
    assert result.exit_code != 0
    assert "rows.jsonl:2: the column text has" in " ".join(result.output.split())


def test_pairs_without_the_other_answer_get_no_margin(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say red", "chosen": " red"}\n')
    result = call("predict", str(runs["reward"]), "--data", str(tmp_path / "rows.jsonl"), "--json")
    assert result.exit_code != 0
    assert "There is no column 'rejected', which the model reads as rejected" in " ".join(result.output.split())


def test_a_reference_without_a_head_is_refused(place: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    path = write(tmp_path, place)
    result = call("train", str(path), "--set", f"preference.reference={runs['reward']}")
    assert result.exit_code == 2
    said = "preference.reference: the weights lack lm_head.weight, which would be random. Take a complete model"
    assert said in " ".join(result.output.split())


def test_an_adapter_in_place_of_a_model_is_refused(place: Path, tmp_path: Path) -> None:
    path = write(tmp_path, place, LORA)
    done("train", str(path), "--max_steps", "1")
    (tmp_path / "run").rename(tmp_path / "adapter")
    for entry in ("model.path", "preference.reference"):
        result = call("train", str(path), "--set", f"{entry}=./adapter")
        assert result.exit_code == 2
        shown = " ".join(result.output.split())
        assert f"{entry}: " in shown
        assert "--merge, and name FOLDER here" in shown


def test_a_loss_that_smooths_trains(place: Path, tmp_path: Path) -> None:
    for loss in ("robust", "exo_pair"):
        path = write(tmp_path, place, f"{RECIPE}preference: {{loss_type: {loss}, label_smoothing: 0.1}}\n")
        done("train", str(path), "--max_steps", "1", "--output_dir", str(tmp_path / loss))


@pytest.mark.process
def test_a_warning_of_trl_is_no_error(place: Path, tmp_path: Path) -> None:
    checkpointing = "gradient_checkpointing: true, gradient_checkpointing_kwargs: {use_reentrant: false}"
    text = RECIPE.replace("bf16: false", f"bf16: false, {checkpointing}")
    process = start("train", str(write(tmp_path, place, f"{text}{LORA.removeprefix(RECIPE)}")), folder=tmp_path)
    shown = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, shown


def test_messages_that_share_no_beginning_are_named(place: Path, tmp_path: Path) -> None:
    def talk(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    rows = [
        {"chosen": talk(row["prompt"], row["chosen"]), "rejected": talk(row["prompt"], row["rejected"])} for row in ROWS
    ]
    rows[3]["rejected"] = talk("say something", "no")
    rows[6] = {role: turns[1:] for role, turns in rows[6].items()}
    path = write(tmp_path, place, RECIPE, rows)
    result = call("train", str(path))
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert "of train: both answers share no first message" in shown
    assert "pairs.jsonl:4" in shown
    assert "pairs.jsonl:7" in shown
    done("train", str(write(tmp_path, place, RECIPE.replace("preference", "reward"), rows)), "--max_steps", "1")


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_pairs_that_are_too_long_are_shown(
    task: str, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[3]["prompt"] = "say red " * 40
    text = RECIPE.replace("preference", task).replace("eval: some.jsonl, ", "eval_share: 0, ")
    text = text.replace("eval_strategy: steps, eval_steps: 6, ", "")
    path = write(tmp_path, place, text, rows)
    done("train", str(path), "--max_steps", "1")
    said = "data.max_length: 1 pair of train longer than 32 tokens left out by TRL. Raise data.max_length."
    assert said in caplog.messages
    other = ("--output_dir", str(tmp_path / "other"))
    result = call("train", str(path), "--set", "data.max_length=2", *other)
    assert result.exit_code == 2
    said = "data.max_length: all 32 pairs of train are longer than the 2 tokens of data.max_length."
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_answers_with_the_same_tokens_are_named_or_refused(
    task: str, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer knows none of their words; without a space before it, an answer is one word with its prompt."""
    unknown = [{"prompt": "say red", "chosen": " xyzzy", "rejected": " plugh"}] * 2
    text = RECIPE.replace("preference", task)
    done("train", str(write(tmp_path, place, text, [*ROWS, *unknown])), "--max_steps", "1")
    (said,) = [one for one in caplog.messages if "the same tokens" in one]
    assert "both answers have the same tokens in 2 pairs of train, which teach nothing: pairs.jsonl:33" in said
    result = call("train", str(write(tmp_path, place, text, unknown)), "--output_dir", "other")
    assert result.exit_code == 2
    assert "both answers have the same tokens in 2 pairs of train" in " ".join(result.output.split())


def test_answers_that_are_cut_to_the_same_tokens_are_refused(place: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "say red", "chosen": f" {'it ' * 40}red", "rejected": f" {'it ' * 40}blue"}] * 8
    result = call("train", str(write(tmp_path, place, RECIPE, rows)), "--output_dir", "other")
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert "both answers have the same tokens in 8 pairs of train, which teach nothing. TRL cuts" in shown
    assert "raise data.max_length" in shown
