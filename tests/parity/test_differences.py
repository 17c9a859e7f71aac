"""The rows that several processes of one session saw are those that one process would have seen."""

import json
import math

import pytest
from differences import Differences

SEEN = [("a", 0.1, "x", 1.0, False), ("b", 0.99, "x", 0.9, True), ("a", 0.3, "y", 1.0, False), ("b", 0.97, "z", 0.9, True), ("c", 0.0, "w", 1.0, False)]


def noted(seen):
    found = Differences()
    for kind, value, where, limit, smallest in seen:
        assert found.note(kind, value, where, limit, smallest=smallest) == value
    return found


def test_rows_of_processes_add_up():
    alone = noted(SEEN).rows
    assert (alone["a"]["value"], alone["a"]["where"], alone["a"]["checks"]) == (0.3, "y", 2)
    assert (alone["b"]["value"], alone["b"]["where"]) == (0.97, "z")
    for border in range(len(SEEN) + 1):
        together = Differences()
        for part in (SEEN[:border], SEEN[border:]):
            together.take_in(json.loads(json.dumps(noted(part).rows)))
        assert together.rows == alone


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("values", [(0.1, math.nan, 0.3), (math.nan, 0.1, 0.3), (0.1, 0.3, math.nan), (math.inf, math.nan, -math.inf)])
def test_nan_is_the_worst_there_is(values, smallest):
    where = "x" * (1 + [math.isnan(value) for value in values].index(True))
    seen = [("a", value, "x" * number, 1.0, smallest) for number, value in enumerate(values, 1)]
    alone, together = Differences(), Differences()
    for kind, value, place, limit, _ in seen:
        alone.note(kind, value, place, limit, smallest=smallest)
        process = Differences()
        process.note(kind, value, place, limit, smallest=smallest)
        together.take_in(json.loads(json.dumps(process.rows)))
    for found in (alone, together):
        row = found.rows["a"]
        assert math.isnan(row["value"]) and (row["where"], row["checks"]) == (where, 3)
