"""A patched model walks over its modules as torch does, whatever is added, replaced or wrapped around it."""

from tiny import tiny_model
from torch import nn

from unsloth_pack import patch_model
from unsloth_pack.modules import list_modules


def test_walks_see_what_torchs_own_see():
    model = tiny_model("llama")
    patch_model(model)
    layers = model.get_base_model().model.layers
    layers[0].twice = layers[1].mlp  # at two paths
    layers[0].nothing, layers[0].empty = None, nn.ModuleList()
    assert [*dict.fromkeys(list_modules(model))] == [*model.modules()]
    assert [*map(id, model.parameters())] == [id(p) for _, p in model.named_parameters()]
    assert not [*model.parameters(recurse=False)]


def test_modes_are_set_wherever_a_module_has_another():
    model = tiny_model("llama")
    patch_model(model)
    late = model.get_base_model().model.layers[1].late = nn.Dropout().eval()
    assert model.train() is model
    assert late.training
    model.eval()
    assert not any(module.training for module in model.modules())


def test_weights_are_counted_as_transformers_counts_them():
    model, plain = tiny_model("llama").get_base_model(), tiny_model("llama").get_base_model()
    patch_model(model)
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert (
            model.num_parameters(**options)
            == model.num_parameters(**options)
            == plain.num_parameters(**options)
        )
    model.model.layers[0].extra = nn.Linear(3, 5, bias=False)
    assert model.num_parameters() == plain.num_parameters() + 15
