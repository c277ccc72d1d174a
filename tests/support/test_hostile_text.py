"""Text of others on its way to a terminal, a journal or a model card: control characters, keys, HTML and links."""

from __future__ import annotations

import html
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
import yaml

from trainwright import TrainerCallback, _types
from trainwright._types import printable, without_tokens
from trainwright.callbacks.log_table import LogTable
from trainwright.callbacks.progress import readable
from trainwright.capabilities.incidents import bundle
from trainwright.command_line import print_line
from trainwright.evaluation.outputs import print_metrics
from trainwright.hub.model_card import CardContent, write_card
from trainwright.journal import record
from trainwright.report.evaluation_page import evaluation_page
from trainwright.report.page import Curve, Marker, card, figure, shares
from trainwright.report.run_page import write_report

from .._support.small import data, make_trainer

ESC = "\x1b]0;owned\x07\x1b[2J\rname\u202e\x9b31m"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\rname\u202e\x9b31m"
TOKEN = "hf_" + "aB3" * 11


def is_clean(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


# -- terminals -------------------------------------------------------------------------------------------------------


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable(ESC) == SHOWN
    assert printable("a\n\tb") == r"a\n\tb"
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\r"
    assert printable("Grüße, 世界 🚀") == "Grüße, 世界 🚀"


def test_nothing_that_is_logged_or_printed_controls_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {ESC: 0.5, f"text{ESC}": ESC, "array" + ESC: [object]}
    folder = tmp_path / f"run{ESC}".replace("/", "")
    trainer = make_trainer(
        folder,
        eval_dataset=data.vectors(4),
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
        disable_tqdm=False,
        compute_metrics=lambda p: dict(metrics),
    )
    with caplog.at_level(logging.INFO, logger="trainwright"):
        trainer.train()
    trainer.log_metrics("eval" + ESC, {ESC: 1.0, "b": ESC})
    print_metrics("eval", {ESC: 1.0})
    print_line(f"{folder}: {ESC}")
    printed = capsys.readouterr()
    assert SHOWN in printed.out
    assert is_clean(printed.out), printed.out
    assert is_clean(printed.err)
    assert is_clean("\n".join(one.getMessage() for one in caplog.records if one.name.startswith("trainwright")))


def test_the_line_above_the_bar_is_clean() -> None:
    table = LogTable(by_evaluation=False, width=lambda: 200)
    text = "".join(
        [*table.lines("1/2", readable({ESC: 1.0, "label": ESC})), *table.lines("1/2", {"loss": 1, ESC: ESC})]
    )
    assert text.count(SHOWN) == 4
    assert is_clean(text)


# -- keys and tokens -------------------------------------------------------------------------------------------------

SECRETS = [
    ("https://user:s3cr3t@host/x", "s3cr3t"),
    ("https://tok3n@host/x", "tok3n"),
    ("GET https://h/x?a=1&api_key=abc123&b=2", "abc123"),
    ("https://h/x?X-Amz-Signature=deadbeef&X-Amz-Credential=AKIAX", "deadbeef"),
    ("https://h/x?sig=q%2Fq", "q%2Fq"),
    ("{'Authorization': 'Bearer abc.def-ghi'}", "abc.def-ghi"),
    ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("Authorization=opaque123", "opaque123"),
    ("sent Bearer abcdefgh12345", "abcdefgh12345"),
    (f"token {TOKEN} is not valid", TOKEN),
    ("WANDB_API_KEY=9f8e7d6c5b4a3210", "9f8e7d6c5b4a3210"),
    ("password='hunter2'", "hunter2"),
    ("sk-zq9wxyzq8wxyzq7wxyzq6wxy", "zq9wxyzq8wxyzq7wxyzq6wxy"),
    ('{"hub_token": "qwerty99"}', "qwerty99"),
]
HARMLESS = [
    "pad_token='<pad>' and eos_token_id=2",
    "https://huggingface.co/org/model/resolve/main/x.bin?download=true",
    "a key error: 'labels'",
    "user@example.com",
    "num_tokens=5",
    "learning_rate=5e-05",
    "hub_token=None",
    "hf_hub_url",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=[text[:20] for text, _ in SECRETS])
def test_what_looks_like_a_key_is_masked(text: str, secret: str) -> None:
    masked = without_tokens(text)
    assert secret not in masked
    assert "***" in masked


@pytest.mark.parametrize("text", HARMLESS)
def test_text_that_is_not_a_key_stays(text: str) -> None:
    assert without_tokens(text) == text


class Fails(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        logging.getLogger("trainwright.x").warning("%s", SECRETS[2][0])
        raise RuntimeError("; ".join(text for text, _ in SECRETS))


def test_an_error_leaves_no_token_in_journal_and_report(tmp_path: Path) -> None:
    (tmp_path / record.JOURNAL_NAME).touch()  # a new one would begin with the first log, which never comes
    trainer = make_trainer(tmp_path, journal=True, callbacks=[Fails()], max_steps=2)
    with pytest.raises(RuntimeError, match="Authorization"):
        trainer.train()
    page = write_report(tmp_path)
    for path in (tmp_path / record.JOURNAL_NAME, Path(page)):
        text = path.read_text()
        assert [secret for _, secret in SECRETS if secret in text] == []
    failed = record.read(tmp_path).of("failed")[0]
    assert "***" in failed["traceback"]
    for line in (tmp_path / record.JOURNAL_NAME).read_text().splitlines():
        json.loads(line)


def test_every_record_of_the_package_is_clean_for_every_handler(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any module, with or without a configuration of logging, and in the traceback below the message too."""
    secrets = "; ".join(text for text, _ in SECRETS)
    logger = logging.getLogger("trainwright.of.any.module")

    def log() -> None:
        try:
            raise ValueError(f"{secrets} {ESC}")
        except ValueError as error:
            logger.exception("%s 100%% %s", ESC, error)
        logger.warning("%d of 100%%, as it was written", 5)

    log()
    shown = caplog.text
    assert caplog.records[-1].args == (5,), "a message without either keeps its format and values"
    logging.getLogger("somebody.else").warning(ESC)
    assert caplog.records[-1].getMessage() == ESC, "records of others are theirs"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log()
    printed = capsys.readouterr().err
    for text in (shown, printed):
        assert [secret for _, secret in SECRETS if secret in text] == []
        assert is_clean(text)
        assert f"{SHOWN} 100% " in text
        assert text.count(SHOWN) == 3, "twice in the message, once in the traceback"
        assert "Traceback" in text
        assert "5 of 100%, as it was written" in text


def test_a_command_masks_and_escapes_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"{SECRETS[0][0]}\n{ESC}", err=True)
    assert capsys.readouterr().err == f"https://***@host/x\n{SHOWN}\n"


# -- values that are secrets, whatever their form ----------------------------------------------------------------------

PLAIN = "correct horse battery"  # no pattern tells that this is a key


@pytest.fixture
def hidden() -> Iterator[set[str]]:
    before = set(_types._hidden)
    yield _types._hidden
    _types._hidden.clear()
    _types._hidden.update(before)


NAMES = [
    *("MY_KEY", "SOME_TOKEN_2", "db_password", "THE_SECRET", "DB_PASSWD", "MYSQL_PWD", "AZURE_STORAGE_SAS", "SAS_URL"),
    *("BASIC_AUTH", "PROXY_AUTHORIZATION", "GIT_CREDENTIALS", "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN"),
]


@pytest.mark.parametrize("name", ["GIT_AUTHOR_NAME", "AUTHORITY", "PWD", "OLDPWD", "DISASTER", "SASHA_NAME"])
def test_a_variable_whose_name_only_looks_so_masks_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PLAIN)
    assert without_tokens(PLAIN) == PLAIN


SPELLINGS: list[Callable[[str], str]] = [
    str,
    repr,
    json.dumps,
    lambda secret: json.dumps(secret, ensure_ascii=False),
    lambda secret: json.dumps({"error": secret}),
    shlex.quote,
    html.escape,
    quote,
    quote_plus,
    lambda secret: f"<p>{html.escape(secret)}</p>",
]


@pytest.mark.parametrize(
    "secret", ['a"b\\c/d&e<f', "it's ümlaut \\ and more", "tab\there+there", "line1 = long\nline2 = long"]
)
@pytest.mark.parametrize("spell", range(len(SPELLINGS)))
def test_a_secret_is_masked_as_it_is_quoted(spell: int, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", secret)
    shown = without_tokens(f"failed: {SPELLINGS[spell](secret)}!")
    assert "***" in shown
    for part in ("c/d", "c%2Fd", "mlaut", "here", "long"):
        assert part not in shown


def test_each_part_of_a_connection_string_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq=="
    whole = f"DefaultEndpointsProtocol=https;AccountName=devstore;AccountKey={key};EndpointSuffix=core.windows.net"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", whole)
    assert without_tokens(f"no: {whole}") == "no: ***"
    assert key not in without_tokens(f"the key {key} of devstore")
    assert "devstore" in without_tokens(f"the key {key} of devstore")
    monkeypatch.setenv("MY_CREDENTIALS", json.dumps({"user": "ann", "private_key": "abcdefghij", "type": "service"}))
    assert without_tokens("abcdefghij of ann, service") == "*** of ann, service"


CONTROLS = "\x1b]0;owned\x07 \u202eevil\u2066 \ud83d"


def test_no_page_has_control_characters_of_labels_texts_and_names() -> None:
    pages = [
        evaluation_page(
            title=CONTROLS,
            note=CONTROLS,
            metrics={CONTROLS: 1.0},
            labels=[CONTROLS, "b"],
            confusion=[[1, 0], [0, 1]],
            hardest=[{"name": CONTROLS, "loss": 1.0, "text": CONTROLS, "right": CONTROLS, "predicted": CONTROLS}],
        ),
        figure(
            CONTROLS, [Curve(CONTROLS, [1], [1], text=[CONTROLS])], marks=[Marker(1, "x", CONTROLS)], labels=[CONTROLS]
        ),
        shares(CONTROLS, [(CONTROLS, 1.0, CONTROLS)], note=CONTROLS),
        card(CONTROLS, ""),
    ]
    for one in pages:
        one.encode()
        assert "owned" in one
        for letter in "\x1b\x07\u202e\u2066":
            assert letter not in one
        for spec in re.findall(r'"application/json">(.*?)</script>', one):
            assert is_clean(json.dumps(json.loads(spec), ensure_ascii=False))


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_variable_with_such_a_name_is_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PLAIN)
    assert without_tokens(f"cannot log in with {PLAIN}!") == "cannot log in with ***!"
    assert without_tokens(PLAIN) == "***"
    assert without_tokens("https://h/?q=correct%20horse%20battery&r=correct+horse+battery") == "https://h/?q=***&r=***"
    monkeypatch.delenv(name)
    assert without_tokens(PLAIN) == PLAIN


@pytest.mark.parametrize("value", ["", "true", "0", "false", "12345", "disabled", "30000.5", "/", "abcde"])
def test_a_value_that_is_ordinary_text_masks_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    text = f"{value} is a value, in 0 of 30000.5 words, disabled and true"
    assert without_tokens(text) == text


def test_a_path_and_the_inside_of_a_word_are_not_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path))
    monkeypatch.setenv("LOGIN_PASSWORD", "batter")
    assert without_tokens(f"{tmp_path}: battery, batter") == f"{tmp_path}: battery, ***"


def test_of_a_secret_of_several_lines_each_line_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_KEY", "-----BEGIN KEY-----\nabcdefghijklmnopqrst\n-----END KEY-----")
    assert without_tokens("line 2: abcdefghijklmnopqrst") == "line 2: ***"


class FailsToLogIn(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logging.getLogger("trainwright.somewhere").warning("refused: %s", PLAIN)
        if state.global_step == 2:
            raise ConnectionError(f"no entry with {PLAIN} or tok-en-of-hub")


def test_secrets_reach_no_log_journal_report_or_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, hidden: set[str]
) -> None:
    monkeypatch.setenv("SERVICE_SECRET", PLAIN)
    settings = {"max_steps": 3, "hub_token": "tok-en-of-hub", "log_level": "warning", "save_strategy": "steps"}
    trainer = make_trainer(tmp_path, callbacks=[FailsToLogIn], **settings)
    with pytest.raises(ConnectionError):
        trainer.train()
    write_report(tmp_path)
    bundle.write_json(tmp_path / "incident.json", {"what": f"{PLAIN} and tok-en-of-hub"})
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl", ".html")]
    assert len(texts) >= 3
    for text in (*texts, caplog.text):
        assert PLAIN not in text
        assert "tok-en-of-hub" not in text
    assert "no entry with *** or ***" in (tmp_path / record.JOURNAL_NAME).read_text()
    assert "refused: ***" in caplog.text


# -- the model card --------------------------------------------------------------------------------------------------


def test_run_data_is_plain_text_in_a_model_card(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\n---\n# Head [click](https://evil.example) | ![x](http://e/x.png) www.evil.example"
    content = CardContent(
        model_name=bad,
        base_model=bad,
        dataset=bad,
        tags=[bad],
        license=bad,
        tasks="t",
        dataset_tags=bad,
        results={bad: 0.5},
        history=[{bad: bad}],
        settings={bad: bad},
        versions={bad: bad},
    )
    write_card(tmp_path, content)
    text = (tmp_path / "README.md").read_text()
    _, head, body = text.split("\n---\n")[0], *text.removeprefix("---\n").split("\n---\n")
    assert yaml.safe_load(head)["tags"][-1] == " ".join(bad.split())
    assert "<script" not in body
    assert "\n# Head" not in body
    assert not re.search(r"(?<!\\)\]\(", body), "no link"
    assert "://evil" not in body
    assert "www.evil" not in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert [line.replace("\\|", "").count("|") for line in rows] == [2, 2, 2], "one column"


def test_an_ordinary_card_links_its_base_model(tmp_path: Path) -> None:
    write_card(tmp_path, CardContent(model_name="my_model-1", base_model="org/base.v2_x", results={"f1_macro": 0.5}))
    text = (tmp_path / "README.md").read_text()
    assert "[org/base.v2_x](https://huggingface.co/org/base.v2_x)" in text
    assert "# my_model-1\n" in text
    assert "- f1_macro: 0.5" in text
