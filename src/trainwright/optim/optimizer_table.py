"""Table of optimizers by name: class, its arguments, its `optim_args`, its limits.

A limit takes the optimizer's name and the arguments and returns a message or None: the problem to report before step 1.

The arguments equal transformers' for the same name. Adding an optimizer is adding a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainwright.config import resolve
from trainwright.config.protocol import Arguments

if TYPE_CHECKING:
    import torch

UNSET = object()
TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")


class Option(NamedTuple):
    """One name of `optim_args`."""

    convert: Callable[[str], object]  # converts text to a value; the message of its ValueError is the expected kind
    # value for the optimizer where none is given (text is converted too); UNSET for the optimizer's own
    default: object = UNSET


Options = Mapping[str, Option]


def whole(text: str) -> int:
    """Converts a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def number(text: str) -> float:
    """Converts a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def flag(text: str) -> bool:
    """Converts true or false."""
    if text.lower() not in TRUE + FALSE:
        raise ValueError("true or false")
    return text.lower() in TRUE


def choose_word(*words: str) -> Callable[[str], str]:
    """Returns a converter that takes only these words."""

    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return convert


def dtype(text: str) -> torch.dtype:
    """Converts the name of a torch type."""
    import torch

    value = getattr(torch, text, None)
    if not isinstance(value, torch.dtype):
        raise ValueError("a torch type such as float32 or bfloat16")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Class of one optimizer and its arguments; every class gets `lr`."""

    path: str  # "module:attribute" of the class
    package: str | None = None  # requirement for pip, with the oldest supported version; None where torch has the class
    # give it `betas` and `eps` of `adam_beta1`, ...: "always", "betas" alone, or "if set" to something else than the
    # default, for classes with other defaults of their own
    adam: Literal["no", "always", "betas", "if set"] = "no"
    decay: bool = False  # give it `weight_decay` as an argument too, besides the groups
    warmup: bool = False  # give it `warmup_steps`
    seeded: bool = False  # give it `seed`
    fixed: Mapping[str, object] = field(default_factory=dict)  # further arguments implied by this name
    options: Options = field(default_factory=dict)  # options allowed in `optim_args`
    # `optim_args` of the group of target modules, for GaLore and APOLLO; empty for the others
    projects: Options = field(default_factory=dict)
    projects_adam: bool = False  # `betas` and `eps` go to that group as well
    layerwise: bool = False  # an optimizer for each parameter, stepping during the backward pass
    whole_model: bool = False  # takes the model instead of parameters
    limits: tuple[Limit, ...] = ()  # combinations that it does not support


Limit = Callable[[str, "Arguments"], "str | None"]


def no_accumulation(name: str, args: Arguments) -> str | None:
    """Reports gradient accumulation: the optimizer updates weights in each backward pass."""
    count = resolve.micro_batches(args)
    if count == 1:
        return None
    return (
        f"optim={name!r} updates the weights during each backward pass, so gradients cannot be accumulated, and "
        f"gradient_accumulation_steps={count} asks for it. Set it to 1 and raise per_device_train_batch_size, or "
        f"choose another optimizer{_without_layers(name)}."
    )


def no_fp16(name: str, args: Arguments) -> str | None:
    """Reports fp16: gradients are used before the scaler unscales them."""
    if not args.fp16:
        return None
    return (
        f"optim={name!r} updates the weights during the backward pass, before a gradient scaler can take its scale "
        "out of the gradients, and fp16=True scales them. Set bf16=True instead."
    )


def one_process(name: str, args: Arguments) -> str | None:
    """Reports a run of several processes: gradients are used before they are averaged."""
    mode = getattr(args.parallel_mode, "value", args.parallel_mode)
    if mode != "distributed":
        return None
    return (
        f"optim={name!r} updates the weights during the backward pass, before the gradients of several processes are "
        f"averaged. Train with one process, or choose another optimizer{_without_layers(name)}."
    )


def needs_cuda(name: str, args: Arguments) -> str | None:
    """Reports a device other than CUDA."""
    from trainwright.distributed.device import runs_cuda_kernels

    if runs_cuda_kernels(args.device):
        return None
    instead = {"adalomo": "lomo"}.get(name, name.replace("_8bit", ""))
    return (
        f"optim={name!r} runs on CUDA devices only, and this run is on {str(args.device)!r}. "
        f"optim={instead!r} runs everywhere."
    )


def whole_warmup(name: str, args: Arguments) -> str | None:
    """Reports a warm-up given as a share of an unknown number of steps."""
    if args.warmup_steps == int(args.warmup_steps) or args.max_steps > 0:
        return None
    return (
        f"warmup_steps={args.warmup_steps} is a share of all steps, and optim={name!r}, which warms up by itself, must "
        "know the number of steps when it is made. Give warmup_steps as a whole number, or set max_steps."
    )


