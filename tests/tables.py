"""Tables of cases: one test runs them all, and tells each case that fails by its name.

A table in place of `pytest.mark.parametrize` takes no time to collect, and sets up its fixtures once.
"""

import contextlib
import functools
import inspect
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

Ids = Callable[[object], str] | Sequence[str] | None


def table(names: str | Sequence[str], cases: Iterable, ids: Ids = None) -> Callable:
    """Run a test on every case, each as a subtest. Takes the arguments of `pytest.mark.parametrize`.

    Tables stack: all combinations of their cases run. Each case has

    - `tmp_path` as the fixtures of the test left it;
    - a `monkeypatch` of its own, undone when the case ends;
    - nothing in `capsys` and `caplog` from the case before.

    Other fixtures are set up once for the whole table.
    """
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    rows = [_row(names, case, number, ids) for number, case in enumerate(cases)]
    assert rows, "a table without cases tests nothing"

    def decorate(test: Callable) -> Callable:
        function, inner = getattr(test, "table", (test, [("", {})]))
        outer = [
            ("-".join(filter(None, (below, above))), {**of_below, **of_above})
            for (above, of_above), (below, of_below) in itertools.product(rows, inner)
        ]

        @functools.wraps(test)
        def run_all(request, subtests, **arguments):
            __tracebackhide__ = True
            with _snapshot(request) as reset:
                for name, values in outer:
                    reset()
                    with subtests.test(name), _own_patches(arguments) as own:
                        function(**own, **values)

        every = inspect.signature(function).parameters.values()
        fixtures = [each for each in every if each.name not in outer[0][1]]
        unknown = outer[0][1].keys() - {each.name for each in every}
        assert not unknown, f"{test.__name__} has no arguments {sorted(unknown)}"
        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("request", "subtests")]
        run_all.__signature__ = inspect.Signature([*fixtures, *ours])
        run_all.table = (function, outer)
        return run_all

    return decorate


def _row(names: tuple[str, ...], case: object, number: int, ids: Ids) -> tuple[str, dict]:
    values = case if len(names) > 1 else (case,)
    assert len(values) == len(names), f"{case!r} is not {names}"
    if callable(ids):
        name = "-".join(str(ids(value)) for value in values)
    else:
        name = str(ids[number]) if ids else "-".join(_shown(value) for value in values)
    return name, dict(zip(names, values, strict=True))


def _shown(value: object) -> str:
    shown = value if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)
    return ascii(shown)[1:-1][:60]


@contextlib.contextmanager
def _own_patches(arguments: dict) -> Iterator[dict]:
    """The arguments of one case."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(pytest.MonkeyPatch.context())
            if isinstance(value, pytest.MonkeyPatch)
            else value
            for name, value in arguments.items()
        }


@contextlib.contextmanager
def _snapshot(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """What forgets the case before: its files, and what it printed and logged."""
    with tempfile.TemporaryDirectory() as kept:
        folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
        if folder:
            shutil.copytree(folder, kept, symlinks=True, dirs_exist_ok=True)

        def reset() -> None:
            if folder:
                _remove_content(folder)
                shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True)
            for name, forget in (("capsys", "readouterr"), ("capfd", "readouterr"), ("caplog", "clear")):
                if name in request.fixturenames:
                    getattr(request.getfixturevalue(name), forget)()

        yield reset


def _remove_content(folder: Path) -> None:
    folder.chmod(0o700)
    for here, folders, _ in os.walk(folder):
        for name in folders:
            if not (path := Path(here, name)).is_symlink():
                path.chmod(0o700)  # of a case that took it away
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
