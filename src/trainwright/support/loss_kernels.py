"""`loss_kernel`: the output layer and the cross-entropy of a causal language model without its logits.

The logits of N tokens over V words are by far the largest tensor of a step, and the loss needs a row of them at a time.
A kernel takes the hidden states instead; `chunked` computes loss and gradients for a few hundred tokens at a time.
Before step 1 the kernel and the plain loss run on the user's model. Where the two differ, or the model has no such
end, a warning says why and the plain loss is used.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from trainwright._types import IGNORE_INDEX
from trainwright.errors import MissingPackageError
from trainwright.support.model_facts import core_model
from trainwright.support.model_modes import ModuleModes

logger = logging.getLogger(__name__)

# hidden (tokens, width), weight (words, width), bias (words) or None, targets (tokens), soft cap or None -> the summed
# loss, and the loss of each token or None
Kernel: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, "float | None"],
    "tuple[torch.Tensor, torch.Tensor | None]",
]
ELEMENTS = 2**25  # logits that exist at a time: 128 MiB in fp32
# More on an accelerator: each chunk reads and writes the summed gradient of the layer, which takes time.
ELEMENTS_ON_ACCELERATORS = 2**27
TENSORS_OF_LOGITS = 3  # in fp32 that the plain loss holds at its peak
PACKAGES = {"cce": ("cut_cross_entropy", "cut-cross-entropy"), "liger": ("liger_kernel", "liger-kernel")}
SMALL_VOCABULARY = 16384  # below it "auto" leaves the loss as it is
# Relative differences of loss and gradients that rounding may make.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 3e-2}
ROUNDING_ON_A_GPU = 5e-3  # for float32, because products may be computed in TF32


class _Chunked(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T + bias`; gradients are computed with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Sums over chunks in fp32: in half precision each chunk would round them.
        sums = [
            torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32))
            if one is not None and needed
            else None
            for one, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        losses = hidden.new_empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        elements = ELEMENTS if hidden.is_cpu else ELEMENTS_ON_ACCELERATORS
        for start in range(0, hidden.shape[0], rows := max(1, elements // weight.shape[0])):
            part = hidden[start : start + rows]
            target = targets[start : start + rows, None]
            logits = functional.linear(part, weight, bias).to(losses.dtype)
            slope = None
            if cap is not None:
                ratio = torch.tanh(logits / cap)
                logits = ratio * cap
                slope = 1 - ratio * ratio
            counts = target.ne(IGNORE_INDEX)
            index = target.clamp(min=0)
            norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses[start : start + rows] = torch.where(counts, norm - logits.gather(1, index), 0.0)[:, 0]
            if grad_hidden is None and sums == [None, None]:
                continue
            grad = logits.sub_(norm).exp_()  # the probabilities
            grad.scatter_add_(1, index, grad.new_full((1, 1), -1.0).expand_as(index)).mul_(counts)
            grad = (grad if slope is None else grad.mul_(slope)).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + rows])
            if sums[0] is not None:
                sums[0] += grad.T @ part
            if sums[1] is not None:
                sums[1] += grad.sum(0)
        ctx.gradients = (grad_hidden, *sums)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError('loss_kernel="chunked" keeps its gradients for one backward. Set loss_kernel=None.')
        return *(one if one is None else one.mul_(grad).to(ctx.dtype) for one in gradients), None, None


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the summed cross-entropy of an output layer without keeping its logits.

    Args:
        hidden: (tokens, width), floating point.
        weight: (words, width), of the same type and device; with `bias` the output layer.
        bias: (words), or None.
        targets: (tokens), int64; -100 for labels that do not count.
        cap: logits are `cap * tanh(logits / cap)`; None: as they are.

    Returns:
        The sum over tokens, a scalar in fp32 with its graph (one backward), and the losses of the tokens (tokens) in
        fp32 without one, 0 if no label counts. With the same memory for any number of tokens besides `hidden`, and
        two copies of `weight` at most.
    """
    return _Chunked.apply(hidden, weight, bias, targets, cap)  # type: ignore[no-any-return,no-untyped-call]


