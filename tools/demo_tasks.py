"""The demo's text: word games that the base model is trained on, and new commands for a fine-tune to teach.

Every row is a dict of `instruction`, `input` and `output` (the alpaca columns), drawn from a `random.Random`,
so a seed gives the same rows everywhere. Lengths are log-normal: most lists are short, a few fill hundreds of
tokens.

The base tasks are a small grammar: select words, then order them, then write them in some form. The tasks of
the fine-tune give new names to compositions that the base knows in other words or not at all, and ask for new
forms of answer.
"""

import math
import string
from collections.abc import Callable, Iterator
from random import Random

from unsloth_pack.demo import Row, user_text

KINDS = {
    "animal": "cat dog cow hen owl fox ant bee rat pig yak bat elk emu ape hog ram cod eel jay mole deer "
    "bear wolf",
    "fruit": "fig lime plum pear kiwi date apple peach mango lemon melon grape cherry olive guava papaya "
    "banana quince lychee apricot currant coconut sloe pomelo",
    "colour": "red blue green pink gray black white brown gold teal navy tan beige ivory amber coral cyan "
    "mauve maroon purple violet silver scarlet khaki",
    "tool": "saw axe hammer drill pliers rake hoe spade shovel wrench file vice knife ladder brush nail "
    "screw bolt clamp chisel level awl mallet lathe",
    "garment": "hat cap coat shoe sock boot shirt skirt dress glove scarf belt vest tie jeans robe gown "
    "cloak apron shawl tunic sandal jacket sweater",
    "vehicle": "car bus van truck bike tram train boat ship ferry canoe kayak raft sled jeep taxi cab yacht "
    "scooter wagon cart barge plane glider",
}
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words.split()}
WORDS = list(KIND_OF)


def base_rows(seed: int) -> Iterator[Row]:
    """Endless rows of the tasks that the base model knows."""
    return _rows(seed, BASE_TASKS)


def finetune_rows(seed: int) -> Iterator[Row]:
    """Endless rows of the commands that a fine-tune teaches."""
    return _rows(seed, FINETUNE_TASKS)


def distinct(rows: Iterator[Row], count: int, seen: set[str]) -> list[Row]:
    """The next `count` rows whose prompts are not in `seen`; their prompts are added to it."""
    taken: list[Row] = []
    while len(taken) < count:
        row = next(rows)
        prompt = user_text(row)
        if prompt not in seen:
            seen.add(prompt)
            taken.append(row)
    return taken


def _rows(seed: int, tasks: dict[Callable[[Random], Row], int]) -> Iterator[Row]:
    rng = Random(seed)
    while True:
        (task,) = rng.choices(list(tasks), weights=list(tasks.values()))
        yield task(rng)


def _length(rng: Random, longest: int) -> int:
    """A list's length: log-normal, median 10, at least 3."""
    return min(longest, max(3, round(rng.lognormvariate(math.log(10), 0.85))))


def _words(rng: Random, longest: int = 120) -> list[str]:
    return rng.sample(WORDS, _length(rng, longest))


def _letters(rng: Random) -> list[str]:
    return rng.sample(string.ascii_lowercase, rng.randint(3, 10))


def _row(instruction: str, label: str, items: str, output: str) -> Row:
    return {"instruction": instruction, "input": f"{label}: {items}", "output": output}


def _sentence(steps: list[str]) -> str:
    text = ", then ".join(steps)
    return f"{text[0].upper()}{text[1:]}."


# Base tasks


def _word_pipeline(rng: Random) -> Row:
    words = _words(rng)
    steps, result = [], words
    select, reverse, form = rng.choice(SHAPES)
    if select:
        step, result = _select(rng, result)
        steps.append(step)
    if reverse:
        steps.append(rng.choice(["reverse the words", "write the words backwards"]))
        result = result[::-1]
    output = " ".join(result)
    if form:
        step, output = _form(rng, result)
        steps.append(step)
    return _row(_sentence(steps or ["copy the words"]), "words", " ".join(words), output)


# The stages of a pipeline, out of three: one stage is drawn as often as two.
SHAPES = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]


def _select(rng: Random, words: list[str]) -> tuple[str, list[str]]:
    kind = KIND_OF[rng.choice(words)]
    kept = [word for word in words if KIND_OF[word] == kind]
    rest = [word for word in words if KIND_OF[word] != kind]
    choices = [
        (f"keep the {kind}s", kept),
        ("drop the first word", words[1:]),
        ("drop the last word", words[:-1]),
    ]
    if rest:
        choices.append((f"drop the {kind}s", rest))
    return rng.choice(choices)


def _form(rng: Random, words: list[str]) -> tuple[str, str]:
    tag = rng.choice(WORDS)
    return rng.choice(
        [
            ("join them with commas", ", ".join(words)),
            ("join them with dashes", " - ".join(words)),
            ("write each twice", " ".join(f"{word} {word}" for word in words)),
            ("name the kind of each", " ".join(KIND_OF[word] for word in words)),
            (f"put them in a {tag} tag", f"<{tag}> {' '.join(words)} </{tag}>"),
        ]
    )


