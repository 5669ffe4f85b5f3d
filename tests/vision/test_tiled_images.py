"""Documents with images in one packed row come out as each of them alone: models with ordinary positions."""

import copy

import pytest
import torch
from correctness.judge import Draw, holds, judge_as_few
from test_wrappers import WRAPPERS
from tiled_models import (
    ALIGNER,
    IMAGE,
    MODELS,
    PATCH,
    SIDE,
    documents,
    images_of,
    made,
    positions,
    row_of,
    run_alone,
    run_packed,
)
from tiny import DEVICE, error
from transformers.models.pixtral import modeling_pixtral
from vision_models import WAYS, Passes, labels_of

from unsloth_pack import patch_model
from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.row import PackedRow

each_model = pytest.mark.parametrize("name", MODELS)


def lengths_of(docs):
    return [len(doc.ids) for doc in docs]


def patched(name, *args):
    model = made(name, *args)
    patch_model(model)
    return model


@pytest.fixture(scope="module")
def references():
    """Plain transformers, by model, what trains, dtype and seed."""
    kept = {}

    def reference(name, trained, dtype, seed):
        key = (name, trained, dtype, seed)
        if key not in kept:
            docs = documents(name, seed=seed)
            exact = run_alone(name, made(name, torch.float64, trained), docs)
            model = made(name, dtype, trained)
            on_row = run_packed(name, model, docs, position_ids=positions(docs))
            kept[key] = Draw(exact, run_alone(name, model, docs), on_row)
        return kept[key]

    return reference


@each_model
@pytest.mark.parametrize(("trained", "dtype", "checkpointing"), WAYS)
def test_packed_is_as_right_as_each_document_alone(name, trained, dtype, checkpointing, references):
    model = patched(name, dtype, trained)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()

    def run(seed):
        return run_packed(name, model, documents(name, seed=seed)), references(name, trained, dtype, seed)

    row = judge_as_few(run, dtype)
    assert holds(row), row["failed"]


@each_model
def test_a_padded_batch_loses_its_padding(name):
    """As TRL's collator makes it: a row for each document."""
    docs = [doc for doc in documents(name) if len(doc.ids) > 1]
    truth = run_alone(name, made(name, torch.float64), docs)
    model = made(name, torch.float64)
    patch = patch_model(model)
    longest = max(lengths_of(docs))
    ids, mask, labels = (torch.zeros(len(docs), longest, dtype=torch.int64) for _ in range(3))
    labels -= 100
    for number, doc in enumerate(docs):
        n = len(doc.ids)
        ids[number, :n], mask[number, :n], labels[number, :n] = doc.ids, 1, labels_of([doc])
    given, leaves = images_of(name, model, docs, requires_grad=True)
    if name in ("idefics3", "smolvlm"):
        given = batched(docs, leaves)
    if name == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).int().to(DEVICE)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    out = model(**{key: value.to(DEVICE) for key, value in batch.items()}, **given)
    out.loss.backward()
    assert "taken out" in patch.report.fused["padding"]
    assert error(out.loss.detach().double().cpu(), truth.loss) < 1e-6
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    grads["pixel_values"] = torch.cat([leaf.grad.flatten() for leaf in leaves])
    assert grads.keys() == truth.grads.keys()
    for key, grad in grads.items():
        assert error(grad.double().cpu(), truth.grads[key]) < 1e-5, key


def batched(docs, leaves):
    """`[B, tiles, ...]`: documents with fewer tiles than another get tiles of zeros."""
    rows = [sum(len(image.pixels) for image in doc.images) for doc in docs]
    by_row = torch.cat(leaves).split(rows)
    masks = torch.cat([image.mask for doc in docs for image in doc.images]).to(DEVICE).split(rows)
    pixels, seen = (
        torch.stack([torch.cat([one, one.new_zeros(max(rows) - len(one), *one.shape[1:])]) for one in each])
        for each in (by_row, masks)
    )
    return {"pixel_values": pixels, "pixel_attention_mask": seen}


@each_model
def test_no_bit_of_another_document_moves(name):
    """Another document's image or text changed; the changed one's own logits must move."""
    model, docs = patched(name).eval(), documents(name)

    def logits(changed):
        with torch.no_grad():
            row = row_of(name, model, changed)
            return model(**row, packed_seq_lengths=lengths_of(docs)).logits[0].split(lengths_of(docs))

    before = logits(docs)
    for number, doc in enumerate(docs):
        changed = copy.deepcopy(docs)
        for image in changed[number].images:
            image.pixels += 1
        if not doc.images:
            changed[number].ids = (doc.ids + 1) % 290
        moved = [not torch.equal(a, b) for a, b in zip(before, logits(changed), strict=True)]
        assert moved == [other == number for other in range(len(docs))]


