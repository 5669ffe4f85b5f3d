"""Rows that branch: segments that continue another segment, as answers continue one prompt.

The truth is every path from a root to a segment, alone in plain transformers in float64.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import DEVICE, error, random_documents, tiny_model
from trainer_runs import asked_by_trl
from written_out import BRANCHED_OPTIONS, FORESTS, path_of, written_out_by_path

from unsloth_pack import LeakFound, patch_model, probe, verify
from unsloth_pack.attention import BACKENDS, attend, sdpa
from unsloth_pack.errors import BackendUnavailable, InputError
from unsloth_pack.memory.checkpointing import enable_checkpointing
from unsloth_pack.packed_row import describe
from unsloth_pack.packed_row.describe import describe_row
from unsloth_pack.packed_row.prefixes import group_by_prefix
from unsloth_pack.packed_row.row import PackedRow


@pytest.mark.parametrize("options", BRANCHED_OPTIONS.values(), ids=BRANCHED_OPTIONS)
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_a_branch_attends_to_its_ancestors_and_itself(forest, options):
    lengths, parent = forest
    torch.manual_seed(0)
    row = PackedRow.of_lengths(lengths, torch.device(DEVICE), parent)
    heads = [(4, 16), (2, 16), (2, 16)]
    leaves = [torch.randn(row.n_tokens, *size, dtype=torch.float64, device=DEVICE) for size in heads]
    grad = torch.randn_like(leaves[0])
    results = []
    for attention in (
        lambda *qkv: attend(*qkv, row, options, "sdpa"),
        lambda *qkv: written_out_by_path(*qkv, lengths, parent, options),
    ):
        qkv = [x.clone().requires_grad_() for x in leaves]
        out = attention(*qkv)
        results.append([out, *torch.autograd.grad(out, qkv, grad)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_positions_and_predictions_of_a_forest(forest):
    lengths, parent = forest
    row = PackedRow.of_lengths(lengths, torch.device("cpu"), parent)
    segments = [s for s, length in enumerate(lengths) for _ in range(length)]
    for i, query in enumerate(segments):
        path = path_of(query, parent)
        within = i - row.starts[query]
        assert row.positions[i] == sum(lengths[s] for s in path[:-1]) + within
        is_first = within == 0
        assert (i in row.unscored_places) == (is_first and parent[query] < 0)
        if is_first and parent[query] >= 0:
            assert row.predictors[i - 1] == row.starts[parent[query]] + lengths[parent[query]] - 1
        elif not is_first:
            assert row.predictors[i - 1] == i - 1


# Rows described by hand


def test_parents_of_several_rows_with_padding():
    lengths, parents = [[2, 1, 3], [4, 1, 1]], [[-1, 0, 0], [-1, 0, 1]]
    row = describe_row((2, 7), torch.device("cpu"), packed_seq_lengths=lengths, parents=torch.tensor(parents))
    assert row.lengths == (2, 1, 3, 1, 4, 1, 1, 1)
    assert row.parent == (-1, 0, 0, -1, -1, 4, 5, -1)
    assert row.positions.tolist() == [0, 1, 2, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 0]
    assert row.unscored_places.tolist() == [0, 6, 7, 13]
    assert row.predictors.tolist() == [0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert row.places_before_others.tolist() == [5, 12, 2]


@pytest.mark.parametrize(
    ("parents", "more", "message"),
    [
        ([-1, 0], {}, "parents of row 0 are 2 for 3 documents; give one a document, -1 for none"),
        ([[-1, 0, 0], [-1]], {}, "parents describe 2 rows of 1; give one list a row"),
        ([-1, 0, 3], {}, "parents of row 0: document 2 continues 3; give -1 to 2"),
        ([-1, -2, 0], {}, "parents of row 0: document 1 continues -2; give -1 to 2"),
        (
            [-1, 1, 0],
            {},
            "parents of row 0: document 1 does not follow 1, which it continues",
        ),
        (
            [1, -1, -1],
            {},
            "parents of row 0: document 0 does not follow 1, which it continues",
        ),
        (
            [-1, -1, 0],
            {},
            "parents of row 0: document 2 does not follow 0, which it continues",
        ),
        ([-1, 0, 0.5], {}, r"parents is \[-1, 0, 0.5\]; give one whole number a document, -1 for none"),
        ([-1, 0, 0], {"seq_idx": [0] * 8}, "parents come with packed_seq_lengths, seq_idx; give packed_seq"),
        (
            [-1, 0, 0],
            {"packed_seq_lengths": None},
            "parents come with nothing; give packed_seq_lengths alone",
        ),
    ],
)
def test_parents_that_are_no_forest_are_refused(parents, more, message):
    described = {"packed_seq_lengths": [3, 2, 2], "parents": parents, **more}
    with pytest.raises(InputError, match=f"^{message}") as refusal:
        describe_row((1, 8), torch.device("cpu"), **described)  # the last token is padding, no document
    assert len(str(refusal.value)) <= 130


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_the_loss_of_a_row_with_parents_is_that_of_its_paths(forest, training):
    """In training and evaluation; the parent's last token predicts the first of each branch."""
    lengths, parent = forest
    segments = random_documents(lengths)
    plain = tiny_model("llama", torch.float64)
    model = copy.deepcopy(plain)
    patch_model(model)
    results = []
    for run in (model, plain):
        run.train(training).zero_grad()
        if run is model:
            ids = torch.cat(segments)[None].to(DEVICE)
            out = run(input_ids=ids, labels=ids, packed_seq_lengths=list(lengths), parents=list(parent))
            loss = out.loss
            assert out.logits.shape == (1, len(ids[0]), 256)
        else:
            losses = []
            for number in range(len(lengths)):
                path = torch.cat([segments[s] for s in path_of(number, parent)])[None].to(DEVICE)
                logits, own = run(input_ids=path, use_cache=False).logits[0, :-1], path[0, 1:]
                n_own = lengths[number] - (parent[number] < 0)
                losses.append(
                    torch.nn.functional.cross_entropy(logits, own, reduction="none")[len(own) - n_own :]
                )
            loss = torch.cat(losses).mean()
        loss.backward()
        grads = {name: p.grad for name, p in run.named_parameters() if p.grad is not None}
        results.append((loss.detach(), grads))
    (loss, grads), (truth, true_grads) = results
    assert error(loss, truth) < 1e-6
    assert max(error(grads[name], true_grads[name]) for name in true_grads) < 1e-5


