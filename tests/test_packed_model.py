"""A patched model on packed rows: nothing leaks, every description means the same, and undoing is exact."""

import copy

import pytest
import torch
from correctness.judge import Draw, judge_as_few, on_the_same_row
from peft import get_peft_model
from tiny import (
    DEVICE,
    TINY,
    error,
    every_description,
    positions_of,
    random_documents,
    run_alone,
    run_packed,
    tiny_config,
    tiny_model,
    with_lora,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    DynamicCache,
)

from unsloth_pack import UnsupportedArchitecture, patch_model, supported_architectures
from unsloth_pack.attention import BACKENDS
from unsloth_pack.errors import BackendUnavailable, InputError
from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.layers.forward_call import ForwardCall
from unsloth_pack.patching.patch import patch_of

ARCHITECTURES = list(supported_architectures())
LENGTHS = [1, 33, 2, 40, 31]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def patched(arch, backend="auto", **overrides):
    model = tiny_model(arch, DTYPE, **overrides)
    patch_model(model, backend)
    return model


def logits_of(model, documents, **describe):
    ids = torch.cat(documents).to(DEVICE)[None]
    describe = describe or {"packed_seq_lengths": [len(document) for document in documents]}
    with torch.no_grad():
        return model(input_ids=ids, **describe).logits[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_changing_one_document_changes_no_bit_of_another(arch):
    documents = random_documents(LENGTHS)
    changed = random_documents(LENGTHS, seed=9)
    has_experts = any("experts" in name for name in TINY[arch])
    checked = 0
    for backend in BACKENDS:
        try:
            model = patched(arch, backend).eval()
        except BackendUnavailable:
            continue
        before = logits_of(model, documents).split(LENGTHS)
        for which in range(len(LENGTHS)):
            mixed = [*documents[:which], changed[which], *documents[which + 1 :]]
            after = logits_of(model, mixed).split(LENGTHS)
            for other in range(len(LENGTHS)):
                is_same = torch.equal(before[other], after[other])
                if has_experts and other != which:  # whose GEMMs depend on how many tokens they get
                    is_same |= (
                        error(after[other].double(), before[other].double()) < 4 * torch.finfo(DTYPE).eps
                    )
                assert is_same == (other != which), (backend, which, other)
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_of_one_document_ignore_the_tokens_of_another(arch):
    """The same loss on one document gives the same adapter gradients whatever its neighbours say."""
    model = patched(arch, "sdpa")
    gradients = []
    for seed in (0, 9):
        documents = random_documents(LENGTHS, seed=seed)
        documents[1] = random_documents(LENGTHS)[1]
        labels = torch.full((1, sum(LENGTHS)), -100, device=DEVICE)
        labels[0, 1:34] = documents[1].to(DEVICE)
        model.zero_grad()
        ids = torch.cat(documents).to(DEVICE)[None]
        model(input_ids=ids, labels=labels, packed_seq_lengths=LENGTHS).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    # Sums over all tokens of the row: zeros of the neighbours may change their order, not their value.
    assert error(gradients[0].double(), gradients[1].double()) < 4 * torch.finfo(DTYPE).eps


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_every_description_gives_the_same_bits(arch, use_cache):
    model = patched(arch).eval()
    documents = random_documents(LENGTHS)
    expected = logits_of(model, documents)
    for name, description in every_description(LENGTHS).items():
        on_device = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in description.items()}
        got = logits_of(model, documents, **on_device, use_cache=use_cache)
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("lengths", [[20], [20, 7]])
def test_positions_need_no_row(lengths):
    model = patched("llama").eval()
    documents = random_documents(lengths)
    got = logits_of(model, documents, position_ids=positions_of(lengths).to(DEVICE))
    assert error(got.double(), logits_of(model, documents).double()) < 4 * torch.finfo(DTYPE).eps


