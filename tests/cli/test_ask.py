"""`trainwright chat`: history, system message, streaming, JSON, and models that it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from trainwright.cli.tasks import conversation
from trainwright.cli.tasks.conversation import Conversation, open_conversation
from trainwright.errors import DataError

from .._support.subprocesses import run_python
from .commands import call, done, small
from .proved import make_base, tune

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # which peft reads
]
TUNED = """\
task: chat
model: {path: base}
data: {train: rows.jsonl, eval_share: 0, max_length: 48, system: be kind}
lora: {r: 2, target_modules: [q_proj]}
training: {output_dir: tuned, max_steps: 2, learning_rate: 1e-5, use_cpu: true, save_steps: 2}
"""
PLAIN = """\
task: causal-lm
model:
  config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2,
           intermediate_size: 32, max_position_embeddings: 32}
  learn_tokenizer: {kind: words, vocab_size: 64}
data: {train: texts.txt, eval_share: 0, max_length: 16}
training: {output_dir: plain, max_steps: 60, learning_rate: 2e-2, use_cpu: true, save_strategy: "no"}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that answers, its exported model, and an adapter on that."""
    folder = tmp_path_factory.mktemp("made")
    make_base(folder, steps=150)
    tune(folder, TUNED)
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def asked(*words: str, stdin: str | bytes | None = None) -> Result:
    result = call("chat", *words, stdin=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("model", ["first", "base", "tuned", "tuned/checkpoint-2"])
def test_a_run_a_model_an_adapter_and_a_checkpoint_answer(model: str, place: Path) -> None:
    result = asked(model, "--once", "say green")
    assert result.exit_code == 0, result.output
    assert result.stdout == "green it is\n"


def test_one_answer_as_json(place: Path) -> None:
    found = json.loads(done("chat", "first", "--once", "say green", "--json"))
    assert found["answer"] == "green it is"
    assert found["is_cut"] is False
    assert found["tokens"] == 4
    cut = json.loads(done("chat", "first", "--once", "say green", "--json", "--max-new-tokens", "1"))
    assert (cut["answer"], cut["is_cut"]) == ("green", True)
    assert "(cut off" in asked("first", "--once", "say green", "--max-new-tokens", "1").stderr


def test_lines_of_standard_input_are_one_conversation(place: Path) -> None:
    result = asked("first", "--json", stdin="say red\n\nsay blue\n/reset\nsay white\n/quit\nsay green\n")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 3
    assert answers[0]["answer"] == "red it is"
    assert answers[2]["answer"] == "white it is"
    lengths = [one["prompt_tokens"] for one in answers]
    assert lengths[0] == lengths[2] < lengths[1], "the history is asked too, until it is reset"
    other = asked("first", stdin="/help\nsay red\n")
    assert other.stdout == "red it is\n"
    assert "/help is not a command. /reset starts a new conversation" in other.stderr


def test_a_line_that_is_no_text_is_said_and_the_next_is_asked(place: Path) -> None:
    result = asked("first", "--json", stdin=b"say \xff\nsay green\n")
    first, second = map(json.loads, result.stdout.splitlines())
    assert "not UTF-8 text" in first["error"]["message"]
    assert second["answer"] == "green it is"


def test_the_system_message_is_that_of_the_run_unless_another_is_given(place: Path) -> None:
    with open_conversation(place / "tuned") as talk:
        assert talk.messages == [{"role": "system", "content": "be kind"}]
        talk.ask("say red")
        assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
        talk.reset()
        assert len(talk.messages) == 1
    with open_conversation(place / "tuned", system="be brief") as talk:
        assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_an_answer_is_streamed_and_ctrl_c_stops_it(place: Path) -> None:
    pieces: list[str] = []
    with open_conversation(place / "first") as talk:
        whole = talk.ask("say green", pieces.append)
        assert len(pieces) > 1
        assert "".join(pieces) == whole.text == "green it is"
        talk.reset()

        def stop(text: str) -> None:
            raise KeyboardInterrupt

        answer = talk.ask("say green", stop)
        assert answer.is_stopped
        assert "green it is".startswith(answer.text.strip())
        assert talk.messages[-1]["content"] == answer.text, "the conversation goes on with what was written"
        assert talk.ask("say red").text


def test_the_oldest_messages_are_left_out_and_a_message_that_is_too_long_is_refused(place: Path) -> None:
    with open_conversation(place / "first") as talk:
        answers = [talk.ask(f"say {word}") for word in ("red", "blue", "green", "white", "red", "blue")]
        assert answers[0].num_forgotten == 0
        assert answers[-1].num_forgotten > 0
        kept = [message["content"] for message in talk.messages]
        with pytest.raises(DataError, match="tokens with its template, and the model reads 48 besides an answer"):
            talk.ask("say red " * 60)
        assert [message["content"] for message in talk.messages] == kept
    result = asked("first", stdin="say red " * 60 + "\nsay green\n")
    assert result.exit_code == 1, "a program learns that a line has no answer"
    assert result.stdout == "green it is\n"
    assert "Ask something shorter" in result.stderr


def test_a_model_of_plain_text_continues_it_and_says_so(place: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one two three four\n" * 16)
    (tmp_path / "plain.yaml").write_text(PLAIN)
    os.chdir(tmp_path)
    done("train", "plain.yaml")
    result = asked("plain", "--once", "one two")
    assert result.stdout.strip() == "three four"
    assert "The model was trained on plain text: it continues what you write" in result.stderr
    assert asked("plain", "--system", "x", "--once", "one").exit_code == 2
    shutil.copytree("plain", "alone")
    (tmp_path / "alone" / "recipe.yaml").unlink()
    assert asked("alone", "--once", "one two").stdout.strip() == "three four"


def test_a_model_for_another_task_is_refused_with_the_command_that_works(tmp_path: Path) -> None:
    small(tmp_path)
    done("train", str(tmp_path / "config.yaml"))
    result = asked(str(tmp_path / "run"), "--once", "a good film")
    assert result.exit_code == 2
    assert "is for text-classification, and chat asks models that write text" in result.output
    assert f"Use: trainwright predict {tmp_path / 'run'} --data FILE." in result.output
    (tmp_path / "run" / "recipe.yaml").unlink()
    assert "--task TASK --data FILE" in asked(str(tmp_path / "run"), "--once", "x").output
    assert "There is no directory" in asked(str(tmp_path / "gone"), "--once", "x").output


@pytest.mark.process
def test_a_terminal_without_utf8_and_a_reader_that_leaves(place: Path) -> None:
    """The answer has characters that an ASCII terminal lacks; a broken pipe ends the command without a traceback."""
    code = (
        "import sys; from trainwright.cli import ask; ask._print_piece('caf\\u00e9\\x1b[31m'); "
        "from trainwright.command_line import print_text; print_text('')"
    )
    shown = run_python("-c", code, PYTHONIOENCODING="ascii", PYTHONUTF8="0").stdout
    assert shown == "caf?\\x1b[31m\n"
    code = (
        "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1); "
        "from trainwright.cli.main import app; sys.argv = ['trainwright', 'schema']; app()"
    )
    ended = run_python("-c", code, code=1)
    assert "Traceback" not in ended.stderr
    assert "Broken pipe" not in ended.stderr


class _Refusing:
    """A tokenizer whose template takes no system message."""

    chat_template = "{{ raise_exception('System role not supported') }}"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("System role not supported")
        return str(self._inner.apply_chat_template(messages, **settings))


def test_a_template_that_refuses_a_system_message_is_named_with_a_cure(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Callable[[Path], Any] = conversation.open_tokenizer
    monkeypatch.setattr(conversation, "open_tokenizer", lambda source: _Refusing(opened(source)))
    result = asked("first", "--system", "be kind", "--once", "say red")
    assert result.exit_code == 2
    assert "System role not supported. Omit --system" in result.output


def test_a_drawn_answer_needs_a_temperature(place: Path) -> None:
    torch.manual_seed(0)
    found = {
        json.loads(done("chat", "first", "--once", "say", "--temperature", "9", "--json"))["answer"] for _ in range(3)
    }
    assert len(found) > 1


def test_a_conversation_without_a_limit_of_positions_keeps_all(place: Path) -> None:
    with open_conversation(place / "first") as talk:
        assert isinstance(talk, Conversation)
        talk._positions = None
        assert talk._prompt({"role": "user", "content": "say red"})[1] == 0
