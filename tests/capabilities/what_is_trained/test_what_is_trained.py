"""The law of what is trained: a planted mistake is named before the first forward pass; in health little is shown."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import TrainerCallback
from trainwright.capabilities.what_is_trained.parameters import read_parameters
from trainwright.capabilities.what_is_trained.roles import find_openings, find_roles
from trainwright.capabilities.what_is_trained.tokens import read_tokens
from trainwright.cli.tasks.adapter import find_targets
from trainwright.errors import DataError, ModelError

from ..._support import chats
from ..._support.subprocesses import run_python
from . import recipes

pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
MOST_LINES = 6


class Reached(Exception):
    """The first forward pass."""


def stop_at_first_forward(model: Any) -> None:
    def stop(*_: Any) -> None:
        raise Reached

    model.register_forward_pre_hook(stop)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and "preflight" in one.name]


@pytest.mark.parametrize("name", recipes.PLANTED)
def test_a_planted_mistake_is_named_before_the_first_forward_pass(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted = recipes.PLANTED[name]
    trainer = planted.make(tmp_path / "run")
    stop_at_first_forward(trainer.model)
    if planted.refuses:
        with pytest.raises((DataError, ModelError), match=planted.says) as caught:
            trainer.train()
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run" / "incidents").exists()
        return
    with pytest.raises(Reached):
        trainer.train()
    said = warned(caplog)
    assert len([line for line in said if re.search(planted.says, line)]) == 1, "\n".join(said)
    assert len(said) == 1, "\n".join(said)


@pytest.mark.parametrize("name", [name for name, one in recipes.PLANTED.items() if not one.refuses])
def test_a_check_up_names_it_too(name: str, tmp_path: Path) -> None:
    planted = recipes.PLANTED[name]
    report = planted.make(tmp_path / "run").check()
    assert not report.is_fine
    assert any(re.search(planted.says, str(one)) for one in report.findings), str(report)


def test_a_check_up_names_an_adapter_that_was_loaded_for_inference(tmp_path: Path) -> None:
    report = recipes.adapter_loaded_for_inference(tmp_path / "run").check()
    (found,) = report.of("in_the_optimizer")
    assert re.search(r"No parameter is trainable: all have requires_grad=False\. Load .*is_trainable=True", str(found))


def lines_of(name: str, folder: Path, capsys: pytest.CaptureFixture[str], **how: Any) -> list[str]:
    trainer = recipes.HEALTHY[name](folder)
    for field, value in how.items():
        setattr(trainer.args, field, value)
    trainer.train()
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("settings ")]


@pytest.mark.parametrize("name", recipes.HEALTHY)
def test_a_healthy_recipe_prints_few_lines_more(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("trainwright").setLevel(logging.WARNING)
    more = lines_of(name, tmp_path / "with", capsys)
    less = lines_of(name, tmp_path / "without", capsys, preflight=False)
    assert warned(caplog) == []
    language_models = (
        "answers_of_a_chat",
        "translations",
        "state_space_model",
        "words_that_are_learned",
        "plain_text",
        "adapter_on_attention",
        "adapter_on_all_linear",
        "router_by_name",
        "adapter_with_excluded_modules",
        "words_that_are_hidden_at_random",
    )
    is_language_model = name in language_models
    added = [line for line in more if line.startswith(("trained ", "tokens ", "          row "))]
    assert len(added) == (5 if is_language_model else 0)
    assert len(more) - len(less) <= MOST_LINES


def test_rows_are_shown_with_the_trained_tokens_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("trainwright").setLevel(logging.WARNING)
    shown = lines_of("answers_of_a_chat", tmp_path, capsys, train_sampling_strategy="sequential")
    (summary,) = [line for line in shown if line.startswith("tokens ")]
    assert "16 of 56 (28.6%) in 4 rows count for the loss; by role: user 0%, assistant 100%, template 0%" in summary
    rows = [line for line in shown if "row " in line and "[[" in line]
    assert len(rows) == 3
    assert all(line.count("[[w") == 1 and line.rstrip().endswith("<|im_end|>]]") for line in rows)


@pytest.mark.parametrize(("settings", "saves"), [({}, True), ({"label_smoothing_factor": 0.1}, False)])
def test_a_large_vocabulary_has_a_line_with_what_a_loss_kernel_saves(
    settings: dict[str, Any], saves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured by benchmarks/vocabulary.py: 3.2 GB of 4.7 for 2,048 tokens of 150,000 words."""
    rows = [{"input_ids": [5] * 64, "labels": [5] * 64}] * 8
    model = chats.llama(vocab_size=300_000, hidden_size=4, num_attention_heads=1, num_key_value_heads=1)
    trainer = recipes.trainer(tmp_path, model, rows, per_device_train_batch_size=8, log_level="warning", **settings)
    stop_at_first_forward(trainer.model)
    with pytest.raises(Reached):
        trainer.train()
    said = "loss      loss_kernel='auto' would save about 1.4 GB: the logits are 512 tokens x 300,000 words"
    assert (said in capsys.readouterr().out) == saves