OTHER_FORMS = {
    "one": ([77], 0),
    "tail": ([3, 50, 20], 30),
    "160": ([1 + i // 50 % 3 for i in range(160)], 0),
    "1000": ([1 + i // 50 % 3 for i in range(1000)], 0),
}
OF_EACH_KIND = ("llama", "gemma3_text", "qwen3_moe", "qwen3_next")  # attention, a window, experts, a state
IN_OTHER_FORMS = [
    pytest.param(
        *(arch, *OTHER_FORMS[name]),
        id=f"{arch}-{name}",
        marks=[pytest.mark.every_architecture]  # packed equals alone: logits, loss and every gradient
        if name == "tail"
        else [pytest.mark.nightly]
        if name == "1000" and arch not in OF_EACH_KIND
        else [],
    )
    for arch in ARCHITECTURES
    for name in OTHER_FORMS
]


@pytest.mark.parametrize(("arch", "lengths", "tail"), IN_OTHER_FORMS)
def test_rows_of_other_forms_are_as_right(arch, lengths, tail):
    exact = tiny_model(arch, torch.float64, device="cpu")
    plain, model = (tiny_model(arch, torch.float32, device="cpu") for _ in range(2))
    patch_model(model)

    def run(seed):
        documents = random_documents(lengths, seed=seed)
        truth = run_alone(exact, documents)
        alone = run_alone(plain, documents, truth.routes)
        draw = Draw(truth, alone, on_the_same_row(plain, documents, truth.routes))
        return run_packed(model, documents, truth.routes if not tail else None, tail=tail), draw

    assert "failed" not in judge_as_few(run, torch.float32)


def test_the_tail_is_never_looked_at():
    model = patched("qwen2").eval()
    documents = random_documents([20, 30])
    rows = [torch.cat([*documents, torch.full((14,), filler)]).to(DEVICE)[None] for filler in (0, 7)]
    with torch.no_grad():
        outs = [model(input_ids=row, labels=row, packed_seq_lengths=[20, 30]) for row in rows]
    assert torch.equal(outs[0].logits[0, :50], outs[1].logits[0, :50])
    assert torch.equal(outs[0].loss, outs[1].loss)


def test_layers_beyond_those_of_the_configuration_do_not_run():
    model, documents = patched("llama").eval(), random_documents([20])
    before = logits_of(model, documents)
    model.config.num_hidden_layers = 1
    got = logits_of(model, documents)
    with torch.no_grad():
        expected = model(input_ids=documents[0].to(DEVICE)[None], use_cache=False).logits[0]
    assert error(got.double(), expected.double()) < 4 * torch.finfo(DTYPE).eps
    assert not torch.equal(got, before)


def test_several_rows_are_flattened_and_come_back_in_their_shape():
    model = patched("llama").eval()
    documents = random_documents([7, 5, 9])
    filler = torch.zeros(3, dtype=torch.long)
    rows = torch.stack([torch.cat(documents[:2]), torch.cat([documents[2], filler])]).to(DEVICE)
    with torch.no_grad():
        out = model(input_ids=rows, packed_seq_lengths=[[7, 5], [9]], output_hidden_states=True)
        row = torch.cat(documents).to(DEVICE)[None]
        expected = model(input_ids=row, packed_seq_lengths=[7, 5, 9], output_hidden_states=True)
    pairs = [(out.logits, expected.logits), *zip(out.hidden_states, expected.hidden_states, strict=True)]
    for got, alone in pairs:
        assert got.shape[:2] == (2, 12)
        assert error(torch.cat([got[0], got[1, :9]]).double(), alone[0].double()) < 4 * torch.finfo(DTYPE).eps


def test_the_first_label_of_each_document_carries_no_loss():
    model = patched("llama")
    lengths = [5, 8, 3]
    ids = torch.cat(random_documents(lengths)).to(DEVICE)[None]
    labels = ids.clone()
    loss = model(input_ids=ids, labels=labels, packed_seq_lengths=lengths).loss
    labels[0, [0, 5, 13]] = -100
    assert torch.equal(loss, model(input_ids=ids, labels=labels, packed_seq_lengths=lengths).loss)
    counted = sum(lengths) - len(lengths)
    summed = model(
        input_ids=ids, labels=labels, packed_seq_lengths=lengths, num_items_in_batch=2 * counted
    ).loss
    assert torch.allclose(summed, loss / 2)


@pytest.mark.parametrize("what", ["padding in front", "embeddings", "a cache"])
def test_the_loss_of_a_training_step_is_that_of_the_same_call(what):
    """It is computed with the head, past transformers' own forward."""
    model = patched("llama")
    ids = torch.stack(random_documents([12, 12])).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    losses = []
    for training in (True, False):
        call = {"input_ids": ids, "use_cache": False}
        if what == "padding in front":
            call["attention_mask"] = mask
        elif what == "embeddings":
            call = {"inputs_embeds": 2 * model.get_input_embeddings()(ids), "use_cache": False}
        else:
            cache = DynamicCache()
            model.eval()(input_ids=ids.flip(1), past_key_values=cache)
            call |= {"past_key_values": cache, "position_ids": torch.arange(20, 32, device=DEVICE)[None]}
        out = model.train(training)(**call, labels=ids.masked_fill(mask == 0, -100))
        assert (out.past_key_values is None) == (what != "a cache")
        losses.append(out.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=8 * torch.finfo(DTYPE).eps)


NUMBERED = [1] * 4 + [2] * 6 + [0] * 2  # as LLaMA-Factory and Axolotl write the mask of a packed row


@pytest.mark.parametrize("training", [False, True])
def test_a_mask_that_numbers_documents_is_not_passed_over(training):
    model, documents = patched("llama").train(training), random_documents([4, 6])
    expected = logits_of(model, documents)
    ids = torch.cat([*documents, documents[0][:2]]).to(DEVICE)[None]
    mask = torch.tensor([NUMBERED], device=DEVICE)
    if training or DEVICE == "cpu":
        with pytest.raises(InputError, match=r"attention_mask holds document ids, .* give packed_seq"):
            model(input_ids=ids, attention_mask=mask)
    with pytest.raises(InputError, match="position_ids and attention_mask disagree on row 0"):
        model(ids[:, :10], attention_mask=mask[:, :10], position_ids=torch.arange(10, device=DEVICE)[None])
    with pytest.raises(InputError, match="packed_seq_lengths and attention_mask disagree on row 0"):
        model(input_ids=ids, attention_mask=mask, packed_seq_lengths=[5, 5])
    for describe in (
        {"packed_seq_lengths": [4, 6]},
        {"position_ids": positions_of([4, 6, 2]).to(DEVICE)[None]},
    ):
        got = model(input_ids=ids, attention_mask=mask, **describe).logits
        assert error(got[0, :10].double(), expected.double()) < 0.02


def test_labels_that_the_trainer_counts_but_no_loss_sees_are_refused():
    model = patched("llama")
    ids = torch.cat(random_documents([5, 8])).to(DEVICE)[None]
    labels = ids.masked_fill(positions_of([5, 8]).to(DEVICE)[None] == 0, -100)
    row = {"cu_seq_lens_q": torch.tensor([0, 5, 13], device=DEVICE), "num_items_in_batch": 12}
    model(input_ids=ids, labels=labels, **row)
    with pytest.raises(InputError, match="DataCollatorWithFlattening"):  # on a later step too
        model(input_ids=ids, labels=ids, **row)
    with pytest.raises(InputError, match=r"labels have shape \[1, 12\]"):
        model(input_ids=ids, labels=labels[:, 1:], packed_seq_lengths=[5, 8])


@pytest.fixture
def on_device(monkeypatch):
    """Every check waits, as where labels lie on a device. Returns the copies that start and that are read."""
    order, start, read = [], HostCopy.__init__, HostCopy.read
    monkeypatch.setattr(
        ForwardCall,
        "require_zero",
        lambda call, count, message: call.counts.append((HostCopy(count), message)),
    )
    monkeypatch.setattr(HostCopy, "__init__", lambda self, x: order.append("start") or start(self, x))
    monkeypatch.setattr(HostCopy, "read", lambda self: order.append("read") or read(self))
    return order


@pytest.mark.parametrize("training", [False, True])
def test_counted_labels_on_a_device_are_looked_at_on_every_step(training, on_device):
    """Read before the decoder has been launched, they would make every step wait for the device."""
    model = patched("llama").train(training)
    model.get_decoder().norm.register_forward_hook(lambda *_: on_device.append("decoder"))
    wrong = torch.cat(random_documents([5, 8])).to(DEVICE)[None]
    right = wrong.masked_fill(positions_of([5, 8]).to(DEVICE)[None] == 0, -100)
    counted = {"packed_seq_lengths": [5, 8], "num_items_in_batch": 11}
    model(input_ids=wrong, labels=wrong, packed_seq_lengths=[5, 8])  # nobody has counted them
    for _ in range(2):
        on_device.clear()
        model(input_ids=wrong, labels=right, **counted)
        assert on_device.index("start") < on_device.index("decoder") < on_device.index("read")
        with pytest.raises(InputError, match="DataCollatorWithFlattening"):
            model(input_ids=wrong, labels=wrong, **counted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_undo_restores_every_bit(arch):
    documents = random_documents(LENGTHS)
    model = tiny_model(arch, DTYPE)
    before, keys = run_alone(model, documents), list(model.state_dict())
    modules, attn = [type(module) for module in model.modules()], model.config._attn_implementation
    attributes = [set(module.__dict__) for module in model.modules()]
    patch = patch_model(model)
    assert list(model.state_dict()) == keys
    assert [type(module).__name__ for module in model.modules()] == [kind.__name__ for kind in modules]
    run_packed(model, documents)
    patch.undo()
    patch.undo()
    after = run_alone(model, documents)
    assert [type(module) for module in model.modules()] == modules
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert model.config._attn_implementation == attn
    assert patch_of(model) is None
    assert torch.equal(before.logits, after.logits)
    for name, grad in before.grads.items():
        assert torch.equal(after.grads[name], grad), name


def test_undo_finds_what_peft_has_copied():
    model = tiny_model("qwen3", DTYPE).unload()
    patch_model(model)
    adapted = with_lora(model, {"modules_to_save": ["mlp", "norm", "q_norm"]})
    patch_model(adapted)
    run_packed(adapted, random_documents(LENGTHS))
    patch_of(adapted).undo()
    for name, module in adapted.named_modules():
        assert not any(kind.__module__.startswith("unsloth_pack") for kind in type(module).__mro__), name
        assert "decoder_layer" not in module.__dict__, name


def test_a_patch_is_a_context_and_can_be_laid_anew():
    model = tiny_model("llama", DTYPE)
    kind = type(model.get_base_model())
    with patch_model(model, "sdpa"):
        patch_model(model)
        assert patch_of(model) is not None
    assert type(model.get_base_model()) is not kind  # the second patch is in force
    patch_of(model).undo()
    assert type(model.get_base_model()) is kind


def test_patching_before_and_after_the_adapter_is_the_same():
    documents = random_documents(LENGTHS)
    adapted = tiny_model("qwen3", DTYPE)
    with patch_model(adapted, "sdpa"):
        expected = logits_of(adapted, documents)
    with patch_model(adapted.get_base_model(), "sdpa"):
        assert torch.equal(logits_of(adapted, documents), expected)


def test_the_report_follows_an_adapter_that_comes_after_the_patch():
    model = tiny_model("qwen3", DTYPE).unload()
    patch = patch_model(model)
    kinds = {*patch.report.fused}
    assert "LoRA" not in str(patch.report)
    adapted = with_lora(model, {"modules_to_save": ["lm_head"]})
    assert patch.report.not_fused["LoRA"] == "14 layers: added after the patch; call patch_model again"
    assert "loss" in patch.report.fused
    anew = patch_model(adapted)
    assert "14 layers" in anew.report.fused["LoRA"]
    assert "LoRA" not in anew.report.not_fused
    adapted.unload()
    assert {*anew.report.fused} == kinds


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ordinary_batches_and_generation_are_as_in_transformers(arch):
    """Left-padded prompts and one alone, a cache, and decoding step by step.

    A static cache's masks come to the model ready made, or as None where they leave out later slots alone.
    """
    plain, model = tiny_model(arch, torch.float32).eval(), tiny_model(arch, torch.float32).eval()
    patch_model(model)
    prompts = random_documents([40, 9, 27])
    left = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence(prompts, **left).to(DEVICE)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], **left).to(DEVICE)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for cache, rows in (("dynamic", slice(None)), ("static", slice(None)), ("static", slice(1))):
        options |= {"attention_mask": mask[rows], "cache_implementation": cache}
        with torch.no_grad():
            expected, got = (m.generate(ids[rows], **options) for m in (plain, model))
        assert torch.equal(expected.sequences, got.sequences)
        assert torch.allclose(torch.stack(expected.logits), torch.stack(got.logits), atol=1e-4, rtol=1e-4)
    seen = mask.cumsum(1) > 1  # what a padding position predicts is undefined
    out = [
        m(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~seen, -100)).loss
        for m in (plain, model)
    ]
    assert torch.allclose(*out, atol=1e-5)


def test_an_attention_implementation_set_after_the_patch_is_refused():
    """Its masks would be misread: those of FlashAttention, in two dimensions, hide nothing of the future."""
    model = patched("llama").eval()
    documents = random_documents(LENGTHS)
    ids, expected = torch.cat(documents).to(DEVICE)[None], logits_of(model, documents)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="is 'flash_attention_2', changed after the patch; undo"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids).index_fill(1, ids.new_zeros(1), 0))
    assert torch.equal(logits_of(model, documents), expected)  # packed rows ask nothing of it
    patch_model(model)
    model(input_ids=ids)


