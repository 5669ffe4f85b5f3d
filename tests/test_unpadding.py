"""Padded batches run without their padding: what is computed, what comes back, and when padding is kept.

The truth is every row alone, in plain transformers in float64.
"""

import copy
from functools import partial

import pytest
import torch
from correctness.judge import Draw, judge_as_few
from tiers import ARCHITECTURES, COVER
from tiny import (
    DEVICE,
    Outcome,
    exactly,
    find_batch,
    gradients,
    random_documents,
    routing,
    run_alone,
    sequence_classifier,
    tiny_config,
    tiny_model,
)
from trainer_runs import asked_by_trl
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
)

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.errors import InputError
from unsloth_pack.kernels.launch import HostCopy

LENGTHS = [5, 40, 1, 17, 30]
N_ANSWERS = 64
PAD = 0
SIDES = ["left", "right"]
ON_EACH_SIDE = [  # every day each architecture on one side
    pytest.param(arch, side, marks=[] if i % 2 == j else [pytest.mark.nightly])
    for i, arch in enumerate((*COVER, *sorted({*ARCHITECTURES} - {*COVER})))
    for j, side in enumerate(SIDES)
]


def absolute_positions(arch, batch):
    """Positions from 0 where they are not relative: padding on the left counts there."""
    spec = supported_architectures()[arch]
    if not (spec.query_scale or spec.qk_norm_after_rope):
        return {}
    return {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def patched(arch="llama", dtype=torch.float32, **options):
    model = tiny_model(arch, dtype)
    patch_model(model, **options)
    return model


def decoder_of(model):
    return getattr(model, "get_base_model", lambda: model)().get_decoder()


@pytest.fixture
def computed(monkeypatch):
    """The shapes of what runs through the decoder layers."""
    shapes = []

    def watch(model):
        layer = decoder_of(model).layers[0]
        layer.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[:2])))
        return model

    watch.shapes = shapes
    return watch


PACKED, KEPT = [(1, sum(LENGTHS))], [(len(LENGTHS), max(LENGTHS))]


# What comes back


@pytest.mark.parametrize(("arch", "side"), ON_EACH_SIDE)
def test_a_padded_batch_trains_as_its_rows_alone(arch, side):
    exact, plain = tiny_model(arch, torch.float64, "cpu"), tiny_model(arch, device="cpu")
    model = tiny_model(arch, device="cpu")
    patch_model(model)

    def run(seed):
        documents = random_documents(LENGTHS, seed=seed)
        truth = run_alone(exact, documents)
        alone = run_alone(plain, documents, truth.routes)
        batch = {name: x.cpu() for name, x in find_batch(documents, side).items()}
        batch |= absolute_positions(arch, batch)
        model.zero_grad()
        with routing(model, truth.routes) as seen:
            out = model(**batch)
            out.loss.backward()
        logits = out.logits[batch["attention_mask"] == 1].detach().double()
        grads = {name: grad.double() for name, grad in gradients(model).items()}
        routes = {name: torch.cat(parts) for name, parts in seen.items() if parts}
        got = Outcome(logits, out.loss.detach().double(), grads, routes)
        return got, Draw(truth, alone, alone)

    assert "failed" not in judge_as_few(run, torch.float32)


@pytest.mark.parametrize(
    "asked", ["logits", "decoder", "embeddings", "hidden states", "tuple", "no gradient"]
)
@pytest.mark.parametrize("side", SIDES)
def test_every_output_has_the_shape_of_the_batch_and_zeros_in_padding(asked, side, computed):
    documents = random_documents(LENGTHS)
    model, batch = computed(patched()), find_batch(documents, side)
    mask, labels = batch["attention_mask"] == 1, batch.pop("labels")
    row = {"input_ids": torch.cat(documents)[None].to(DEVICE), "packed_seq_lengths": LENGTHS}
    if side == "left":  # transformers counts positions from the first place of a row
        row["position_ids"] = mask.nonzero()[:, 1][None]
    if asked in ("decoder", "tuple"):
        options = {"return_dict": asked == "decoder"}
        outs = [decoder_of(model)(**given, **options)[0] for given in (batch, row)]
    elif asked == "hidden states":
        outs = [torch.stack(model(**x, output_hidden_states=True).hidden_states) for x in (batch, row)]
        outs = [out.movedim(0, 2) for out in outs]
    elif asked == "embeddings":
        embed = model.get_input_embeddings()
        given = [dict(x, inputs_embeds=embed(x["input_ids"]), input_ids=None) for x in (batch, row)]
        outs = [model(**x).logits for x in given]
    elif asked == "no gradient":
        model.eval()
        with torch.no_grad():
            outs = [model(**x, labels=None, use_cache=False).logits for x in (batch, row)]
    else:
        outs = [model(**x).logits for x in (batch, row)]
    assert computed.shapes == 2 * PACKED
    assert outs[0].shape[:2] == labels.shape
    assert torch.equal(outs[0][mask], outs[1][0])
    assert not outs[0][~mask].any()


