"""However a batch is cut up, the update is that of the whole batch: accumulation, uneven windows, parts that fit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from trainwright import Trainer, TrainingArguments
from trainwright.errors import EvaluationMemoryError
from trainwright.support import model_facts

VOCABULARY = 23
LENGTH = 9
CLOSE = {"rtol": 1e-5, "atol": 2e-7}


class MeanOfTokens(nn.Module):
    """Returns its own mean over the label tokens of a batch, and does not want to know of the window."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class WithBalance(nn.Module):
    """A counted loss and a mixture's balance loss, which is a mean over the samples of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.3, use_cache=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        logits = self.head(hidden)
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / kwargs.get("num_items_in_batch", (labels != -100).sum())
        balance = hidden.pow(2).mean(dim=(1, 2)).mean()
        return {"loss": loss + 0.3 * balance, "logits": logits, "aux_loss": balance}


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def bert() -> nn.Module:
    """Takes any keyword, and returns the mean of its micro-batch all the same."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, **sizes, **without))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def llama_classifier() -> nn.Module:
    """Calls the loss function of its model, without the keywords that it took."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, num_key_value_heads=2, **sizes)
    return LlamaForTokenClassification(config)


MODELS = {"counted": llama, "mean": MeanOfTokens, "auxiliary": WithBalance, "bert": bert, "t5": t5}
HEADS = {"bert": bert, "llama_classifier": llama_classifier}
MEANS = ("mean", "bert", "t5")


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length, of which each has another number of labels."""
    generator = torch.Generator().manual_seed(3)
    items = []
    for i in range(number):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 1 + i % (LENGTH - 2)] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


def gradients(kind: str, folder: Path, *, batch: int, micro_batches: int, number: int = 8, **how: Any) -> torch.Tensor:
    """The change of all weights after one epoch of plain SGD without clipping: rate times the gradients."""
    torch.manual_seed(0)
    model = how.pop("model", None) or (MODELS | HEADS)[kind]()
    trainer = how.pop("trainer", Trainer)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        num_train_epochs=1,
        loss_weighting=how.pop("weighting", "items"),
        lr_scheduler_type="constant",
        max_grad_norm=0,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=micro_batches,
        **how,
    )
    sgd = (torch.optim.SGD, {"lr": 0.1})
    trainer(model, args, train_dataset=samples(number), optimizer_cls_and_kwargs=sgd).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("batch", "micro_batches", "number"), [(4, 2, 8), (2, 4, 8), (1, 8, 8), (3, 3, 8), (4, 3, 9)])
def test_accumulating_equals_the_full_batch(
    kind: str, batch: int, micro_batches: int, number: int, tmp_path: Path
) -> None:
    whole = gradients(kind, tmp_path, batch=number, micro_batches=1, number=number)
    torch.testing.assert_close(
        gradients(kind, tmp_path, batch=batch, micro_batches=micro_batches, number=number), whole, **CLOSE
    )
    assert whole.abs().max() > 1e-3


