"""What an `ArchSpec` declares is what the model has: no more, and no less."""

from dataclasses import fields, replace

import pytest
import torch
from tiny import MIXED_LENGTHS, error, random_documents, run_alone, run_packed, tiny_model
from torch import nn

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.errors import InputError
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.patching import patch as patching
from unsloth_pack.patching.parts import mixers_by_layer
from unsloth_pack.patching.patch import patch_of

SPECS = supported_architectures()
PLAIN = ArchSpec("plain")
NO_DIFFERENCE = {"model_type", "stands_alone", "only", "unread"}
# tests/test_api.py, tests/test_shared_kv.py, tests/test_expert_targets.py
TESTED_ELSEWHERE = {"projections", "norm_keeps_dtype", "refused_by_peft"}
OF_WRAPPERS = {"placeholders", "wrapper_has_softcap"}  # tests/test_wrappers.py
DECLARED = [
    (arch, field.name)
    for arch, spec in SPECS.items()
    for field in fields(spec)
    if field.name not in NO_DIFFERENCE | TESTED_ELSEWHERE | OF_WRAPPERS
    and getattr(spec, field.name) != getattr(PLAIN, field.name)
]


def patched_as(spec, monkeypatch, **overrides):
    monkeypatch.setattr(patching, "arch_spec_for", lambda model_type: spec)
    model = tiny_model(spec.model_type, device="cpu", **overrides)
    patch_model(model, unpad=False)
    return model


def padded_batch(documents):
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("arch", [arch for arch, spec in SPECS.items() if spec.norm == "rms"])
def test_norms_under_a_wider_weight_return_the_dtype_that_transformers_returns(arch):
    """In float16 some keep the weights of norms in float32."""
    model = tiny_model(arch, device="cpu")
    norms = [
        m
        for m in model.get_decoder().modules()
        if type(m).__name__.lower().endswith("rmsnorm") and hasattr(m, "weight")
    ]
    dtypes = []
    for _ in range(2):
        dtypes.append([norm(torch.ones(1, 3, len(norm.weight)).half()).dtype for norm in norms])
        patch_model(model)
    assert dtypes[0] == dtypes[1]
    assert dtypes[0]


@pytest.mark.parametrize(("arch", "field"), DECLARED)
def test_every_declared_difference_matters_in_the_tiny_configuration(arch, field, monkeypatch):
    """Without it the model is refused or fails, its answers to a packed row or a padded batch are far off, or
    less of it is fused."""
    plain, documents = tiny_model(arch, device="cpu"), random_documents(MIXED_LENGTHS)
    alone = run_alone(plain, documents)
    batch = padded_batch(documents)
    with torch.no_grad():
        padded = plain(**batch).logits
    spec = replace(SPECS[arch], **{field: getattr(PLAIN, field)})
    try:
        model = patched_as(spec, monkeypatch)
        packed = run_packed(model, documents, alone.routes)
        with torch.no_grad():
            changed = model(**batch).logits
    except (InputError, TypeError, AttributeError, RuntimeError, AssertionError):
        return
    if field in ("names", "activation", "mlp_multipliers") and "MLP" not in patch_of(model).report.fused:
        monkeypatch.undo()
        assert "MLP" in patch_model(tiny_model(arch, device="cpu")).report.fused
        return
    seen = batch["attention_mask"] == 1
    assert max(error(packed.logits, alone.logits), error(changed[seen], padded[seen])) > 1e-3


@pytest.mark.parametrize("arch", SPECS)
def test_a_difference_that_is_not_declared_is_refused(arch, monkeypatch):
    model = tiny_model(arch, device="cpu")
    _, mixer = mixers_by_layer(model.get_base_model().get_decoder(), SPECS[arch])[-1]
    classes = [type(module) for module in model.modules()]
    for name, what in [
        ("temperature", nn.Parameter(torch.ones(()))),
        ("gate", nn.Linear(2, 2)),
        ("flag", True),
    ]:
        setattr(mixer, name, what)
        with pytest.raises(InputError, match=f"has {name}, of which the ArchSpec of '{arch}' says nothing"):
            patch_model(model)
        delattr(mixer, name)
    assert [type(module) for module in model.modules()] == classes
    patch_model(model)


