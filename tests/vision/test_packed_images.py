"""Documents with images in one packed row come out as each of them alone."""

import copy

import pytest
import torch
from correctness.judge import Draw, holds, judge_as_few
from image_models import (
    ALIGNER,
    GRIDS,
    IMAGE,
    MERGE,
    MODELS,
    WAYS,
    Passes,
    axes_of,
    documents,
    images_of,
    labels_of,
    lengths_of,
    made,
    patched,
    plain_positions,
    row_of,
    run_alone,
    run_packed,
    text_and_axes,
    tower_of,
)
from tables import table
from tiny import DEVICE, error

from unsloth_pack import patch_model
from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.images import RowImages
from unsloth_pack.packed_row.row import PackedRow

each_model = pytest.mark.parametrize("name", MODELS)
each_with_grids = pytest.mark.parametrize("name", GRIDS)
SEVERAL = {
    True: [[1, (4, 4), 3], [2, (2, 4), 2, (4, 2), 1]],
    False: [[1, (1, 2), 3], [2, (1, 1), 2, (2, 1), 1]],
}


@pytest.fixture(scope="module")
def references():
    """Plain transformers, by model, what trains, dtype and seed."""
    kept = {}

    def reference(name, trained, dtype, seed):
        key = (name, trained, dtype, seed)
        if key not in kept:
            docs = documents(name, seed=seed)
            exact = run_alone(name, made(name, torch.float64, trained), docs)
            model, routes = made(name, dtype, trained), exact.routes
            on_row = run_packed(name, model, docs, routes, position_ids=plain_positions(name, docs))
            kept[key] = Draw(exact, run_alone(name, model, docs, routes), on_row)
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
        draw = references(name, trained, dtype, seed)
        return run_packed(name, model, documents(name, seed=seed), draw.truth.routes), draw

    row = judge_as_few(run, dtype)
    assert holds(row), row["failed"]


@each_model
def test_a_padded_batch_loses_its_padding(name):
    """As TRL's collator makes it: a row for each document. Two differ in their images alone."""
    docs = [doc for doc in documents(name) if len(doc.ids) > 1]
    docs.append(copy.deepcopy(next(doc for doc in docs if doc.images)))
    for image in docs[-1].images:
        image.pixels += 1
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
    if name == "gemma3" or name in GRIDS:
        types = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
        given[types] = (ids == IMAGE).int().to(DEVICE)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    out = model(**{key: value.to(DEVICE) for key, value in batch.items()}, **given)
    out.loss.backward()
    assert "taken out" in patch.report.fused["padding"]
    assert patch.report.not_fused["prefixes"] == "kept in 1 batches: images come with it"
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


@pytest.mark.parametrize(
    ("name", "static"), [*((name, False) for name in MODELS), *((name, True) for name in GRIDS)]
)
def test_generates_what_plain_generates(name, static):
    model = made(name).eval()
    docs = documents(
        name, [[3, (4, 6), 2, (2, 2), 4] if name in GRIDS else [3, (1, 2), 2, (1, 1), 4]], seed=5
    )
    given = row_of(name, model, docs)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given |= {"mm_token_type_ids": docs[0].types[None].to(DEVICE)} if name in GRIDS else {}
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    options |= dict(cache_implementation="static") if static else {}
    plain = model.generate(**given, **options)
    patch_model(model)
    assert torch.equal(model.generate(**given, **options), plain)


def mlps_of(tower):
    return [module for key, module in tower.named_modules() if key.endswith((".mlp", ".feed_forward"))]


@each_model
@pytest.mark.parametrize("trained", ["frozen tower", "aligner", "tower"])
def test_a_frozen_tower_runs_no_backward_pass(name, trained):
    """Whatever hooks a trainer has set."""
    model, docs = patched(name, torch.float32, trained), documents(name)
    tower = tower_of(model)
    first = tower.patch_embed if name in GRIDS else tower.get_input_embeddings()
    first.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    model.enable_input_require_grads()
    mlps = tower.blocks if name in GRIDS else mlps_of(tower)
    passes = Passes(mlps)
    row = row_of(name, model, docs)
    model(**row, packed_seq_lengths=lengths_of(docs), labels=labels_of(docs)[None]).loss.backward()
    assert passes.number == (len(mlps) if trained == "tower" else 0)
    got = any(p.grad is not None for key, p in model.named_parameters() if any(a in key for a in ALIGNER))
    assert got == (trained == "aligner")


@each_model
@pytest.mark.parametrize("loss", ["pixels", "all"])
def test_a_row_that_has_lost_its_images_is_refused(name, loss):
    model, docs = patched(name), documents(name, SEVERAL[name in GRIDS])
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


GRID = "qwen3_vl"