class OwnMean(Trainer):
    """A loss of the user's own that does not look at the count."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


class OwnCount(Trainer):
    """A loss of the user's own that is counted, in a nested function."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")

        def mean(total: torch.Tensor) -> torch.Tensor:
            return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)

        outputs = model(**inputs)
        loss = mean(functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        return (loss, outputs) if return_outputs else loss


class Doubled(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return (2 * loss[0], loss[1]) if isinstance(loss, tuple) else 2 * loss


OWN = {"head": Trainer, "own mean": OwnMean, "own count": OwnCount, "doubled": Doubled}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("trainer", OWN)
def test_by_default_head_that_ignores_count_trains_on_mean_of_the_window(
    kind: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever computes the loss; `original` gives the sum of four means, but for the loss that is counted."""
    how: dict[str, Any] = {"trainer": OWN[trainer], "report_to": "none"}
    whole = gradients(kind, tmp_path, batch=8, micro_batches=1, weighting=None, **how)
    parts = {"batch": 2, "micro_batches": 4}
    torch.testing.assert_close(gradients(kind, tmp_path, weighting=None, **parts, **how), whole, **CLOSE)
    ratio = gradients(kind, tmp_path, weighting="original", **parts, **how).norm() / whole.norm()
    assert (3.0 < ratio < 5.0) == (trainer != "own count")
    ratio = gradients(kind, tmp_path, weighting="batches", **parts, **how).norm() / whole.norm()
    assert 0.7 < ratio < 1.3


def test_the_start_of_a_run_says_where_the_mean_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how: dict[str, Any] = {"report_to": "none"}
    for kind, weighting, said in (
        ("bert", None, True),
        ("bert", "original", False),
        ("bert", "batches", False),
        ("counted", None, False),
        ("mean", None, False),
    ):
        gradients(kind, tmp_path, batch=2, micro_batches=4, weighting=weighting, **how)
        assert ("mean over the 4 micro-batches of a step" in capsys.readouterr().out) == said


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "more", "ignores"),
    [
        ("BertForSequenceClassification", {}, True),
        ("BertForMaskedLM", {}, True),
        ("RobertaForSequenceClassification", {}, True),
        ("LlamaForSequenceClassification", {}, True),
        ("LlamaForTokenClassification", {}, True),
        ("LlamaForCausalLM", {}, False),
        ("BertLMHeadModel", {"is_decoder": True}, False),
        ("ViTForImageClassification", {"image_size": 8, "patch_size": 4}, False),
        ("ViTForImageClassification", {"image_size": 8, "patch_size": 4, "num_labels": 1}, True),
    ],
)
def test_which_heads_ignore_the_count(name: str, more: dict[str, Any], ignores: bool) -> None:
    model = getattr(transformers, name)
    assert model_facts.ignores_item_count(model(model.config_class(**SMALL, **more))) == ignores


class Small(nn.Module):
    """A device that is full when a batch has more samples than it can hold."""

    def __init__(self, inner: nn.Module, room: int) -> None:
        super().__init__()
        self.inner = inner
        self.room = room
        self.sizes = []
        self.config = getattr(inner, "config", None)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        self.sizes.append(len(input_ids))
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")
        return self.inner(input_ids=input_ids, labels=labels, **kwargs)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("room", [1, 3, 4])
def test_what_does_not_fit_is_cut_and_the_update_stays_the_same(kind: str, room: int, tmp_path: Path) -> None:
    whole = gradients(kind, tmp_path, batch=8, micro_batches=1, number=16)
    torch.manual_seed(0)
    model = Small(MODELS[kind](), room)
    if kind in MEANS:  # uses no count, so the wrapper must not seem to take one
        model.accepts_loss_kwargs = False
    cut = gradients(kind, tmp_path, batch=8, micro_batches=1, number=16, model=model, auto_find_batch_size=True)
    torch.testing.assert_close(cut, whole, **CLOSE)
    assert max(model.sizes[-3:]) <= room  # the second window starts with parts that fit
    assert model.sizes.count(8) == 1


def test_a_single_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    model = Small(MeanOfTokens(), 0)
    model.accepts_loss_kwargs = False
    with pytest.raises(torch.OutOfMemoryError):
        gradients("mean", tmp_path, batch=4, micro_batches=1, model=model, auto_find_batch_size=True)
    assert model.sizes == [4, 2, 1]


def test_without_the_setting_the_error_ends_the_run_at_once(tmp_path: Path) -> None:
    model = Small(MeanOfTokens(), 2)
    model.accepts_loss_kwargs = False
    with pytest.raises(torch.OutOfMemoryError):
        gradients("mean", tmp_path, batch=4, micro_batches=1, model=model)
    assert model.sizes == [4]


def test_another_error_is_not_taken_for_a_full_memory(tmp_path: Path) -> None:
    class Breaks(MeanOfTokens):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradients("mean", tmp_path, batch=4, micro_batches=1, model=Breaks(), auto_find_batch_size=True)


class Draws(Small):
    """Uses up random numbers, before it finds that memory is full or after."""

    def __init__(self, inner: nn.Module, room: int, *, before: bool) -> None:
        super().__init__(inner, room)
        self.before = before
        self.accepts_loss_kwargs = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        if self.before:
            torch.rand(1000)
        outputs = super().forward(input_ids, labels, **kwargs)
        if not self.before:
            torch.rand(1000)
        return {**outputs, "loss": outputs["loss"] * (1 + torch.rand(()))}


def test_random_states_are_those_from_before_the_failed_step(tmp_path: Path) -> None:
    """A try that failed after it drew random numbers leaves no trace of them."""
    how = {"batch": 8, "micro_batches": 1, "number": 16, "auto_find_batch_size": True}
    changes = []
    for before in (True, False):
        torch.manual_seed(0)
        changes.append(gradients("mean", tmp_path, model=Draws(MeanOfTokens(), 4, before=before), **how))
    assert torch.equal(*changes)


def test_an_evaluation_that_does_not_fit_touches_only_evaluation(tmp_path: Path) -> None:
    class FullInEvaluation(MeanOfTokens):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")
            return super().forward(input_ids, labels)

    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        disable_tqdm=True,
        auto_find_batch_size=True,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer = Trainer(FullInEvaluation(), args, train_dataset=samples(8), eval_dataset=samples(8))
    with pytest.raises(EvaluationMemoryError, match=r"at step 1.*per_device_eval_batch_size \(8\)"):
        trainer.train()
    assert trainer._trainwright.run.progress.window.num_parts == 1
