"""Adapters that are put on a patched model later: those that would let documents see each other are refused.

A patch knows the adapters that are there. What PEFT puts around the patched model afterwards acts before a
call enters it: virtual tokens shift the documents, and positions that would tell them apart are dropped. PEFT
has no hook for this, so `PeftModel.__init__` and `add_adapter` are wrapped, once. Models that are not patched
take any adapter.
"""

from functools import wraps
from typing import Any

from peft import PeftModel
from torch import nn

from unsloth_pack.forwards.decoder import FastDecoder
from unsloth_pack.patching.refusals import refuse_adapters

_WRAPPED = "unsloth_pack_later_adapters"


def refuse_later_adapters(peft_class: type[PeftModel] = PeftModel) -> None:
    """Wrap what puts an adapter on a model, if that has not been done."""
    if vars(peft_class).get(_WRAPPED):
        return
    theirs: Any = peft_class
    make, add = theirs.__init__, theirs.add_adapter

    @wraps(make)
    def made(
        self: Any, model: Any, peft_config: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> None:
        _refuse(model, adapter_name, peft_config)
        make(self, model, peft_config, adapter_name, *args, **kwargs)

    @wraps(add)
    def add_adapter(self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(self, adapter_name, peft_config)
        return add(self, adapter_name, peft_config, *args, **kwargs)

    theirs.__init__, theirs.add_adapter = made, add_adapter
    setattr(peft_class, _WRAPPED, True)


def _refuse(model: nn.Module, adapter_name: str, peft_config: Any) -> None:
    if any(isinstance(module, FastDecoder) for module in model.modules()):
        refuse_adapters({adapter_name: peft_config})
