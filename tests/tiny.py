"""Tiny random models and packed rows, and what plain transformers in float64 makes of each document alone."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from unsloth_pack import supported_architectures
from unsloth_pack.api import lora_targets
from unsloth_pack.models import spec_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED_LENGTHS = [1, 33, 2, 128, 31, 129, 32, 127]


def tiny_model(arch, dtype=torch.float32, device=DEVICE, seed=0, lora=None, **overrides):
    """An untouched transformers model with a LoRA adapter whose B is not 0; the same in every dtype.

    `lora` are fields of the `LoraConfig` beside its rank and its targets, `overrides` those of the model's.
    """
    spec = supported_architectures()[arch]
    config = spec.tiny_config(**overrides)
    options = {"attn_implementation": "eager"} if spec.softcap else {}  # older SDPA paths drop the softcap
    torch.manual_seed(seed)
    model = with_lora(AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options), lora)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = {}
    for name, weight in model.state_dict().items():
        noise = 0.1 * torch.randn(weight.shape, generator=generator)
        if "lora_magnitude" in name:
            weight = weight * (1 + noise)
        elif "lora_" in name:
            weight = noise
        elif "norm" in name or name.endswith("bias") or not weight.any():  # a router may begin with zeros
            weight = weight + noise
        # exact in every dtype: 16 bits are judged on their arithmetic alone
        weights[name] = weight.bfloat16().half().float()
    base = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    if dtype == torch.float64:  # the grouped GEMM of the experts has no float64
        base.config._experts_implementation = "eager"
    model = with_lora(base, lora).to(device).train()
    model.load_state_dict(weights)
    return model


def with_lora(base, lora=None):
    targets = lora_targets(base, None)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **lora or {})
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def random_documents(lengths, seed=0, vocab_size=256):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


@dataclass
class Outcome:
    """What a model made of some documents, on the CPU in float64."""

    logits: torch.Tensor  # [all tokens, vocabulary]
    loss: torch.Tensor  # mean over all counted tokens
    grads: dict[str, torch.Tensor]
    routes: dict[str, torch.Tensor]  # the experts of every token, by router


def run_alone(model, documents, routes=None):
    """Every document in a row of its own; the loss is the mean over the tokens of all.

    Neighbours of one length share a batch, each its own row of it.
    """
    counted = sum(len(document) - 1 for document in documents)
    batches = [torch.stack([*group]) for _, group in groupby(documents, key=len)]
    logits, loss = [], torch.tensor(0.0)
    model.zero_grad()
    with exactly(model), routing(model, routes) as seen:
        for batch in batches:
            ids = batch.to(model.device)
            out = model(input_ids=ids, use_cache=False).logits
            logits.append(out.detach().flatten(0, 1))
            if ids.shape[1] > 1:
                wide = out[:, :-1].to(torch.promote_types(out.dtype, torch.float32))
                share = F.cross_entropy(wide.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / counted
                share.backward()
                loss = loss + share.detach().double().cpu()
    return _outcome(model, torch.cat(logits), loss, seen)


def run_packed(model, documents, routes=None, tail=0, **describe):
    """All documents in one packed row, perhaps with padding behind them."""
    ids = torch.cat([*documents, torch.zeros(tail, dtype=torch.int64)]).to(model.device)[None]
    labels = ids.clone()
    first = torch.tensor([0, *(len(document) for document in documents)]).cumsum(0)
    labels[0, first[:-1]] = -100
    labels[0, first[-1] :] = -100
    if not describe:
        describe = {"packed_seq_lengths": [len(document) for document in documents]}
    model.zero_grad()
    with exactly(model), routing(model, routes) as seen:
        out = model(input_ids=ids, labels=labels, **describe)
        out.loss.backward()
    return _outcome(model, out.logits[0, : ids.shape[1] - tail], out.loss, seen)


def _outcome(model, logits, loss, seen):
    grads = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    routes = {name: torch.cat(parts) for name, parts in seen.items()}
    return Outcome(logits.detach().double().cpu(), loss.detach().double().cpu(), grads, routes)


@contextmanager
def exactly(model):
    """Meanwhile a model in float64 that carries a state computes in float64 throughout.

    transformers casts the state to float32, whatever the dtype. As a truth such a model would share its
    rounding with plain transformers in float32, whose errors then looked too small.
    """
    if model.dtype != torch.float64 or not spec_of(model.config.get_text_config().model_type).mixers:
        yield
        return
    with ExitStack() as stack:
        for name in ("to", "type", "float"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _staying_wide(name)))
        yield


def _staying_wide(name):
    """A method that casts; a tensor in float64 is not cast to float32."""
    cast = getattr(torch.Tensor, name)

    def staying_wide(x, *args, **kwargs):
        if x.dtype == torch.float64:
            if name == "float":
                return x
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        return cast(x, *args, **kwargs)

    return staying_wide


@contextmanager
def routing(model, routes=None):
    """Record which experts each token goes to, or send it where `routes` says.

    Which experts a token gets is a discrete choice: in bfloat16 a near tie may fall either way, and a
    comparison of rounding errors would then compare luck.
    """
    seen, hooks = {}, []

    def hook_of(name):
        def hook(module, args, output):
            logits, scores, experts = in_order(output, len(module.weight))
            if routes is not None:
                weigh = weighing(logits, scores, experts)
                start = sum(map(len, seen.get(name, []))) % len(routes[name])  # recomputation starts over
                chosen = routes[name][start : start + len(logits)].to(logits.device)
                replaced = {id(experts): chosen, id(scores): weigh(chosen)}
                output, experts = tuple(replaced.get(id(part), part) for part in output), chosen
            seen.setdefault(name, []).append(experts.cpu())
            return output

        return hook

    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            hooks.append(module.register_forward_hook(hook_of(name)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def in_order(output, n_experts):
    """The logits, the weights and the numbers of the experts: routers return them in different orders."""
    (experts,) = (part for part in output if not part.is_floating_point())
    first, second = (part for part in output if part.is_floating_point())
    logits_last = first.shape[-1] != n_experts
    return (second, first, experts) if logits_last else (first, second, experts)


def weighing(logits, scores, experts):
    """How a router weighs experts, as a function of their numbers: found by its own output."""

    def by(function, chosen):
        weights = function(logits.float()).gather(1, chosen)
        return (weights / weights.sum(-1, keepdim=True)).to(scores.dtype)

    ways = [partial(by, lambda x: x.softmax(-1)), partial(by, torch.sigmoid)]
    return min(ways, key=lambda way: (way(experts) - scores).abs().max())


def error(got, truth):
    """Relative error in the Frobenius norm; NaN never passes a comparison."""
    return float((got - truth).detach().norm() / truth.detach().norm().clamp(min=1e-30))