def test_journal_and_check_up_have_it_in_full(tmp_path: Path) -> None:
    trainer = recipes.chat(tmp_path, journal=True)
    report = trainer.check()
    assert "attention, MLP, embeddings, head, norms" in str(report)
    assert "<mark>w" in report._repr_html_()
    (section,) = report.to_dict()["sections"]
    assert section["name"] == "what_is_trained"
    assert section["tokens"]["trained"] == 16
    json.dumps(section)
    trainer.train()
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    (entry,) = [one for one in entries if one["kind"] == "what_is_trained"]
    assert entry["step"] == 1
    assert entry["tokens"]["tokens"] == 56
    assert {one["kind"] for one in entry["parameters"]["kinds"]} >= {"attention", "MLP", "norms"}


def test_the_report_marks_the_trained_tokens(tmp_path: Path) -> None:
    from trainwright.report.run_page import write_report

    recipes.chat(tmp_path, journal=True).train()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "What is trained" in page
    assert page.count("<mark>w") == 3


def test_no_listener_stays_in_the_step(tmp_path: Path) -> None:
    names: list[list[str]] = []
    trainer = recipes.chat(tmp_path)

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            names.append([one.name for one in trainer._trainwright.run.extensions])

    trainer.add_callback(Looks())
    trainer.train()
    assert len(names) == 2
    assert all("guard" in some and "what_is_trained" not in some for some in names)