# Padded batches whose rows begin alike


def answers_to(prompts, answers, order=None):
    """Documents: to each prompt its answers, as lists of lengths; in random order where one is wanted."""
    drawn = iter(random_documents([*prompts, *(n for lengths in answers for n in lengths)]))
    prompts = [next(drawn) for _ in prompts]
    documents = [
        torch.cat([prompt, next(drawn)])
        for prompt, lengths in zip(prompts, answers, strict=True)
        for _ in lengths
    ]
    return documents if order is None else [documents[i] for i in order]


def batch_of(documents, side="right", first=0):
    """A padded batch; GRPO pads prompts on the left and completions on the right: `first` places."""
    longest = max(map(len, documents)) + first
    ids, mask = (torch.zeros(len(documents), longest, dtype=torch.int64) for _ in range(2))
    for row, document in enumerate(documents):
        start = first if side == "right" else longest - len(document)
        ids[row, start : start + len(document)], mask[row, start : start + len(document)] = document, 1
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def computed_tokens(model):
    """Filled with the number of tokens that go through the decoder's layers, call by call."""
    counts = []
    layer = model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[1]))
    return counts


def logits_and_gradients(model, batches, weights):
    """Logits of all tokens of the batches, and the gradients of their sum weighted by `weights`."""
    model.zero_grad()
    logits = [model(**batch, use_cache=False).logits for batch in batches]
    real = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1 for batch in batches]
    logits = torch.cat([out[mask] for out, mask in zip(logits, real, strict=True)])
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


