"""`DistillationLoss` on patched models, against plain torch in float64 with an untouched copy as teacher."""

from functools import partial

import image_models
import pytest
import torch
from exactness import divergences
from tables import table
from tiny import DEVICE, error, random_documents, tiny_model

from unsloth_pack import FastLanguageModel, patch_model
from unsloth_pack.errors import InputError
from unsloth_pack.lora.base_model import FrozenCopy, base_model
from unsloth_pack.losses.distillation import DistillationLoss, model_teacher, stored_teacher

ROWS = [[5, 1, 9, 3], [2, 12, 1], [7]]  # documents of the rows of an update
ARCHITECTURES = ["llama", "qwen3", "gemma2", "phi3", "qwen3_moe", "gpt_oss"]


def row_of(lengths, seed=0):
    """A packed row in which some tokens have no label, and its documents with their labels."""
    documents = random_documents(lengths, seed)
    ids = torch.cat(documents)[None]
    generator = torch.Generator().manual_seed(seed)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = -100
    batch = {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE), "packed_seq_lengths": lengths}
    return batch, list(zip(documents, labels[0].split(lengths), strict=True))


def plain_sums(model, teacher, documents, loss):
    """The sums over labels of cross-entropy and divergence, from the logits of every document alone."""
    crossed, diverged = 0.0, 0.0
    for ids, labels in documents:
        kept = labels[1:] != -100
        if not kept.any():
            continue
        logits = model(input_ids=ids[None].to(DEVICE), use_cache=False).logits[0, :-1][kept]
        with torch.no_grad():
            theirs = teacher(input_ids=ids[None].to(DEVICE), use_cache=False).logits[0, :-1][kept]
        crossed = crossed - logits.log_softmax(-1).gather(1, labels[1:][kept, None].to(DEVICE)).sum()
        a, b = (x.div(loss.temperature).log_softmax(-1) for x in (logits, theirs))
        diverged = diverged + divergences(a, b)[loss.divergence].sum()
    return crossed, diverged


def without_adapter(model):
    """A plain model's own way to its base."""

    def run(**inputs):
        with model.disable_adapter():
            return model(**inputs)

    return run


def distilled(model, **options):
    """Set the loss of a patched model whose base is its teacher."""
    base = model.get_base_model()
    base.training_loss = DistillationLoss(
        partial(model_teacher, within=partial(base_model, model)), **options
    )
    return base.training_loss


