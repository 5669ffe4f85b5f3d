"""Tiny random models and packed rows, and what plain transformers in float64 makes of each document alone."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from unittest import mock

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.modeling_layers import GenericForSequenceClassification

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.lora.expert_stacks import get_stored_stack
from unsloth_pack.lora.targets import lora_targets
from unsloth_pack.models import arch_spec_for
from unsloth_pack.modules import train_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED_LENGTHS = [1, 33, 2, 128, 31, 129, 32, 127]
TINY = yaml.safe_load((Path(__file__).parent / "tiny_configs.yaml").read_text())


def tiny_config(arch, **overrides):
    """A config of an architecture that is small enough to train in a test; `overrides` beat its file's."""
    return AutoConfig.for_model(arch, **{**TINY["usual"], **TINY[arch], **overrides})


def tiny_model(arch, dtype=torch.float32, device=DEVICE, seed=0, lora=None, **overrides):
    """An untouched transformers model with a LoRA adapter whose B is not 0; the same in every dtype.

    `lora` are fields of the `LoraConfig` beside its rank and its targets, `overrides` those of the model's.
    """
    spec = supported_architectures()[arch]
    config = tiny_config(arch, **overrides)
    options = {"attn_implementation": "eager"} if spec.softcap or spec.sinks else {}  # SDPA paths drop them
    torch.manual_seed(seed)
    model = with_lora(AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options), lora)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = {}
    for name, weight in model.state_dict().items():
        noise = 0.1 * torch.randn(weight.shape, generator=generator)
        if "trainable_tokens_delta" in name:
            weight = weight + noise
        elif "lora_magnitude" in name:
            weight = weight * (1 + noise)
        elif "lora_" in name:
            weight = noise
        elif "norm" in name or name.endswith(("bias", "scalar", "scale")) or not weight.any():
            weight = weight + noise  # which begins as ones or zeros
        if name.endswith("act_fn.eps"):  # between it and 0 the slope of transformers' xIELU jumps, and one
            weight = torch.zeros_like(weight)  # input of 50,000 that rounding takes across decides alone
        if spec.attention == "shared_kv_attention" and "q_norm" in name:
            weight = weight * len(weight) ** -0.5  # this attention scales nothing: a trained norm does
        # exact in every dtype: 16 bits are judged on their arithmetic alone
        weights[name] = weight.bfloat16().half().float()
    base = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    if dtype == torch.float64:  # the grouped GEMM of the experts has no float64
        base.config._experts_implementation = "eager"
    model = with_lora(base, lora).to(device).train()
    model.load_state_dict(weights)
    return model


def patched(arch="llama", dtype=torch.float32, **overrides):
    """A patched `tiny_model` on the CPU."""
    model = tiny_model(arch, dtype, "cpu", **overrides)
    patch_model(model)
    return model


def is_full(lora):
    """Whether `tiny_model` puts no adapter on: all of the model trains but for what is `frozen`."""
    return (lora or {}).get("tuning") == "full"


def with_lora(base, lora=None):
    """Adapters on all that `FastLanguageModel` adapts by default: experts and what stands beside them too."""
    if is_full(lora):
        train_only(base, None, lora.get("frozen"))
        return base
    fields = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **(lora or {})}
    if "target_modules" in fields:
        return get_peft_model(base, LoraConfig(**fields), autocast_adapter_dtype=False)
    config = LoraConfig(**lora_targets(base, None, fields).config_fields(4, 8, fields))
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
    return as_outcome(model, torch.cat(logits), loss, seen)


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
    return as_outcome(model, out.logits[0, : ids.shape[1] - tail], out.loss, seen)


def as_outcome(model, logits, loss, seen):
    grads = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    routes = {name: torch.cat(parts) for name, parts in seen.items() if parts}
    return Outcome(logits.detach().double().cpu(), loss.detach().double().cpu(), grads, routes)


