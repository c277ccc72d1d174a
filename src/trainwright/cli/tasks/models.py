"""Models and tokenizers: pretrained or from scratch; tokenizers learned from the training text."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainwright._types import JSONObject
from trainwright.checkpoint.weights import ADAPTER_FILES, weight_files
from trainwright.cli.recipe.schema import LearnPart
from trainwright.cli.tasks.adapter import quantized
from trainwright.cli.tasks.source import ModelConfig, TaskSource, first_line
from trainwright.config.arguments import TrainingArguments
from trainwright.config.fields import value_if_known
from trainwright.errors import MissingPackageError, did_you_mean
from trainwright.support.findings import Finding, some

LACKS = "the weights lack {}, which would be random"
WRITES_TEXT = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off transformers' progress bars and loading reports: a new head is expected."""
    from transformers.utils import logging as hf_logging

    logs: Any = hf_logging
    level = logs.get_verbosity()
    had_bars = logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if had_bars:
            logs.enable_progress_bar()


def load_config(
    material: TaskSource, tokenizer: PreTrainedTokenizerBase | None = None, **settings: object
) -> ModelConfig:
    """Returns the model's configuration, adapted to tokenizer and data; RecipeError if that is impossible."""
    from transformers import CONFIG_MAPPING, AutoConfig

    model = material.recipe.model
    given = dict(model.config)
    if model.path is None:
        kind = given.pop("model_type")
        if kind not in CONFIG_MAPPING:
            hint = did_you_mean(kind, CONFIG_MAPPING)
            material.wrong(f"transformers has no model {kind!r}.{hint}", "model", "config", "model_type")
        known = CONFIG_MAPPING[kind]()
        _check_names(material, given, known)
        return AutoConfig.for_model(kind, **{**settings, **_describe_tokenizer(tokenizer, known), **given})
    if material.model is None:
        _refuse_adapter(material, model.path, "model", "path")
    try:
        config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        material.wrong(f"no model can be loaded from there: {first_line(error)}", "model", "path")
    _check_names(material, given, config)
    own = _describe_tokenizer(tokenizer, config) if model.learn_tokenizer is not None else {}
    for name, value in {**settings, **own, **given}.items():
        setattr(config, name, value)
    return config


def load_model(material: TaskSource, config: ModelConfig) -> PreTrainedModel:
    """Loads the model with pretrained weights, or makes it from scratch, unless there is one already."""
    if material.model is not None:
        there: PreTrainedModel = material.model
        return there
    import torch
    import transformers

    kind: Any = getattr(transformers, material.recipe.spec.model_class)
    model = material.recipe.model
    dtype = getattr(torch, model.dtype or "float32")
    try:
        if model.path is None or model.from_scratch:
            loaded: PreTrainedModel = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            given = {"revision": model.revision, "dtype": dtype, **quantized(model.quantization)}
            given["output_loading_info"] = True
            loaded, info = kind.from_pretrained(model.path, config=config, trust_remote_code=False, **given)
            missing = sorted(info["missing_keys"])
            if missing and material.recipe.spec.model_class in WRITES_TEXT:
                material.wrong(
                    f"{LACKS.format(some(missing))}, and which an adapter does not train. "
                    "Take a complete model; if its head shares the embeddings, leave out model.config."
                    "tie_word_embeddings.",
                    "model",
                    "path",
                )
            prefix = f"{loaded.base_model_prefix}."
            inner = [name for name in missing if name.startswith(prefix) and "pooler" not in name]
            if inner:
                material.found.append(
                    Finding(
                        "warning",
                        f"the weights lack {some(inner)} of the model itself, which are drawn at random.",
                        "Take a complete model, or one of the same kind.",
                        check="missing_weights",
                        entry="model.path",
                    )
                )
        return loaded
    except MissingPackageError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if model.quantization is not None:
            said = f"the weights cannot be loaded in {model.quantization} on this machine: {first_line(error)}. Take "
            material.wrong(
                f"{said}the entry out to train the adapter on full-precision weights.", "model", "quantization"
            )
        material.wrong(
            f"{config.model_type} cannot be used for {material.recipe.task}: {first_line(error)}",
            "model",
            "path" if model.path is not None else "config",
        )


def load_reference(material: TaskSource, place: str) -> PreTrainedModel:
    """Loads the model that the answers of a preference are compared with; RecipeError if that is impossible."""
    import torch
    import transformers

    kind: Any = getattr(transformers, material.recipe.spec.model_class)
    dtype = getattr(torch, material.recipe.model.dtype or "float32")
    entry = ("preference", "reference")
    _refuse_adapter(material, place, *entry)
    try:
        found: PreTrainedModel
        found, info = kind.from_pretrained(place, dtype=dtype, trust_remote_code=False, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        material.wrong(f"no model can be loaded from there: {first_line(error)}", *entry)
    missing = sorted(info["missing_keys"])
    if missing:
        material.wrong(f"{LACKS.format(some(missing))}. Take a complete model that writes text.", *entry)
    return found


def _refuse_adapter(material: TaskSource, place: str, *entry: str) -> None:
    """Refuses a directory with an adapter alone, which has no weights of the model itself."""
    folder = Path(place)
    is_adapter = any((folder / name).is_file() for name in (*ADAPTER_FILES, "adapter_config.json"))
    if is_adapter and not weight_files(folder):
        material.wrong(
            f"{place} has an adapter, without the weights of its model. Make a whole model of it: trainwright export "
            f"{place} FOLDER --merge, and name FOLDER here.",
            *entry,
        )


def _check_names(material: TaskSource, given: JSONObject, config: ModelConfig) -> None:
    """Refuses names that the model does not read; a configuration accepts any name without an error."""
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    said = f"a {config.model_type} model has no such setting."
    unknown = [name for name in given if name not in known]
    material.tree.refuse(
        (("model", "config", name), f"model.config.{name}: {said}{did_you_mean(name, known)}") for name in unknown
    )


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase | None, config: ModelConfig) -> JSONObject:
    if tokenizer is None:
        return {}
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    found: JSONObject = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in names}}
    if config.is_encoder_decoder:
        first = tokenizer.bos_token_id
        found["decoder_start_token_id"] = tokenizer.pad_token_id if first is None else first
        found["forced_eos_token_id"] = found["forced_bos_token_id"] = None
    return found


