"""Brackets that are missing, surplus or of the wrong kind: what `reader.py` does about them.

A bracket that does not fit has two readings: it is surplus, or others are missing before it. Both are tried on what
follows (`misfit`), and the one that explains more of it is taken.
"""

from __future__ import annotations

from . import strings
from .frame import Frame
from .strings import CLOSE_ARRAY, CLOSE_OBJECT, COMMAS, OPEN_ARRAY, OPEN_OBJECT, QUOTES
from .vocabulary import aliases, normalise_key, script_only_keys

PANEL_LISTS = frozenset(("panels", "shots", "scenes", "storyboard", "\u5206\u955c"))
SIDE_LISTS = frozenset(("dialogue", "dialogues", "characters", "\u5bf9\u8bdd", "\u89d2\u8272"))
_LEVELS = {"panels": "panel", "dialogue": "row", "characters": "character"}
_LOOK_AHEAD = 6  # closing brackets that are looked at to judge one


def level_of(frame: Frame) -> str:
    """script, panel, row or character for an object whose place tells it, else ""; of an array, that of its entries."""
    if frame.is_object:
        if frame.parent is None:
            return "script"
        return "" if frame.parent.is_object else level_of(frame.parent)
    around = frame.parent
    if around is None or not around.is_object or around.key is None:
        return ""
    key = normalise_key(around.key)
    if level_of(around) == "script":
        return _LEVELS.get(aliases("script").get(key, ""), "")
    return "row" if aliases("panel").get(key) == "dialogue" else ""