GROUPS = {  # of answers to prompts, the order of the rows, and the tokens of prompts that are saved
    "GRPO": (((17, 9), ((4, 9, 1, 6), (3, 5, 5))), None, 3 * 17 + 2 * 9),
    "DPO": (((17, 9, 30), ((4, 9), (8, 3), (2, 2))), (0, 2, 4, 1, 3, 5), 17 + 9 + 30),
    "one prompt without a partner": (((12, 20), ((4, 9, 2), (11,))), (3, 0, 1, 2), 2 * 12),
}


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss", "qwen3", "deepseek_v3", "gemma4_text"])
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_rows_with_equal_prompts_train_as_alone(arch, group):
    """Against whole rows, which differ in sharing alone, and plain transformers, which norms in float32."""
    made_of, order, saved = group
    documents = answers_to(*made_of, order)
    plain = tiny_model(arch, torch.float64)
    whole, model = copy.deepcopy(plain), copy.deepcopy(plain)
    patch_model(whole, share_prefixes=False)
    patch = patch_model(model)
    counts, whole_counts = computed_tokens(model), computed_tokens(whole)
    n_tokens = sum(map(len, documents))
    weights = torch.randn(n_tokens, 256, dtype=torch.float64, device=DEVICE)
    alone = logits_and_gradients(plain, [{"input_ids": x[None].to(DEVICE)} for x in documents], weights)
    exact = 1e-7 if arch in ("deepseek_v3", "gpt_oss") else 1e-12  # some routers compute in float32
    for first in (0, 3):
        batch = batch_of(documents, first=first)
        logits, grads = logits_and_gradients(model, [batch], weights)
        assert (counts.pop(), counts) == (n_tokens - saved, [])
        unshared = logits_and_gradients(whole, [batch], weights)
        assert whole_counts.pop() == n_tokens
        for (truth, true_grads), bound in ((unshared, exact), (alone, 1e-5)):
            assert error(logits, truth) < bound
            assert grads.keys() == true_grads.keys()
            assert max(error(grads[name], true_grads[name]) for name in true_grads) < bound
    assert "prefixes" in patch.report.fused


def ways_to_divide(documents):
    if not documents:
        yield []
        return
    for way in ways_to_divide(documents[1:]):
        yield [[documents[0]], *way]
        yield from ([*way[:i], [documents[0], *way[i]], *way[i + 1 :]] for i in range(len(way)))


def test_groups_share_what_they_have_in_common_and_save_about_as_much_as_any():
    draw, ratios = np.random.default_rng(0), []
    for _ in range(60):
        ids = draw.integers(0, 2, (draw.integers(2, 7), 6)) * (np.arange(6) > 1)  # as behind a template
        is_equal = ids[:, None] == ids[None, :]
        common = np.where(is_equal.all(axis=-1), 6, is_equal.argmin(axis=-1))
        groups = group_by_prefix(common.copy())
        assert sorted(i for documents, _ in groups for i in documents) == list(range(len(ids)))
        assert all(common[i, j] >= n_shared for group, n_shared in groups for i in group for j in group)
        most = max(
            sum((len(group) - 1) * common[np.ix_(group, group)].min() for group in way)
            for way in ways_to_divide(list(range(len(ids))))
        )
        ratios.append(sum((len(group) - 1) * n_shared for group, n_shared in groups) / most)
    assert min(ratios) > 0.8
    assert np.mean(np.array(ratios) == 1) > 0.9


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_changing_a_branch_moves_no_bit_of_another_and_changing_the_prefix_moves_all(arch):
    model = tiny_model(arch).eval()
    patch_model(model)
    batch = batch_of(answers_to((40, 9), ((4, 9, 30), (5, 5))))
    counts, (_, prefix, others) = computed_tokens(model), (None, [0, 1, 2], [3, 4])

    def run(place=None):
        ids = batch["input_ids"].clone()
        if place is not None:
            ids[place] = 255 - ids[place]
        with torch.no_grad():
            return model(ids, attention_mask=batch["attention_mask"], use_cache=False).logits

    before = run()
    changed = run((1, 43))
    assert torch.equal(before[[0, 2, 3, 4]], changed[[0, 2, 3, 4]])
    assert torch.equal(before[1, :43], changed[1, :43])
    assert (before[1, 43:49] != changed[1, 43:49]).any(dim=-1).all()
    changed = run((prefix, 39))
    assert torch.equal(before[others], changed[others])
    assert all((before[row, 39] != changed[row, 39]).any() for row in prefix)
    assert all((before[row, 40:44] != changed[row, 40:44]).any(dim=-1).all() for row in prefix)
    assert {*counts} == {40 + 4 + 9 + 30 + 9 + 5 + 5}


