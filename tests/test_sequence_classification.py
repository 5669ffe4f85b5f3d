"""Heads that answer once per document of a packed row, against transformers over each document alone.

Weights are in float64; what remains are the angles, which transformers computes in float32.
"""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recorded_graphs import graphs_of, lengths_of
from tiers import ARCHITECTURES, COVER
from tiny import (
    DEVICE,
    error,
    exactly,
    find_batch,
    gradients,
    random_documents,
    sequence_classifier,
    tiny_config,
)
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments, default_data_collator

from unsloth_pack import patch_model
from unsloth_pack.errors import InputError
from unsloth_pack.packing import pack_dataset
from unsloth_pack.patching.patch import patch_of

LENGTHS = [5, 40, 1, 17, 30]
N_LABELS = 4
EVERY = [
    pytest.param(arch, marks=[] if arch in COVER or arch == "qwen3" else [pytest.mark.nightly])
    for arch in ARCHITECTURES
]
TARGETS = {
    "single_label_classification": torch.tensor([3, 0, 2, 2, 1]),
    "multi_label_classification": (torch.arange(20).view(5, 4) % 3 == 0).double(),
    "regression": torch.linspace(-2, 2, 20, dtype=torch.float64).view(5, 4),
    "reward": torch.linspace(-2, 2, 5, dtype=torch.float64),  # a regression with one label
}


def classifier(arch="llama", n_labels=N_LABELS, **overrides):
    """A model of transformers in float64 whose weights depend on the arguments alone."""
    config = tiny_config(arch, **{"pad_token_id": 0, "num_labels": n_labels, **overrides})
    torch.manual_seed(0)
    model = sequence_classifier(config)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    return model.to(DEVICE, torch.float64).train()


def patched(*args, **overrides):
    model = classifier(*args, **overrides)
    patch_model(model)
    return model


def packed(documents, **more):
    return {
        "input_ids": torch.cat(documents)[None].to(DEVICE),
        "packed_seq_lengths": [len(document) for document in documents],
        **more,
    }


def alone(model, documents):
    """The answers `[documents, labels]` to each document in a batch of its own."""
    return torch.cat([model(input_ids=document[None].to(DEVICE)).logits for document in documents])


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", EVERY)
def test_every_document_is_answered_as_alone(arch):
    documents, labels = random_documents(LENGTHS), TARGETS["single_label_classification"].to(DEVICE)
    plain, model = classifier(arch), patched(arch)
    with exactly(plain), exactly(model):
        expected = alone(plain, documents)
        F.cross_entropy(expected, labels).backward()
        out = model(**packed(documents), labels=labels)
        out.loss.backward()
    assert_equal(out.logits, expected)
    assert_equal(out.loss, F.cross_entropy(expected, labels))
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("problem", TARGETS)
def test_losses_are_those_of_transformers_over_a_padded_batch(problem):
    n_labels = 1 if problem == "reward" else N_LABELS
    config = {"problem_type": "regression" if problem == "reward" else problem}
    documents, labels = random_documents(LENGTHS), TARGETS[problem].to(DEVICE)
    batch = find_batch(documents, "right") | {"labels": labels}
    plain, model = (make("llama", n_labels, **config) for make in (classifier, patched))
    expected, as_padded = plain(**batch), model(**batch)
    # `default_data_collator` puts a dimension of rows in front
    for given in (labels, labels[None]):
        out = model(**packed(documents), labels=given)
        assert_equal(out.loss, expected.loss)
        assert_equal(out.logits, expected.logits)
    assert_equal(as_padded.loss, expected.loss)
    wide = model(**packed(documents), labels=labels, num_items_in_batch=torch.tensor(4 * labels.numel()))
    assert_equal(4 * wide.loss, expected.loss)