class Brackets:
    """The part of the reader that opens and closes containers. Needs `text`, `stack`, `note` and `placed`."""

    def pop(self) -> None:
        frame = self.stack.pop()
        if frame.key is not None:
            frame.value[frame.key] = None
        if self.stack:
            self.placed(self.stack[-1])

    def push_list(self, frame: Frame, entries: list) -> None:
        """An array around the last value of an object, open again."""
        frame.key = next(reversed(frame.value))
        frame.value[frame.key] = entries
        fresh = Frame(False, frame)
        fresh.value, fresh.after_comma = entries, True
        self.stack.append(fresh)

    def close(self, pos: int, object_bracket: bool) -> int:
        frame = self.stack[-1]
        if frame.is_object == object_bracket:
            if frame.key is not None:
                self.note("a value is missing; read as null")
            elif frame.after_comma:
                self.note("a trailing comma is left out")
            self.pop()
            return pos + 1
        name = self.text[pos]
        if self.is_surplus(pos, object_bracket):
            self.note(f"a surplus {name} is left out")
            return pos + 1
        self.note(f"a missing {'}' if frame.is_object else ']'} is read as if it stood before {name}")
        self.pop()
        return pos  # the bracket is looked at again from outside

    def is_surplus(self, pos: int, object_bracket: bool) -> bool:
        """Whether a bracket that does not fit is better left out than explained by missing ones."""
        around = len(self.stack) - 1
        while around >= 0 and self.stack[around].is_object != object_bracket:
            around -= 1
        if around < 0:
            return True
        return self.misfit(self.stack[:], pos + 1) < self.misfit(self.stack[:around], pos + 1)

    def misfit(self, frames: list[Frame], pos: int) -> int:
        """How much of what stands at `pos` does not fit if `frames` are open there."""
        cost = 0
        for _ in range(_LOOK_AHEAD):
            pos = strings.skip(self.text, pos)
            if pos >= len(self.text):
                return cost + bool(frames)
            char = self.text[pos]
            if char not in CLOSE_OBJECT and char not in CLOSE_ARRAY:
                break
            if frames and frames[-1].is_object == (char in CLOSE_OBJECT):
                frames = frames[:-1]
            else:
                cost += 1
            pos += 1
        if not frames:
            return cost + (pos < len(self.text) and self.text[pos] in COMMAS)
        if pos >= len(self.text) or self.text[pos] not in COMMAS:
            return cost
        return cost + self.misfit_of_next(frames[-1], strings.skip(self.text, pos + 1))

    def misfit_of_next(self, frame: Frame, pos: int) -> int:
        """0 if the piece at `pos`, after a comma, can be the next of `frame`."""
        word = strings.any_key_ahead(self.text, pos)
        if word is not None:
            if not frame.is_object or word in frame.value:
                return 1
            level = level_of(frame)
            return int(bool(level) and strings.is_known_key(word) and normalise_key(word) not in aliases(level))
        char = self.text[pos : pos + 1]
        if not char or char not in OPEN_OBJECT + OPEN_ARRAY and char not in QUOTES:
            return 0
        if frame.is_object:
            return 1
        last = frame.value[-1] if frame.value else None
        if char in OPEN_OBJECT and isinstance(last, dict) and last:
            return int(self.first_key(pos) != next(iter(last)))
        return int(frame.value != [] and (char in OPEN_OBJECT) != isinstance(last, dict))

    def first_key(self, pos: int) -> str | None:
        """The first key of the object that opens at `pos`, maybe with one bracket too many."""
        pos = strings.skip(self.text, pos + 1)
        if self.text[pos : pos + 1] in tuple(OPEN_OBJECT):
            pos = strings.skip(self.text, pos + 1)
        return strings.any_key_ahead(self.text, pos)

    def key_in_list(self, frame: Frame, pos: int) -> bool:
        """A known key among the entries of a list: the list was not closed before it, or an object not opened."""
        word = strings.key_ahead(self.text, pos)
        if not word or not strings.is_known_key(word):
            return False
        last = frame.value[-1] if frame.value else None
        again = isinstance(last, dict) and normalise_key(word) not in script_only_keys()  # one more of its kind
        if again and frame.parent and frame.parent.is_object and word not in last:
            inner, outer = level_of(frame), level_of(frame.parent)
            again = not (inner and outer) or normalise_key(word) in aliases(inner) or normalise_key(word) not in aliases(outer)
        closed_before = frame.value and not again or frame.after_comma and not frame.value
        if closed_before and frame.parent and frame.parent.is_object:
            self.note("a missing ] is read as if it stood before a key of the object around it")
            self.pop()
            self.stack[-1].needs_comma = False
        else:
            self.note("a missing { is read as if it stood before a key", element=True)
            fresh = Frame(True, frame)
            frame.value.append(fresh.value)
            self.stack.append(fresh)
        return True

    def object_among_keys(self, frame: Frame, pos: int) -> int | None:
        """An object where a key is expected: where to go on, or None if no rule covers it."""
        if not frame.value and not frame.after_comma:
            self.note("a surplus { is left out")
            return pos + 1
        last = next(reversed(frame.value.values()), None)
        first = self.first_key(pos)
        if isinstance(last, dict) and last and first == next(iter(last)) and first not in frame.value:
            self.note(f"a missing [ is read as if it stood before the value of {next(reversed(frame.value))[:40]}")
            self.push_list(frame, [last])
            return pos
        if len(self.stack) > 1 and not self.stack[-2].is_object:
            self.note("a missing } is read as if it stood before {")
            self.pop()
            return pos
        return None

    def in_side_list(self) -> bool:
        """Whether the innermost object is a row of the dialogue or one of the characters."""
        around = self.stack[-3]
        return not self.stack[-2].is_object and around.is_object and normalise_key(around.key or "") in SIDE_LISTS

    def starts_again(self, word: str, frame: Frame) -> bool:
        """Whether a key is the list of panels as the first key of an object in a list of panels: the writer broke off
        and began the script again."""
        if frame.value or frame.start < 0 or len(self.stack) < 3 or normalise_key(word) not in PANEL_LISTS:
            return False
        around = self.stack[-3]
        return not self.stack[-2].is_object and around.is_object and around.key == word

    def next_object(self, frame: Frame) -> Frame:
        """Close the object and open another one in the same list."""
        self.pop()
        fresh = Frame(True, self.stack[-1])
        fresh.bare = frame.bare
        self.stack[-1].value.append(fresh.value)
        self.stack.append(fresh)
        return fresh
