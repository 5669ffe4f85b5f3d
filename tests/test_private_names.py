"""The list of private names of other libraries is up to date, and the installed libraries have them all."""

from tools.private_names import LIBRARIES, find_names, sources
from unsloth_pack.cli.doctor import TESTED, missing_names, private_names


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
