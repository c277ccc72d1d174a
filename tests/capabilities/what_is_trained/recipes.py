"""Recipes with a planted mistake each, and what must be said of it before the first forward pass; and healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from trainwright import Trainer, TrainingArguments

from ..._support import chats

SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2}
MOE: dict[str, Any] = {**chats.SIZES, "num_experts_per_tok": 2}
Make = Callable[[Path], Trainer]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A recipe with a mistake."""

    make: Make
    says: str  # regular expression
    refuses: bool = False  # by an error


PLANTED: dict[str, Planted] = {}
HEALTHY: dict[str, Make] = {}


def planted(says: str, *, refuses: bool = False) -> Callable[[Make], Make]:
    def enter(make: Make) -> Make:
        PLANTED[make.__name__] = Planted(make=make, says=says, refuses=refuses)
        return make

    return enter


def healthy(make: Make) -> Make:
    HEALTHY[make.__name__] = make
    return make


def trainer(folder: Path, model: Any, rows: Any, *, processing_class: Any = None, collator: Any = None, **how: Any):
    args = TrainingArguments(
        output_dir=str(folder),
        **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", **SETTINGS, **how},
    )
    return Trainer(
        model=model, args=args, train_dataset=rows, processing_class=processing_class, data_collator=collator
    )


def chat(folder: Path, *, trains: str = "assistant", template: str = chats.MARKED, model: Any = None, **how: Any):
    rows = [chats.encoded(number, trains=trains, template=template) for number in range(8)]
    model = chats.llama() if model is None else model
    return trainer(folder, model, rows, processing_class=chats.tokenizer(template), **how)


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4))


def qwen() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=8, head_dim=8))


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": chats.VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0, eos_token_id=3))


def adapted(model: Any, **how: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, **how))


# -- tokens ------------------------------------------------------------------------------------------------------------


@planted(r"masked_labels: All \d+ labels .* -100.*\{% generation %\}")
def template_without_generation_marks(folder: Path) -> Trainer:
    return chat(folder, template=chats.TEMPLATE)


@planted(
    r"chat_loss: The loss is on every token of the chats: 24 of 24 tokens of the user .*\{% generation %\} marks a"
)
def loss_on_all_of_a_chat(folder: Path) -> Trainer:
    return chat(folder, trains="all")


@planted(r"chat_loss: .*this chat template has no \{% generation %\} marks")
def loss_on_all_of_a_chat_without_marks(folder: Path) -> Trainer:
    rows = [chats.encoded(number, trains="all") for number in range(8)]
    return trainer(folder, chats.llama(), rows, processing_class=chats.tokenizer())


@planted(r"chat_loss: No token of an answer counts for the loss: 16 tokens of the assistant")
def loss_on_questions_alone(folder: Path) -> Trainer:
    return chat(folder, trains="user")


@planted(r"masked_labels: All")
def loss_on_none(folder: Path) -> Trainer:
    return chat(folder, trains="none")


@planted(r"padding_loss: \d+ of the \d+ tokens that count for the loss in the first step are padding")
def padding_that_counts(folder: Path) -> Trainer:
    rows = [chats.encoded(number) for number in range(8)]
    for row in rows:
        row["labels"] += [0] * 6
        row["input_ids"] += [0] * 6
        row["attention_mask"] += [0] * 6
    return trainer(folder, chats.llama(), rows, processing_class=chats.tokenizer())


# -- parameters --------------------------------------------------------------------------------------------------------


@planted(r"adapter_reach: The adapter reaches no expert of 1 layer .*target_parameters=")
def adapter_that_reaches_no_expert(folder: Path) -> Trainer:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**MOE, num_local_experts=4, head_dim=8))
    return chat(folder, model=adapted(model, target_modules="all-linear"))


@planted(r"adapter_reach: The adapter changes 1 router of experts .*mlp\.gate.*not asked by name")
def adapter_on_a_router(folder: Path) -> Trainer:
    return chat(folder, model=adapted(mixtral(), target_modules="all-linear"))


@planted(r"adapter_reach: The adapter changes 1 router of experts .*mlp\.gate.*not asked by name")
def adapter_on_the_router_of_qwen(folder: Path) -> Trainer:
    return chat(folder, model=adapted(qwen(), target_modules="all-linear"))


@planted(r"adapter_reach: query_proj of target_modules is no module")
def adapter_on_a_module_that_is_not_there(folder: Path) -> Trainer:
    return chat(folder, model=adapted(chats.llama(), target_modules=["v_proj", "query_proj"]))