def test_what_is_no_common_prefix():
    """Padding, tokens at other positions, and the last token of a row that another continues."""
    prompt, answer = random_documents([20, 9])
    one, other = torch.cat([prompt, answer]), prompt[4:]
    longest = len(one)
    model = tiny_model("llama", torch.float64)
    patch_model(model)
    counts = computed_tokens(model)

    def run(rows, starts, positions=None):
        """Rows with all of `prompt` before them, of which the mask hides what comes before their start."""
        ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest)
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[number, : len(prompt)], ids[number, start : start + len(row)] = prompt, row
            mask[number, start : start + len(row)] = 1
        batch = {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}
        if positions is not None:
            batch["position_ids"] = positions.to(DEVICE)
        logits = model(**batch).logits[batch["attention_mask"] == 1]
        alone = [model(row[None].to(DEVICE), use_cache=False).logits[0] for row in rows]
        assert error(logits, torch.cat(alone)) < 1e-6
        return counts[-1 - len(rows)]

    restarting = torch.stack([torch.arange(longest), (torch.arange(longest) - 4).clamp(min=0)])
    assert run([one, other], [0, 4], restarting) == len(one) + len(other)
    shifted = torch.stack([torch.arange(longest), torch.arange(longest) + 7])
    assert run([one, one], [0, 0], shifted) == 2 * len(one)
    assert run([one, one], [0, 0]) == len(one) + 1
    assert run([one, prompt], [0, 0]) == len(one) + 1


def test_trls_scores_of_a_row_with_parents():
    """As for whole documents, whose scores TRL's head computes."""
    (documents,) = [answers_to((17,), ((4, 9, 1),))]
    model = tiny_model("llama", torch.float64)
    patch_model(model)
    asked_by_trl(model)
    ids = torch.cat([documents[0], documents[1][17:], documents[2][17:]])[None].to(DEVICE)
    described = {"packed_seq_lengths": [17, 4, 9, 1], "parents": [-1, 0, 0, 0]}
    scores = model(input_ids=ids, labels=ids, fused_lm_head=True, **described).log_probs[0].split([20, 9, 1])
    for document, own in zip(documents, scores, strict=True):
        row = document[None].to(DEVICE)
        whole = model(input_ids=row, labels=row, packed_seq_lengths=[len(document)], fused_lm_head=True)
        torch.testing.assert_close(own, whole.log_probs[0][-len(own) :], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"logits_to_keep": 3}, "logits_to_keep leaves logits out"),
        ({"return_dict": False}, "return_dict is False"),
    ],
)
def test_a_loss_from_logits_of_branches_is_refused(options, why):
    model = tiny_model("llama")
    patch_model(model)
    (ids,) = random_documents([9])
    row = {"input_ids": ids[None].to(DEVICE), "packed_seq_lengths": [5, 4], "parents": [-1, 0], **options}
    model(**row)  # without labels there is no loss
    with pytest.raises(
        InputError, match=f"labels of a row with parents need the head: {why}; leave parents out"
    ):
        model(**row, labels=row["input_ids"])


# Planted leaks


def sees_its_sibling(q, k, v, row, options):
    """Every branch continues the segment before it."""
    parent = [s - 1 if before >= 0 else -1 for s, before in enumerate(row.parent or ())]
    return sdpa.attend(q, k, v, replace(row, parent=tuple(parent) or None, _built={}), options)


