"""What must hold for the result of any text whatever, used by the property tests and the fuzz run."""

import html
import re

from a3b_engine.errors import ScriptError
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import ParseResult
from a3b_engine.script.strings import decode

LISTS = ("prompt", "negative", "caption", "dialogue", "seed", "width", "height", "index")
MOST_ESCAPED = 6  # times a text may have been written as a string inside a string
STATUSES = ("ok", "repaired", "truncated", "failed")
_SPACES = re.compile(r"\s+")
_SOURCE_OF_DEFAULTS = ("shot", "reading_direction")  # mapped to closed sets


def flat(text: str) -> str:
    return _SPACES.sub(" ", text).strip()


def readings(text: str) -> str:
    """The text as it stands and with its escapes resolved, as often as they can be, as JSON and as HTML has them."""
    forms = [text, html.unescape(text), text.replace("\\|", "|")]
    for form in forms[:2]:
        for _ in range(MOST_ESCAPED):
            form = decode(form)
            forms.append(form)
            if "\\" not in form:
                break
    return flat("\n".join(dict.fromkeys(forms)))


def strings_of(value) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() if key not in _SOURCE_OF_DEFAULTS for text in strings_of(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in strings_of(inner)]
    return [value] if isinstance(value, str) else []


def check_sources(result: ParseResult, text: str) -> None:
    """Every string of the script stands in the text. (Pieces of a list are joined by commas; lines that stood apart
    in the text by a line break; `''` in a YAML string is one mark; of a text that is escaped in parts, backslashes may
    be left.)"""
    if result.script is None:
        return
    haystack = readings(text)
    for item in strings_of(result.script.model_dump()):
        pieces = [flat(piece) for piece in re.split(r"[,\n]", item)]
        stands = flat(item) in haystack or all(piece in haystack for piece in pieces)
        stands = stands or flat(item.replace("'", "''")) in haystack
        assert stands or flat(item).replace("\\", "") in haystack.replace("\\", ""), f"not in the source: {item!r}"


def check_lists(result: ParseResult, choices: tuple[str, ...] = ("stop", "keep")) -> None:
    """The lists are of one length >= 1 with placeholders, and with each choice, or the documented error is raised."""
    lists = panel_lists(result, on_error="placeholder")
    assert {len(getattr(lists, name)) for name in LISTS} == {lists.count} and lists.count >= 1
    assert all(isinstance(seed, int) and 0 <= seed < 2**64 for seed in lists.seed)
    assert lists.index == sorted(set(lists.index))
    for choice in choices:
        try:
            kept = panel_lists(result, on_error=choice)
        except ScriptError as error:
            assert str(error)
        else:
            assert {len(getattr(kept, name)) for name in LISTS} == {kept.count} and kept.count >= 1


def check_form(result: ParseResult) -> None:
    """Status, script, cause and report agree, and can be written anywhere."""
    assert result.status in STATUSES
    assert (result.script is None) == (result.status == "failed")
    assert bool(result.cause) == (result.status in ("failed", "truncated"))
    assert all(line.startswith(("info: ", "repair: ", "warning: ")) for line in result.report)
    assert result.status != "ok" or all(line.startswith("info: ") for line in result.report)
    assert result.status != "repaired" or any(not line.startswith("info: ") for line in result.report)
    "\n".join([result.cause, *result.report]).encode("utf-8")
    if result.script is not None:
        result.script.model_dump_json().encode("utf-8")
        indexes = [panel.index for panel in result.script.panels]
        assert indexes == sorted(set(indexes)) and set(result.partial) <= set(indexes)


def check_everything(result: ParseResult, text: str) -> None:
    check_form(result)
    check_sources(result, text)
    check_lists(result)
