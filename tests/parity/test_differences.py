"""The rows that several processes of one session saw are those that one process would have seen."""

import json

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
