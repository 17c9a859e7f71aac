"""Filling in a workflow in API form: nodes are found by their class, never by their number."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from .console import RunnerError
from .paths import WORKFLOW


class Workflow:
    """A workflow in API form. `set` changes one input of the only node of a class."""

    def __init__(self, graph: dict):
        self.graph = graph

    @classmethod
    def load(cls, path: Path = WORKFLOW) -> Workflow:
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise RunnerError(f"cannot read the workflow {path}: {error}") from error

    def copy(self) -> Workflow:
        return Workflow(copy.deepcopy(self.graph))

    def node(self, class_type: str) -> str:
        """The id of the only node of that class."""
        found = [key for key, node in self.graph.items() if node["class_type"] == class_type]
        if len(found) != 1:
            raise RunnerError(f"the workflow has {len(found)} nodes of class {class_type}, expected 1")
        return found[0]

    def inputs(self, class_type: str) -> dict:
        return self.graph[self.node(class_type)]["inputs"]

    def set(self, class_type: str, **values) -> Workflow:
        inputs = self.inputs(class_type)
        for name, value in values.items():
            if name not in inputs:
                raise RunnerError(f"the workflow's {class_type} has no input {name!r}")
            inputs[name] = value
        return self
