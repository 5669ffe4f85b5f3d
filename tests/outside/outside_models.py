"""Tiny random models of every architecture, each twice: untouched, and patched."""

import copy

import torch
from tiny import tiny_config
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from unsloth_pack import patch_model, supported_architectures

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCHITECTURES = sorted(supported_architectures())
LENGTHS = [5, 40, 1, 17, 30]

# Shows whatever a template can be given, as Qwen3's and others do with less
TELLING_TEMPLATE = (
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content is defined %}{{ m.content }}{% else %}<none>{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.name }}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def plain_model(architecture="llama", **overrides):
    """Untouched; norms and biases are not at their initial values."""
    config = tiny_config(architecture, **overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            weight.data += 0.1 * torch.randn_like(weight)
    return model.to(DEVICE).eval()


def plain_and_patched(architecture="llama", **overrides):
    plain = plain_model(architecture, **overrides)
    patched = copy.deepcopy(plain)
    patch_model(patched)
    return plain, patched


def fill_adapters(model, seed=1):
    """A LoRA's B starts at 0, where A has no gradient and a merge changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name or "trainable_tokens" in name:
            noise = 0.1 * torch.randn(weight.shape, generator=generator)
            weight.data = (weight.cpu() + noise if "magnitude" in name else noise).to(weight)
    return model


def documents(vocab_size=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).to(DEVICE) for length in LENGTHS]


def packed_call(model, seed=0, **more):
    """Logits `[tokens, V]` and loss of all documents in one row."""
    ids = torch.cat(documents(seed=seed))[None]
    out = model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS, **more)
    return out.logits[0], out.loss


def calls_alone(model, seed=0):
    """Logits `[tokens, V]` and loss of every document by itself."""
    logits = [model(input_ids=document[None], use_cache=False).logits[0] for document in documents(seed=seed)]
    pairs = zip(logits, documents(seed=seed), strict=True)
    losses = [F.cross_entropy(out[:-1], ids[1:], reduction="sum") for out, ids in pairs]
    return torch.cat(logits), sum(losses) / sum(length - 1 for length in LENGTHS)


def gradients(model, call):
    """Of one call's loss."""
    model.zero_grad()
    call(model)[1].backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("_orig_mod."): grad for name, grad in named.items()}  # as torch.compile puts it


def assert_close(got, truth, what="", slack=1e-4):
    """By the Frobenius norm; NaN never passes."""
    got, truth = got.detach(), truth.detach()
    error = float((got - truth).double().norm() / truth.double().norm().clamp(min=1e-12))
    assert error < slack, f"{what} {error}"


def assert_same_training(patched, plain):
    """A packed row gives the logits, the loss and the gradients of every document by itself."""
    (got, loss), (truth, true_loss) = packed_call(patched), calls_alone(plain)
    assert_close(got.detach(), truth.detach(), "logits")
    assert_close(loss.detach(), true_loss.detach(), "loss")
    ours, theirs = gradients(patched, packed_call), gradients(plain, calls_alone)
    assert ours.keys() == theirs.keys()
    scale = max(float(grad.norm()) for grad in theirs.values())
    for name, grad in theirs.items():
        assert float((ours[name] - grad).norm()) <= 1e-4 * max(float(grad.norm()), 1e-3 * scale), name


# With the tokens that tests of merging train
IDS = torch.tensor([[3, 40, 4, 5, 99, 7, 257, 3, 200, 4, 31, 5, 6, 12, 5, 90]])


def logits(model):
    model.eval()
    for module in model.modules():  # bitsandbytes packs weights anew, and rounds, in inference on some CPUs
        module.training = type(module).__name__ == "Linear4bit" and not hasattr(module, "base_layer")
    with torch.no_grad():
        return model(input_ids=IDS.to(model.device)).logits.double().cpu()
