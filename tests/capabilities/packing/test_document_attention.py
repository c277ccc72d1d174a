"""Attention by document: which models have it, and that it equals attention with a mask for each pair of tokens."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainwright.capabilities.packing.data_handler import HANDLER
from trainwright.capabilities.packing.document_attention import NAME, is_document_ends, make_document_ends
from trainwright.checkpoint import rng
from trainwright.cli.replay import replay
from trainwright.errors import NonFiniteError
from trainwright.support.patches import checkpointed_activations

from ..._support.small import make_trainer
from ..incidents.test_bundles import folders
from .test_packed_training import KEY_VALUE, MODELS, SMALL, losses_and_gradients, seeded, texts

PACKED = {"packing": "best_fit", "packing_length": 16, "per_device_train_batch_size": 3}
GEMMA = SMALL | KEY_VALUE | {"head_dim": 8, "query_pre_attn_scalar": 8}
SLIDING = ["sliding_attention", "full_attention"]


def llama(**settings: Any) -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(**SMALL, **KEY_VALUE, **settings))


def mixtral(**settings: Any) -> Any:
    return T.MixtralForCausalLM(T.MixtralConfig(**SMALL, **KEY_VALUE, num_local_experts=2, **settings))


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    **{name: (make, "documents") for name, make in MODELS.items() if not name.endswith("-eager")},
    "qwen3": (lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**SMALL, **KEY_VALUE, head_dim=8)), "documents"),
    "gemma 3, two kinds of layers": (
        lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**GEMMA, sliding_window=4, layer_types=SLIDING)),
        "documents",
    ),
    "mixtral": (mixtral, "documents"),
    # its balance counts tokens by the mask
    "mixtral, balanced": (lambda: mixtral(output_router_logits=True), "positions"),
    "gemma 2, which caps its scores": (
        lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**GEMMA, sliding_window=4, layer_types=SLIDING)),
        "positions",
    ),
    "llama-eager": (MODELS["llama-eager"], "positions"),
    "bert-eager": (MODELS["bert-eager"], "blocks"),
}


def trainer_of(folder: Path, model: Any, **settings: Any) -> Any:
    return make_trainer(folder, model=model, train_dataset=texts(), **PACKED | settings)


def find_form(batch: dict[str, Any]) -> str:
    """How a batch shows where documents begin."""
    mask = batch.get("attention_mask")
    if mask is None:
        return "positions"
    return "documents" if is_document_ends(mask) else "blocks"


@pytest.fixture
def with_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packed rows as before there was attention by document."""
    name = "trainwright.capabilities.packing.packed_rows.can_attend_by_document"
    with monkeypatch.context() as patch:
        patch.setattr(name, lambda *_, **__: False)
        yield


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_has_documents_or_a_mask(kind: str, tmp_path: Path) -> None:
    make, form = FAMILIES[kind]
    model = seeded(make)
    before = model.config._attn_implementation
    trainer = trainer_of(tmp_path, model)
    batch = next(iter(trainer.get_train_dataloader()))
    assert find_form(batch) == form
    assert model.config._attn_implementation == (NAME if form == "documents" else before)


BY_DOCUMENT = [name for name, (_, form) in FAMILIES.items() if form == "documents"]


@pytest.mark.parametrize("kind", ["llama", "mistral-with-a-window", "gemma 3, two kinds of layers", "gpt2", "bert"])
def test_losses_and_gradients_are_those_of_a_dense_mask(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    make, _ = FAMILIES[kind]
    loss, gradients, num_items = losses_and_gradients(trainer_of(tmp_path, seeded(make)))
    request.getfixturevalue("with_masks")
    with_mask = trainer_of(tmp_path, seeded(make))
    assert find_form(next(iter(with_mask.get_train_dataloader()))) != "documents"
    expected, expected_gradients, expected_items = losses_and_gradients(with_mask)
    assert num_items == expected_items
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        difference = (gradient - expected_gradients[name]).norm() / max(float(expected_gradients[name].norm()), 1e-6)
        assert difference <= 1e-5, name


@pytest.mark.parametrize("kind", BY_DOCUMENT)
def test_a_changed_document_leaves_the_others_equal_to_the_bit(kind: str, tmp_path: Path) -> None:
    model = seeded(FAMILIES[kind][0]).eval()
    batch = next(iter(trainer_of(tmp_path, model).get_train_dataloader()))
    ends = batch["attention_mask"][0].unique().tolist()
    start = ends[0] if len(ends) > 1 else 0
    stop = ends[len(ends) > 1]
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, start:stop] = (changed["input_ids"][0, start:stop] + 7) % 48
    with torch.no_grad():
        logits = model(**batch).logits
        others = model(**changed).logits
    assert not torch.equal(logits[0, start:stop], others[0, start:stop])
    assert torch.equal(logits[0, :start], others[0, :start])
    assert torch.equal(logits[0, stop:], others[0, stop:])
    assert torch.equal(logits[1:], others[1:])


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes |= {leaf.shape for leaf in tree_leaves(result) if hasattr(leaf, "shape")}
        return result