def _without_layers(name: str) -> str:
    return f", for example {name.removesuffix('_layerwise')!r}" if name.endswith("_layerwise") else ""


def _options(convert: Callable[[str], Any], *names: str, **defaults: object) -> dict[str, Option]:
    return {**{name: Option(convert) for name in names}, **{n: Option(convert, value) for n, value in defaults.items()}}


BITSANDBYTES = "bitsandbytes>=0.46"
GALORE = "galore-torch"
LOMO = "lomo-optim"
IN_BACKWARD = (no_accumulation, no_fp16, one_process)
RMSPROP = _options(number, "momentum", "alpha", "eps", "weight_decay") | _options(flag, "centered")
ADEMAMIX = _options(number, "beta1", "beta2", "eps", beta3=0.9999, alpha=5.0) | _options(whole, "t_alpha", "t_beta3")
PROJECTION = _options(whole, rank=128, update_proj_gap=200)
SIDES = ("std", "reverse_std", "right", "left")
GALORE_GROUP = PROJECTION | _options(number, scale=0.25) | _options(choose_word(*SIDES, "full"), proj_type="std")
APOLLO_GROUP = PROJECTION | _options(number, scale=1.0) | _options(choose_word(*SIDES), proj_type="std")
APOLLO_GROUP |= _options(choose_word("random", "svd"), proj="random")
APOLLO_GROUP |= _options(choose_word("channel", "tensor"), scale_type="channel")
SCHEDULE_FREE_OPTIONS = _options(number, weight_lr_power=2.0, r=0.0)
EXTERNAL_RATE = {"scale_parameter": False, "relative_step": False}


def _bnb(kind: str, *, bits: int, paged: bool | None = None, **more: Any) -> OptimizerSpec:
    fixed = {"optim_bits": bits, **({} if paged is None else {"is_paged": paged})}
    return OptimizerSpec(path=f"bitsandbytes.optim:{kind}", package=BITSANDBYTES, fixed=fixed, **more)


def _galore(kind: str, *, layerwise: bool = False, limits: tuple[Limit, ...] = (), **more: Any) -> OptimizerSpec:
    limits = (IN_BACKWARD if layerwise else ()) + limits
    return OptimizerSpec(
        path=f"galore_torch:{kind}", package=GALORE, projects=GALORE_GROUP, layerwise=layerwise, limits=limits, **more
    )


def _torchao(kind: str) -> OptimizerSpec:
    options = _options(whole, block_size=256) | _options(flag, bf16_stochastic_round=False)
    return OptimizerSpec(path=f"torchao.optim:{kind}", package="torchao>=0.11", adam="always", options=options)


def _schedule_free(kind: str, **more: Any) -> OptimizerSpec:
    limits = (whole_warmup,) if more.get("warmup") else ()
    more = {"options": SCHEDULE_FREE_OPTIONS, **more}
    return OptimizerSpec(path=f"schedulefree:{kind}", package="schedulefree>=1.4", decay=True, limits=limits, **more)