@each_with_grids
def test_every_description_means_the_same(name):
    model, docs = patched(name, torch.float64), documents(name)
    lengths, longest = lengths_of(docs), max(lengths_of(docs))
    ends, ids = torch.tensor([0, *lengths]).cumsum(0).int(), row_of(name, model, docs)["input_ids"]
    given = [
        {"packed_seq_lengths": torch.tensor(lengths)},
        {"position_ids": text_and_axes(docs)},
        {"position_ids": text_and_axes(docs)[1:], "packed_seq_lengths": lengths},
        {"position_ids": text_and_axes(docs)[:1, 0]},
        dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest),
        dict(packed_seq_lengths=lengths, mm_token_type_ids=(ids == IMAGE).int()),
    ]
    outcomes = [run_packed(name, model, docs, **describe) for describe in given]
    for outcome in outcomes[1:]:
        assert torch.equal(outcome.logits, outcomes[0].logits)
        assert outcome.loss == outcomes[0].loss


# Positions on three axes


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
@pytest.mark.parametrize("seed", range(20))
def test_axes_are_those_of_transformers(name, seed):
    """Document by document; images that touch each other it cannot tell apart."""
    generator = torch.Generator().manual_seed(seed)

    def number(least, most):
        return int(torch.randint(least, most + 1, (), generator=generator))

    parts = []
    for _ in range(number(1, 6)):
        part = [number(1, 5)] if number(0, 2) else []
        for _ in range(number(0, 3)):
            part += [(MERGE * number(1, 5), MERGE * number(1, 5)), number(1, 4)]
        parts.append(part or [1])
    docs = documents(name, parts, seed)
    row = PackedRow.of_lengths(tuple(lengths_of(docs)), torch.device("cpu"))
    ids, grids = torch.cat([doc.ids for doc in docs]), torch.cat([doc.grids for doc in docs]).numpy()
    grids //= [1, MERGE, MERGE]
    images = RowImages.locate((ids == IMAGE).numpy(), grids.prod(axis=1), row)
    axes = torch.from_numpy(images.axes(row, grids))
    assert torch.equal(axes, torch.cat([axes_of(doc) for doc in docs], dim=1))
    inner = made(name).get_base_model().model
    theirs = [inner.get_rope_index(doc.ids[None], doc.types[None], doc.grids)[0][:, 0] for doc in docs]
    assert torch.equal(axes, torch.cat(theirs, dim=1))


# What is refused


def call(model, docs, **changed):
    given = row_of(GRID, model, docs) | {"packed_seq_lengths": lengths_of(docs)} | changed
    return model(**{key: value for key, value in given.items() if value is not None})


def wrong_axes(docs):
    axes = text_and_axes(docs)
    axes[2, 0, -1] += 1
    return axes


def late_axes(docs, axis=slice(1, 4), document=slice(None)):
    is_late = torch.zeros(4, len(docs), dtype=torch.int64)
    is_late[axis, document] = 1
    lengths = torch.tensor(lengths_of(docs))
    return text_and_axes(docs) + is_late.repeat_interleave(lengths, dim=1)[:, None].to(DEVICE)


def grids_of(docs):
    return torch.cat([doc.grids for doc in docs])


REFUSED = {  # what of a call differs, and what is said
    "no grids": ({"image_grid_thw": None}, "a packed row comes with images but no image_grid_thw"),
    "grids of others": (
        lambda docs: {"image_grid_thw": grids_of(docs) * torch.tensor([1, 1, 2])},
        "pixel_values holds",
    ),
    "an image less": (
        lambda docs: {"image_grid_thw": docs[0].grids, "pixel_values": docs[0].pixels},
        "a row holds",
    ),
    "a boundary inside an image": (
        lambda docs: {"packed_seq_lengths": [3, sum(lengths_of(docs)) - 3]},
        "do not stand side by side in one document",
    ),
    "other axes": (lambda docs: {"position_ids": wrong_axes(docs)}, "leave them out, or make them agree"),
    "a document whose width starts late": (
        lambda docs: {"position_ids": late_axes(docs, axis=3, document=1)},
        "position_ids of document 1 start at [0, 0, 1]",
    ),
    "videos": (lambda docs: {"pixel_values_videos": docs[0].pixels}, "only images are packed"),
}


@each_with_grids
def test_axes_of_several_documents_without_boundaries_are_refused(name):
    """transformers would run them as one document."""
    model, docs = patched(name), documents(name)
    axes = text_and_axes(docs)[1:]
    lost = {"packed_seq_lengths": None, "position_ids": axes}
    with pytest.raises(InputError, match=r"start over 5 times inside a row, and nothing says where"):
        call(model, docs, **lost)
    with pytest.raises(InputError, match="start over 5 times"):
        call(model, docs, **lost, attention_mask=torch.ones(axes.shape[1:], dtype=torch.int64, device=DEVICE))
    call(model, docs[2:3], packed_seq_lengths=None, position_ids=text_and_axes(docs[2:3])[1:])


@table("case", REFUSED)
def test_refused(case):
    model, docs = patched("qwen3_vl"), documents("qwen3_vl", [[1, (4, 4), 3], [2, (2, 4), 2]])
    change, said = REFUSED[case]
    with pytest.raises(InputError) as caught:
        call(model, docs, **(change(docs) if callable(change) else change))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
