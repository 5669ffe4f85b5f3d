"""Install everything that a patch changes outside its model, and take it back with the last patch."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.memory.checkpointing import GiveBackSpareMemory
from unsloth_pack.patching import refusals
from unsloth_pack.patching.trainer_hooks import deferred_logging, optimizer
from unsloth_pack.patching.trainer_hooks.check_collator import CheckCollatorCallback
from unsloth_pack.patching.trainer_hooks.prefetch import PrefetchCallback


class FindTrlCallback(TrainerCallback):
    """Replace the methods of TRL's trainer when a trainer is made: a patch does not import TRL."""

    def on_init_end(self, *_: Any, **__: Any) -> None:
        HOOKS.replace_methods()


_TRAINER = "transformers.trainer", "Trainer"
_SFT_TRAINER = "trl.trainer.sft_trainer", "SFTTrainer"
_PEFT_MODEL = "peft.peft_model", "PeftModel"
# Our function gets the original, then the method's own arguments. It leaves unpatched models to the original.
Method = tuple[str, str, str]  # module, class, name
METHODS: dict[Method, tuple[Callable[..., Any], str]] = {
    (*_TRAINER, "create_optimizer"): (optimizer.create_optimizer, "join an adapter's weights"),
    (*_TRAINER, "_clip_grad_norm"): (optimizer.clip_grad_norm, "clip the joined gradient"),
    (*_TRAINER, "_get_grad_norm"): (optimizer.get_grad_norm, "take the joined gradient's norm"),
    (*_SFT_TRAINER, "compute_loss"): (deferred_logging.compute_loss, "sum metrics on the GPU"),
    (*_SFT_TRAINER, "log"): (deferred_logging.log, "read these sums when they are logged"),
    (*_SFT_TRAINER, "_maybe_log_save_evaluate"): (
        deferred_logging.log_save_evaluate,
        "write a log line once the next update is launched",
    ),
    (*_SFT_TRAINER, "_inner_training_loop"): (deferred_logging.train, "write the last line after an error"),
    (*_PEFT_MODEL, "__init__"): (refusals.init_peft_model, "refuse adapters that join documents"),
    (*_PEFT_MODEL, "add_adapter"): (refusals.add_adapter, "refuse adapters that join documents"),
}
# Of every trainer that is made meanwhile
CALLBACKS: dict[type[TrainerCallback], str] = {
    GiveBackSpareMemory: "free GPU memory when training ends",
    CheckCollatorCallback: "refuse collators that drop where documents end",
    deferred_logging.NanFilterCallback: "do not wait for the loss of every step",
    PrefetchCallback: "load batches while the GPU computes",
    FindTrlCallback: "replace TRL's methods once TRL is imported",
}
_INHERITED = object()


class TrainerHooks:
    """All changes outside a model: `METHODS` and `CALLBACKS`, in force while anybody has them installed."""

    def __init__(self) -> None:
        self._n_users = 0
        self._replaced: dict[Method, tuple[Any, Any]] = {}  # the class's own attribute, and ours

    def install(self) -> None:
        """Put the changes in force, until as many calls of `uninstall`."""
        self._n_users += 1
        callbacks: Any = DEFAULT_CALLBACKS
        callbacks.extend(callback for callback in CALLBACKS if callback not in callbacks)
        self.replace_methods()

    def replace_methods(self) -> None:
        """Replace the methods of the libraries that are imported by now, if the changes are in force."""
        for method, (function, _) in METHODS.items() if self._n_users else ():
            owner, name = _owner(method), method[-1]
            if owner is not None and method not in self._replaced:
                ours = _bind(function, getattr(owner, name))
                self._replaced[method] = vars(owner).get(name, _INHERITED), ours
                setattr(owner, name, ours)

    def uninstall(self) -> None:
        """Take all changes back, if nobody else has them installed."""
        self._n_users -= 1
        if self._n_users:
            return
        callbacks: Any = DEFAULT_CALLBACKS
        callbacks[:] = [callback for callback in callbacks if callback not in CALLBACKS]
        for method, (original, ours) in [*self._replaced.items()]:
            owner, name = _owner(method), method[-1]
            if vars(owner).get(name) is not ours:
                continue  # wrapped by another library since; ours stays below, and is not put in twice
            del self._replaced[method]
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def _owner(method: Method) -> Any:
    """The class of a method, or None while its module is not imported."""
    return getattr(sys.modules.get(method[0]), method[1], None)


def _bind(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    return method


HOOKS = TrainerHooks()