PAD = "<pad>"
BEGIN = "<s>"
END = "</s>"
UNKNOWN = "<unk>"
MASK = "<mask>"
FOLDER = (
    "tokenizer"  # folder in output_dir with a learned tokenizer, for other processes and a resume; removed at the end
)
LIMIT = 1024  # tokens, if neither the model, the tokenizer nor the recipe limits the length of a text
NO_LIMIT = 1 << 30  # a tokenizer without a limit reports a number beyond any text


def load_tokenizer(
    material: TaskSource, args: TrainingArguments, corpus: Callable[[], Iterable[str]], *, begins: bool = True
) -> PreTrainedTokenizerBase:
    """Loads or learns the tokenizer of a run; a learned tokenizer is the same in every process and after a resume."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # data workers are forked later
    from transformers import AutoTokenizer

    model = material.recipe.model
    if model.learn_tokenizer is not None:
        return _learned_once(material, args, corpus, begins=begins)
    try:
        where = model.tokenizer or model.path
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, revision=model.revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        said = f"no tokenizer can be loaded from there: {first_line(error)}"
        material.wrong(said, "model", "tokenizer" if model.tokenizer else "path")
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.unk_token
    return found


def max_length(
    material: TaskSource, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, *, name: str = "max_length"
) -> int:
    """Returns the maximum number of tokens of a text; `name` is the entry of `data` that sets it."""
    asked = getattr(material.recipe.data, name) or material.recipe.data.max_length
    positions = getattr(config, "max_position_embeddings", None)
    if asked is not None:
        if positions is not None and asked > positions:
            material.wrong(f"{asked} tokens exceed the model's {positions} positions.", "data", name)
        return int(asked)
    known = [limit for limit in (tokenizer.model_max_length, positions) if limit is not None and limit < NO_LIMIT]
    return int(min(known, default=LIMIT))


def _learned_once(
    material: TaskSource, args: TrainingArguments, corpus: Callable[[], Iterable[str]], *, begins: bool
) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    part = material.recipe.model.learn_tokenizer
    assert part is not None
    if material.is_check:  # a run that may be there keeps its tokenizer
        with tempfile.TemporaryDirectory() as scratch:
            learn(corpus(), part, begins=begins).save_pretrained(scratch)
            return AutoTokenizer.from_pretrained(scratch, trust_remote_code=False)
    assert args.output_dir is not None  # the constructor sets it
    output = Path(args.output_dir)
    folder = output / FOLDER
    origin = value_if_known(args, "branch_from")
    continues = args.resume_from_checkpoint or origin
    if continues and not folder.is_dir() and (output / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(output, trust_remote_code=False)  # saved by a finished run
    with args.main_process_first():
        is_first = args.local_process_index == 0
        if is_first and origin and not folder.is_dir():  # its weights belong to the words of its origin
            AutoTokenizer.from_pretrained(origin, trust_remote_code=False).save_pretrained(folder)
        elif is_first and not (continues and folder.is_dir()):
            learn(corpus(), part, begins=begins).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def remove_learned(output_dir: Path) -> None:
    """Removes the copy of a learned tokenizer of a finished run: it is also saved with the model."""
    if (output_dir / "tokenizer.json").is_file():
        shutil.rmtree(output_dir / FOLDER, ignore_errors=True)


def learn(corpus: Iterable[str], part: LearnPart, *, begins: bool = True) -> PreTrainedTokenizerBase:
    """Learns a tokenizer; with `begins`, texts also begin with a special token, besides the one at their end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, BEGIN, END, UNKNOWN, MASK]
    backend: Any  # the package tokenizers gives these different types
    trainer: Any
    if part.kind == "bpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        size = max(part.vocab_size, len(alphabet) + len(special))
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        backend = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        split: Any = pre_tokenizers.WhitespaceSplit()
        if part.pattern is not None:
            split = pre_tokenizers.Sequence([split, pre_tokenizers.Split(Regex(part.pattern), "isolated")])
        backend.pre_tokenizer = split
        trainer = trainers.WordLevelTrainer(vocab_size=part.vocab_size, special_tokens=special, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    start = f"{BEGIN} " if begins else ""
    ids = [(token, backend.token_to_id(token)) for token in (BEGIN, END)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start}$A {END}", pair=f"{start}$A {END} $B {END}", special_tokens=ids
    )
    named = {"pad": PAD, "bos": BEGIN, "eos": END, "unk": UNKNOWN, "mask": MASK, "cls": BEGIN, "sep": END}
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=backend, **{f"{name}_token": token for name, token in named.items()})  # type: ignore[no-any-return]
