"""The untouched model of a case, and the same in float64 on the CPU."""

import copy
import re
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from tiny import DEVICE, MIXED_LENGTHS, is_full, tiny_config, tiny_model, with_lora
from torch import nn
from torch.nn import functional as F

from unsloth_pack.checkpoints.loading import load_adapter
from unsloth_pack.kernels import reference
from unsloth_pack.layers.mixers.state_space import StateMixer
from unsloth_pack.lora import linear as layers
from unsloth_pack.lora.expert_stacks import STACKS, is_quantised
from unsloth_pack.lora.linear import FastLoraLinear
from unsloth_pack.memory import checkpointing
from unsloth_pack.models import arch_spec_for
from unsloth_pack.patching.parts import mixers_by_layer

from .cases import CHECKPOINTING, DTYPES, STAGES, VARIANTS, WINDOWS


class NotApplicable(Exception):
    """There is no such model; says why."""


def build(arch, window, variant, dtype):
    """The model as transformers and PEFT make it, for a name of DTYPES."""
    lora, overrides = VARIANTS[variant], _overrides(arch, window, variant)
    if is_full(lora) and dtype == "nf4":
        raise NotApplicable("quantised weights have no gradient")
    try:
        if dtype == "nf4":
            model = tiny_model(arch, DTYPES[dtype], "cpu", lora=lora, **overrides)
            model = in_nf4(model, partial(with_lora, lora=lora))
        else:
            model = tiny_model(arch, DTYPES[dtype], lora=lora, **overrides)
    except ValueError as error:  # routed experts take neither dropout nor DoRA
        raise NotApplicable(f"PEFT refuses: {error}") from error
    if variant == "bias" and not any(name.endswith("bias") for name, _ in model.named_parameters()):
        raise NotApplicable(f"no layer of {arch} has a bias")
    if variant in STAGES:
        model = _second_stage(
            model, lambda base, folder: PeftModel.from_pretrained(base, folder, is_trainable=True)
        )
    return _with_token_dropout(model)


def to_patch(model, variant):
    """A copy of a model that `build` made; a second stage's adapter is loaded as a run loads it."""
    return _second_stage(model, load_adapter) if variant in STAGES else copy.deepcopy(model)


def _second_stage(model, load):
    """The same model, with its adapter saved and loaded again."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        base = copy.deepcopy(model).unload()
        for name in ("peft_config", "active_adapter"):
            base.__dict__.pop(name, None)
        return load(base, folder).train()


def build_exact(arch, window, variant, quantised=None):
    """The model in float64, with the weights that `quantised` computes with, where it is given."""
    overrides = _overrides(arch, window, variant)
    model = tiny_model(arch, torch.float64, "cpu", lora=VARIANTS[variant], **overrides)
    if quantised is not None:
        copy_dequantised(quantised, model)
    return _with_token_dropout(model)


def copy_dequantised(quantised, exact):
    """The weights that a model in 4 bits computes with, put into the same model in float64."""
    from bitsandbytes.functional import dequantize_4bit

    with torch.no_grad():
        for name, module in quantised.named_modules():
            if type(module).__name__ == "Linear4bit" and not isinstance(module, LoraLayer):
                weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
                exact.get_submodule(name).weight.copy_(weight)
            elif is_quantised(module):
                for stack in STACKS:
                    getattr(exact.get_submodule(name), stack).copy_(getattr(module, stack))


def enable_checkpointing(model, mode, patch):
    """Turn on a patched model's checkpointing; return what the reports of patch and plan say."""
    checkpointing.enable_checkpointing(model, CHECKPOINTING[mode])
    about = {"unfused": patch.report.not_fused["LoRA"]} if "LoRA" in patch.report.not_fused else {}
    plan = model.get_decoder().recompute_plan
    if plan is not None:  # without this all of a tiny model fits, and nothing is recomputed
        plan.n_recomputed, plan.decide = plan.n_layers // 2, lambda tokens, device: None
        about["plan"] = str(plan)
    return about


def _overrides(arch, window, variant):
    overrides = {} if window == "none" else {"sliding_window": WINDOWS[window]}
    if variant == "bias":
        config = tiny_config(arch)
        overrides |= {name: True for name in ("attention_bias", "mlp_bias") if hasattr(config, name)}
    return overrides


