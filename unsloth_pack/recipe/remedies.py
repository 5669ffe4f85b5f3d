"""What to write in place of a name that no option has."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from unsloth_pack.recipe.other_trainers import FLAGS, GROUPS

_TELLING = 5  # letters that a shortened name needs to be recognised
_TYPED = 4  # letters that a name needs for a slip in it to be recognised
_LONG = 8  # and if the slip is another letter


class Remedy(NamedTuple):
    """What to write, and the option that was meant; empty where no single one was."""

    says: str
    option: str = ""


def remedy_for(
    name: str,
    known: Collection[str],
    remedies: Mapping[str, str],
    spell: Callable[[str], str] = str,
) -> Remedy | None:
    """What to write in place of `name`; None if nobody can tell.

    Names of other trainers come first. A guess needs a slip of one letter, or a name that was cut off within
    a word: names of other things are as alike as `max_tokens` and `max_token_loss`.

    Args:
        name: may be nested: `rlhf.beta`.
        known: the names of options.
        remedies: by the name of another trainer, what to do instead.
        spell: how an option is named in the answer.
    """
    whole = name.strip("-").replace("-", "_").lower()
    group, _, last = whole.rpartition(".")

    def meant(option: str) -> Remedy:
        return Remedy(f"did you mean {spell(option)}?", option)

    if group in GROUPS and last in known and whole not in (*FLAGS, *remedies):
        return meant(last)
    for each in dict.fromkeys((whole, last)):
        if FLAGS.get(each) in known:
            return meant(FLAGS[each])
        if each in remedies:
            return Remedy(remedies[each])
    alike = whole if whole in known else _cut_off(whole, known) or _slipped(whole, known)
    return meant(alike) if alike else None


def _cut_off(name: str, known: Iterable[str]) -> str | None:
    """The option that begins with `name`: a whole word of it, such as `padding`, means something else."""
    longer = [each for each in known if each.startswith(name)]
    is_one = len(longer) == 1 and len(name) >= _TELLING and longer[0][len(name)] != "_"
    return longer[0] if is_one else None


def _slipped(name: str, known: Iterable[str]) -> str | None:
    """The option whose name has one slip; None if there are several."""
    found = [each for each in known if len(each) >= _TYPED and _is_slip(name, each)]
    return found[0] if len(found) == 1 else None


def _is_slip(name: str, meant: str) -> bool:
    """Whether `name` has one letter too many, too few or changed, or two neighbours swapped.

    The first letter is right, and digits are: `load_in_2bit` is no option. In a short name no letter is new:
    `speed` is not `seed`.
    """
    pairs = enumerate(zip(name, meant, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(name), len(meant)))
    rest, wanted = name[at:], meant[at:]
    is_doubled = rest[1:] == wanted and rest[:1] == name[at - 1 : at]
    is_swapped = rest[2:] == wanted[2:] and rest[:2] == wanted[1::-1]
    is_new = (
        rest[1:] in (wanted, wanted[1:]) and len(meant) >= _LONG and not (rest[:1] + wanted[:1]).isdigit()
    )
    return at > 0 and (is_doubled or is_swapped or rest == wanted[1:] or is_new)