def prefix_sees_a_branch(q, k, v, row, options):
    out = sdpa.attend(q, k, v, row, options)
    if row.parent is None:
        return out
    return out.index_add(0, torch.tensor([0]), 1e-2 * v[row.starts[1]].mean().expand_as(out[:1]))


def window_ends_at_the_branch(q, k, v, row, options):
    whole = row if options.window is None else replace(row, parent=None, _built={})
    return sdpa.attend(q, k, v, whole, options)


def without_prefix(q, k, v, row, options):
    return sdpa.attend(q, k, v, replace(row, parent=None, _built={}), options)


BETWEEN, ALONE = {"leak between branches", "leak into gradients between branches"}, {"branches against alone"}


@pytest.mark.parametrize(
    ("wrong", "arch", "caught", "is_probed"),
    [
        (sees_its_sibling, "llama", BETWEEN | ALONE, True),
        (prefix_sees_a_branch, "llama", BETWEEN | ALONE, True),
        (window_ends_at_the_branch, "gemma2", ALONE, False),
        (without_prefix, "llama", BETWEEN | ALONE, True),
        ("positions off by one", "llama", ALONE, False),
    ],
)
def test_a_planted_leak_between_branches_is_caught(wrong, arch, caught, is_probed, monkeypatch):
    model = tiny_model(arch, device="cpu")
    patch_model(model)
    documents = [document.tolist() for document in random_documents([9, 1, 14])]
    assert verify(model, documents=documents).passed
    if callable(wrong):
        monkeypatch.setitem(BACKENDS, "sdpa", replace(BACKENDS["sdpa"], attend=wrong))
    else:
        right = describe.count_tokens_above

        def off_by_one(lengths, parent):
            return right(lengths, parent) + (np.array(parent) >= 0)

        monkeypatch.setattr(describe, "count_tokens_above", off_by_one)
    report = verify(model, documents=documents)
    assert {check.name for check in report.checks if not check.passed} == caught
    if is_probed:
        with pytest.raises(LeakFound, match="documents of a packed row"):
            model(**{name: x.cpu() for name, x in batch_of(answers_to((17,), ((4, 9),))).items()})
        with pytest.raises(LeakFound, match="documents of a packed row"):
            probe(model)


def test_a_model_that_does_not_attend_yet_trains(caplog):
    """As before its first update, where output projections begin as zeros."""
    plain = tiny_model("llama", lora={"tuning": "full"})
    for layer in plain.get_decoder().layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model = copy.deepcopy(plain)
    patch_model(model)
    batch = batch_of(answers_to((17,), ((4, 9),)))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss, truth = (run(**batch, labels=labels, use_cache=False).loss for run in (model, plain))
    assert error(loss, truth) < 1e-6
    assert caplog.messages == ["not probed for leaks between documents: no token reaches a later one"]


# Whatever computes the layers


def checkpointed(mode):
    return lambda model: enable_checkpointing(model, mode)


def reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


@pytest.mark.parametrize(
    ("lora", "prepare"),
    [
        ({}, checkpointed(True)),
        ({}, checkpointed("offload")),
        ({}, checkpointed("auto")),
        ({}, reentrant),
        ({"use_dora": True}, None),
        ({"lora_bias": True}, None),
    ],
    ids=["checkpointed", "offload", "auto", "reentrant", "DoRA", "bias"],
)
def test_checkpointing_and_layers_that_are_not_fused_share(lora, prepare):
    batch = batch_of(answers_to((17, 9), ((4, 9, 1), (3, 5))))
    results = []
    for shares in (True, False):
        model = tiny_model("llama", torch.float64, lora=lora)
        patch_model(model, share_prefixes=shares)
        if prepare is not None:
            prepare(model)
        counts = computed_tokens(model)
        weights = torch.randn(
            int(batch["attention_mask"].sum()), 256, generator=torch.Generator().manual_seed(0)
        )
        results.append((counts, *logits_and_gradients(model, [batch], weights.double().to(DEVICE))))
    (counts, logits, grads), (whole_counts, truth, true_grads) = results
    assert (counts[0], whole_counts[0]) == (17 + 9 + 22, 3 * 17 + 2 * 9 + 22)
    assert error(logits, truth) < 1e-12
    assert max(error(grads[name], true_grads[name]) for name in true_grads) < 1e-12


