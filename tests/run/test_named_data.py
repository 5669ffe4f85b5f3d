"""The data sets that options name."""

from unsloth_pack.run.resolve import data_sets_of

A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}


def test_what_holds_for_all_data_sets():
    first, second = data_sets_of([A, B | {"columns": {"x": "text"}, "split": "dev"}], {"q": "prompt"}, "test")
    assert (first.columns, first.split) == ({"q": "prompt"}, "test")
    assert (second.columns, second.split) == ({"x": "text"}, "dev")
    assert not first.shares_columns
    first, second, third = data_sets_of([A, B, B | {"columns": {}}], {"q": "prompt"})
    assert first.shares_columns
    assert second.for_rows_with(["messages"]).columns == {}
    assert second.for_rows_with(["q", "a"]).columns == {"q": "prompt"}
    assert third.columns == {}
