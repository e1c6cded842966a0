"""What `make compat` names is there: it takes more than an hour, and is run seldom."""

from __future__ import annotations

from tests.compat import keras_plugin, matrix, smoke
from tests.processes import loss_scenarios


def test_scenarios_of_parity():
    named = {*matrix.PARITY, *matrix.FEW}
    assert sorted(named - loss_scenarios.SCENARIOS.keys()) == []


def test_checks_and_the_table_of_the_page():
    assert set(matrix.SMOKES) == set(smoke.CHECKS) and callable(keras_plugin.pytest_configure)
    text = matrix.PAGE.read_text()
    before, _, rest = text.partition(matrix.BEGIN)
    rows = rest.partition(matrix.END)[0].splitlines()
    assert before and len(rows) == 2 + len(matrix.SETS)
    assert rows[0] == matrix.table({}).splitlines()[0]
    for row, chosen in zip(rows[2:], matrix.SETS.values(), strict=True):
        assert [cell.strip() for cell in row.split("|")][3:6] == [
            chosen.pinned[name] for name in ("ray", "keras", "tensorflow")
        ]