def in_nf4(model, adapt, part=""):
    """The model with the linear layers under its adapter in NF4, quantised twice, as `load_in_4bit` does.

    Args:
        adapt: puts such an adapter on a model that has none.
        part: a pattern in the names of the layers that are quantised.
    """
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise NotApplicable(f"bitsandbytes does not import ({error})") from error
    weights = copy.deepcopy(model.state_dict())  # as `modules_to_save` come off, they are the base's
    layers_of_lora = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    targets = [name for name, layer in layers_of_lora if re.search(part, name) and _is_linear(layer)]
    names = [name.removeprefix("base_model.model.") for name in targets]
    base = model.unload()
    for name in names:
        linear = base.get_submodule(name)
        options = {"quant_type": "nf4", "compress_statistics": True}
        quantised = Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=linear.weight.dtype,
            **options,
        )
        quantised.weight = Params4bit(linear.weight.data, requires_grad=False, **options)
        quantised.bias = linear.bias
        base.set_submodule(name, quantised)
    base.is_loaded_in_4bit = True
    base = base.to(DEVICE)  # which quantises
    model = adapt(base).to(DEVICE).train()
    kept = {name: w for name, w in weights.items() if name.removesuffix(".base_layer.weight") not in targets}
    model.load_state_dict(kept, strict=False)
    return model


def _is_linear(layer):
    """Beside experts PEFT adapts linear layers as parameters, which it cannot do in four bits."""
    return isinstance(layer.get_base_layer(), nn.Linear) and not isinstance(layer, ParamWrapper)


class _TokenDropout(nn.Dropout):
    """Drops by token and not at random, so that all runs over the same documents drop the same.

    Calls see the tokens of all documents in order: all at once in a packed row, perhaps with padding behind
    them, or document after document. What is dropped is what a fused layer drops with the same seed.
    """

    def __init__(self, p, n_features, seed):
        super().__init__(p)
        self.register_buffer("seed", torch.tensor([seed]), persistent=False)
        keep = reference.dropout(torch.ones(sum(MIXED_LENGTHS), n_features), self.seed, p) != 0
        self.register_buffer("keep", keep, persistent=False)
        self.seen = 0

    def forward(self, x):
        n_tokens, n_all = x.shape[:-1].numel(), len(self.keep)
        if n_tokens >= n_all:
            keep = F.pad(self.keep, (0, 0, 0, n_tokens - n_all))
        else:
            keep = self.keep[self.seen : self.seen + n_tokens]
            self.seen = (self.seen + n_tokens) % n_all
        return x.masked_fill(~keep.view(x.shape), 0) / (1 - self.p)


@contextmanager
def drawing_dropout(model):
    """Fused layers of a patched model draw what they drop, as in training, but from the seeds of the case."""
    for layer in model.modules():
        if isinstance(layer, FastLoraLinear):
            by_token = dict(layer.lora_dropout)
            for name, dropout in by_token.items():
                if isinstance(dropout, _TokenDropout):
                    layer.lora_dropout[name] = nn.Dropout(dropout.p)
                    layer.lora_dropout[name].seed = dropout.seed
            if layers.why_not_fused(layer) is not None:
                layer.lora_dropout.update(by_token)
    frozen = FastLoraLinear.frozen

    def seeded(layer):
        own = frozen(layer)
        return own if own.seed is None else own._replace(seed=layer.lora_dropout["default"].seed)

    with mock.patch.object(FastLoraLinear, "frozen", seeded):
        yield


def _with_token_dropout(model):
    """Layers that carry a state see tokens in another order, and not each once: there nothing is dropped."""
    _without_dropout_in_states(model)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for seed, layer in enumerate(layers):
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                layer.lora_dropout[name] = _TokenDropout(dropout.p, layer.in_features, seed)
    return model.to(model.device)


def _without_dropout_in_states(model):
    decoder = model.get_decoder()
    for mixer, one in mixers_by_layer(decoder, arch_spec_for(decoder.config.model_type)):
        for layer in one.modules() if isinstance(mixer, StateMixer) else ():
            if isinstance(layer, LoraLayer):
                layer.lora_dropout.update({name: nn.Identity() for name in layer.lora_dropout})
