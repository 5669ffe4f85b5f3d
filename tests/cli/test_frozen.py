"""What is asked to train, and is frozen or trained otherwise by another option."""

from pathlib import Path

import pytest

TOKENS = "tokens.txt"
FROZEN = {
    "saved": (
        {"modules_to_save": "mlp", "freeze_modules": "layers.1.mlp.up_proj"},
        "modules_to_save trains model.layers.1.mlp.up_proj, and freeze_modules freezes it",
    ),
    "new tokens' head": (
        {"add_tokens": TOKENS, "freeze_modules": "lm_head"},
        "add_tokens trains lm_head, and freeze_modules freezes it; freeze less",
    ),
    "tokens": (
        {"trainable_token_indices": 5, "freeze_modules": "embed_tokens"},
        "trainable_token_indices trains model.embed_tokens, and freeze_modules freezes it",
    ),
}


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_frozen_and_asked_to_train(case, refused, untied, monkeypatch):
    monkeypatch.setattr("unsloth_pack.checkpoints.loading.load_model", None)
    Path(TOKENS).write_text("<a>\n")
    flags, says = FROZEN[case]
    assert says in refused(model_name=untied, **flags)


@pytest.mark.parametrize(
    ("tuning", "base", "flags"),
    [
        ("lora", "untied", {"train_modules": "layers.0", "freeze_modules": "mlp"}),
        ("lora", "untied", {"trainable_token_indices": 5, "freeze_modules": "lm_head"}),
        ("full", "untied", {"add_tokens": TOKENS, "freeze_modules": "lm_head"}),
    ],
    ids=str,
)
def test_what_is_frozen_beside_what_trains(tuning, base, flags, train, request):
    Path(TOKENS).write_text("<a>\n")
    assert (
        train("--packing", model_name=request.getfixturevalue(base), tuning=tuning, max_steps=1, **flags) == 0
    )


@pytest.mark.parametrize(
    ("asked", "base", "trains"),
    [
        ("add_tokens", "tied", "modules_to_save"),
        ("trainable_token_indices", "untied", "train_modules"),
        ("trainable_token_indices", "tied", "modules_to_save"),
    ],
)
def test_rows_of_what_trains_as_a_whole(asked, base, trains, request, refused, monkeypatch):
    monkeypatch.setattr("unsloth_pack.checkpoints.loading.load_model", None)
    Path(TOKENS).write_text("<a>\n")
    given = {"add_tokens": TOKENS, "trainable_token_indices": 3}
    folder = request.getfixturevalue(base)
    line = refused(model_name=folder, **{asked: given[asked], trains: "embed_tokens"})
    assert f"{trains} names " in line
    assert f"embed_tokens, and {asked} trains single rows of its weight; leave one of them out" in line
    if base == "tied":
        line = refused(model_name=folder, **{asked: given[asked], trains: "lm_head"})
        assert f"{trains} names lm_head, and {asked} trains single rows of its weight" in line
