"""A proved export: the model that ships is compared with the trained one, and each planted fault is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trainwright.capabilities.averages.saved import read_average
from trainwright.cli.tasks import export, export_folder, opened
from trainwright.cli.tasks.export_proof import _moved_metrics, difference_limit
from trainwright.cli.tasks.export_weights import Expected, _differs
from trainwright.errors import CheckpointError
from trainwright.hub.model_card import is_untouched
from trainwright.support.scratch import owner_mark

from .._support.subprocesses import run_python
from .commands import SMALL, call, done, small
from .proved import ROWS, TUNED, make_base, tune, write_rows

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # which peft reads
]
Fault = Callable[[Path], None]
WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base model, and an adapter that was trained on it with a trained copy of the head."""
    folder = tmp_path_factory.mktemp("made")
    make_base(folder)
    tune(folder)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of the run; the base stays where it was trained on."""
    shutil.copytree(made / "tuned", tmp_path / "tuned")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Plants a fault: each export is changed after it was written."""
    write = export_folder._write_model

    def with_fault(fault: Fault) -> None:
        def write_wrong(asked: Any, partial: Path) -> None:
            write(asked, partial)
            fault(partial)

        monkeypatch.setattr(export_folder, "_write_model", write_wrong)

    return with_fault


def edit_json(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **values}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def refused(*words: str) -> tuple[str, dict[str, Any]]:
    """Runs an export that is refused; returns what it says, and its proof."""
    result = call("export", "tuned", "new", *words, "--json")
    assert result.exit_code == 1, result.output
    assert not Path("new").exists()
    assert [path.name for path in Path().iterdir() if "partial" in path.name] == []
    return result.stderr, json.loads(result.stdout)["proof"]


def test_a_merged_export_is_proved_on_held_out_rows_and_its_card_says_so(place: Path) -> None:
    said = done("export", "tuned", "new", "--merge", "--prove")
    assert "16 rows of the hold-out, weights in float32" in said
    assert "100 % of the likeliest next ones are equal" in said
    assert " trained, " in said
    card = (place / "new" / "README.md").read_text()
    assert "## Export" in card
    assert "- rows: 16 of the hold-out" in card
    assert "It is the trained model" in card
    assert is_untouched(card)
    assert "- learning rate: 0.01" in card.replace("_", " ")
    assert [
        word for word in ("library_name: peft", "lora", "More Information", "base_model", str(place)) if word in card
    ] == []
    proof = json.loads(done("export", "tuned", "other", "--merge", "--prove", "--json"))["proof"]
    assert proof["holds"]
    assert proof["relative_difference"] < 1e-5
    assert proof["metrics"]["trained"]["loss"] == pytest.approx(proof["metrics"]["exported"]["loss"], rel=1e-5)
    assert proof["kept"] == pytest.approx(1, abs=1e-4)


def test_the_card_of_a_merged_model_is_there_without_one_before_and_keeps_the_text_of_a_person(place: Path) -> None:
    (place / "tuned" / "README.md").unlink()
    done("export", "tuned", "none", "--merge")
    assert is_untouched((place / "none" / "README.md").read_text())
    head = "library_name: peft\nlicense: mit\nbase_model: /some/where\ntags: [lora, mine]"
    (place / "tuned" / "README.md").write_text(f"---\n{head}\n---\n# Mine\n\nWritten by me.\n")
    done("export", "tuned", "mine", "--merge")
    card = (place / "mine" / "README.md").read_text()
    assert "# Mine\n\nWritten by me." in card
    assert "license: mit" in card
    assert "- mine" in card
    assert [word for word in ("peft", "lora", "/some/where") if word in card] == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_is_no_difference(dtype: str, place: Path) -> None:
    rows = write_rows(place / "new.jsonl", ROWS[:3])
    words = ("--merge", "--dtype", dtype, "--prove", str(rows), "--json")
    proof = json.loads(done("export", "tuned", "new", *words))["proof"]
    assert proof["holds"]
    assert proof["rows"] == 3
    assert proof["rows_from"] == "new.jsonl"
    assert 1e-5 < proof["relative_difference"] < proof["limit"]
    assert {one.dtype for one in load_file(place / "new" / WEIGHTS).values()} == {export.DTYPES[dtype]}
    assert json.loads((place / "new" / "config.json").read_text())["dtype"] == proof["dtype"]


