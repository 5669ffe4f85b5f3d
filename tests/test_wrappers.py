"""A text model inside a model of vision and language: found, patched and undone, on rows of text alone."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import DEVICE, MIXED_LENGTHS, error, random_documents, tiny_config
from trainer_runs import asked_by_trl

from unsloth_pack import FastLanguageModel, patch_model, verify
from unsloth_pack.errors import InputError
from unsloth_pack.models import arch_spec_for, vision_spec_for

LENGTHS = MIXED_LENGTHS[:4]


_IDS = dict(image_token_id=299, video_token_id=298)
_GRID_IDS = _IDS | dict(vision_start_token_id=297, vision_end_token_id=296)
_TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
_GRID_TOWER = dict(
    depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=14
)
_OF_PATCHES = dict(image_size=28, patch_size=14)
WRAPPERS = {  # the class, the text model, the tower, and what else the config has
    # with a softcap in the text model's config that the wrapper ignores
    "gemma3": (
        *("Gemma3", "gemma3_text", _TOWER | _OF_PATCHES),
        dict(mm_tokens_per_image=1, image_token_id=299, boi_token_id=298, eoi_token_id=297),
    ),
    "gemma4": (
        *("Gemma4", "gemma4_text"),
        _TOWER | dict(num_key_value_heads=2, head_dim=16, patch_size=14, position_embedding_size=16),
        _IDS | dict(audio_token_id=297),
    ),
    "mistral4": (
        *("Mistral3", "mistral4"),
        _TOWER | _OF_PATCHES | dict(model_type="pixtral", head_dim=16),
        dict(image_token_index=299),
    ),
    "qwen2_5_vl": (
        *("Qwen2_5_VL", "qwen2_5_vl_text", _GRID_TOWER | dict(window_size=56, fullatt_block_indexes=[0])),
        _GRID_IDS,
    ),
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", _GRID_TOWER, _GRID_IDS),
}
AROUND = {"mistral4": "mistral3"}  # model types of wrappers, where they are not the name


def wrapped(name, dtype, **text):
    kind, arch, tower, more = WRAPPERS[name]
    text |= dict(first_k_dense_replace=2) if name == "mistral4" else {}  # no experts
    config = tiny_config(arch, vocab_size=300, **text).to_dict()
    config = getattr(transformers, f"{kind}Config")(text_config=config, vision_config=dict(tower), **more)
    return getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, dtype=dtype)


def made(name, dtype=torch.float32, adapter=True, seed=0):
    """A random model, the same in every dtype."""
    torch.manual_seed(seed)
    weights = wrapped(name, torch.float32).state_dict()
    generator = torch.Generator().manual_seed(seed + 1)
    for key, weight in weights.items():
        # Gemma 3's projector begins as zeros: no image would change anything
        if "norm" in key or key.endswith("bias") or "mm_input_projection" in key:
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    model = wrapped(name, dtype)
    model.load_state_dict(weights)
    model = model.to(DEVICE).train()
    if not adapter:
        return model.requires_grad_(False)
    targets = (
        r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj.*|out_proj)"
    )
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    for key, weight in model.named_parameters():
        if "lora_" in key:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return model


def joined(documents):
    return torch.cat(documents)[None].to(DEVICE)


def alone(model, documents):
    """Logits of every document in a call of its own, and the gradients of the mean loss of all."""
    counted = sum(len(d) - 1 for d in documents)
    model.zero_grad()
    logits = []
    for document in documents:
        ids = document[None].to(DEVICE)
        out = model(input_ids=ids, use_cache=False).logits
        logits.append(out[0].detach())
        if len(document) > 1:
            loss = torch.nn.functional.cross_entropy(out[0, :-1].double(), ids[0, 1:], reduction="sum")
            (loss / counted).backward()
    return torch.cat(logits), gradients(model)


def gradients(model):
    return {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", WRAPPERS)
def test_packed_rows_are_as_documents_alone(name):
    documents = random_documents(LENGTHS)
    true_logits, true_gradients = alone(made(name, torch.float64), documents)
    plain_logits, plain_gradients = alone(made(name), documents)
    model = made(name)
    patch = patch_model(model)
    assert patch.report.model_type == arch_spec_for(patch.report.model_type).model_type
    ids = joined(documents)
    with torch.no_grad():
        logits = model(input_ids=ids, packed_seq_lengths=LENGTHS).logits[0].double()
    assert error(logits, true_logits) <= 1.5 * error(plain_logits.double(), true_logits)
    model.zero_grad()
    labels = ids.index_fill(1, torch.tensor([0, *LENGTHS[:-1]], device=DEVICE).cumsum(0), -100)
    out = model(input_ids=ids, labels=labels, packed_seq_lengths=LENGTHS)
    out.loss.backward()
    got = gradients(model)
    assert got.keys() == true_gradients.keys()
    ours, theirs = (
        max(error(grads[key], true) for key, true in true_gradients.items())
        for grads in (got, plain_gradients)
    )
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_document_sees_another(name):
    model = made(name)
    patch_model(model)
    model.eval()
    documents = random_documents(LENGTHS)
    before = model(input_ids=joined(documents), packed_seq_lengths=LENGTHS).logits
    documents[1] = (documents[1] + 1) % 256
    after = model(input_ids=joined(documents), packed_seq_lengths=LENGTHS).logits
    kept = [*range(LENGTHS[0]), *range(sum(LENGTHS[:2]), sum(LENGTHS))]
    assert torch.equal(before[0, kept], after[0, kept])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_door_is_the_wrappers(name):
    """A row is described once, the loss is fused, TRL's trainers get their scores, and verify passes."""
    model = made(name)
    patch_model(model)
    ids = joined(random_documents(LENGTHS))
    out = model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS)
    assert type(out).__name__ == "LossOutput"
    with torch.no_grad():
        plain = model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS)
    assert torch.allclose(out.loss, plain.loss, rtol=1e-5)
    assert torch.allclose(out.logits, plain.logits, atol=1e-5)
    kept = model(input_ids=ids, packed_seq_lengths=LENGTHS, logits_to_keep=3).logits
    assert torch.allclose(kept, plain.logits[:, -3:], atol=1e-5)
    base = asked_by_trl(model)
    scored = model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS, fused_lm_head=True)
    assert torch.allclose(scored.loss, out.loss, rtol=1e-5)
    assert vars(base)["unsloth_pack_trl_head"].why_not is None
    assert verify(model).passed


