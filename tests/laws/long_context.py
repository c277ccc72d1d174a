"""Runs of small models on sequences in parts, for the script `long_context_run.py` and the tests that judge it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pyarrow.parquet as pq
import torch
import transformers
from torch import nn
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.parity.models import seeded
from tests.parity.sides import OURS, without_clock
from trainwright import EvalPrediction, ExpertLoad
from trainwright.engine.sequence_parts import read_attention

TOTAL = 4  # rows in a micro-batch of all processes
VOCAB = 32
Rows = list[dict[str, Any]]


# -- models ------------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(attention: str = "sdpa", **more: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES | more, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def one_key_for_all() -> nn.Module:
    """One key-value head, fewer than there are processes."""
    return llama(num_key_value_heads=1)


def windowed() -> nn.Module:
    """Each token sees itself and three before it."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4))


def gpt2() -> nn.Module:
    """Learned positions, and no more of them than the longest row."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 13, "vocab_size": VOCAB}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=2))


def registered() -> nn.Module:
    """An attention that a user has registered, with its masks."""
    transformers.AttentionInterface.register("of_the_user", ALL_ATTENTION_FUNCTIONS["sdpa"])
    transformers.AttentionMaskInterface.register("of_the_user", sdpa_mask)
    return llama("of_the_user")


def experts() -> nn.Module:
    """A mixture with a loss of balance."""
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.05
    )
    return transformers.MixtralForCausalLM(config)


def adapter() -> nn.Module:
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(llama(), config)


def recomputed() -> nn.Module:
    model = llama()
    model.activation_checkpointing_enable()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "eager": lambda: llama("eager"),
    "one key": one_key_for_all,
    "windowed": windowed,
    "gpt2": gpt2,
    "registered": registered,
    "experts": experts,
    "adapter": adapter,
    "recomputed": recomputed,
}

# -- rows --------------------------------------------------------------------------------------------------------------


def padded(size: int = 12) -> Rows:
    """Texts of 5 to 13 tokens, of which unequal parts are to be learnt; every third one is padded on the left."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for i in range(size):
        length = 5 + (i * 5) % 9
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: i % 4] = -100
        missing = 13 - length
        sides = (missing, 0) if i % 3 == 2 else (0, missing)
        filled = [nn.functional.pad(ids, sides), nn.functional.pad(labels, sides, value=-100)]
        mask = nn.functional.pad(torch.ones_like(ids), sides)
        rows.append({"input_ids": filled[0], "labels": filled[1], "attention_mask": mask})
    return rows