OWN = {  # of a llama: what the patch would replace
    "model": lambda model: model,
    "decoder": lambda model: model.model,
    "rotary embedding": lambda model: model.model.rotary_emb,
    "attention": lambda model: model.model.layers[1].self_attn,
    "MLP": lambda model: model.model.layers[1].mlp,
    "norm": lambda model: model.model.layers[1].input_layernorm,
}


@pytest.mark.parametrize("part", OWN.values(), ids=OWN)
def test_a_forward_of_the_models_own_is_never_replaced(part):
    """By remote code or by a subclass."""
    model = tiny_model("llama", device="cpu").get_base_model()
    classes = [type(module) for module in model.modules()]
    own = part(model)
    kind = type(own)
    alike = [module for module in model.modules() if type(module) is kind]

    class Own(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    for module in alike:
        module.__class__ = Own
    with pytest.raises(
        InputError, match=r"^Own has a forward from test_specs, which the patch would replace"
    ):
        patch_model(model)
    for module in alike:
        module.__class__ = kind
    assert [type(module) for module in model.modules()] == classes
    patch_model(model)


@pytest.mark.parametrize("arch", SPECS)
def test_every_mlp_is_fused_or_its_activation_is(arch):
    report = patch_model(tiny_model(arch, device="cpu")).report
    without_a_gate = {"apertus", "arcee", "nemotron_h"}
    assert ("MLP" in report.not_fused) is ("activation" in report.fused) is (arch in without_a_gate)


def test_attention_of_remote_code_is_refused_even_with_an_inherited_forward():
    model = tiny_model("llama", device="cpu")
    attention = model.get_base_model().model.layers[1].self_attn
    names = {"__module__": "transformers_modules.some_model.modeling", "__qualname__": "OwnAttention"}
    attention.__class__ = type("OwnAttention", (type(attention),), names)
    with pytest.raises(InputError, match=r"OwnAttention is the model's own code; .* without trust_remote"):
        patch_model(model)


def test_an_option_that_is_not_computed_is_refused():
    with pytest.raises(
        InputError, match=r"^clip_qkv is 1.0: only None is computed; set it before you patch$"
    ):
        patch_model(tiny_model("olmoe", device="cpu", clip_qkv=1.0))
    patch_model(tiny_model("olmoe", device="cpu"))


def test_exaone_4_without_a_window_rotates_in_every_layer():
    """With one it rotates only in layers that have it."""
    full = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 2}
    plain, model = (tiny_model("exaone4", device="cpu", **full) for _ in range(2))
    patch_model(model)
    documents = random_documents([9, 33])
    assert error(run_packed(model, documents).logits, run_alone(plain, documents).logits) < 1e-5


def test_seed_oss_drops_from_both_branches_of_a_layer():
    """As transformers does, which draws the same numbers in the same order."""
    options = {"device": "cpu", "residual_dropout": 0.5}
    plain, model = tiny_model("seed_oss", **options), tiny_model("seed_oss", **options)
    patch_model(model)
    (document,) = random_documents([40])
    outs = []
    for one, row in ((plain, {}), (model, {"packed_seq_lengths": [40]})):
        torch.manual_seed(0)
        out = one(input_ids=document[None], use_cache=False, **row).logits
        out.square().sum().backward()
        outs.append([out, *(p.grad for p in one.parameters() if p.grad is not None)])
    assert all(error(x, y) < 1e-5 for x, y in zip(*outs, strict=True))
    assert error(plain.eval()(input_ids=document[None]).logits, outs[0][0]) > 0.1