@each_model
def test_the_loss_of_a_document_reaches_its_own_pixels_alone(name):
    model, docs = patched(name, torch.float64, "all"), documents(name)
    given, leaves = images_of(name, model, docs, requires_grad=True)
    given["input_ids"] = row_of(name, model, docs)["input_ids"]
    parts = model(**given, packed_seq_lengths=lengths_of(docs)).logits[0].split(lengths_of(docs))
    owners = [number for number, doc in enumerate(docs) for _ in doc.images]
    for number, part in enumerate(parts):
        grads = torch.autograd.grad(part.square().sum(), leaves, retain_graph=True, materialize_grads=True)
        assert [bool(grad.any()) for grad in grads] == [owner == number for owner in owners]


@each_model
def test_swapped_images_are_seen(name):
    model, docs = patched(name).eval(), documents(name, [[1, (1, 1), 3], [2, (1, 1), 2]])
    swapped = copy.deepcopy(docs)
    swapped[0].images, swapped[1].images = docs[1].images, docs[0].images
    with torch.no_grad():
        right, wrong = (
            model(**row_of(name, model, given), packed_seq_lengths=lengths_of(docs)).logits[0]
            for given in (docs, swapped)
        )
    behind_images = len(docs[0].ids) - 3
    assert torch.equal(right[:1], wrong[:1])
    moved = ~torch.isclose(right, wrong).all(dim=-1)
    assert moved[behind_images : len(docs[0].ids)].all()


@each_model
def test_a_row_of_text_alone(name):
    model, docs = made(name, torch.float64), documents(name, [[5], [1], [9]])
    truth = run_alone(name, model, docs)
    patch_model(model)
    assert error(run_packed(name, model, docs).logits, truth.logits) < 1e-6


@each_model
def test_undone_bit_for_bit(name):
    model, docs = made(name, torch.float32, "all"), documents(name)
    answers = run_packed(name, model, docs, position_ids=positions(docs))  # transformers sets hooks in it
    before = {key: type(module) for key, module in model.named_modules()}
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    patch = patch_model(model)
    run_packed(name, model, docs)
    patch.undo()
    assert {key: type(module) for key, module in model.named_modules()} == before
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes
    again = run_packed(name, model, docs, position_ids=positions(docs))
    assert torch.equal(answers.logits, again.logits)


@each_model
def test_generates_what_plain_generates(name):
    model = made(name).eval()
    docs = documents(name, [[3, (1, 2), 2, (1, 1), 4]], seed=5)
    given = row_of(name, model, docs)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    plain = model.generate(**given, **options)
    patch_model(model)
    assert torch.equal(model.generate(**given, **options), plain)


# The tower


def tower_of(model):
    inner = model.get_base_model().model
    return inner.vision_model if hasattr(inner, "vision_model") else inner.vision_tower


def mlps_of(tower):
    return [module for key, module in tower.named_modules() if key.endswith((".mlp", ".feed_forward"))]


@each_model
@pytest.mark.parametrize("trained", ["frozen tower", "aligner", "tower"])
def test_a_frozen_tower_runs_no_backward_pass(name, trained):
    """Whatever hooks a trainer has set."""
    model, docs = patched(name, torch.float32, trained), documents(name)
    tower = tower_of(model)
    tower.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    model.enable_input_require_grads()
    mlps = mlps_of(tower)
    passes = Passes(mlps)
    row = row_of(name, model, docs)
    model(**row, packed_seq_lengths=lengths_of(docs), labels=labels_of(docs)[None]).loss.backward()
    assert passes.number == (len(mlps) if trained == "tower" else 0)
    got = any(p.grad is not None for key, p in model.named_parameters() if any(a in key for a in ALIGNER))
    assert got == (trained == "aligner")


def test_a_tower_of_sizes_makes_no_mask_of_all_patches(monkeypatch):
    model, docs = patched("mistral3"), documents("mistral3")
    monkeypatch.setattr(modeling_pixtral, "generate_block_attention_mask", None)
    run_packed("mistral3", model, docs)


