"""The list of private names of other libraries is up to date, and the installed libraries have them all."""

import pytest
import torch

from tools.private_names import LIBRARIES, find_names, sources
from unsloth_pack.cli.doctor import TESTED, PrivateName, missing_names, private_names


def test_the_list_is_up_to_date():
    """Which names other than those with an underscore are exported depends on the installed releases."""
    found = find_names(sources())
    listed = {(each.owner, each.name): {*each.files} for each in private_names()}
    by_name = [
        {name: files for (_, name), files in some.items() if name[0] == "_"} for some in (found, listed)
    ]
    assert by_name[0] == by_name[1], "run python -m tools.private_names"
    assert {each.owner.partition(".")[0] for each in private_names()} == {*LIBRARIES} <= TESTED.keys()


def test_every_listed_name_is_there():
    assert missing_names(private_names()) == []


PLANTED = """
import torch
import torch._dynamo as dynamo
from transformers import Trainer
from trl.chat_template_utils import has_generation_markers

class Own(Trainer):
    def __init__(self, model):
        self._mine = torch.cuda._sleep
        self._parameters = getattr(model, "_tied_weights_keys", None)

    def _get_grad_norm(self):
        return self._save_checkpoint + super()._clip_grad_norm() + self._mine + f"_total_{self}"

def _helper(module: "Own"):
    return module._parameters, module._mine, Trainer._hidden, "a _b", "_kernel", module._replace(x=1), _helper
"""


def test_names_that_are_found():
    found = find_names({"a.py": PLANTED})
    private = {"torch.cuda": ["_sleep"], "transformers.Trainer": ["_hidden"]}
    private["torch.nn.modules.module"] = ["_parameters"]
    private["transformers.modeling_utils"] = ["_tied_weights_keys"]
    private["transformers.trainer"] = ["_get_grad_norm", "_save_checkpoint", "_clip_grad_norm"]
    private["trl.chat_template_utils"] = ["has_generation_markers"]
    assert found == {(owner, name): {"a.py"} for owner, names in private.items() for name in names}
    with pytest.raises(LookupError, match="have _theirs; add"):
        find_names({"a.py": "model._theirs"})


@pytest.mark.parametrize(
    ("owner", "name", "is_there"),
    [
        ("torch.nn.modules.module", "_modules", True),
        ("torch.nn.modules.module", "_module", False),  # a part of a name
        ("torch", "_scaled_mm", True),
        ("torch.ops.aten", "_unsafe_view", True),
        ("torch.ops.aten", "_no_such_view", False),
        ("no_such_library.module", "_name", False),
    ],
)
def test_names_that_are_gone(owner, name, is_there):
    wanted = PrivateName(owner, name, ())
    assert missing_names([wanted]) == ([] if is_there else [wanted])


def test_what_needs_cuda_is_not_sought_without(monkeypatch):
    wanted = PrivateName("torch._C", "_cuda_no_such_name", ())
    for version, missing in ((None, []), ("13.0", [wanted])):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert missing_names([wanted]) == missing
