"""One container that `reader.py` is inside of, and the path to it for messages."""

from __future__ import annotations

from typing import Any


class Frame:
    """An object or array that is not closed yet."""

    __slots__ = ("value", "is_object", "key", "needs_comma", "after_comma", "bare", "parent", "start")

    def __init__(self, is_object: bool, parent: Frame | None, start: int = -1) -> None:
        self.value: Any = {} if is_object else []
        self.is_object = is_object
        self.key: str | None = None  # key whose value comes next
        self.needs_comma = False
        self.after_comma = False
        self.bare = False  # keys of this object are not quoted
        self.parent = parent
        self.start = start  # where its bracket stands in the text, -1 if it is only implied

    def path(self, element: bool) -> str:
        """Place of this container, or with `element` of the array element that is about to be read."""
        parts = [f"[{len(self.value)}]" if element and not self.is_object else ""]
        if self.is_object and self.key:
            parts.append(f".{self.key[:40]}")
        frame = self.parent
        while frame:  # what is inside already stands in its parent
            parts.append(f".{frame.key[:40]}" if frame.is_object else f"[{len(frame.value) - 1}]")
            frame = frame.parent
        return "".join(reversed(parts)).lstrip(".")
