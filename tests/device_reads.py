"""What would wait for a GPU, counted on a CPU, where nothing waits."""

import sys
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

_READS = {"tolist", "cpu", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__"}
_SCALAR = "_local_scalar_dense"  # below `item`, `bool`, `int` and comparisons in an `if`, from C++ too
_SIZED = {"nonzero", "masked_select", "unique", "_unique2"}  # the size of their result comes from the device


class _Methods(TorchFunctionMode):
    def __init__(self, places):
        super().__init__()
        self._places = places

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in _READS:
            self._places.append(_caller())
        return function(*args, **kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, places):
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        is_copy = name == "lift_fresh"  # a tensor made of a number, which goes to the device next
        if name == _SCALAR or name in _SIZED or is_copy:
            self._places.append(_caller())
        return function(*args, **kwargs or {})


def _caller():
    """Where Python code other than torch's asked for it."""
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}:{frame.f_lineno}"


@contextmanager
def counted_reads():
    """The places, inside this context, that read a tensor on the host, or make one of a number."""
    places = []
    with _Methods(places), _Operations(places):
        yield places


# What reads on the host, or copies that were started before the decoder
ON_THE_HOST = {"check_labels", "prepare_head_inputs", "count", "pinned", "leave_out", "check_counts"}


class Reads(TrainerCallback):
    """The functions that read a tensor in a step after the first."""

    functions = frozenset()

    def on_step_begin(self, args, state, control, **_):
        self.inside = counted_reads() if state.global_step else None
        self.places = self.inside.__enter__() if self.inside else ()

    def on_step_end(self, args, state, control, **_):
        if self.inside:
            self.inside.__exit__(None, None, None)
            self.functions |= {place.split(":")[1] for place in self.places}