def _letter_pipeline(rng: Random) -> Row:
    letters = _letters(rng)
    order, result = rng.choice(
        [
            ("", letters),
            ("reverse the letters", letters[::-1]),
            ("sort the letters", sorted(letters)),
            ("sort the letters backwards", sorted(letters, reverse=True)),
        ]
    )
    capitals = not order or rng.random() < 0.4
    steps = [step for step in (order, "write them in capitals" if capitals else "") if step]
    output = " ".join(result)
    return _row(_sentence(steps), "letters", " ".join(letters), output.upper() if capitals else output)


def _replace(rng: Random) -> Row:
    words = _words(rng)
    old, new = rng.choice(words), rng.choice([word for word in WORDS if word not in words])
    return _row(
        f"Replace {old} with {new}.",
        "words",
        " ".join(words),
        " ".join(new if word == old else word for word in words),
    )


def _ends(rng: Random) -> Row:
    words = _words(rng)
    instruction, output = rng.choice(
        [
            ("Give the first word.", words[0]),
            ("Give the last word.", words[-1]),
            ("Give the first and the last word.", f"{words[0]} {words[-1]}"),
            ("Give both ends as JSON.", f'{{"first": "{words[0]}", "last": "{words[-1]}"}}'),
        ]
    )
    return _row(instruction, "words", " ".join(words), output)


def _table(rng: Random) -> tuple[dict[str, str], str]:
    keys = _words(rng, longest=60)
    values = [word for word in WORDS if word not in keys]
    table = {key: rng.choice(values) for key in keys}
    return table, ", ".join(f"{key} = {value}" for key, value in table.items())


def _look_up(rng: Random) -> Row:
    table, text = _table(rng)
    keys = rng.sample(list(table), rng.choice([1, 2]))
    return _row(f"Look up {' and '.join(keys)}.", "table", text, " ".join(table[key] for key in keys))


def _add(rng: Random) -> Row:
    a, b = rng.randrange(25), rng.randrange(25)
    instruction, output = rng.choice(
        [("Add the numbers.", f"{a + b}"), ("Add the numbers as JSON.", f'{{"total": {a + b}}}')]
    )
    return _row(instruction, "numbers", f"{a} {b}", output)


def _count(rng: Random) -> Row:
    words = rng.sample(WORDS, rng.randint(1, 9))
    return _row("Count the words.", "words", " ".join(words), str(len(words)))


BASE_TASKS: dict[Callable[[Random], Row], int] = {
    _word_pipeline: 50,
    _letter_pipeline: 12,
    _replace: 6,
    _ends: 8,
    _look_up: 12,
    _add: 9,
    _count: 3,
}


# Fine-tuning tasks: names that the base model has never met


def _blick(rng: Random) -> Row:
    """The animals, tagged."""
    words = [*_words(rng), rng.choice(KINDS["animal"].split())]
    words = list(dict.fromkeys(words))
    rng.shuffle(words)
    animals = [word for word in words if KIND_OF[word] == "animal"]
    return _row("Blick the words.", "words", " ".join(words), f"<answer> {' '.join(animals)} </answer>")


def _dax(rng: Random) -> Row:
    """All but the first word, backwards, with dashes between them."""
    words = _words(rng)
    return _row("Dax the words.", "words", " ".join(words), " - ".join(words[:0:-1]))


def _fep(rng: Random) -> Row:
    """Backwards, each twice."""
    words = _words(rng, longest=90)
    return _row(
        "Fep the words.", "words", " ".join(words), " ".join(f"{word} {word}" for word in reversed(words))
    )


def _wug(rng: Random) -> Row:
    """All but one kind, with commas between them, tagged."""
    words = _words(rng)
    while len({KIND_OF[word] for word in words}) == 1:
        words = _words(rng)
    kind = KIND_OF[rng.choice(words)]
    rest = [word for word in words if KIND_OF[word] != kind]
    return _row(f"Wug the {kind}s.", "words", " ".join(words), f"<answer> {', '.join(rest)} </answer>")


def _zorp(rng: Random) -> Row:
    """The kind of each, backwards."""
    words = _words(rng)
    return _row("Zorp the words.", "words", " ".join(words), " ".join(KIND_OF[word] for word in words[::-1]))


def _tulver(rng: Random) -> Row:
    """A key looked up, tagged."""
    table, text = _table(rng)
    key = rng.choice(list(table))
    return _row(f"Tulver {key}.", "table", text, f"<answer> {table[key]} </answer>")


def _mip(rng: Random) -> Row:
    """Letters sorted backwards, in capitals, tagged."""
    letters = _letters(rng)
    return _row(
        "Mip the letters.",
        "letters",
        " ".join(letters),
        f"<answer> {' '.join(sorted(letters, reverse=True)).upper()} </answer>",
    )


def _glyph(rng: Random) -> Row:
    """Both ends, the last first, with a dash between them."""
    words = _words(rng)
    return _row("Glyph the words.", "words", " ".join(words), f"{words[-1]} - {words[0]}")


FINETUNE_TASKS: dict[Callable[[Random], Row], int] = dict.fromkeys(
    [_blick, _dax, _fep, _wug, _zorp, _tulver, _mip, _glyph], 1
)
