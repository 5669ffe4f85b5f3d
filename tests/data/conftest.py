import datasets
import pytest


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