@table("divergence, temperature", [("forward_kl", 1.0), ("reverse_kl", 2.0), ("jsd", 0.7)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loss_and_gradient_are_those_of_plain_torch(arch, divergence, temperature):
    plain, model = tiny_model(arch, torch.float64), tiny_model(arch, torch.float64)
    patch_model(model)
    loss = distilled(model, divergence=divergence, temperature=temperature, kl_weight=0.7, ce_weight=0.4)
    rows = [row_of(lengths, seed) for seed, lengths in enumerate(ROWS)]
    n_items = sum(int((batch["labels"] != -100).sum()) for batch, _ in rows)
    for batch, documents in rows:  # accumulated
        crossed, diverged = plain_sums(plain, without_adapter(plain.eval()), documents, loss)
        expected = (0.4 * crossed + 0.7 * diverged) / n_items
        expected.backward()
        got = model(**batch, num_items_in_batch=n_items).loss
        got.backward()
        assert abs(got.item() / expected.item() - 1) < 1e-6  # rotary tables are in float32
        assert abs(loss.values["sft_loss"].sum().item() / crossed.item() - 1) < 1e-6
        assert abs(loss.values["kl_loss"].sum().item() / diverged.item() - 1) < 1e-5
    assert all(layer.training for layer in model.modules())
    for (name, got), (_, true) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (got.grad is None) == (true.grad is None)
        if true.grad is not None:
            assert error(got.grad, true.grad) < 1e-5, name


def step(model, batch):
    """The loss and gradients of one step."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def untrained(arch, dtype=torch.float32, lora=None, **overrides):
    """A patched model with an adapter that changes nothing yet."""
    model = tiny_model(arch, dtype, lora=lora, **overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.zero_()
    patch_model(model)
    return model


def untrained_in_4bit():
    pytest.importorskip("bitsandbytes")
    model, _ = FastLanguageModel.from_pretrained("demo", load_in_4bit=True)
    return FastLanguageModel.get_peft_model(model, r=4)


HEADS = ["q_proj", "v_proj", "down_proj", "lm_head"]
UNTRAINED = {
    **{f"{arch} {dtype}": partial(untrained, arch, dtype) for arch in ARCHITECTURES for dtype in (
        torch.float32, torch.bfloat16)},
    "dropout": partial(untrained, "llama", lora={"lora_dropout": 0.5}, attention_dropout=0.5),
    "a bias": partial(untrained, "qwen2"),
    "an adapter on the head": partial(untrained, "llama", lora={"target_modules": HEADS}),
    "adapters on some layers": partial(untrained, "llama", lora={"target_modules": ["k_proj", "up_proj"]}),
    "an embedding": partial(untrained, "llama", lora={"target_modules": ["embed_tokens", "q_proj"]}),
    "4 bits": untrained_in_4bit,
}  # fmt: skip


@pytest.mark.parametrize("make", UNTRAINED.values(), ids=UNTRAINED)
def test_an_untrained_adapter_has_no_divergence_from_the_base_and_no_gradient(make):
    """To the last bit; with dropout, which the student alone has, as far as its other layers drop nothing."""
    model = make()
    batch, _ = row_of(ROWS[0])
    loss = distilled(model, kl_weight=1.0, ce_weight=0.0)
    if model.config.get_text_config().attention_dropout:
        model.config.attention_dropout = 0.0
        for layer in model.get_base_model().get_decoder().layers:
            layer.self_attn.attention_dropout = 0.0
    assert_no_divergence(model, loss, batch)


def assert_no_divergence(model, loss, batch):
    total, gradients = step(model, batch)
    assert total == 0
    assert not loss.values["kl_loss"].any()
    assert loss.values["teacher_entropy"].any()
    assert gradients
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("name", ["qwen3 torch.bfloat16", "qwen3 torch.float32", "4 bits"])
def test_an_untrained_adapter_has_no_divergence_on_a_gpu(name, is_captured):
    """Once captured, in shorter rows too: teacher and student compute the same padded row."""
    model = UNTRAINED[name]()
    patch_model(model, "triton")
    graphs = model.get_decoder().step_graphs
    graphs.why_never = None if is_captured else "for comparison"
    loss = distilled(model, kl_weight=1.0, ce_weight=0.0)
    for seed in range(8):
        lengths = [90, 60, 106 if seed < 5 else 90]
        assert_no_divergence(model, loss, row_of(lengths, seed)[0])
    assert str(graphs).startswith("captured") == is_captured


@table("kind, lora", [
    ("tokens", {"trainable_token_indices": [3, 5, 9]}),
    ("modules", {"modules_to_save": ["lm_head", "norm"]}),
    ("head", {"target_modules": HEADS}),
    ("layers that PEFT runs", {"use_dora": True}),
])  # fmt: skip
def test_all_that_trains_beside_the_layers_is_left_out_of_the_base(kind, lora):
    lora = {"target_modules": ["q_proj"]} | lora
    plain, model = (tiny_model("qwen3", torch.float64, lora=lora) for _ in "ab")
    for each in (plain, model):
        with torch.no_grad():
            for name, weight in each.named_parameters():
                if "modules_to_save" in name:
                    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 10)
    patch_model(model)
    loss = distilled(model, kl_weight=1.0, ce_weight=0.0)
    batch, documents = row_of(ROWS[0])
    _, diverged = plain_sums(plain, without_adapter(plain), documents, loss)
    model(**batch)
    assert abs(loss.values["kl_loss"].sum().item() / diverged.item() - 1) < 1e-5
    assert diverged > 0.01


def test_gradients_pass_through_the_base():
    plain, model = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64)
    patch_model(model)
    ids = random_documents([9])[0][None].to(DEVICE)
    grads = []
    for each, off in ((plain, plain.disable_adapter()), (model, base_model(model))):
        embeds = each.get_input_embeddings()(ids).detach().requires_grad_()
        with off:
            each(inputs_embeds=embeds, labels=ids).loss.backward()
        grads.append(embeds.grad)
    assert error(grads[1], grads[0]) < 1e-6
    assert not any("lora" in name and weight.grad is not None for name, weight in model.named_parameters())


def test_a_teacher_that_trains_elsewhere_keeps_no_activations():
    model, teachers = tiny_model("llama"), []
    patch_model(model)
    loss = distilled(model)
    loss.teacher = lambda inputs: teachers.append(model_teacher(inputs)) or teachers[0]
    step(model, row_of(ROWS[0])[0])
    assert not teachers[0].hidden.requires_grad


def test_dropout_is_the_students_alone():
    """Of two passes of the teacher under dropout everywhere."""
    model = untrained("llama", attention_dropout=0.5)
    batch, _ = row_of(ROWS[1])
    loss = distilled(model, kl_weight=1.0)
    entropies = []
    for _ in range(2):
        step(model, batch)
        entropies.append(loss.values["teacher_entropy"])
        assert loss.values["kl_loss"].any()
    assert torch.equal(*entropies)


def test_a_frozen_copy_stays_as_it_was():
    plain, model = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64)
    patch_model(model)
    frozen = FrozenCopy(model)
    with torch.no_grad():
        for each in (plain, model):
            for weight in each.parameters():
                if weight.requires_grad:
                    weight.mul_(1.5)
    before = tiny_model("llama", torch.float64)
    teacher = partial(model_teacher, within=frozen.in_place)
    loss = model.get_base_model().training_loss = DistillationLoss(teacher, kl_weight=0.5, ce_weight=0.5)
    batch, documents = row_of(ROWS[0])
    crossed, diverged = plain_sums(plain, before, documents, loss)
    expected = (crossed + diverged) / 2 / int((batch["labels"] != -100).sum())
    expected.backward()
    total, gradients = step(model, batch)
    assert abs(total / expected.item() - 1) < 1e-6
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            assert error(gradients[name], weight.grad) < 1e-5


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_another_model_teaches_and_gets_no_gradient(packed):
    plain, model = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64)
    other, untouched = (tiny_model("gemma2", torch.float64, seed=3, vocab_size=256) for _ in "ab")
    patch_model(model)
    patch_model(other)
    teacher = partial(model_teacher, model=other.get_base_model())
    loss = model.get_base_model().training_loss = DistillationLoss(teacher, kl_weight=0.5, ce_weight=0.5)
    batch, documents = row_of(ROWS[0])
    if not packed:
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence([d[i] for d in documents], True, [0, -100][i]) for i in (0, 1)
        )
        mask = torch.arange(ids.shape[1]) < torch.tensor(ROWS[0])[:, None]
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}
        batch = {name: x.to(DEVICE) for name, x in batch.items()}
    crossed, diverged = plain_sums(plain, untouched.eval(), documents, loss)
    expected = (crossed + diverged) / 2 / int((batch["labels"] != -100).sum())
    assert abs(step(model, batch)[0] / expected.item() - 1) < 1e-6
    assert all(weight.grad is None for weight in other.parameters())
    assert other.training


def test_stored_predictions_stand_in_for_the_teacher():
    """Of all tokens they are the teacher; of the likeliest two less is known of it."""
    model = tiny_model("llama", torch.float64)
    patch_model(model)
    batch, _ = row_of(ROWS[0])
    loss = distilled(model, kl_weight=1.0)
    whole = step(model, batch)
    with torch.no_grad(), base_model(model):
        log_probs, ids = (
            model(input_ids=batch["input_ids"], packed_seq_lengths=ROWS[0]).logits.log_softmax(-1).topk(256)
        )
    loss.teacher = stored_teacher
    stored = {"teacher_ids": ids.int(), "teacher_log_probs": log_probs}
    total, gradients = step(model, batch | stored)
    assert abs(total / whole[0] - 1) < 1e-5
    assert all(error(gradients[name], gradient) < 1e-5 for name, gradient in whole[1].items())
    few = {name: x[..., :2] for name, x in stored.items()}
    few["teacher_log_probs"] = few["teacher_log_probs"].half()
    step(model, batch | few)
    assert 0 < loss.values["kl_loss"].sum() < step_divergence(model, loss, batch | stored)
    with pytest.raises(
        InputError, match="a stored teacher needs teacher_ids and teacher_log_probs; give both"
    ):
        model(**batch)
    with pytest.raises(ValueError, match=r"the teacher has \[1, 17\] rows"):
        model(**batch, **stored | {"teacher_ids": ids[:, 1:]})


def step_divergence(model, loss, batch):
    step(model, batch)
    return loss.values["kl_loss"].sum()


def test_evaluation_computes_the_same_loss():
    model = tiny_model("llama", torch.float32)
    patch_model(model)
    distilled(model, kl_weight=1.0)
    batch, _ = row_of(ROWS[0])
    expected = step(model, batch)[0]
    with torch.no_grad():
        out = model.eval()(**batch)
    assert out.loss.item() == expected
    assert not out.loss.requires_grad
    assert out.logits.shape == (1, sum(ROWS[0]), 256)


@table("arguments, why", [
    ({"output_router_logits": True}, "output_router_logits is on"),
    ({"return_dict": False}, "return_dict is False"),
    ({"logits_to_keep": 2}, "logits_to_keep leaves logits out"),
])  # fmt: skip
def test_a_call_that_needs_logits_is_refused(arguments, why):
    model = untrained("qwen3_moe")
    distilled(model)
    with pytest.raises(
        InputError, match=f"training_loss needs the head: {why}; set it back to cross_entropy"
    ):
        model(**row_of(ROWS[0])[0], **arguments)


@pytest.mark.parametrize("trained", ["frozen tower", "tower", "aligner"])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl"])
def test_images_are_of_the_teachers_row_too(name, trained):
    """A frozen tower encodes them once for both, unless it has an adapter: the base has none."""
    plain, model = (image_models.made(name, torch.float64, trained) for _ in "ab")
    patch_model(model)
    if trained == "tower":
        image_models.tower_of(model).requires_grad_(False)
    loss = distilled(model, kl_weight=1.0, ce_weight=0.0)
    docs = image_models.documents(name)
    inputs = image_models.row_of(name, model, docs)
    labels = image_models.labels_of(docs)[None].to(DEVICE)
    calls = []
    image_models.tower_of(model).register_forward_hook(lambda *_: calls.append(1))
    out = model(**inputs, labels=labels, packed_seq_lengths=image_models.lengths_of(docs))
    assert len(calls) == (1 if trained == "frozen tower" else 2)
    diverged = 0.0
    for doc in docs:
        alone = image_models.row_of(name, plain, [doc])
        alone["position_ids"] = image_models.plain_positions(name, [doc])
        with torch.no_grad():
            logits, theirs = (
                run(**alone, use_cache=False).logits[0, :-1].log_softmax(-1)
                for run in (plain, without_adapter(plain))
            )
        kept = image_models.labels_of([doc])[1:] != -100
        diverged += (theirs.exp() * (theirs - logits)).sum(-1)[kept].sum()
    assert diverged > 0
    assert abs(loss.values["kl_loss"].sum() / diverged - 1) < 1e-4
    out.loss.backward()