@planted(r"tied: config.tie_word_embeddings is True, but input and output embeddings are two tensors")
def tied_head_saved_alone(folder: Path) -> Trainer:
    model = chats.llama(tie_word_embeddings=True)
    return chat(folder, model=adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"]))


@planted(r"adapter_reach: Input and output embeddings are tied, but the adapter has only model.embed_tokens")
def adapter_on_tied_embeddings(folder: Path) -> Trainer:
    model = chats.llama(tie_word_embeddings=True)
    return chat(folder, model=adapted(model, target_modules=["q_proj", "embed_tokens"]))


@planted(r"frozen: Only norms are trained: 80 of ")
def all_but_the_norms_frozen(folder: Path) -> Trainer:
    model = chats.llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name
    return chat(folder, model=model)


@planted(r"PeftModel has \d+ parameters, all of them frozen.*is_trainable=True", refuses=True)
def adapter_loaded_for_inference(folder: Path) -> Trainer:
    model = adapted(chats.llama(), target_modules=["q_proj"])
    model.save_pretrained(folder / "adapter")
    return chat(folder, model=PeftModel.from_pretrained(chats.llama(), folder / "adapter"))


@planted(r"adapter_reach: The adapter changes 1 router of experts \(.*mlp.gate\) and nothing else")
def adapter_on_a_router_alone(folder: Path) -> Trainer:
    return chat(folder, model=adapted(mixtral(), target_modules=["gate"]))


@planted(r"in_the_optimizer: \d+ trainable parameters not in the optimizer")
def parameters_that_no_optimizer_holds(folder: Path) -> Trainer:
    model = chats.llama()
    found = chat(folder, model=model)
    found.optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    return found


@planted(r"precision: .* trained in bf16 .*round.*dtype=torch\.float32.*bf16=True")
def weights_in_bf16(folder: Path) -> Trainer:
    return chat(folder, model=chats.llama().to(torch.bfloat16))


@planted(r"precision: .*fp16.*dtype=torch\.float32")
def weights_in_fp16(folder: Path) -> Trainer:
    return chat(folder, model=chats.llama().to(torch.float16))


# -- certain errors ----------------------------------------------------------------------------------------------------


def bert(**changes: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {name: chats.SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")}
    settings = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**sizes | settings | changes))


def texts(**changes: Any) -> list[dict[str, Any]]:
    return [{"input_ids": [5, 6, 7 + number], "label": number % 3, **changes} for number in range(8)]


@planted(r"label_types: The labels are floats \(.*\), but BertForSequenceClassification chooses .*int64", refuses=True)
def float_labels(folder: Path) -> Trainer:
    return trainer(folder, bert(), [{**row, "label": float(row["label"])} for row in texts()])


@planted(r"label_types: The labels are floats \(1.5, ", refuses=True)
def float_labels_of_a_single_choice(folder: Path) -> Trainer:
    return trainer(folder, bert(problem_type="single_label_classification"), texts(label=1.5))


@planted(r"label_types: The labels are whole numbers in rows of 3, .*takes floats.*float\(one\)", refuses=True)
def several_labels_as_whole_numbers(folder: Path) -> Trainer:
    rows = [{"input_ids": row["input_ids"], "labels": [1, 0, 1]} for row in texts()]  # as `label` they become floats
    return trainer(folder, bert(problem_type="multi_label_classification"), rows)


@planted(r"long_rows: 8 training rows have more than the 14 tokens .*max_length=14", refuses=True)
def rows_longer_than_the_positions_of_roberta(folder: Path) -> Trainer:
    """Two of its positions are for padding: 512 tokens of 514."""
    sizes = {name: chats.SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = RobertaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16, num_labels=3, pad_token_id=1
    )
    return trainer(folder, RobertaForSequenceClassification(config), texts(input_ids=[5] * 15))


@planted(r"long_rows: 8 training rows have more than the 16 tokens .*max_length=16", refuses=True)
def rows_longer_than_the_positions(folder: Path) -> Trainer:
    return trainer(folder, bert(), texts(input_ids=[5] * 17))


@planted(r"vocabulary: input_ids holds 48, but the model has embeddings for 0 to 47", refuses=True)
def ids_beyond_the_vocabulary(folder: Path) -> Trainer:
    return trainer(folder, bert(), texts(input_ids=[5, 6, chats.VOCAB]))


@planted(r"classes: .*labels beyond the classes .*resize_token_embeddings\(len\(tokenizer\)\)")
def labels_of_another_tokenizer(folder: Path) -> Trainer:
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, chats.VOCAB + 3]}] * 8
    return trainer(folder, chats.llama(), rows, processing_class=chats.tokenizer())


@planted(r"padding_loss: \d+ of the \d+ tokens that count for the loss in the first step are padding")
def padding_of_answers_that_counts(folder: Path) -> Trainer:
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9, 3, 0, 0]}] * 8
    return trainer(folder, t5(), rows, processing_class=chats.tokenizer())