def test_hidden_states_and_router_logits_are_recorded():
    model = patched("qwen3_moe").eval()
    documents = random_documents([4, 6])
    ids = torch.cat(documents).to(DEVICE)[None]
    with torch.no_grad():
        out = model(
            input_ids=ids, packed_seq_lengths=[4, 6], output_hidden_states=True, output_router_logits=True
        )
    assert [tuple(h.shape) for h in out.hidden_states] == [(1, 10, 64)] * 3
    assert [tuple(r.shape) for r in out.router_logits] == [(10, 4)]
    assert out.aux_loss > 0


def test_a_head_that_gives_one_answer_a_row_takes_one_document_a_row():
    plain = AutoModelForQuestionAnswering.from_config(tiny_model("llama").config).to(DEVICE).eval()
    model = copy.deepcopy(plain)
    patch_model(model)
    ids = torch.stack(random_documents([12, 12])).to(DEVICE)
    with pytest.raises(InputError, match=r"gives one answer a row, 2 hold 3 documents; give every document"):
        model(input_ids=ids, packed_seq_lengths=[[5, 7], [12]])
    expected = plain(input_ids=ids)[0]
    assert torch.allclose(model(input_ids=ids)[0], expected, atol=1e-5)
    assert torch.allclose(model(input_ids=ids, packed_seq_lengths=[[12], [12]])[0], expected, atol=1e-5)


