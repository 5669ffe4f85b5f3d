"""Train the vision demo's base model from nothing, in about ten minutes on one core.

    python -m tools.build_vision_demo

It learns to name the shapes of a picture, to say in words where they are, and to write JSON about shapes that
are given in words. It is never asked for JSON about a picture, which is what the demo's fine-tune teaches.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    get_wsd_schedule,
)

from unsloth_pack import VisionDataCollator, patch_model
from unsloth_pack.demo import VISION_MODEL_DIR
from unsloth_pack.demo.evaluate import exact_match
from unsloth_pack.demo.pictures import (
    CELL,
    MOST_CELLS,
    Row,
    Scene,
    Shape,
    Turn,
    heldout_scenes,
    picture_row,
    scenes,
    turns,
)
from unsloth_pack.images.processor import VisionProcessor
from unsloth_pack.images.tokens import IMAGE_TOKENS

TOKENS = IMAGE_TOKENS["qwen3_vl"]
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PATCH = CELL // 2  # two by two patches make a token, which is then one cell
CHAT_TEMPLATE = """\
{%- macro write(content) -%}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ write(message.content or '') }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ (call.function or call) | tojson }}{% endfor -%}
<|im_end|>{% endgeneration %}
{%- else %}{{ write(message.content) }}<|im_end|>{% endif %}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


# How often each task is drawn, and the chance of a further one about the same picture. An answer may then
# follow others, so that it is not learned as what stands at one place of a text.
CAPTION = "Name the shapes."
SHARES = {"caption": 3, "words": 0.5, "where": 1, "list": 2}
FURTHER = 0.5


def caption(scene: Scene) -> str:
    """The shapes in words: "small red circle top left, large blue square middle right"."""

    def word(words: tuple[str, str, str], place: int, count: int) -> str:
        return words[0] if place == 0 else words[2] if place == count - 1 else words[1]

    return ", ".join(
        f"{shape.size} {shape.name} {word(('top', 'middle', 'bottom'), shape.row, scene.rows)} "
        f"{word(('left', 'center', 'right'), shape.column, scene.columns)}"
        for shape in scene.shapes
    )


def caption_row(scene: Scene) -> Row:
    """A row of the base model's task."""
    return picture_row(scene, turns(CAPTION, caption(scene)))


def turns_of(task: str, scene: Scene, rng: Random) -> list[Turn]:
    """The questions of a task about a picture, and their answers."""
    boxes = [f"{shape.name} {_box(scene, shape)}" for shape in scene.shapes]
    match task:
        case "caption":
            return turns(CAPTION, caption(scene))
        case "list":
            return turns("Where are the shapes?", "; ".join(boxes))
        case "words":
            return turns(f"As JSON: {'; '.join(boxes)}", scene.dense_caption())
    names = [shape.name for shape in scene.shapes]
    alone = [shape for shape in scene.shapes if names.count(shape.name) == 1]
    rng.shuffle(alone)
    asked = [turns(f"Where is the {shape.name}?", _box(scene, shape)) for shape in alone]
    return [turn for each in asked for turn in each] or turns(CAPTION, caption(scene))


def _box(scene: Scene, shape: Shape) -> str:
    return " ".join(map(str, scene.thousandths(shape)))


def base_rows(seed: int) -> Iterator[Row]:
    """Endless conversations about pictures; no held-out picture is among them."""
    rng, held_out = Random(seed + 1000), {*heldout_scenes()}
    for scene in scenes(seed):
        if scene in held_out:
            continue
        tasks: list[str] = []
        while not tasks or (len(tasks) < len(SHARES) and rng.random() < FURTHER):
            (task,) = rng.choices([*SHARES], [*SHARES.values()])
            tasks += [task] if task not in tasks else []
        said = [turn for task in tasks for turn in turns_of(task, scene, rng)]
        yield picture_row(scene, said) if tasks != ["words"] else {"messages": said, "images": []}