@planted(r"texts_as_numbers: 'input_ids' is a text in train\[\d\]: 'w1 w2'.*[Tt]okenize", refuses=True)
def texts_in_place_of_ids(folder: Path) -> Trainer:
    return trainer(folder, bert(), texts(input_ids="w1 w2"), processing_class=chats.tokenizer())


class Gathers:
    """A collator that leaves texts as they are."""

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return {"text": [row["text"] for row in rows], "labels": torch.tensor([row["label"] for row in rows])}


@planted(r"inputs: The first batch has no token ids: 'text' is still a text.*Tokenize", refuses=True)
def texts_in_the_batch(folder: Path) -> Trainer:
    rows = [{"text": "w1 w2", "label": 1}] * 8
    return trainer(folder, bert(), rows, collator=Gathers(), remove_unused_columns=False)


@planted(r"labels: No label in the first batch .*Give the samples 'labels'", refuses=True)
def labels_missing(folder: Path) -> Trainer:
    return trainer(folder, bert(), [{"input_ids": [5, 6, 7]}] * 8)


@planted(r"texts_as_numbers: 'label' is a text in train\[\d\]: 'good'.*class_encode_column", refuses=True)
def labels_as_texts(folder: Path) -> Trainer:
    return trainer(folder, bert(), texts(label="good"))


# -- healthy -----------------------------------------------------------------------------------------------------------


@healthy
def answers_of_a_chat(folder: Path) -> Trainer:
    return chat(folder)


@healthy
def translations(folder: Path) -> Trainer:
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9, 3, -100, -100]}] * 8
    return trainer(folder, t5(), rows, processing_class=chats.tokenizer())


@healthy
def state_space_model(folder: Path) -> Trainer:
    torch.manual_seed(0)
    sizes = {name: chats.SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
    return chat(folder, model=MambaForCausalLM(MambaConfig(**sizes, state_size=4)))


@healthy
def words_that_are_learned(folder: Path) -> Trainer:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return chat(folder, model=get_peft_model(chats.llama(), config))


@healthy
def plain_text(folder: Path) -> Trainer:
    rows = [{"input_ids": list(range(n, n + 9)), "labels": list(range(n, n + 9))} for n in range(4, 12)]
    return trainer(folder, chats.llama(), rows, processing_class=chats.tokenizer())


@healthy
def adapter_on_attention(folder: Path) -> Trainer:
    return chat(folder, model=adapted(mixtral(), target_modules=["q_proj", "v_proj"]))


@healthy
def adapter_on_all_linear(folder: Path) -> Trainer:
    return chat(folder, model=adapted(chats.llama(), target_modules="all-linear"))


@healthy
def router_by_name(folder: Path) -> Trainer:
    targets = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return chat(folder, model=adapted(qwen(), target_modules=["q_proj"], target_parameters=targets))


@healthy
def classifier(folder: Path) -> Trainer:
    return trainer(folder, bert(), texts())


@healthy
def regression(folder: Path) -> Trainer:
    return trainer(folder, bert(num_labels=1), [{**row, "label": row["label"] / 7} for row in texts()])


@healthy
def several_labels(folder: Path) -> Trainer:
    rows = texts(label=[1.0, 0.0, 1.0])
    return trainer(folder, bert(problem_type="multi_label_classification"), rows)


@healthy
def adapter_of_a_classifier(folder: Path) -> Trainer:
    """peft saves heads of two names, of which a model has one, and BERT's configuration calls its embeddings tied."""
    return trainer(folder, adapted(bert(), task_type="SEQ_CLS", target_modules=["query", "value"]), texts())


@healthy
def adapter_with_excluded_modules(folder: Path) -> Trainer:
    return chat(folder, model=adapted(chats.llama(), target_modules="all-linear", exclude_modules=["down_proj"]))


@healthy
def adapter_and_a_head_saved_whole(folder: Path) -> Trainer:
    return trainer(folder, adapted(bert(), target_modules="all-linear", modules_to_save=["classifier"]), texts())


@healthy
def floats_that_an_own_forward_converts(folder: Path) -> Trainer:
    model = bert()
    original = model.forward

    def forward(input_ids: Any = None, labels: Any = None) -> Any:
        return original(input_ids, labels=None if labels is None else labels.long())

    model.forward = forward  # type: ignore[method-assign]
    return trainer(folder, model, [{**row, "label": float(row["label"])} for row in texts()])


@healthy
def words_that_are_hidden_at_random(folder: Path) -> Trainer:
    """Short rows of which the first batch may have none with a hidden word."""
    torch.manual_seed(0)
    sizes = {name: chats.SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6 if number % 4 == 0 else -100, -100, -100]} for number in range(8)
    ]
    return trainer(folder, model, rows)