def test_rows_with_padding_and_texts_that_end_with_the_padding_token():
    """A text whose EOS pads too is answered before it, and one of padding alone at its first token."""
    documents = random_documents([6, 4, 3, 5, 2])
    documents[1][2:] = 0
    documents[4][:] = 0
    expected = alone(classifier(), documents)
    rows = [torch.cat(documents[:2]), torch.cat(documents[2:])]
    tails = [torch.full((12 - len(row),), 7) for row in rows]  # padding need not be `pad_token_id`
    ids = torch.stack([torch.cat(pair) for pair in zip(rows, tails, strict=True)]).to(DEVICE)
    out = patched()(input_ids=ids, packed_seq_lengths=[[6, 4], [3, 5, 2]])
    assert_equal(out.logits, expected)
    without = patched(pad_token_id=None)
    assert_equal(
        without(input_ids=ids, packed_seq_lengths=[[6, 4], [3, 5, 2]]).logits,
        alone(classifier(pad_token_id=None), documents),
    )
    embeds = without.get_input_embeddings()(ids)
    embedded = without(inputs_embeds=embeds, packed_seq_lengths=[[6, 4], [3, 5, 2]], return_dict=False)
    assert_equal(embedded[0], alone(classifier(pad_token_id=None), documents))


def test_another_document_moves_no_bit_of_an_answer():
    documents, model = random_documents(LENGTHS), patched()
    report = patch_of(model).report
    assert report.fused["answers"].startswith("one for each document")
    assert "loss" not in report.fused | report.not_fused  # of tokens
    before = model(**packed(documents)).logits
    documents[1] = (documents[1] + 1) % 256
    after = model(**packed(documents)).logits
    assert torch.equal(before[[0, 2, 3, 4]], after[[0, 2, 3, 4]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("shape", [(1, 93), (4,), (5, 3)])
def test_labels_of_tokens_or_of_other_documents_are_refused(shape):
    message = r"labels have shape .* and the row 5 documents; give one label each"
    with pytest.raises(InputError, match=message):
        patched()(**packed(random_documents(LENGTHS)), labels=torch.zeros(shape, dtype=torch.int64))


def test_a_captured_decoder_answers_too(monkeypatch):
    """Graphs replay the decoder alone; the head reads what they return."""
    model, documents = patched(), random_documents(LENGTHS)
    expected, replayed = model(**packed(documents)).logits, []

    def replay(decoder, row, inputs, wants_router):
        replayed.append(decoder._packed_forward(row, inputs, None).last_hidden_state)
        return SimpleNamespace(hidden=replayed[-1], router_logits=None)

    monkeypatch.setattr(model.model, "step_graphs", SimpleNamespace(why_never=None, replay=replay))
    out = model(**packed(documents), labels=TARGETS["single_label_classification"].to(DEVICE))
    assert len(replayed) == 1
    assert torch.equal(out.logits, expected)


@pytest.mark.gpu
def test_captured_steps_train_as_uncaptured_ones():
    models = []
    for why_never in (None, "for comparison"):
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS")
        base = classifier("qwen3").to(torch.bfloat16)
        model = get_peft_model(base, config, autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
        patch_model(model, "flash")
        graphs_of(model).why_never = why_never
        models.append(model)
    for step in range(10):
        documents = random_documents(lengths_of(step), seed=step)
        labels = torch.arange(len(documents), device=DEVICE) % N_LABELS
        losses = []
        for model in models:
            model.zero_grad()
            losses.append(model(**packed(documents), labels=labels).loss)
            losses[-1].backward()
        assert abs(float(losses[0] - losses[1])) < 0.02
        ours, theirs = map(gradients, models)
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            assert error(ours[name].double(), grad.double()) < 0.05, name
    assert str(graphs_of(models[0])).startswith("captured for")


def test_trainer_over_packed_rows_takes_the_mean_over_the_documents_of_an_update(tmp_path):
    """Rows hold other numbers of documents, and an update accumulates over two of them."""
    import datasets

    documents, labels = random_documents(LENGTHS), TARGETS["single_label_classification"]
    rows = [
        {"input_ids": ids.tolist(), "labels": [int(label)]}
        for ids, label in zip(documents, labels, strict=True)
    ]
    packed_rows = pack_dataset(datasets.Dataset.from_list(rows), 48)
    assert sorted(map(len, packed_rows["labels"])) == [2, 3]
    assert all(len(row["labels"]) == len(row["seq_lengths"]) for row in packed_rows)
    model, plain = patched(), classifier()
    F.cross_entropy(alone(plain, documents), labels.to(DEVICE)).backward()
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "report_to": "none"}
    options |= {"disable_tqdm": True, "use_cpu": DEVICE == "cpu", "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Trainer(model, arguments, default_data_collator, packed_rows).train()
    for name, grad in gradients(plain).items():
        moved = before[name] - dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(moved, grad, rtol=1e-4, atol=1e-6)