# What shares nothing, and says why


def embedded(model, batch):
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))


def noisy(model, batch):
    model.get_input_embeddings().neftune_noise_alpha = 5.0


@pytest.mark.parametrize(
    ("arch", "options", "change", "why"),
    [
        ("llama", {"share_prefixes": False}, None, "share_prefixes=False"),
        ("llama", {"unpad": False}, None, "unpad=False"),
        ("lfm2", {}, None, "a layer carries a state from token to token"),
        ("falcon_h1", {}, None, "a layer carries a state from token to token"),
        ("dynamic", {}, None, "the rotary embedding depends on the length of a document"),
        ("llama", {}, embedded, "kept in 1 batches: it comes as embeddings"),
        ("llama", {}, noisy, "kept in 1 batches: NEFTune's noise depends on the length of a document"),
    ],
)
def test_what_shares_no_prefixes_says_why(arch, options, change, why):
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    model = tiny_model("llama", **rope) if arch == "dynamic" else tiny_model(arch)
    patch = patch_model(model, **options)
    batch = batch_of(answers_to((17,), ((4, 9),)))
    if change is not None:
        change(model, batch)
    counts = computed_tokens(model)
    model(**batch)
    assert counts == [26 if "unpad" in options else 2 * 17 + 13]
    assert patch.report.not_fused["prefixes"] == why
    if change is None and not options:
        with pytest.raises(InputError, match=f"parents of a packed row: {why}; give every document whole"):
            model(batch["input_ids"][:1, :20], packed_seq_lengths=[17, 3], parents=[-1, 0])


def test_a_prefix_of_few_tokens_is_not_worth_sharing():
    model = tiny_model("llama")
    patch = patch_model(model)
    counts = computed_tokens(model)
    for n_shared, n_computed in ((3, 60), (4, 56)):  # a sixteenth is 3.75
        model(**batch_of(answers_to((n_shared,), ((30 - n_shared, 30 - n_shared),))))
        assert counts.pop() == n_computed
    assert "4 of 120 tokens saved so far" in patch.report.fused["prefixes"]
    with pytest.raises(InputError, match="share_prefixes is 1; give True or False"):
        patch_model(model, share_prefixes=1)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flash", "xformers", "sdpa"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "youtu"])  # no experts: they may choose others
def test_every_backend_shares_as_it_computes_whole_rows(arch, backend):
    """In bfloat16: no further from float64 than 1.5 times the same model without sharing."""
    documents = answers_to((300, 40), ((130, 9, 1, 64), (70, 5)))
    weights = torch.randn(sum(map(len, documents)), 256, dtype=torch.float64, device=DEVICE)
    exact = tiny_model(arch, torch.float64)
    patch_model(exact, "sdpa", share_prefixes=False)
    truth, true_grads = logits_and_gradients(exact, [batch_of(documents)], weights)
    errors = []
    for shares in (True, False):
        model = tiny_model(arch, torch.bfloat16)
        try:
            patch_model(model, backend, share_prefixes=shares)
        except BackendUnavailable as unavailable:
            pytest.skip(str(unavailable))
        counts = computed_tokens(model)
        logits, grads = logits_and_gradients(model, [batch_of(documents)], weights.bfloat16())
        assert counts[-1] == sum(map(len, documents)) - (3 * 300 + 40 if shares else 0)
        squares = sum(float((grads[n].double() - g).square().sum()) for n, g in true_grads.items())
        errors.append((error(logits.double(), truth), squares**0.5))
    assert all(shared <= 1.5 * whole for shared, whole in zip(*errors, strict=True))