def test_what_cannot_be_patched_is_refused():
    from peft import AdaptionPromptConfig, LoraConfig, PromptTuningConfig
    from transformers import GPT2Config

    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(
        UnsupportedArchitecture,
        match=r"'gpt2' has no patch; add it to .*; supported are apertus, arcee, ",
    ):
        patch_model(gpt2)
    with pytest.raises(InputError, match="cannot patch a Linear; give a transformers model"):
        patch_model(torch.nn.Linear(2, 2))
    base = tiny_model("llama").get_base_model()
    prompted = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(InputError, match="virtual tokens shift the documents; use LoRA"):
        patch_model(prompted)
    for config, why in (
        (
            AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
            "it wraps the attention",
        ),
        (LoraConfig(alora_invocation_tokens=[5], target_modules=["q_proj"]), "once a row"),
    ):
        adapted = get_peft_model(tiny_model("llama").unload(), config)
        with pytest.raises(InputError, match=why):
            patch_model(adapted)
    both_ways = AutoModelForCausalLM.from_config(tiny_config("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(InputError, match="use_bidirectional_attention=True"):
        patch_model(both_ways)
    base = tiny_model("llama").unload()
    base.config.is_causal = False
    with pytest.raises(InputError, match="is_causal=False"):
        patch_model(base)


def test_calls_that_cannot_be_are_refused():
    model = patched("llama").eval()
    ids = torch.cat(random_documents([4, 6])).to(DEVICE)[None]
    with pytest.raises(InputError, match="attention weights"):
        model(input_ids=ids, packed_seq_lengths=[4, 6], output_attentions=True)
    weights_wanted = tiny_model("llama", DTYPE)
    weights_wanted.set_attn_implementation("eager")  # without which transformers refuses the option
    weights_wanted.config.output_attentions = True
    patch_model(weights_wanted)
    with pytest.raises(InputError, match="attention weights"):
        weights_wanted(input_ids=ids)
    for nothing in ({}, {"packed_seq_lengths": [4, 6]}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**nothing)
    made_mask = torch.ones(1, 1, 10, 10, dtype=torch.bool, device=DEVICE)
    with pytest.raises(InputError, match=r"attention_mask is .*, the packed row"):
        model(ids, attention_mask=made_mask, packed_seq_lengths=[4, 6], past_key_values=DynamicCache())
    cache = model(input_ids=ids[:, :1], use_cache=True).past_key_values
    with pytest.raises(InputError, match="cannot continue a cache"):
        model(input_ids=ids, packed_seq_lengths=[4, 6], past_key_values=cache)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(InputError, match="exactly one"):
        model(input_ids=ids, inputs_embeds=embeds, packed_seq_lengths=[4, 6])


@pytest.mark.parametrize("arch", ["granite", "gemma", "falcon_h1", "llama"])
def test_inputs_embeds_may_be_packed_too(arch):
    """Some models multiply those that are given, some only their own."""
    model = tiny_model(arch).eval()
    embeds = [model.get_input_embeddings()(ids.to(DEVICE)[None]) for ids in random_documents(LENGTHS)]
    row, positions = torch.cat(embeds, 1), positions_of(LENGTHS).to(DEVICE)[None]
    with torch.no_grad():
        alone = torch.cat([model(inputs_embeds=one).logits[0] for one in embeds])
        patch_model(model)
        out = model(inputs_embeds=row, position_ids=positions).logits[0]
    assert error(out.double(), alone.double()) < 1e-5


def test_the_report_says_what_was_done():
    model = tiny_model("qwen3_moe", DTYPE)
    report = patch_model(model).report
    assert report.model_type == "qwen3_moe"
    assert report.attn_backend in (("flash", "triton") if DEVICE == "cuda" else ("sdpa",))
    assert report.fused["experts"].startswith("1 layers, each as one autograd node")
    assert not report.not_fused.keys() & {"MLP", "experts"}
    for word in ("attention backend", "fused", "QK norm", "LoRA"):
        assert word in str(report)
