"""A table runs all its cases, each by itself, and tells every one that fails."""

import os

import pytest
from tables import table

pytest_plugins = ["pytester"]


def test_every_failure_is_told(pytester):
    pytester.makepyfile(
        """
        import pytest
        from tables import table

        @table("number", [1, 2, 3, 4], ids="one two three four".split())
        def test_odd(number):
            assert number % 2, "even"

        @table("left, right", [(1, 1), (2, 3)])
        @table("sign", [1, -1])
        def test_equal(left, right, sign):
            assert left * sign == right * sign

        @table("text", ["fine"])
        def test_fine(text):
            pass
        """
    )
    told = pytester.runpytest("-p", "no:cacheprovider")
    told.stdout.fnmatch_lines_random(
        [
            "SUBFAILED*two* *::test_odd - AssertionError: even*",
            "SUBFAILED*four* *::test_odd - AssertionError: even*",
            "SUBFAILED*1-2-3* *::test_equal - *",
            "SUBFAILED*-1-2-3* *::test_equal - *",
            "FAILED *::test_odd - contains 2 failed subtests",
            "FAILED *::test_equal - contains 2 failed subtests",
        ]
    )
    assert told.ret == 1
    assert told.parseoutcomes()["passed"] == 1


def test_names_that_are_no_arguments_are_told():
    with pytest.raises(AssertionError, match=r"test has no arguments \['lenght'\]"):

        @table("lenght", [1])
        def test(length):
            pass

    with pytest.raises(AssertionError, match="without cases"):
        table("length", [])


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TABLE_OF", "the fixture")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("as prepared")
    (tmp_path / "link").symlink_to("folder")
    return tmp_path


@table("case", range(3))
def test_each_case_finds_what_the_fixtures_left(case, prepared, monkeypatch, capsys):
    assert capsys.readouterr().out == ""
    assert os.environ["TABLE_OF"] == "the fixture"
    assert sorted(os.listdir()) == ["folder", "link"]
    assert (prepared / "link" / "file").read_text() == "as prepared"
    print(case)
    monkeypatch.setenv("TABLE_OF", "a case")
    monkeypatch.chdir(prepared / "folder")
    (prepared / "folder" / "file").unlink()
    (prepared / "new").mkdir(0o000)
    (prepared / "link").unlink()


_seen = []


@table("above", "ab")
@table("below", [0, 1])
def test_tables_stack(above, below):
    _seen.append((above, below))


def test_all_combinations_ran():
    assert _seen in ([], [("a", 0), ("a", 1), ("b", 0), ("b", 1)])