def test_an_adapter_and_a_whole_model_are_proved_as_they_are(made: Path, place: Path) -> None:
    assert json.loads(done("export", "tuned", "adapter", "--prove", "--json"))["proof"]["largest_difference"] == 0
    assert json.loads(done("export", str(made / "first"), "whole", "--prove", "--json"))["proof"]["holds"]
    rounded = json.loads(done("export", str(made / "first"), "half", "--prove", "--dtype", "bf16", "--json"))["proof"]
    assert rounded["dtype"] == "bfloat16"
    assert rounded["holds"]


def drop_trained_copy(base: Path) -> Fault:
    head = load_file(base / WEIGHTS)["lm_head.weight"]
    return lambda folder: edit_weights(folder, lambda weights: weights.update({"lm_head.weight": head}))


def tie_head(base: Path) -> Fault:
    def fault(folder: Path) -> None:
        edit_json(folder / "config.json", tie_word_embeddings=True)
        edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))

    return fault


def leave_base(base: Path) -> Fault:
    known = {name: one for name, one in load_file(base / WEIGHTS).items() if name != "lm_head.weight"}
    return lambda folder: edit_weights(folder, lambda weights: weights.update(known))


def double_change(base: Path) -> Fault:
    known = load_file(base / WEIGHTS)

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if "q_proj" in name or "v_proj" in name:
                weights[name] = known[name] + 2 * (weights[name] - known[name])

    return lambda folder: edit_weights(folder, change)


def cut_rank(base: Path) -> Fault:
    known = load_file(base / WEIGHTS)

    def change(weights: dict[str, torch.Tensor]) -> None:
        name = f"{QUERY}.weight"
        left, values, right = torch.linalg.svd(weights[name] - known[name])
        weights[name] = known[name] + left[:, :1] * values[0] @ right[:1]

    return lambda folder: edit_weights(folder, change)


def quantize(base: Path) -> Fault:
    return lambda folder: edit_json(folder / "config.json", quantization_config={"load_in_4bit": True})


def change_tokenizer(base: Path) -> Fault:
    def fault(folder: Path) -> None:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text())
        words = found["model"]["vocab"]
        words["red"], words["blue"] = words["blue"], words["red"]
        path.write_text(json.dumps(found))

    return fault


def change_template(base: Path) -> Fault:
    def fault(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text() + "{{ 'now' }}")

    return fault


def change_settings(base: Path) -> Fault:
    return lambda folder: edit_json(folder / "config.json", rope_parameters={"rope_theta": 2.0, "rope_type": "default"})


def rename_class(base: Path) -> Fault:
    return lambda folder: edit_json(folder / "config.json", architectures=["LlamaModel"])


def draw_head(base: Path) -> Fault:
    return lambda folder: edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))


