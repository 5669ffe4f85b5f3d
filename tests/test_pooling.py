"""One embedding or one score for each document of a packed row, from models without a head for it."""

import pytest
import torch
from tiny import DEVICE, find_batch, gradients, random_documents, tiny_config, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel

from unsloth_pack import InputError, patch_model, pool_documents

LENGTHS = [[5, 40, 1, 17], [9, 2, 30, 6]]  # of anchors, and of what belongs to them


class Embedder(nn.Module):
    """Called as the losses of sentence-transformers call a model: a batch in, `sentence_embedding` out."""

    def __init__(self, how, is_patched=True):
        super().__init__()
        torch.manual_seed(0)
        config = tiny_config("qwen3", pad_token_id=0)
        self.model, self.how = AutoModel.from_config(config, attn_implementation="sdpa").double(), how
        if is_patched:
            patch_model(self.model)
        self.to(DEVICE).train()

    def forward(self, features):
        lengths = features.get("packed_seq_lengths")
        hidden = self.model(**features).last_hidden_state
        if lengths is not None:
            return {"sentence_embedding": pool_documents(hidden, lengths, self.how)}
        mask = features["attention_mask"]
        weights = mask if self.how == "mean" else mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
        weights = weights / weights.sum(1, keepdim=True)
        return {"sentence_embedding": (hidden * weights[..., None]).sum(1)}


def ranking_loss(model, columns):
    """Rank the text that belongs to each anchor above the others: two calls of the model, then one loss."""
    anchors, others = (F.normalize(model(dict(each))["sentence_embedding"], dim=1) for each in columns)
    return F.cross_entropy(20 * anchors @ others.T, torch.arange(len(anchors), device=DEVICE))


@pytest.mark.parametrize("how", ["last", "mean"])
def test_embeddings_train_alike_padded_and_packed(how):
    texts = [random_documents(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]
    padded = [find_batch(documents, "right") for documents in texts]
    for batch in padded:
        del batch["labels"]
    tail = torch.full((3,), 7)
    packed = [
        {"input_ids": torch.cat([*documents, tail])[None].to(DEVICE), "packed_seq_lengths": lengths}
        for documents, lengths in zip(texts, LENGTHS, strict=True)
    ]
    results = []
    for columns, is_patched in ((padded, False), (padded, True), (packed, True)):
        model = Embedder(how, is_patched)
        loss = ranking_loss(model, columns)
        loss.backward()
        results.append([loss.detach(), *gradients(model).values()])
    for ours in results[1:]:
        for one, plain in zip(ours, results[0], strict=True):
            torch.testing.assert_close(one, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["last", "mean"])
def test_no_number_of_another_document_or_of_padding_is_read(how):
    hidden = torch.randn(2, 6, 3, dtype=torch.float64)
    lengths = [[2, 4], [1, 3]]
    expected = pool_documents(hidden, lengths, how)
    hidden[0, :2] = hidden[1, 4:] = torch.nan
    pooled = pool_documents(hidden.requires_grad_(), lengths, how)
    assert torch.equal(pooled[1:], expected[1:])
    assert pooled[0].isnan().all()
    pooled[1:].sum().backward()
    assert not hidden.grad[0, :2].any()
    assert not hidden.grad[1, 4:].any()


def test_a_reranker_reads_the_logits_of_the_last_tokens_alone():
    """Causal rerankers compare the logits of two tokens there, such as those of yes and no."""
    model, plain = tiny_model("qwen3", torch.float64), tiny_model("qwen3", torch.float64)
    patch_model(model)
    documents = random_documents(LENGTHS[0])
    last = torch.tensor(LENGTHS[0]).cumsum(0).to(DEVICE) - 1
    ids = torch.cat(documents)[None].to(DEVICE)
    out = model(input_ids=ids, packed_seq_lengths=LENGTHS[0], logits_to_keep=last).logits
    assert out.shape[:2] == (1, 4)
    expected = torch.stack([plain(input_ids=each[None].to(DEVICE)).logits[0, -1] for each in documents])
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4, 2], "first"), "how is 'first'; give 'last' or 'mean'"),
        (([4, 9],), "of 6 tokens; give the length of each"),
        ((None,), "packed_seq_lengths is None; give the lengths"),
    ],
)
def test_what_cannot_be_pooled_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        pool_documents(torch.zeros(1, 6, 3), *arguments)
    with pytest.raises(InputError, match=r"shape \[6, 3\]; give \[B, T, C\]"):
        pool_documents(torch.zeros(6, 3), [6])