def test_a_run_is_the_same_with_it_and_without(tmp_path: Path) -> None:
    weights = []
    for preflight in (True, False):
        trainer = recipes.chat(tmp_path / str(preflight), preflight=preflight)
        trainer.train()
        weights.append([one.detach().clone() for one in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_input_and_labels_of_an_encoder_decoder_are_one_row() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    found = read_tokens([{**batch, "labels": torch.tensor([[8, 3, -100]])}], recipes.t5(), chats.tokenizer())
    assert found is not None
    assert (found.rows, found.tokens, found.trained, found.trained_padding) == (1, 4, 2, 0)
    ((before, is_trained), (after, is_counted)) = found.examples[0]
    assert (is_trained, is_counted, after) == (False, True, "question <|im_end|>") or before


def test_the_first_label_of_a_causal_model_never_counts() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    found = read_tokens([{"input_ids": ids, "labels": ids}], chats.llama(), chats.tokenizer())
    assert found is not None
    assert (found.tokens, found.trained) == (6, 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("state_space_model", "state space"),
        ("words_that_are_learned", "(PROMPT_TUNING) on"),
    ],
)
def test_kinds_of_modules_have_their_names(name: str, says: str, tmp_path: Path) -> None:
    assert says in read_parameters(recipes.HEALTHY[name](tmp_path).model).summary


def test_all_adapters_that_are_trained_are_named() -> None:
    model = recipes.adapted(chats.llama(), target_modules=["q_proj"])
    model.add_adapter("second", recipes.LoraConfig(r=2, target_modules=["up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    found = read_parameters(model)
    assert "LORA and LORA" in found.summary
    assert {one.kind for one in found.kinds if one.trained} == {"attention", "MLP"}


def test_samples_that_share_a_row_are_counted_apart() -> None:
    one = chats.encoded(0)
    other = chats.encoded(1, trains="none")
    ids = torch.tensor([one["input_ids"] + other["input_ids"]])
    labels = torch.tensor([one["labels"] + other["labels"]])
    positions = torch.tensor([[*range(14), *range(14)]])
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    found = read_tokens([batch], chats.llama(), chats.tokenizer())
    assert found is not None
    assert (found.rows, found.rows_without, found.tokens, found.trained) == (2, 1, 28, 4)


@pytest.mark.parametrize(
    "template",
    [
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + ' ' }}{% endfor %}",
    ],
)
def test_roles_are_found_by_marks_of_other_templates(template: str) -> None:
    tokenizer = chats.tokenizer(template)
    tokenizer.add_tokens(["[INST]", "[/INST]", "<s>", "</s>", "###"], special_tokens=True)
    text = tokenizer.apply_chat_template(chats.conversation(0) + chats.conversation(1), tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    roles = find_roles(ids, find_openings(tokenizer))
    spoken = {role: {tokenizer.decode([i]) for i, one in zip(ids, roles, strict=True) if one == role} for role in roles}
    assert {"w0", "w4", "w5"} <= spoken["user"]
    assert {"w5", "w7", "w8"} <= spoken["assistant"]
    assert "w0" not in spoken["assistant"]


def test_a_template_without_roles_tells_none() -> None:
    assert find_openings(chats.tokenizer("{% for m in messages %}{{ m.content }} {% endfor %}")) == {}
    assert find_openings(chats.tokenizer("{{ raise_exception('no') }}")) == {}
    assert find_openings(None) == {}


@pytest.mark.parametrize("make", [recipes.mixtral, recipes.qwen])
def test_the_adapter_of_a_configuration_file_leaves_routers_out(make: Callable[[], Any]) -> None:
    model = make()
    layers, parameters = find_targets(model)
    adapted = recipes.adapted(model, target_modules=layers, target_parameters=parameters)
    found = {one.kind: one.trained for one in read_parameters(adapted).kinds}
    assert found["attention"] > 0
    assert found["experts"] > 0
    assert found["router"] == 0


TRL = {
    "all": [r"chat_loss: The loss is on every token .*which the chat template's \{% generation %\} marks allow"],
    "all, no marks": [r"chat_loss: .*this chat template has no \{% generation %\} marks"],
    "answers": [],
    "answers, padding free": [],
    "router": [r"adapter_reach: The adapter changes 1 router"],
    "vocabulary": [r"vocabulary: input_ids holds \d+, but the model has embeddings for 0 to 19"],
}


@pytest.mark.more  # `make test` has no TRL
@pytest.mark.process
@pytest.mark.framework
@pytest.mark.timeout(300)
def test_recipes_of_trl_are_named_too(tmp_path: Path) -> None:
    done = run_python(str(Path(__file__).with_name("on_trl.py")), str(tmp_path), HF_HUB_OFFLINE="1")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == TRL.keys()
    for name, expected in TRL.items():
        said = found[name]["warned"]
        assert len(said) == len(expected), (name, said)
        assert all(re.search(pattern, line) for pattern, line in zip(expected, said, strict=True)), (name, said)
        shown = [line for line in found[name]["shown"] if line.startswith(("trained ", "tokens ", "          row "))]
        assert len(shown) == 5
        if name.startswith("answers"):
            assert "16 of 56 (28.6%) in 4 rows count for the loss; by role: user 0%, assistant 100%" in shown[1]