def train_tokenizer(rows: Iterable[Row]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that splits digits, with the special tokens of Qwen3-VL."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, START, END, *TOKENS.texts],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [turn["content"] for row in rows for turn in row["messages"]]
    bpe.train_from_iterator([*texts, *["user\n", "assistant\n"] * 100], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, *TOKENS.texts],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_processor(tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig) -> VisionProcessor:
    """One token for each cell of a picture, whose size stays as it is."""
    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    image_processor = Qwen2VLImageProcessorPil(min_pixels=CELL**2, max_pixels=(16 * CELL) ** 2, **sizes)
    # transformers' AutoProcessor loads nothing without one
    of_videos = {"video_processor_type": "Qwen3VLVideoProcessor", **sizes}
    return VisionProcessor(image_processor, tokenizer, tokenizer.chat_template, config, of_videos)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """An untrained Qwen3-VL of 0.8 million parameters."""
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    ids = {name: tokenizer.get_vocab()[text] for name, text in zip(names, TOKENS.texts, strict=True)}
    width, side = 128, 2 * MOST_CELLS
    text = dict(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=width,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.08,  # 1 / sqrt(hidden_size); so narrow a model learns slowly from 0.02
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters=dict(
            rope_type="default", rope_theta=100.0, mrope_section=[6, 5, 5], mrope_interleaved=True
        ),
    )
    vision = dict(
        depth=2,
        num_heads=2,
        hidden_size=64,
        intermediate_size=128,
        patch_size=PATCH,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=width,
        num_position_embeddings=side**2,
        deepstack_visual_indexes=[0],
        initializer_range=0.08,
    )
    config = AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    table = model.model.visual.pos_embed.weight
    with torch.no_grad():
        table.copy_(position_table(side, table.shape[1]))
    return model


def position_table(side: int, width: int) -> torch.Tensor:
    """`[side * side, width]` waves over rows and over columns: places that the tower can read from the start.

    Drawn small and at random, as the model does it, they are lost beside the patches.
    """
    places, frequencies = torch.linspace(0, 1, side), torch.arange(1, width // 4 + 1)
    angles = torch.pi / 2 * places[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    down = waves[:, None].expand(side, side, -1)
    across = waves[None].expand(side, side, -1)
    return 3 * torch.cat([down, across], dim=-1).reshape(side * side, width)


def train(
    model: Any, processor: VisionProcessor, rows: Iterator[Row], heldout: list[Row], steps: int, batch: int
) -> None:
    """Train every weight in place on packed rows, printing the loss and the held-out exact match."""
    patch = patch_model(model)
    collate = VisionDataCollator(model, processor, train_on_responses_only=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    falling = steps * 4 // 9
    schedule = get_wsd_schedule(optimizer, 100, falling, num_stable_steps=steps - falling - 100)
    losses, started = [], time.perf_counter()
    model.train()
    for step in range(1, steps + 1):
        loss = model(**collate([*islice(rows, batch)]), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            mean = sum(losses) / len(losses)
            losses.clear()
            print(f"step {step:5d}  loss {mean:.4f}  {time.perf_counter() - started:.0f} s", flush=True)
        if step % 500 == 0 or step == steps:
            print(f"exact match {exact_match(model, processor, heldout).score:.3f}", flush=True)
    patch.undo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=VISION_MODEL_DIR, help="the folder that gets the model")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=16, help="conversations of a step, packed into one row")
    args = parser.parse_args()

    torch.manual_seed(0)
    heldout = [caption_row(scene) for scene in heldout_scenes()]
    tokenizer = train_tokenizer(islice(base_rows(seed=5), 3000))
    model = new_model(tokenizer)
    processor = new_processor(tokenizer, model.config)
    print(f"{model.num_parameters():,} parameters")
    train(model, processor, base_rows(seed=7), heldout, args.steps, args.batch)

    model = model.to(torch.bfloat16)
    result = exact_match(model, processor, heldout)
    for miss in [generation for generation in result.generations if generation.answer != generation.expected][
        :5
    ]:
        print(f"missed {miss.expected!r}, got {miss.answer!r}")
    print(f"exact match in bfloat16 {result.score:.3f}")
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