def test_a_tower_off_by_one_is_seen(monkeypatch):
    """An image that ends a patch late."""
    model, docs = made("mistral3", torch.float64), documents("mistral3")
    truth = run_alone("mistral3", model, docs)
    patch_model(model).skip_probe()
    of_lengths = PackedRow.of_lengths

    def shifted(lengths, device):
        return of_lengths((lengths[0] + 1, lengths[1] - 1, *lengths[2:]), device)

    monkeypatch.setattr(PackedRow, "of_lengths", shifted)
    assert error(run_packed("mistral3", model, docs).logits, truth.logits) > 1e-3


def test_a_tower_with_dropout_attends_as_transformers_does():
    model, docs = made("mistral3", torch.float64).eval(), documents("mistral3")
    truth = run_alone("mistral3", model, docs)
    tower_of(model).config.attention_dropout = 0.1
    patch = patch_model(model)
    assert "attention_dropout is 0.1" in patch.report.not_fused["tower"]
    assert error(run_packed("mistral3", model, docs).logits, truth.logits) < 1e-6


# What is refused

SEVERAL = [[1, (1, 2), 3], [2, (1, 1), 2, (2, 1), 1]]


def without(name):
    return lambda row: row.pop(name)


def replaced(name, change):
    def act(row):
        row[name] = change(row[name])

    return act


def _cut(row):
    row["packed_seq_lengths"] = [3, sum(row["packed_seq_lengths"]) - 3]


def _shifted(row):  # one tile of the second document would go to the first
    first, second = row["packed_seq_lengths"]
    row["packed_seq_lengths"] = [first + 5, second - 5]


def _embeddings(row):
    row["inputs_embeds"] = torch.zeros(*row.pop("input_ids").shape, 64)


def _zeros(row):
    row["pixel_values"][:, 1] = 0


_SAID_OF_ZEROS = {  # pixels on a GPU are not looked at, which would wait for it: their number is wrong
    "cpu": "image 1 of pixel_values is zeros, which the model takes for padding",
    "cuda": "an image of zeros counts as padding",
}
REFUSED = {
    ("llava_onevision", "several images a document"): (
        without("batch_num_images"),
        "batch_num_images is not given, it has to hold the number of images",
    ),
    ("llava_onevision", "wrong counts"): (
        replaced("batch_num_images", lambda counts: counts.flip(0)),
        "batch_num_images is [2, 1]",
    ),
    ("llava_onevision", "counts of floats"): (
        replaced("batch_num_images", lambda counts: counts.float()),
        "one whole number a document, from 0",
    ),
    ("llava_onevision", "a size less"): (
        replaced("image_sizes", lambda sizes: sizes[:-1]),
        "pixel_values holds 3 images, image_sizes 2",
    ),
    ("mistral3", "no sizes"): (without("image_sizes"), "comes with images but no image_sizes"),
    ("mistral3", "no pixels"): (without("pixel_values"), "comes with images but no pixel_values"),
    ("mistral3", "sizes of nothing"): (
        replaced("image_sizes", lambda sizes: sizes * 0),
        "[images, 2] whole numbers of pixels, from 1",
    ),
    ("mistral3", "larger than its pixels"): (
        replaced("image_sizes", lambda sizes: sizes * 2),
        "give the sizes that the model's processor has made",
    ),
    ("mistral3", "sizes of others"): (
        replaced("image_sizes", lambda sizes: sizes[[1, 0, 2]]),
        "document 0 of a row ends inside image 1",
    ),
    ("mistral3", "pixels of a list"): (replaced("pixel_values", list), "pixel_values is list"),
    ("idefics3", "four dimensions"): (
        replaced("pixel_values", lambda pixels: pixels[0]),
        "give a tensor of 5 dimensions",
    ),
    ("idefics3", "zeros"): (_zeros, _SAID_OF_ZEROS[DEVICE]),
    ("idefics3", "a mask alone"): (without("pixel_values"), "comes with images but no pixel_values"),
    ("idefics3", "a tile less"): (replaced("pixel_values", lambda pixels: pixels[:, 1:]), "a row holds"),
    ("internvl", "a tile less"): (replaced("pixel_values", lambda pixels: pixels[1:]), "a row holds"),
    ("internvl", "a document ends inside a tile"): (_cut, "document 0 of a row ends inside image 0"),
    ("internvl", "a boundary late"): (_shifted, "document 0 of a row ends inside image 2"),
    ("internvl", "embeddings"): (_embeddings, "give input_ids"),
    ("gemma3", "another size"): (
        replaced("pixel_values", lambda pixels: pixels[:, :, :-4]),
        "pixel_values is [3, 3, 12, 16], the tower takes images of 16 x 16",
    ),
    ("gemma3", "an image less"): (replaced("pixel_values", lambda pixels: pixels[1:]), "a row holds"),
    ("gemma3", "types of others"): (
        replaced("token_type_ids", lambda types: types.roll(1, 1)),
        "token_type_ids of token 1 is not 1, its id is that of an image",
    ),
    ("gemma3", "types without images"): (
        replaced("token_type_ids", lambda types: types * 0 + 1),
        "token_type_ids of token 0 is 1, its id is not that of an image",
    ),
    ("gemma3", "types of some"): (
        replaced("token_type_ids", lambda types: types[:, 1:]),
        "token_type_ids is [1, 20], the input ids [1, 21]",
    ),
    ("gemma3", "types of a list"): (
        replaced("token_type_ids", lambda types: types.tolist()),
        "token_type_ids is list",
    ),
    ("gemma3", "a document ends inside an image"): (_cut, "document 0 of a row ends inside image 0"),
    ("gemma3", "videos"): (
        lambda row: row.update(pixel_values_videos=row["pixel_values"]),
        "comes with pixel_values_videos; only images are packed, as pixel_values",
    ),
    ("internvl", "videos"): (
        lambda row: row.update(pixel_values_videos=row["pixel_values"]),
        "comes with pixel_values_videos; only images are packed, as pixel_values",
    ),
    ("idefics3", "features"): (
        lambda row: row.update(image_hidden_states=row["pixel_values"]),
        "comes with image_hidden_states; only images are packed, as pixel_values",
    ),
}