def _cce(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, None]:
    from cut_cross_entropy import linear_cross_entropy

    total: torch.Tensor = linear_cross_entropy(
        hidden, weight, targets, bias=bias, softcap=cap, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total, None


def _liger(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, None]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    found = liger_fused_linear_cross_entropy(
        hidden, weight, targets, bias, ignore_index=IGNORE_INDEX, reduction="sum", softcap=cap
    )
    total: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return total, None


KERNELS: dict[str, Kernel] = {"chunked": chunked_cross_entropy, "cce": _cce, "liger": _liger}


def choose(name: str, *, runs_triton: bool) -> str:
    """Returns the kernel named by `loss_kernel`; MissingPackageError if its package is not installed.

    `runs_triton`: whether the device runs the packages' kernels.
    """
    has = {kernel: importlib.util.find_spec(module) is not None for kernel, (module, _) in PACKAGES.items()}
    if name == "auto":
        return next((one for one in PACKAGES if has[one] and runs_triton), "chunked")
    if not has.get(name, True):
        raise MissingPackageError(
            f'loss_kernel="{name}" needs a package that is not installed: pip install {PACKAGES[name][1]}. "chunked" '
            "needs none."
        )
    return name


def _alone(compare: Callable[[], str | None]) -> str | None:
    return compare()


@contextmanager
def without_logits(
    model: nn.Module,
    wanted: str,
    *,
    keeps_outputs: bool,
    obstacle: str | None,
    runs_triton: bool,
    agree: Callable[[Callable[[], str | None]], str | None] = _alone,
) -> Iterator[str | None]:
    """Trains with a loss kernel while it lasts; with the plain loss, and a warning, if it cannot be applied.

    Gives the reason for which it cannot be, or None. The model is placed and not yet wrapped. `keeps_outputs`: training
    looks at more of its output than the loss; `obstacle`: why the engine cannot leave the output layer as it is;
    `runs_triton`: whether the device runs the packages' kernels. `agree` runs the comparison in the main process and
    returns its result in all: others may have no weights yet (FSDP).
    """
    core = core_model(model)
    device = next(model.parameters()).device
    name = choose(wanted, runs_triton=runs_triton)
    swap = _Swap(core, KERNELS[name])
    if wanted == "auto" and isinstance(swap.head, nn.Linear) and swap.head.weight.shape[0] < SMALL_VOCABULARY:
        yield None
        return
    if name in PACKAGES and not runs_triton:
        reason: str | None = f"its kernels need a GPU, and the model is on {device.type}"
    elif keeps_outputs:
        reason = "training looks at the logits (compute_loss, compute_loss_func or label smoothing)"
    else:
        reason = obstacle or swap.find_obstacle()
    if reason is None:
        with swap.installed():
            reason = agree(swap.compare)
            if reason is None:
                logger.info("loss_kernel: %s computes the loss of %s without logits.", name, type(core).__name__)
                yield None
                return
    logger.warning(
        'loss_kernel="%s" is not used with %s: %s. The plain loss is used.', wanted, type(core).__name__, reason
    )
    yield reason


def estimate_saving(model: nn.Module, tokens: int) -> tuple[int, int] | None:
    """Estimates what a kernel would save of the peak of a step, in bytes, and returns it with the number of words.

    Args:
        model: the model that is trained.
        tokens: tokens of a micro-batch, with padding.

    Returns:
        None for a model whose loss no kernel computes. The plain loss holds the logits, their log-softmax and its
        gradient; the kernel as much of a chunk.
    """
    core = core_model(model)
    swap = _Swap(core, chunked_cross_entropy)
    if swap.find_obstacle() is not None:
        return None
    words = int(swap.head.weight.shape[0])
    chunk = ELEMENTS if swap.head.weight.is_cpu else ELEMENTS_ON_ACCELERATORS
    return max(0, tokens * words - chunk) * TENSORS_OF_LOGITS * 4, words


_INSTALLED: WeakKeyDictionary[nn.Module, _Swap] = WeakKeyDictionary()


def token_losses(model: nn.Module) -> torch.Tensor | None:
    """Returns the token losses (batch, tokens) of a model's last forward pass; None if no kernel computed them.

    They are not an entry of the output, because DDP rebuilds the output from the declared fields of its class.
    """
    swap = _INSTALLED.get(core_model(model))
    return None if swap is None else swap.token_losses


class _Swap:
    """Makes the output layer of a model return its input, and its loss function take that in place of logits."""

    def __init__(self, core: Any, kernel: Kernel) -> None:
        self.core = core
        self.kernel = kernel
        find = getattr(core, "get_output_embeddings", None)
        self.head: Any = find() if callable(find) else None
        config: Any = getattr(core, "config", None)
        self.config: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.is_active = self.in_evaluation = self.was_used = False
        self.token_losses: torch.Tensor | None = None  # from the last forward pass

    def find_obstacle(self) -> str | None:
        """Returns why this model cannot be changed in this way; None if no reason is known."""
        if type(self.head) is not nn.Linear:
            return f"its output layer is {'missing' if self.head is None else 'a ' + type(self.head).__name__}"
        if hasattr(self.head.weight, "device_mesh"):
            return "each process holds only a part of the output layer"
        if getattr(getattr(self.core, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
            return "it does not compute transformers' loss of a causal language model"
        return None

    @contextmanager
    def installed(self) -> Iterator[None]:
        plain_head = self.head.forward
        plain_loss = self.core.loss_function

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return hidden if self.is_active else plain_head(hidden)

        @functools.wraps(plain_loss)  # the count of labels depends on its name
        def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return (self.loss if self.is_active else plain_loss)(logits, labels, *args, **kwargs)

        self.head.forward = head
        before = set(vars(self.core))
        self.core.loss_function = loss
        added = vars(self.core).keys() - before  # empty if the model had set its own loss function
        handles = [
            self.core.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
            self.core.register_forward_hook(self._end, prepend=True, always_call=True),
        ]
        _INSTALLED[self.core] = self
        try:
            yield
        finally:
            del _INSTALLED[self.core]
            for handle in handles:
                handle.remove()
            del self.head.forward
            if added:
                for name in added:
                    delattr(self.core, name)
            else:
                self.core.loss_function = plain_loss

    def _begin(self, core: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        self.token_losses = None
        if (core.training or self.in_evaluation) and labels is not None and kwargs.get("return_dict") is not False:
            self.is_active = True
            if self.cap is not None:
                self.config.final_logit_softcapping = None  # the kernel does it

    def _end(self, core: nn.Module, args: Any, output: Any) -> None:
        if self.is_active:
            self.is_active = False
            if self.cap is not None:
                self.config.final_logit_softcapping = self.cap
            if output is not None:
                output["logits"] = None

    def loss(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes `ForCausalLMLoss` from hidden states (batch, tokens, width)."""
        self.was_used = True
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(hidden.device)
        if ignore_index != IGNORE_INDEX:
            targets = targets.masked_fill(targets.eq(ignore_index), IGNORE_INDEX)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        weight = self.head.weight
        bias = self.head.bias
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            if hidden.is_cpu:  # elsewhere their number would have to be waited for
                total, losses = self._compute_labelled(hidden, weight, bias, targets)
            else:
                total, losses = self.kernel(hidden, weight, bias, targets, self.cap)
        self.token_losses = None if losses is None else losses.view(shift_labels.shape)
        if num_items_in_batch is None:
            return total / targets.ne(IGNORE_INDEX).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _compute_labelled(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the kernel for the tokens with a label only: in chats most tokens have none."""
        places = targets.ne(IGNORE_INDEX).nonzero()[:, 0]
        if len(places) == len(targets):
            return self.kernel(hidden, weight, bias, targets, self.cap)
        total, some = self.kernel(hidden[places], weight, bias, targets[places], self.cap)
        return total, None if some is None else some.new_zeros(targets.shape).index_copy_(0, places, some)

    def compare(self) -> str | None:
        """Runs the model with and without the kernel on a few random tokens; returns how they differ, if they do."""
        weight = self.head.weight
        first = next((p for p in self.core.parameters() if p.requires_grad), None)
        wanted = {id(p): p for p in (first, weight, self.head.bias) if p is not None and p.requires_grad}
        tokens = torch.randint(0, weight.shape[0], (2, 12), generator=torch.Generator().manual_seed(0)).to(
            weight.device
        )
        labels = tokens.clone()
        labels[0, 3:5] = labels[1, -2:] = IGNORE_INDEX
        found = []
        modes = ModuleModes(self.core)
        self.core.eval()  # without dropout
        try:
            for self.in_evaluation in (False, True):
                with torch.enable_grad():
                    value = self.core(input_ids=tokens, labels=labels).loss
                    grads = torch.autograd.grad(value, list(wanted.values()), allow_unused=True) if wanted else ()
                found.append([value.detach(), *(one for one in grads if one is not None)])
        except Exception as error:  # raised by the user's model, which may not accept these tokens
            return f"it could not be compared with the plain loss ({type(error).__name__}: {error})"
        finally:
            self.in_evaluation = False
            modes.restore()
        if not self.was_used:
            return "its forward does not call its output layer and its loss function"
        limit = ROUNDING.get(weight.dtype, max(ROUNDING.values()))
        limit = limit if weight.device.type == "cpu" else max(limit, ROUNDING_ON_A_GPU)
        for what, plain, ours in zip(("loss", *["gradients"] * len(wanted)), *found, strict=False):
            difference = float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-12))
            if not difference <= limit:
                return f"its {what} differs from the plain one by {difference:.1e} of the largest value"
        return None
