"""A patched model lists its modules as torch does, whatever is added, replaced or wrapped around it."""

from tiny import tiny_model
from torch import nn

from unsloth_pack import patch_model


def names(model, **options):
    return [(name, id(module)) for name, module in model.named_modules(**options)]


def test_a_change_is_seen_at_once():
    model = tiny_model("llama")
    base = model.get_base_model()
    patch_model(model)
    n_modules, n_parameters = len(names(base)), base.num_parameters()
    base.model.layers[0].extra = nn.Linear(3, 5, bias=False)
    assert len(names(base)) == n_modules + 1
    assert base.num_parameters() == n_parameters + 15
    base.model.layers[0].extra = nn.Linear(3, 7, bias=False)
    assert base.num_parameters() == n_parameters + 21
    base.model.layers[0]._modules["other"] = base.model.layers[0]._modules.pop("extra")
    assert "model.layers.0.other.weight" in dict(base.named_parameters())
    del base.model.layers[0].other
    assert len(names(base)) == n_modules
    assert base.num_parameters() == n_parameters