def packed(size: int = 12) -> Rows:
    """Rows of 13 tokens with two or three samples, told apart by positions that begin again."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(size):
        first = 3 + i % 5
        lengths = [first, 13 - first] if i % 2 else [first, 4, 9 - first]
        ids = torch.randint(3, VOCAB, (13,), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = ids.masked_fill(positions == 0, -100)
        rows.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return rows


def masked(size: int = 12) -> Rows:
    """Rows of 12 tokens, of which only the first three are to be learnt: all of them in the part of one process."""
    generator = torch.Generator().manual_seed(6)
    rows = []
    for _ in range(size):
        ids = torch.randint(3, VOCAB, (12,), generator=generator)
        labels = ids.clone()
        labels[3:] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


ROWS: dict[str, Callable[[], Rows]] = {"padded": padded, "packed": packed, "masked": masked}
ACCUMULATION = (1, 4)
# name -> (model, rows, micro-batches of a step, more settings)
CELLS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    f"{rows}, {steps}": ("llama", rows, steps, {}) for rows in ROWS for steps in ACCUMULATION
}
# Rows of which each model is tried with: those on which more of it could be wrong.
ROWS_OF = {
    "eager": "padded",
    "one key": "packed",
    "windowed": "packed",
    "gpt2": "padded",
    "registered": "packed",
    "experts": "padded",
    "adapter": "packed",
    "recomputed": "packed",
}
MORE: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    **{f"{model}, {rows}": (model, rows, 2, {}) for model, rows in ROWS_OF.items()},
    **{f"experts, packed, {steps}": ("experts", "packed", steps, {}) for steps in ACCUMULATION},
    "experts, masked": ("experts", "masked", 2, {}),
    "smoothed": ("llama", "padded", 2, {"label_smoothing_factor": 0.1}),
    "clipped": ("llama", "padded", 2, {"max_grad_norm": 0.05}),
    "ledger": ("llama", "padded", 2, {"ledger": True}),
}
# The same with a compiler, whose programs are made for whatever a part of a batch looks like.
COMPILED: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "compiled": ("llama", "packed", 4, {"torch_compile": True}),
    "compiled by block": ("llama", "padded", 4, {"torch_compile": "regional"}),
}
ALL = {**CELLS, **MORE, **COMPILED}


def write_model(cell: str, folder: Path) -> None:
    """Writes the model of a cell, for processes that load it in parts."""
    model = ALL[cell][0]
    seeded(MODELS[model]).save_pretrained(folder / model.replace(" ", "_"))


def loaded(model: str, folder: Path, sizes: dict[str, int]) -> Any:
    """The weights of `seeded(MODELS[model])`, in parts."""
    whole = MODELS[model]()
    loads = type(whole).from_pretrained
    how = transformers.DistributedConfig(**sizes)
    trained = loads(folder / model.replace(" ", "_"), distributed_config=how, attn_implementation=read_attention(whole))
    if getattr(whole, "is_gradient_checkpointing", False):
        trained.activation_checkpointing_enable()
    return trained


def trainer_of(cell: str, folder: Path, *, replicas: int = 1, sizes: dict[str, int] | None = None, **more: Any) -> Any:
    """A trainer whose micro-batches have `TOTAL` rows over all replicas.

    With `sizes` the model is loaded in parts, from beside the folder of the run.
    """
    model, rows, steps, settings = ALL[cell]
    data = ROWS[rows]()
    always = {
        "per_device_train_batch_size": TOTAL // replicas,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": steps,
        "seed": 5,
        "optim": "sgd",
        "learning_rate": 0.3,
        "logging_steps": 1,
        "max_steps": 4,
        "max_grad_norm": 1.0,
    }
    trainer = OURS.make(
        seeded(MODELS[model]) if sizes is None else loaded(model, folder.parent, sizes),
        folder,
        always | settings | more,
        train_dataset=data,
        eval_dataset=data[:7],
        compute_metrics=hits,
        preprocess_logits_for_metrics=only_logits,
    )
    if model == "experts":
        trainer.add_extension(ExpertLoad())
    return trainer


def only_logits(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """A mixture of experts returns the balance and the logits of its routers beside its own."""
    if not isinstance(outputs, tuple):
        return outputs  # type: ignore[no-any-return]
    _balance, logits, *routes = outputs
    assert all(layer.shape[0] == labels.numel() for layer in routes[-1])
    return logits  # type: ignore[no-any-return]


def hits(prediction: EvalPrediction) -> dict[str, float]:
    """Next tokens that are right, which only logits in the order of the rows show."""
    labels = prediction.label_ids[:, 1:]
    found = prediction.predictions.argmax(-1)[:, :-1] == labels
    return {"hits": float(found[labels != -100].mean()), "tokens": float((labels != -100).sum())}


def ledger_of(folder: Path) -> list[list[float]]:
    """The numbers of each sample in the ledger of a run, if it has one."""
    path = folder / "ledger.parquet"
    if not path.exists():
        return []
    columns = pq.read_table(path).to_pydict()
    return [column for column in columns.values() if all(isinstance(value, float) for value in column)]


def whole_state(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights put together from their parts; of DeepSpeed's only the main process has them, and the others none."""
    if trainer.is_deepspeed_enabled:
        spread = trainer._trainwright.services.engine.whole_weights(trainer.model)
        if spread:  # under the first name of a weight that is used twice
            names = {id(weight): name for name, weight in trainer.model.named_parameters()}
            weights = trainer.model.named_parameters(remove_duplicate=False)
            return {**spread, **{name: spread[names[id(weight)]] for name, weight in weights}}
    return {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in trainer.model.state_dict().items()}


def outcome(trainer: Any, **how: Any) -> dict[str, Any]:
    """Trains, evaluates and predicts, and says in plain numbers what came of it."""
    out = trainer.train(**how)
    state = whole_state(trainer)
    judged = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset).predictions
    return {
        "weights": {name: value.double().flatten().tolist() for name, value in state.items()},
        "log": without_clock(trainer.state.log_history),
        "loss": out.training_loss,
        "step": out.global_step,
        "judged": {name: judged[name] for name in ("eval_loss", "eval_hits", "eval_tokens")},
        "logits": torch.as_tensor(predicted).double().flatten().tolist(),
        "ledger": ledger_of(Path(trainer.args.output_dir)),
    }
