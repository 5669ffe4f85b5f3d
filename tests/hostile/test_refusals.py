"""Bad input of every kind is refused in one line, with exit code 2, and nothing is written or lost."""

import cases_files
import cases_flags
import cases_models
import cases_rows
import pytest
from refusals import line_of

CASES = [*cases_files.CASES, *cases_rows.CASES, *cases_models.CASES, *cases_flags.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case, place):
    print(line_of(case, place))
