import pytest


def pytest_collection_modifyitems(config, items):
    if "nightly" in config.option.markexpr:
        return
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="run with -m nightly"))