FAULTS = {
    "modules_to_save": (drop_trained_copy, "lm_head", "the trained copy (modules_to_save) was dropped"),
    "tied head": (tie_head, "lm_head", "is tied to the input embeddings again"),
    "untouched base": (leave_base, QUERY, "is the base model's: the adapter is not in it, as in 3 modules more"),
    "wrong alpha": (double_change, QUERY, "has 2 times the change that was trained: another alpha or rank"),
    "wrong rank": (cut_rank, QUERY, "differs from the trained layer by"),
    "tokenizer": (change_tokenizer, "tokenizer.json", "makes other tokens of rows.jsonl:"),
    "template": (change_template, "chat_template.jinja", "is not the template that the run trained with"),
    "settings": (change_settings, "model.rotary_emb", "no weight is away by more than rounding"),
    "head not saved": (draw_head, "lm_head", "drawn at random"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_its_module_or_file(
    name: str, made: Path, place: Path, plant: Callable[[Fault], None]
) -> None:
    fault, where, what = FAULTS[name]
    plant(fault(made / "base"))
    said, proof = refused("--merge", "--prove")
    first = proof["differences"][0]
    assert first["place"] == where
    assert what in first["text"]
    assert f"The first difference is in {where}: " in said
    assert "--accept-differences writes it" in said


def edit_file(name: str, change: Callable[[Any], Any]) -> Fault:
    def fault(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return fault


def swap_words(found: Any) -> None:
    words = found["model"]["vocab"]
    words["green"], words["white"] = words["white"], words["green"]


def add_tensor(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update(more=torch.ones(3)))


def round_weights(folder: Path) -> None:
    export.cast_weights(folder, torch.bfloat16)


# Faults in which both models read the rows alike.
SETTINGS: dict[str, tuple[Fault, str, str]] = {
    "no generation": (
        lambda folder: (folder / "generation_config.json").unlink(),
        "generation_config.json",
        "is not in",
    ),
    "generation eos": (
        edit_file("generation_config.json", lambda found: found.update(eos_token_id=5)),
        "generation_config.json",
        "eos_token_id is 5, trained with [2, 13]",
    ),
    "eos": (
        edit_file("config.json", lambda found: found.update(eos_token_id=5)),
        "config.json",
        "eos_token_id is 5, trained with 2",
    ),
    "padding side": (
        edit_file("tokenizer_config.json", lambda found: found.update(padding_side="left")),
        "tokenizer_config.json",
        'padding_side is "left", trained without it',
    ),
    "length": (
        edit_file("tokenizer_config.json", lambda found: found.update(model_max_length=48)),
        "tokenizer_config.json",
        "model_max_length is 48, trained with 1000000000000000019884624838656",
    ),
    "vocabulary": (
        edit_file("tokenizer.json", swap_words),
        "tokenizer.json",
        "model.vocab.green is 11, trained with 9 (and 1 entry more)",
    ),
    "special": (
        edit_file("tokenizer.json", lambda found: found["added_tokens"][-1].update(special=False)),
        "tokenizer.json",
        "added_tokens.<|im_end|>.special is false, trained with true",
    ),
    "theta": (
        edit_file("config.json", lambda found: found["rope_parameters"].update(rope_theta=10000.01)),
        "config.json",
        "rope_parameters.rope_theta is 10000.01, trained with 10000.0",
    ),
    "tensor": (add_tensor, "model.safetensors", "has the extra tensor more, which the trained model lacks"),
    "type": (round_weights, "config.json", "the weights are in bfloat16, not in float32, and --dtype was not given"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changed_is_named_by_its_entry(name: str, place: Path, plant: Callable[[Fault], None]) -> None:
    fault, where, what = SETTINGS[name]
    plant(fault)
    said, proof = refused("--merge", "--prove", str(write_rows(place / "red.jsonl", ROWS[:1])))
    assert proof["differences"][0]["place"] == where
    assert what in proof["differences"][0]["text"]
    assert f"The first difference is in {where}: " in said


def test_an_adapter_with_more_tensors_or_other_end_tokens_is_named(place: Path, plant: Callable[[Fault], None]) -> None:
    def fault(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file({**load_file(path), "base_model.model.more": torch.ones(2)}, path)
        edit_json(folder / "generation_config.json", eos_token_id=5)

    plant(fault)
    _, proof = refused("--prove")
    assert [one["place"] for one in proof["differences"]][:1] == ["generation_config.json"]
    assert "has the tensor base_model.model.more" in proof["differences"][-1]["text"]


@pytest.mark.parametrize(
    ("fault", "said"), [(quantize, "config.json: has quantization_config"), (rename_class, "was trained")]
)
def test_an_export_that_cannot_be_used_is_refused(
    fault: Callable[[Path], Fault], said: str, made: Path, place: Path, plant: Callable[[Fault], None]
) -> None:
    plant(fault(made / "base"))
    result = call("export", "tuned", "new", "--merge", "--prove", "--accept-differences")
    assert result.exit_code == 1
    assert said in result.output
    assert not Path("new").exists()


def test_differences_are_accepted_by_an_option_and_written_into_the_card(
    made: Path, place: Path, plant: Callable[[Fault], None]
) -> None:
    plant(double_change(made / "base"))
    said = done("export", "tuned", "new", "--merge", "--prove", "--accept-differences", "--json")
    assert json.loads(said)["proof"]["is_accepted"]
    card = (place / "new" / "README.md").read_text()
    assert "It differs from the trained model, which was accepted" in card
    assert f"- differs: {QUERY}: has 2 times the change" in card


def test_settings_of_an_adapter_that_are_not_those_of_the_run_are_named(place: Path) -> None:
    edit_json(place / "tuned" / "adapter_config.json", lora_alpha=16)
    _, proof = refused("--merge", "--prove")
    assert proof["differences"][0] == {
        "place": "adapter_config.json",
        "text": "lora_alpha is 16, and the run trained with 8 (lora.alpha in its recipe)",
    }


def test_a_change_that_rounding_removes_is_named(place: Path) -> None:
    path = place / "tuned" / "adapter_model.safetensors"
    weights = {name: one * 1e-3 if "lora_B" in name else one for name, one in load_file(path).items()}
    save_file(weights, path)
    base = Path(json.loads((place / "tuned" / "adapter_config.json").read_text())["base_model_name_or_path"])
    shutil.copytree(base, place / "half")
    # The adapter is not the one whose loss was recorded.
    (place / "tuned" / "trainer_state.json").unlink()
    edit_weights(place / "half", lambda found: found.update({name: one.bfloat16() for name, one in found.items()}))
    edit_json(place / "tuned" / "adapter_config.json", base_model_name_or_path=str(place / "half"))
    _, proof = refused("--merge", "--prove", "--dtype", "bf16")
    assert "of the adapter's change, which is smaller than the distance" in proof["differences"][0]["text"]
    assert proof["relative_difference"] < proof["limit"]
    assert json.loads(done("export", "tuned", "new", "--merge", "--prove", "--dtype", "fp32", "--json"))["proof"][
        "holds"
    ]


def test_an_average_in_place_of_the_weights_is_named(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Fault], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    text = TUNED.replace("path: base", f"path: {made / 'base'}").partition("lora:")
    tail = (
        "training: {output_dir: tuned, max_steps: 4, learning_rate: 1e-2, use_cpu: true, save_steps: 4, average: ema}\n"
    )
    (tmp_path / "whole.yaml").write_text(text[0] + tail)
    done("train", "whole.yaml")
    checkpoint = tmp_path / "tuned" / "checkpoint-4"
    average = read_average(checkpoint)
    proved = json.loads(done("export", "tuned", "average", "--weights", "average", "--prove", "--json"))["proof"]
    assert proved["holds"]
    plant(lambda folder: edit_weights(folder, lambda found: found.update({name: average[name] for name in found})))
    result = call("export", str(checkpoint), "new", "--prove", "--json")
    assert result.exit_code == 1
    first = json.loads(result.stdout)["proof"]["differences"][0]
    assert first["place"] == "model.embed_tokens"
    assert first["text"].startswith("has the average of the weights, and not the trained ones")


def test_a_base_model_that_was_moved_away_is_named_with_a_cure(place: Path) -> None:
    edit_json(place / "tuned" / "adapter_config.json", base_model_name_or_path=str(place / "gone"))
    said = call("export", "tuned", "new", "--merge").output
    assert f"The base model of the adapter was in {place / 'gone'}, and is not there" in said
    assert "base_model_name_or_path" in said
    assert not Path("new").exists()


def test_a_base_of_few_bits_takes_no_merge(made: Path, place: Path) -> None:
    shutil.copytree(made / "base", place / "small")
    edit_json(place / "small" / "config.json", quantization_config={"load_in_4bit": True})
    edit_json(place / "tuned" / "adapter_config.json", base_model_name_or_path=str(place / "small"))
    said = call("export", "tuned", "new", "--merge").output
    assert "has weights of few bits (quantization_config" in said


def test_an_export_into_an_empty_directory_that_is_there(place: Path) -> None:
    (place / "here").mkdir()
    os.chdir(place / "here")
    done("export", "../tuned", ".", "--merge", "--prove")
    assert Path("config.json").is_file()
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []


def test_gguf_is_converted_where_the_converter_is_and_else_named_as_a_command(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(place / "bin"))
    result = call("export", "tuned", "new", "--merge", "--to", "gguf")
    assert result.exit_code == 1
    assert "python llama.cpp/convert_hf_to_gguf.py new --outfile new/new.gguf --outtype f32" in result.output
    assert (place / "new" / WEIGHTS).is_file()
    assert call("export", "tuned", "adapter", "--to", "gguf").exit_code == 2

    program = place / "bin" / "convert_hf_to_gguf.py"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[3], 'wb').write(b'GGUF')\n")
    program.chmod(0o755)
    said = done("export", "tuned", "other", "--merge", "--to", "gguf")
    assert "Its numbers were not compared with the model's." in said
    assert (place / "other" / "other.gguf").is_file()
    program.write_text(f"#!{sys.executable}\nprint('no such architecture')\nraise SystemExit(3)\n")
    failed = call("export", "tuned", "third", "--merge", "--to", "gguf")
    assert failed.exit_code == 1
    assert "no such architecture" in failed.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtype", "int8"), "--dtype int8: write fp32, bf16, fp16."),
        (("--to", "onnx"), "--to onnx: write gguf"),
        (("--accept-differences",), "--accept-differences is for --prove"),
        (("--prove", "gone.jsonl"), "There is no file gone.jsonl"),
        (("--weights", "best"), "write trained or average"),
    ],
)
def test_options_that_cannot_be_are_refused_early(words: tuple[str, ...], said: str, place: Path) -> None:
    result = call("export", "tuned", "new", *words)
    assert result.exit_code == 2
    assert said in result.output


def test_a_model_of_a_script_is_proved_on_a_file(made: Path, place: Path) -> None:
    shutil.copytree(made / "base", place / "alone" / "model")
    rows = write_rows(place / "new.jsonl", ROWS[:4])
    result = call("export", "alone/model", "new", "--prove")
    assert result.exit_code == 2
    assert "has no recipe.yaml, so its rows are unknown. Name a file: --prove data.jsonl" in result.output
    assert json.loads(done("export", "alone/model", "new", "--prove", str(rows), "--json"))["proof"]["holds"]
    assert not is_untouched((place / "new" / "README.md").read_text())


def test_the_limit_follows_the_coarser_type_and_the_depth() -> None:
    assert difference_limit([torch.float32, torch.float32], 100) == 1e-4
    assert difference_limit([torch.float32, torch.bfloat16], 28) == pytest.approx(8 * 2**-8 * 28**0.5)
    assert difference_limit([torch.float16, torch.float32], 4) == pytest.approx(16 * 2**-11)


def test_a_small_change_is_there_or_named_in_each_type() -> None:
    base = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    change = 1e-3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.float16):
        one = Expected("layer.weight", base + change, base)
        assert _differs(one, (base + change).to(dtype), {}) == ""
        assert "the adapter is not in it" in _differs(one, base.to(dtype), {})
        assert "times the change" in _differs(one, (base + 3 * change).to(dtype), {})


VARIANTS = {
    "dora": ({"tie_word_embeddings": "true"}, "use_dora: true, target_modules: all-linear", "fp32"),
    "bf16 base": ({"tie_word_embeddings": "true"}, "use_rslora: true, target_modules: all-linear", None),
    "autocast": ({}, "target_modules: [q_proj]", "bf16"),
    "tied head": ({"tie_word_embeddings": "true"}, "target_modules: [q_proj], modules_to_save: [lm_head]", None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_usual_adapters_are_proved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes, lora, dtype = VARIANTS[name]
    make_base(tmp_path, steps=2, **changes)
    is_half = name == "bf16 base"
    text = TUNED.replace("{path: base}", "{path: base, dtype: bfloat16}" if is_half else "{path: base}")
    head, _, tail = text.partition("lora: ")
    rest = tail.partition("\n")[2]
    if name == "autocast":
        rest = rest.replace("use_cpu: true", "use_cpu: true, bf16: true")
        dtype = None
    tune(tmp_path, f"{head}lora: {{r: 4, alpha: 64, {lora}}}\n{rest}")
    words = () if dtype is None else ("--dtype", dtype)
    proof = json.loads(done("export", "tuned", "new", "--merge", "--prove", *words, "--json"))["proof"]
    assert proof["holds"]
    assert proof["dtype"] == ("bfloat16" if is_half else "float32")
    assert proof["kept"] == pytest.approx(1, abs=0.2 if is_half else 1e-3)
    for source in ("tuned", "tuned/checkpoint-6"):
        folder = source.replace("/", "-") + "-adapter"
        assert json.loads(done("export", source, folder, "--prove", "--json"))["proof"]["holds"]


def test_a_row_that_was_lost_is_found_beside_a_large_change() -> None:
    base = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    change = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    one = Expected("embed_tokens.weight", base + change, base)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = (base + change).to(dtype)
        assert _differs(one, found, {}) == ""
        found[7] = 0
        assert _differs(one, found, {}) == "differs from the trained layer in 1 of 64 rows, the first is 7"


ADDED = {
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "alone": {},
    "tokens": {"trainable_token_indices": [14, 15]},
}


@pytest.mark.parametrize("name", [*ADDED, "head lost"])
def test_an_adapter_with_added_tokens_is_put_on_a_base_without_them(name: str, made: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(made / "base")
    size = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(size + 2)
    given = ADDED.get(name, {"target_modules": ["q_proj", "embed_tokens"]})
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **given})
    adapted = get_peft_model(model, config).eval()
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        adapted.save_pretrained(tmp_path / "adapter")
    if name == "head lost":
        with pytest.raises(CheckpointError, match="lack the rows of the head"):
            export.load_adapted(tmp_path / "adapter")
        return
    ids = torch.arange(size - 2, size + 2)[None]
    export.merge(tmp_path / "adapter", tmp_path / "merged")
    with torch.no_grad():
        expected = adapted(ids).logits
        assert torch.equal(export.load_adapted(tmp_path / "adapter")(ids).logits, expected)
        torch.testing.assert_close(opened.load_whole(tmp_path / "merged")[0].eval()(ids).logits, expected)


def test_a_base_with_sampling_values_alone_is_tuned_saved_and_exported(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published models have them; transformers refuses to save such settings once the end tokens have changed."""
    place = tmp_path
    monkeypatch.chdir(place)
    for name in ("base", "rows.jsonl"):
        (shutil.copytree if name == "base" else shutil.copyfile)(made / name, place / name)
    edit_json(place / "base" / "generation_config.json", temperature=0.9, top_p=0.6, do_sample=None, eos_token_id=1)
    tune(place)
    whole = TUNED.partition("lora: ")
    tune(place, whole[0] + whole[2].partition("\n")[2].replace("tuned", "whole"), "whole.yaml")
    done("export", "tuned", "new", "--merge", "--prove")
    done("export", "whole", "other", "--prove")
    for folder in ("tuned", "whole", "whole/checkpoint-6", "new", "other"):
        found = json.loads((place / folder / "generation_config.json").read_text())
        assert (found["temperature"], found["top_p"]) == (0.9, 0.6)
        assert found["eos_token_id"][0] == 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing_behind(name: str, place: Path, tmp_path: Path) -> None:
    script = f"""
import signal, sys
from pathlib import Path
from trainwright.cli.main import app
from trainwright.cli.tasks import export_folder
export_folder._write_model = lambda *_: signal.raise_signal(signal.{name})
app(["export", "tuned", "new", "--merge", "--prove"])
"""
    (tmp_path / "temporary").mkdir()
    before = set(place.iterdir())
    run_python("-c", script, cwd=place, code=128 + signal.Signals[name], TMPDIR=str(tmp_path / "temporary"))
    assert set(place.iterdir()) == before
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_classifier_with_an_adapter_is_proved_with_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = small(tmp_path)
    done("train", str(config))
    text = config.read_text().partition("data:")
    rest = text[2].replace("output_dir: run", "output_dir: tuned")
    (tmp_path / "lora.yaml").write_text(f"task: text-classification\nmodel: {{path: run}}\nlora: {{r: 2}}\ndata:{rest}")
    done("train", "lora.yaml")
    proof = json.loads(done("export", "tuned", "new", "--merge", "--prove", "--json"))["proof"]
    assert proof["holds"]
    assert {"loss", "accuracy", "f1"} == set(proof["metrics"]["trained"]) == set(proof["metrics"]["exported"])
    assert proof["rows"] == 16
    assert proof["outputs"] == "classes"
    assert "of the likeliest ones are equal" in done("export", "tuned", "other", "--merge", "--prove")


@pytest.mark.parametrize("is_recipe", [True, False])
def test_a_merged_adapter_ends_its_answers_as_it_was_trained_to(
    is_recipe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path, steps=2)
    edit_json(base / "config.json", eos_token_id=1)
    edit_json(base / "generation_config.json", eos_token_id=1)
    monkeypatch.chdir(tmp_path)
    tune(tmp_path)
    whole = TUNED.partition("lora: ")
    tune(tmp_path, whole[0] + whole[2].partition("\n")[2].replace("tuned", "whole"), "whole.yaml")
    trained = json.loads(Path("whole/generation_config.json").read_text())
    places = ["tuned", "tuned/checkpoint-6"]
    if not is_recipe:
        # As a script of another library saves it: adapter and tokenizer.
        shutil.copytree("tuned/checkpoint-6", "alone/adapter")
        places = ["alone/adapter"]
    for number, source in enumerate(places):
        done("export", source, f"new{number}", "--merge")
        done("export", source, f"adapter{number}")
        for folder in (f"new{number}", f"adapter{number}"):
            model = (
                export.load_adapted(Path(folder))
                if folder.startswith("adapter")
                else opened.load_whole(Path(folder))[0]
            )
            found = model.generation_config.eos_token_id
            assert found[:2] == trained["eos_token_id"] == [2, 13]
            assert is_recipe == (len(found) == 2)
            assert model.config.eos_token_id == json.loads(Path("whole/config.json").read_text())["eos_token_id"] == 2


def test_numbers_around_a_constant_are_judged_by_their_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SMALL.replace("text-classification", "regression")
    config = small(tmp_path, text)
    lines = Path("table.csv").read_text().replace(",yes", ",1003.3").replace(",no", ",1000.7")
    Path("table.csv").write_text(lines)
    done("train", str(config), "--learning_rate", "0")
    edit_weights(tmp_path / "run", lambda weights: weights["classifier.bias"].fill_(1001.3))
    shutil.move("run", "base")
    head, _, tail = config.read_text().partition("model:")
    tail = tail.partition("data:")[2].replace("output_dir: run", "output_dir: tuned").replace("1e-2", "1e-3")
    Path("tuned.yaml").write_text(f"{head}model: {{path: base}}\ndata:{tail}")
    done("train", "tuned.yaml")
    said = done("export", "tuned", "new", "--prove")
    assert "of their spread" in said
    assert "likeliest" not in said
    assert "likeliest" not in Path("new/README.md").read_text()
    result = call("export", "tuned", "half", "--dtype", "bf16", "--prove", "--json")
    assert result.exit_code == 1
    proof = json.loads(result.stdout)["proof"]
    assert proof["equal_tokens"] is None
    assert proof["relative_to"] == "spread"
    assert "metric rmse" in [one["place"] for one in proof["differences"]]
    assert "export with --dtype fp32" in proof["differences"][0]["text"]


def test_metrics_may_move_by_the_limit_alone() -> None:
    def moved(
        before: dict[str, float], after: dict[str, float], spread: tuple[float, float] | None = None
    ) -> list[str]:
        return [one.place for one in _moved_metrics(before, after, limit=0.05, rows=16, spread=spread)]

    assert moved({"loss": 0.5, "accuracy": 0.9}, {"loss": 0.52, "accuracy": 0.8}) == []
    assert moved({"loss": 0.5, "accuracy": 0.9}, {"loss": 0.6, "accuracy": 0.7}) == ["metric loss", "metric accuracy"]
    assert moved({"rmse": 0.06, "pearson": 0.9}, {"rmse": 1.75, "pearson": 0.85}, (2.0, 1.0)) == ["metric rmse"]
    assert moved({"pearson": 0.9}, {"pearson": 0.6}, (2.0, 1.0)) == ["metric pearson"]
    assert moved({"pearson": 0.9}, {"pearson": 0.6}, (2.0, 0.1)) == []
    assert moved({"loss": math.nan}, {"loss": math.nan}) == []
    assert moved({"loss": 1.0}, {"loss": math.nan}) == ["metric loss"]


def test_what_is_cheap_to_refuse_is_refused_before_the_merge(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_folder, "_write_model", lambda *_: pytest.fail("the model was written"))
    Path("dangling").symlink_to("nowhere")
    assert "is a link to nowhere, which is not there" in call("export", "tuned", "dangling", "--merge").output
    Path("file").write_text("")
    assert "file is a file" in call("export", "tuned", "file", "--merge").output
    assert "file/new cannot be written" in call("export", "tuned", "file/new", "--merge").output
    assert call("export", "tuned", "new", "--prove", str(write_rows(place / "bad.jsonl", [{"x": "y"}]))).exit_code == 2
    recipe = place / "tuned" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rows.jsonl", "gone.jsonl"))
    result = call("export", "tuned", "new", "--merge", "--prove")
    assert result.exit_code == 2
    assert "The rows of the run cannot be read" in result.output
    assert "gone.jsonl" in result.output
    assert "--prove FILE" in result.output
    edit_json(place / "tuned" / "adapter_config.json", base_model_name_or_path=str(place / "away"))
    assert "and is not there" in call("export", "tuned", "new", "--merge", "--prove").output
    assert not Path("new").exists()


def test_rows_of_a_file_do_when_those_of_the_run_are_gone(place: Path) -> None:
    recipe = place / "tuned" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rows.jsonl", "gone.jsonl"))
    rows = write_rows(place / "new.jsonl", ROWS[:3])
    assert json.loads(done("export", "tuned", "new", "--merge", "--prove", str(rows), "--json"))["proof"]["holds"]


def test_partial_directories_of_ended_processes_are_removed(place: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    (place / "here").mkdir()
    machine = owner_mark().rpartition("-")[0]
    elsewhere = f"01234567-{machine.partition('-')[2]}"
    gone = [f".{name}.{machine}-{ended.pid}-0123abcd.partial" for name in ("new", "other", "with.dots")]
    gone += [f"here/.{machine}-{ended.pid}-0123abcd.partial"]
    kept = [
        f".new.{machine}-{os.getppid()}-0123abcd.partial",
        f".new.{elsewhere}-{ended.pid}-0123abcd.partial",
        ".new.partial",
        "new.partial",
    ]
    for name in (*gone, *kept):
        (place / name).mkdir()
        (place / name / "file").write_text("")
    link = place / f".new.{machine}-{ended.pid}-0123abce.partial"
    link.symlink_to("tuned")
    done("export", "tuned", "new")
    done("export", "tuned", "here")
    assert not any((place / name).exists() for name in gone)
    assert all((place / name / "file").is_file() for name in kept)
    assert link.is_symlink()
    assert (place / "tuned" / "config.json").is_file()


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(asked: Any, partial: Path) -> None:
        shutil.rmtree(asked.source)
        raise FileNotFoundError(asked.source)

    monkeypatch.setattr(export_folder, "_write_model", write)
    result = call("export", "tuned/checkpoint-6", "new")
    assert result.exit_code == 1
    assert "was deleted while it was exported" in result.output
    assert "save_total_limit" in result.output


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_adapter_in_another_type_than_its_base_is_proved(
    dtype: str, place: Path, plant: Callable[[Fault], None]
) -> None:
    proof = json.loads(done("export", "tuned", "rounded", "--dtype", dtype, "--prove", "--json"))["proof"]
    assert proof["holds"]
    assert proof["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert proof["kept"] == pytest.approx(1, abs=0.01)

    def fault(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        weights = load_file(path)
        save_file({name: one * 2 if "lora_B" in name else one for name, one in weights.items()}, path)

    plant(fault)
    _, proof = refused("--dtype", dtype, "--prove")
    assert "times the change that was trained" in proof["differences"][0]["text"]


@pytest.mark.parametrize("source", ["tuned", "tuned/checkpoint-6"])
def test_a_base_that_changed_since_the_training_is_named(source: str, made: Path, place: Path) -> None:
    shutil.copytree(made / "base", place / "other")
    edit_weights(place / "other", lambda weights: weights[f"{QUERY}.weight"].mul_(3))
    settings = place / source / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(made / "base"), str(place / "other")))
    if source != "tuned":
        # As one that accepted the change of the file.
        done("verify", source, "--accept")
    result = call("export", source, "new", "--merge", "--prove", "--json")
    assert result.exit_code == 1
    first = json.loads(result.stdout)["proof"]["differences"][0]
    assert first["place"] == "base model"
    assert f"with the adapter on {place / 'other'}, the loss of the hold-out is" in first["text"]
    assert "the base (model.path) or the rows changed since the training" in first["text"]
    rows = write_rows(place / "new.jsonl", ROWS[:3])
    assert json.loads(done("export", source, "new", "--merge", "--prove", str(rows), "--json"))["proof"]["holds"]