@each_model
@pytest.mark.parametrize("loss", ["pixels", "all"])
def test_a_row_that_has_lost_its_images_is_refused(name, loss):
    model, docs = patched(name), documents(name, SEVERAL)
    row = (
        row_of(name, model, docs)
        if loss == "pixels"
        else {"input_ids": row_of(name, model, docs)["input_ids"]}
    )
    row.pop("pixel_values", None)
    n_tokens = int((row["input_ids"] == IMAGE).sum())
    with pytest.raises(InputError) as caught:
        model(**row, packed_seq_lengths=lengths_of(docs))
    holds = f"a packed row holds {n_tokens} image tokens and comes without pixel_values"
    assert any(said in str(caught.value) for said in (holds, "comes with images but no pixel_values"))
    assert "\n" not in str(caught.value)


def test_counts_of_several_documents_without_boundaries_are_refused():
    model, docs = patched("llava_onevision"), documents("llava_onevision", SEVERAL)
    with pytest.raises(InputError, match="batch_num_images is of 2 documents, the input ids have 1 rows"):
        model(**row_of("llava_onevision", model, docs))


@pytest.mark.parametrize(("name", "case"), REFUSED)
def test_refused(name, case):
    model, docs = patched(name), documents(name, SEVERAL)
    row = row_of(name, model, docs) | {"packed_seq_lengths": lengths_of(docs)}
    if case == "a tile less":
        row.pop("pixel_attention_mask", None)
    change, said = REFUSED[name, case]
    change(row)
    with pytest.raises(InputError) as caught:
        model(**row)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_counts_of_other_documents_are_refused():
    docs = documents("llava_onevision", [[(1, 1), (1, 1), 1], [(1, 1), 1, (1, 1), (1, 1)]])
    model = patched("llava_onevision")
    row = row_of("llava_onevision", model, docs) | {"packed_seq_lengths": lengths_of(docs)}
    with pytest.raises(
        InputError, match=r"batch_num_images is \[3, 2\], the documents of the row hold \[2, 3\]"
    ):
        model(**row | {"batch_num_images": [3, 2]})
    model(**row | {"batch_num_images": [2, 0, 3]})


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5"])
@pytest.mark.parametrize("argument", ["pixel_values", "pixel_values_videos"])
def test_models_that_pack_text_alone_say_so(name, argument):
    model = WRAPPERS[name](torch.float32)
    patch_model(model)
    row = {"input_ids": torch.tensor([[5, IMAGE, 6, 7]]), argument: torch.zeros(1, 3, SIDE, PATCH)}
    with pytest.raises(InputError) as caught:
        model(**row, packed_seq_lengths=[2, 2])
    said = str(caught.value)
    assert f"a packed row comes with {argument}; a {type(model).__name__} packs rows of text alone" in said
    assert "give such examples unpacked" in said
