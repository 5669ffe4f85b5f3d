"""Losses of sentence-transformers over a patched model train it as an untouched one."""

import pytest
import torch
from model_folder import byte_tokenizer
from tiny import error, gradients, tiny_config
from transformers import AutoModel

from unsloth_pack import patch_model

pytestmark = pytest.mark.extras
TEXTS = ["two plus two is four", "hello", "a long story of people who talk", "x y z", "another thing here"]
ROWS = [TEXTS[start:] + TEXTS[:start] for start in range(3)]
SCORES = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.2], dtype=torch.float64)
LOSSES = {  # the columns of text that each takes, and its labels
    "MultipleNegativesRankingLoss": (2, None),
    "CachedMultipleNegativesRankingLoss": (2, None),  # computes every text twice, in small batches
    "CoSENTLoss": (2, SCORES),
    "TripletLoss": (3, torch.zeros(5)),
}


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_sentence_transformers(name, pooling, tmp_path):
    from sentence_transformers import SentenceTransformer, losses, models

    torch.manual_seed(0)
    AutoModel.from_config(tiny_config("qwen3", vocab_size=258)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    n_columns, labels = LOSSES[name]
    results = []
    for is_patched in (False, True):
        body = models.Transformer(str(tmp_path))
        body.auto_model.double()
        if is_patched:
            patch_model(body.auto_model)
        pool = models.Pooling(body.get_embedding_dimension(), pooling_mode=pooling)
        embedder = SentenceTransformer(modules=[body, pool], device="cpu").train()
        options = {"mini_batch_size": 2} if name.startswith("Cached") else {}
        columns = [embedder.tokenize(texts) for texts in ROWS[:n_columns]]
        loss = getattr(losses, name)(embedder, **options)(columns, labels)
        loss.backward()
        results.append([loss.detach(), *gradients(body.auto_model).values()])
    for plain, ours in zip(*results, strict=True):
        assert error(ours, plain) < 1e-6  # the losses themselves compute in float32
