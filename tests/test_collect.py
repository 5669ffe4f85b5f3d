"""The documents hold the tables of the newest comparison."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from comparison import Comparison, tables, with_table


@pytest.mark.parametrize("document", tables(Comparison()), ids=lambda path: path.name)
def test_the_documents_hold_the_tables_that_the_script_prints(document):
    table = tables(Comparison())[document]
    text = document.read_text()
    assert with_table(text, table) == text
    assert with_table(text.replace(table[2], "| old |"), table) == text
    with pytest.raises(ValueError, match="0 tables begin with"):
        with_table("nothing", table)