@contextmanager
def exactly(model):
    """Meanwhile a model in float64 that carries a state computes in float64 throughout.

    transformers casts the state to float32, whatever the dtype. As a truth such a model would share its
    rounding with plain transformers in float32, whose errors then looked too small.
    """
    if model.dtype != torch.float64 or not arch_spec_for(model.config.get_text_config().model_type).mixers:
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
    comparison of rounding errors would then compare luck. All routers choose by `topk`.
    """
    seen, undo = {}, []
    for name, block in model.named_modules():
        if isinstance(getattr(block, "experts", None), nn.Module):
            undo += _routed(block, seen.setdefault(name, []), None if routes is None else routes[name])
    try:
        yield seen
    finally:
        for hook in undo:
            hook.remove()


def _routed(block, seen, route):
    stacks = (get_stored_stack(module, "down_proj") for module in block.experts.modules())
    n_experts = next(stack.shape[0] for stack in stacks if stack is not None)
    topk, patched = torch.topk, ExitStack()

    def chosen(scores, k, dim=-1, **options):
        values, experts = topk(scores, k, dim=dim, **options)
        if scores.dim() != 2 or scores.shape[1] != n_experts or k != _experts_a_token(block):
            return values, experts  # of groups of experts
        if route is not None:
            start = sum(map(len, seen)) % len(route)  # recomputation starts over
            experts = route[start : start + len(scores)].to(scores.device)
            values = scores.gather(-1, experts)
        seen.append(experts.cpu())
        return values, experts

    def enter(module, args):
        for name in ("torch.topk", "torch.Tensor.topk"):
            patched.enter_context(mock.patch(name, chosen))

    def leave(module, args, output):
        patched.close()

    hooks = [block.register_forward_pre_hook(enter)]
    return [*hooks, block.register_forward_hook(leave, always_call=True)]


def _experts_a_token(block):
    names = ("top_k", "top_k_experts")  # of the router, or its configuration
    places = [place for module in block.modules() for place in (module, getattr(module, "config", None))]
    return next(k for place in places for name in names if (k := getattr(place, name, None)) is not None)


def error(got, truth):
    """Relative error in the Frobenius norm; NaN never passes a comparison."""
    return float((got - truth).detach().norm() / truth.detach().norm().clamp(min=1e-30))


def positions_of(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def every_description(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return {
        "packed_seq_lengths": {"packed_seq_lengths": list(lengths)},
        "lengths as a tensor": {"packed_seq_lengths": torch.tensor(lengths)},
        "trl 1.15": {"position_ids": positions_of(lengths)[None]},
        "with trl's column": {
            "position_ids": positions_of(lengths)[None],
            "seq_lengths": [list(lengths[:1]), list(lengths[1:])],  # two examples joined to one row
        },
        "trl's column alone": {"seq_lengths": torch.tensor(lengths)[None]},
        "trl 1.16": {
            "position_ids": positions_of(lengths)[None],
            "cu_seq_lens_q": cu,
            "cu_seq_lens_k": cu,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        },
        "cu_seq_lens alone": {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu},
        "seq_idx alone": {
            "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        },
        "with an all-ones mask": {
            "position_ids": positions_of(lengths)[None],
            "attention_mask": torch.ones(1, sum(lengths)),
        },
    }


def padded(documents, side, value=0):
    """`[B, T]` of documents, on the device."""
    return pad_sequence(documents, batch_first=True, padding_value=value, padding_side=side).to(DEVICE)


def find_batch(documents, side, filler=None):
    """A batch whose loss is that of every row alone; `filler` seeds random ids in the padding."""
    ids, mask = padded(documents, side), padded([torch.ones_like(d) for d in documents], side)
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100).masked_fill(mask == 0, -100)
    if filler is not None:
        noise = torch.randint(3, 256, ids.shape, generator=torch.Generator().manual_seed(filler))
        ids = torch.where(mask == 1, ids, noise.to(DEVICE))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sequence_classifier(config):
    """transformers' class, or where it has none one that is made as it makes the others."""
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    pretrained = MODEL_MAPPING[type(config)].__bases__[0]
    name = pretrained.__name__.replace("PreTrainedModel", "ForSequenceClassification")
    return type(name, (GenericForSequenceClassification, pretrained), {})