def with_answers(auto_class, arch="llama", dtype=torch.float32, **overrides):
    config = tiny_config(arch, pad_token_id=PAD, num_labels=N_ANSWERS, **overrides)
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if auto_class is AutoModelForSequenceClassification:
        model = sequence_classifier(config)._from_config(config, **options)
    else:
        model = auto_class.from_config(config, **options)
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"
    return model.to(DEVICE, dtype).train()


def answer(model, labels, *batches):
    """The answers `[rows, labels]` of all batches, their mean loss and its gradients."""
    model.zero_grad()
    with exactly(model):
        logits = torch.cat([model(**batch).logits for batch in batches])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    grads = {name: grad.double() for name, grad in gradients(model).items()}
    return Outcome(logits.detach().double(), loss.detach().double(), grads, {})


@pytest.mark.parametrize(("arch", "side"), ON_EACH_SIDE)
def test_a_classifier_answers_every_row_as_alone(arch, side, computed):
    classifier = partial(with_answers, AutoModelForSequenceClassification, arch)
    exact, plain, model = classifier(torch.float64), classifier(), classifier()
    patch_model(model)
    computed(model)

    def run(seed):
        documents = random_documents(LENGTHS, seed=seed)
        labels = torch.randint(N_ANSWERS, (len(documents),), device=DEVICE)
        rows = [{"input_ids": document[None].to(DEVICE)} for document in documents]
        batch, other = (find_batch(documents, side, filler) | {"labels": None} for filler in (None, 1))
        positions = absolute_positions(arch, batch)
        batch, other = batch | positions, other | positions
        got, again = answer(model, labels, batch), answer(model, labels, other)
        assert torch.equal(got.logits, again.logits)
        assert all(map(torch.equal, got.grads.values(), again.grads.values()))
        draw = Draw(answer(exact, labels, *rows), answer(plain, labels, *rows), answer(plain, labels, batch))
        return got, draw

    assert "failed" not in judge_as_few(run, torch.float32)
    assert set(computed.shapes) == set(PACKED)


# What stands in padding


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("arch", "side"), ON_EACH_SIDE)
def test_what_stands_in_padding_changes_no_bit(arch, checkpointing, side):
    """Random ids, and embeddings of padding that are no numbers."""
    documents = random_documents(LENGTHS)
    model = patched(arch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: torch.where(args[0][..., None] == PAD, torch.nan, out)
    )
    expected = None
    for filler in (None, 1, 2):
        model.zero_grad()
        out = model(**find_batch(documents, side, filler))
        out.loss.backward()
        got = [out.loss, out.logits, *gradients(model).values()]
        assert all(x.isfinite().all() for x in got)
        expected = expected or got
        assert all(map(torch.equal, got, expected))


# When padding is taken out


def holes(batch):
    batch["attention_mask"][1, 7] = 0


def padding_that_predicts(batch):
    batch["labels"][0, batch["attention_mask"][0].argmax()] = 5


def padding_with_labels(batch):
    batch["labels"] = torch.where(batch["attention_mask"] == 0, PAD, batch["labels"])


def no_token(batch):
    batch["attention_mask"].zero_()


