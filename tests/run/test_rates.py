"""Learning rates by name are refused where they would never apply."""

import pytest
from model_folder import save_model
from tables import table

from unsloth_pack.config import TrainOptions, changed, read_record
from unsloth_pack.errors import InputError
from unsloth_pack.run.model import load_run_model
from unsloth_pack.run.optimizer import rates_of
from unsloth_pack.training.optimizers import check_rates


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False))


def refusal(folder, **given):
    of_model = {"model_name": folder, "max_seq_length": 64, "dtype": "float32"}
    o = changed(TrainOptions(), read_record({**of_model, **given}, "given"))
    try:
        check_rates(load_run_model(o.model, o.adapter), rates_of(o.training, o.images))
    except InputError as error:
        return str(error)
    return ""


@table(
    ("given", "says"),
    [
        ({"learning_rates": {"layers.0": 1, "layers": 1}}, ""),
        ({"learning_rates": {"lm_head": 1}}, "learning_rates 'lm_head' is 1, and no weight that it is for"),
        ({"learning_rates": {"lm_head": 1}, "target_modules": "lm_head,q_proj"}, ""),
        ({"embedding_learning_rate": 1}, "embedding_learning_rate is 1, and no weight"),
        ({"embedding_learning_rate": 1, "modules_to_save": "embed_tokens"}, ""),
        (
            {"learning_rates": {"no_such": 1}, "embedding_learning_rate": 1},
            "learning_rates 'no_such' is 1, and no weight",
        ),
    ],
)
def test_rates_of_what_trains_and_of_what_does_not(given, says, folder):
    told = refusal(folder, **given)
    assert says in told
    assert bool(told) == bool(says)
    assert told.count("\n") == (len(given) == 2 and "no_such" in told)  # all at once
