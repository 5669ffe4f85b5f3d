"""The ledger of planted faults fits the package and the tests of today."""

import re

from planted import ROOT, read_ledger


def test_every_fault_can_be_planted_and_names_tests_that_are_there():
    missing = []
    for fault in read_ledger():
        assert fault.edited()
        assert fault.tests
        for test in fault.tests:
            path, *names = test.split("[")[0].split("::")
            source = (ROOT / path).read_text()
            missing += [
                test for name in names if not re.search(rf"^(def|class) {name}\b", source, re.MULTILINE)
            ]
    assert not missing