@pytest.mark.parametrize(
    ("change", "side", "why"),
    [
        (holes, "right", "padding between the tokens"),
        (padding_that_predicts, "left", "padding has labels, or predicts"),
        (padding_with_labels, "right", "padding has labels, or predicts"),
        (no_token, "right", "keeps no token"),
    ],
)
def test_a_batch_that_keeps_its_padding_is_that_of_transformers_and_reported(change, side, why, computed):
    plain, model = tiny_model("llama"), tiny_model("llama")
    patch = patch_model(model)
    batch = find_batch(random_documents(LENGTHS), side)
    change(batch)
    computed(model)
    out, expected = model(**batch), plain(**batch)
    assert computed.shapes == KEPT
    if change is not no_token:
        assert torch.allclose(out.loss, expected.loss, rtol=1e-5)
    assert "padding" in patch.report.fused
    assert why in patch.report.not_fused["padding"]
    assert patch.report.not_fused["padding"].startswith("kept in 1 batches: ")


@pytest.mark.parametrize(
    ("options", "training", "grads", "is_packed"),
    [
        ({}, True, True, True),
        ({"use_cache": False}, True, False, True),
        ({"use_cache": False}, False, False, True),
        ({"use_cache": True}, True, True, False),
        ({}, True, False, False),
        ({}, False, False, False),
        ({"past_key_values": "empty"}, True, True, False),
    ],
)
def test_where_a_cache_is_made_padding_is_kept(options, training, grads, is_packed, computed):
    model, batch = patched().train(training), find_batch(random_documents(LENGTHS), "right")
    del batch["labels"]
    computed(model)
    if "past_key_values" in options:
        options = {"past_key_values": DynamicCache()}
    with torch.set_grad_enabled(grads):
        out = model(**batch, **options)
    assert computed.shapes == (PACKED if is_packed else KEPT)
    assert (out.past_key_values is None) == is_packed


def test_it_can_be_switched_off(computed):
    model = tiny_model("llama")
    patch = patch_model(model, unpad=False)
    assert patch.report.not_fused["padding"] == "unpad=False"
    assert "padding" not in patch.report.fused
    computed(model)(**find_batch(random_documents(LENGTHS), "right"))
    assert computed.shapes == KEPT
    with pytest.raises(InputError, match="unpad is 'no'; give True or False"):
        patch_model(model, unpad="no")


@pytest.mark.parametrize("auto_class", [AutoModelForQuestionAnswering, AutoModelForTokenClassification])
def test_heads_that_score_padding_keep_it(auto_class, computed):
    model = with_answers(auto_class, classifier_dropout=0.0)
    plain = copy.deepcopy(model)
    patch = patch_model(model)
    batch = find_batch(random_documents(LENGTHS), "right")
    del batch["labels"]
    assert torch.allclose(computed(model)(**batch)[0], plain(**batch)[0], atol=1e-5)
    assert computed.shapes == KEPT
    assert "scores every place of a row" in patch.report.not_fused["padding"]


# What it costs


@pytest.fixture
def copies(monkeypatch):
    made_of = []
    start = HostCopy.__init__
    monkeypatch.setattr(HostCopy, "__init__", lambda self, x: made_of.append(x.numel()) or start(self, x))
    return made_of


def test_one_copy_comes_to_the_host_and_none_for_the_same_batch_again(copies):
    model, batch = patched(), find_batch(random_documents(LENGTHS), "right")
    labels = batch.pop("labels")
    asked_by_trl(model)
    n_tokens = labels.numel()

    def call():
        del copies[:]
        with torch.no_grad():
            model(**batch, labels=labels, use_cache=False, fused_lm_head=True)
        return [n for n in copies if n >= n_tokens]

    # the mask, whether padding has labels, and where each two rows differ
    assert call() == [n_tokens + 1 + len(LENGTHS) ** 2]
    assert call() == []
    batch["input_ids"][1, 3] += 1
    assert len(call()) == 1
    labels[1, 3] = -100
    assert len(call()) == 1
    batch["attention_mask"] = batch["attention_mask"].clone()
    assert len(call()) == 1


def test_a_mask_that_has_changed_is_read_again():
    model, batch = patched(), find_batch(random_documents(LENGTHS), "right")
    del batch["labels"]
    before = model(**batch).logits
    batch["attention_mask"][1, 20:] = 0
    after = model(**batch).logits
    assert torch.allclose(after[1, :20], before[1, :20], atol=1e-5)
    assert not after[1, 20:].any()


def test_a_batch_of_inference_mode_serves_no_training():
    model, batch = patched(), find_batch(random_documents(LENGTHS), "right")
    with torch.inference_mode():
        model(**batch, use_cache=False)
    model(**batch).loss.backward()
    assert gradients(model)
