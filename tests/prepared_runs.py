"""The data and the configuration of a run, as `train` makes them before it loads a model."""

from types import SimpleNamespace

from unsloth_pack.checkpoints.loading import weight_dtype
from unsloth_pack.run.data import build_data
from unsloth_pack.run.documents import load_run_tokenizer
from unsloth_pack.run.machine import device_type
from unsloth_pack.run.resolve import with_optimizer
from unsloth_pack.run.trainer import build_config


def prepare(options):
    o = with_optimizer(options, device_type())
    config = build_config(
        o.data, o.training, o.output, weight_dtype(o.model.dtype, o.adapter.tuning == "full")
    )
    tokenizer = load_run_tokenizer(o.model.model_name, o.adapter)
    data = build_data(o.model, o.data, o.images, tokenizer, config, o.adapter.init_adapter)
    return SimpleNamespace(options=o, config=config, **tokenizer._asdict(), **vars(data))