def squares(model: Any, batch: dict[str, Any]) -> list[torch.Size]:
    """The tensors of a step, forward and backward, with an entry for each pair of a row's tokens."""
    width = batch["input_ids"].shape[1]
    with Shapes() as mode:
        model(**batch).loss.backward()
    return [shape for shape in mode.shapes if tuple(shape[-2:]) == (width, width)]


def test_no_tensor_has_an_entry_for_each_pair_of_tokens(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    settings = {"packing_length": 40, "train_dataset": texts([20, 11, 9, 19, 12, 8])}
    model = seeded(MODELS["llama"])
    by_document = make_trainer(tmp_path, model=model, **PACKED | settings)
    assert not squares(model, next(iter(by_document.get_train_dataloader())))
    request.getfixturevalue("with_masks")
    other = seeded(MODELS["llama"])
    with_mask = make_trainer(tmp_path, model=other, **PACKED | settings)
    assert squares(other, next(iter(with_mask.get_train_dataloader())))


@pytest.mark.parametrize("settings", [{"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_recomputed_activations_have_the_same_gradients(settings: dict[str, bool], tmp_path: Path) -> None:
    plain, recomputed = (trainer_of(tmp_path, seeded(MODELS["llama"]).train()) for _ in range(2))
    with checkpointed_activations(recomputed.model, settings):
        loss, gradients, _ = losses_and_gradients(recomputed)
    expected, expected_gradients, _ = losses_and_gradients(plain)
    assert loss == expected
    assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients.items())


def test_a_document_longer_than_the_block_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.capabilities.packing.document_attention.MIN_BLOCK", 3)
    trainer = trainer_of(tmp_path, seeded(MODELS["mistral-with-a-window"]))  # the proof compares it with masks
    assert find_form(next(iter(trainer.get_train_dataloader()))) == "documents"


def test_other_batches_are_computed_as_by_sdpa(tmp_path: Path) -> None:
    """An evaluation, a generation, and the user's own calls."""
    model = seeded(MODELS["llama"])
    other = copy.deepcopy(model).eval()
    trainer_of(tmp_path, model).train()
    model.load_state_dict(other.state_dict())
    model.eval()
    ids = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, other(ids, attention_mask=mask).logits)
        how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **how), other.generate(ids, **how))


def test_files_and_other_processes_get_the_plain_name(tmp_path: Path) -> None:
    model = seeded(MODELS["llama"])
    trainer_of(tmp_path, model).train()
    assert model.config._attn_implementation == NAME
    assert copy.deepcopy(model).config._attn_implementation == NAME
    assert pickle.loads(pickle.dumps(model)).config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()
    assert T.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config._attn_implementation == "sdpa"


def test_ends_are_of_few_different_shapes_and_go_with_their_rows() -> None:
    ends = make_document_ends([[3, 4], [5], [1] * 7], 8)
    assert ends.shape == (3, 1, 3, 16)  # 5 tokens are at most 2 ** 3
    assert ends[0].tolist() == [[[3, 7, *[8] * 14]] * 3]
    assert make_document_ends([[1] * 16], 16).shape == (1, 1, 1, 32)
    assert make_document_ends([[9, 8]], 17).shape[2] == 4
    assert make_document_ends([[2, 2]], 40).shape[2] == 6  # padding is a document
    query = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    attend = ALL_ATTENTION_FUNCTIONS[NAME]
    layer = torch.nn.Module()
    whole, _ = attend(layer, query, query, query, ends)
    for row in range(3):
        part = query[row : row + 1]
        assert torch.equal(attend(layer, part, part, part, ends[row : row + 1])[0], whole[row : row + 1])


def test_a_bundle_of_packed_rows_replays_to_the_same_bits(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, seeded(MODELS["llama"]), on_nonfinite="stop", learning_rate=1e25, num_train_epochs=4)
    with pytest.raises(NonFiniteError):
        trainer.train()
    (folder,) = folders(tmp_path)
    assert json.loads((folder / "incident.json").read_text())["attn_implementation"] == NAME
    with rng.unchanged_random_states():
        assert replay(folder, model=None, precision=None, one_by_one=False).is_same


def test_the_plan_says_what_computes_the_attention(tmp_path: Path) -> None:
    for kind, line in {"llama": "attention by document", "llama-eager": "attention with the masks"}.items():
        trainer = trainer_of(tmp_path, seeded(MODELS[kind]))
        (found,) = HANDLER.describe(trainer.args, trainer.get_train_dataloader(), None, dispatches=False)
        assert found.startswith(f"packing   {line}")
