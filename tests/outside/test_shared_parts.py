"""Models that share modules: a policy and its reward model, or two adapters' models over one decoder."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from unsloth_pack import InputError, patch_model

LENGTHS = [6, 9, 12]


@pytest.fixture
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


def heads_over_one_decoder(model, folder):
    """Two heads that see the very same decoder."""
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other.model = model.model
    rewards = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    rewards.model = model.model
    return {"language": other, "rewards": rewards, "decoder": model.model}


def leaks(model):
    """Whether the last document's logits change with the first document."""
    ids = torch.randint(3, 250, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    others = ids.clone()
    others[0, : LENGTHS[0]] += 1
    with torch.no_grad():
        one, two = (model(input_ids=row, packed_seq_lengths=LENGTHS).logits for row in (ids, others))
    return not torch.equal(one[0, LENGTHS[0] :], two[0, LENGTHS[0] :])


@pytest.mark.parametrize("other", ["language", "rewards", "decoder"])
def test_a_decoder_takes_one_patch(other, model, model_folder):
    """Undoing one of two would leave the other handing rows to a decoder that passes over them."""
    sharer = heads_over_one_decoder(model, model_folder)[other]
    patch = patch_model(model)
    with pytest.raises(InputError, match="patched already"):
        patch_model(sharer)
    assert not leaks(model)
    patch.undo()
    with patch_model(sharer):
        if other == "language":
            assert not leaks(sharer)
        with pytest.raises(InputError, match="patched already"):
            patch_model(model)
    assert not leaks_when_patched(model)


def leaks_when_patched(model):
    with patch_model(model):
        return leaks(model)


def test_a_decoder_that_was_put_in_later(model, model_folder):
    """The patched model must not run the decoder that it had, nor hand rows to one that passes over them."""
    patch = patch_model(model)
    model.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).model
    with pytest.raises(InputError, match="patch_model"):
        leaks(model)
    patch.undo()
    assert not leaks_when_patched(model)