@pytest.mark.parametrize("name", WRAPPERS)
def test_everything_else_is_as_in_transformers(name):
    """Ordinary batches, generation, and the model that comes back."""
    plain, model = made(name, adapter=False).eval(), made(name, adapter=False).eval()
    ids = torch.stack(random_documents([9, 9])).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    patch = patch_model(model)
    for call in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        assert torch.allclose(model(**call).logits[mask == 1], plain(**call).logits[mask == 1], atol=1e-5)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    classes = {n: type(m) for n, m in plain.named_modules()}
    patch.undo()
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    "name", [name for name in WRAPPERS if vision_spec_for(AROUND.get(name, name)) is None]
)
def test_an_image_in_a_packed_row_is_refused(name):
    model = made(name)
    patch_model(model)
    ids = joined(random_documents(LENGTHS))
    with pytest.raises(InputError, match=r"a packed row comes with pixel_values; .* unpacked"):
        model(input_ids=ids, packed_seq_lengths=LENGTHS, pixel_values=torch.zeros(1, 3, 28, 28))


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_adapter_goes_on_the_text_model_alone(name):
    """Projections of the tower have the same names; on rows of text they would never get a gradient."""
    model = made(name, adapter=False)
    patch_model(model)
    model = FastLanguageModel.get_peft_model(model, r=4)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("language_model" in key for key in trained)
    ids = joined(random_documents(LENGTHS))
    model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS).loss.backward()
    assert all(p.grad is not None for p in trained.values())