def _apollo(**more: Any) -> OptimizerSpec:
    more |= {"projects": APOLLO_GROUP, "projects_adam": True}
    return OptimizerSpec(path="apollo_torch:APOLLOAdamW", package="apollo-torch", adam="if set", **more)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw_torch": OptimizerSpec(path="torch.optim:AdamW", adam="always"),
    "adamw_torch_fused": OptimizerSpec(path="torch.optim:AdamW", adam="always", fixed={"fused": True}),
    "adamw_torch_xla": OptimizerSpec(path="torch_xla.amp.syncfree:AdamW", package="torch_xla", adam="always"),
    "adamw_torch_npu_fused": OptimizerSpec(path="torch_npu.optim:NpuFusedAdamW", package="torch_npu", adam="always"),
    "adamw_anyprecision": OptimizerSpec(
        path="torchdistx.optimizers:AnyPrecisionAdamW",
        package="torchdistx @ git+https://github.com/pytorch/torchdistx",
        adam="always",
        options=_options(flag, use_kahan_summation=False)
        | _options(dtype, momentum_dtype="float32", variance_dtype="float32", compensation_buffer_dtype="bfloat16"),
    ),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adafactor": OptimizerSpec(
        path="trainwright.optim.schedules:Adafactor", fixed=EXTERNAL_RATE, limits=(resolve.plain_tensors,)
    ),
    "sgd": OptimizerSpec(
        path="torch.optim:SGD",
        options=_options(number, "momentum", "dampening", "weight_decay") | _options(flag, "nesterov"),
    ),
    "adagrad": OptimizerSpec(path="torch.optim:Adagrad", options=_options(number, "lr_decay", "weight_decay", "eps")),
    "rmsprop": OptimizerSpec(path="torch.optim:RMSprop", options=RMSPROP),
    "muon": OptimizerSpec(
        path="trainwright.optim.own_optimizers:MuonWithAdamW",
        adam="always",
        options=_options(number, momentum=0.95)
        | _options(flag, nesterov=True, split_qkv=False)
        | _options(whole, ns_steps=5)
        | _options(choose_word("original", "match_rms_adamw"), adjust_lr_fn="match_rms_adamw"),
        limits=(resolve.whole_matrices,),
    ),
    "adamw_bf16": OptimizerSpec(
        path="trainwright.optim.adamw_bf16:AdamWBF16",
        adam="always",
        seeded=True,
        options=_options(choose_word("kahan", "stochastic"), rounding="kahan")
        | _options(choose_word("bfloat16", "float32"), moments="bfloat16"),
    ),
    # bitsandbytes
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), _bnb("AdamW", bits=8, paged=False, adam="always")),
    "paged_adamw_32bit": _bnb("AdamW", bits=32, paged=True, adam="always"),
    "paged_adamw_8bit": _bnb("AdamW", bits=8, paged=True, adam="always"),
    "ademamix": _bnb("AdEMAMix", bits=32, paged=False, adam="always", options=ADEMAMIX),
    "ademamix_8bit": _bnb("AdEMAMix", bits=8, paged=False, adam="always", options=ADEMAMIX),
    "paged_ademamix_32bit": _bnb("AdEMAMix", bits=32, paged=True, adam="always", options=ADEMAMIX),
    "paged_ademamix_8bit": _bnb("AdEMAMix", bits=8, paged=True, adam="always", options=ADEMAMIX),
    "lion_32bit": _bnb("Lion", bits=32, paged=False, adam="betas"),
    "lion_8bit": _bnb("Lion", bits=8, paged=False, adam="betas"),
    "paged_lion_32bit": _bnb("Lion", bits=32, paged=True, adam="betas"),
    "paged_lion_8bit": _bnb("Lion", bits=8, paged=True, adam="betas"),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), _bnb("RMSprop", bits=32, options=RMSPROP)),
    "rmsprop_bnb_8bit": _bnb("RMSprop", bits=8, options=RMSPROP),
    # other packages
    "galore_adamw": _galore("GaLoreAdamW", adam="if set"),
    "galore_adamw_8bit": _galore("GaLoreAdamW8bit", adam="if set", limits=(needs_cuda,)),
    "galore_adafactor": _galore("GaLoreAdafactor", fixed=EXTERNAL_RATE),
    "galore_adamw_layerwise": _galore("GaLoreAdamW", adam="if set", layerwise=True),
    "galore_adamw_8bit_layerwise": _galore("GaLoreAdamW8bit", adam="if set", layerwise=True, limits=(needs_cuda,)),
    "galore_adafactor_layerwise": _galore("GaLoreAdafactor", layerwise=True, fixed=EXTERNAL_RATE),
    "apollo_adamw": _apollo(),
    "apollo_adamw_layerwise": _apollo(layerwise=True, limits=IN_BACKWARD),
    "lomo": OptimizerSpec(path="lomo_optim:Lomo", package=LOMO, whole_model=True, limits=IN_BACKWARD),
    "adalomo": OptimizerSpec(
        path="lomo_optim:AdaLomo", package=LOMO, whole_model=True, limits=(*IN_BACKWARD, needs_cuda)
    ),
    "grokadamw": OptimizerSpec(
        path="grokadamw:GrokAdamW",
        package="grokadamw",
        adam="if set",
        options=_options(
            number, alpha_init=0.98, lamb=2.0, gamma=0.1, grokking_signal_decay_rate=0.1, gradient_clipping=1.0
        ),
    ),
    "schedule_free_radam": _schedule_free("RAdamScheduleFree", adam="always"),
    "schedule_free_adamw": _schedule_free("AdamWScheduleFree", adam="always", warmup=True),
    "schedule_free_sgd": _schedule_free(
        "SGDScheduleFree", warmup=True, options=SCHEDULE_FREE_OPTIONS | _options(number, "momentum")
    ),
    "stable_adamw": OptimizerSpec(
        path="optimi:StableAdamW",
        package="torch-optimi",
        adam="always",
        decay=True,
        options=_options(flag, decouple_lr=False, kahan_sum=None) | _options(number, max_lr=None),
    ),
}
