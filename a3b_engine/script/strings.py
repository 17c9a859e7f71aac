"""Where a damaged JSON string ends, and what its escapes mean.

A model that forgets to escape a quotation mark leaves no certain end of the string. A mark ends a value only if what
follows could follow a value in that place: a bracket that fits, or a comma and then the next key.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .vocabulary import known_keys, normalise_key

# Opening mark -> marks that close it, and marks that close it only on strong evidence (a writer who changed marks).
_CLOSERS: dict[str, tuple[str, str]] = {
    '"': ('"', "\u201c\u201d\uff02"),
    "'": ("'", "\u2018\u2019"),
    "`": ("`", ""),
    "\u201c": ("\u201d\u201c\uff02", '"'),
    "\u201d": ("\u201d\u201c", '"'),
    "\u201e": ("\u201c\u201d", '"'),
    "\uff02": ("\uff02", '"\u201d'),
    "\u2018": ("\u2019\u2018", "'"),
    "\u2019": ("\u2019\u2018", "'"),
    "\uff07": ("\uff07", "'"),
    "\u300c": ("\u300d", ""),
    "\u300e": ("\u300f", ""),
    "\u00ab": ("\u00bb", ""),
}
QUOTES = frozenset(_CLOSERS)
OPEN_OBJECT, CLOSE_OBJECT = "{\uff5b", "}\uff5d"
OPEN_ARRAY, CLOSE_ARRAY = "[\uff3b\u3010", "]\uff3d\u3011"
COMMAS, COLONS = ",\uff0c\u3001;\uff1b\u060c\u061b", ":\uff1a"
_CLOSE = CLOSE_OBJECT + CLOSE_ARRAY
_STARTS = frozenset(QUOTES | set(OPEN_OBJECT + OPEN_ARRAY))

# White space, also where it was escaped one time too many, and a backslash that Markdown sets before a bracket.
SPACE = re.compile(r"(?:[\s\ufeff\u200b-\u200f\u2060]+|\\[nrt](?=\\[nrt]|\s{0,80}[\"'{}\[\]])|\\(?=[{}\[\]]))*")
_INDENT = re.compile(r"[ \t\r]{0,200}")
_CLOSED_LINE = re.compile(r"\}\s{0,80}[,\]}]")
_COMMENT = re.compile(r"(?://|#|--[ \t])[^\n]{0,2000}|/\*.{0,2000}?\*/|<!--.{0,2000}?-->", re.DOTALL)
COMMENTS = ("//", "#", "/*", "<!--", "-- ")
_MARKS = "".join(sorted(QUOTES - {"`"})) + "\u300d\u300f\u00bb"
_KEY_AHEAD = re.compile(rf"[{_MARKS}]([^{_MARKS}\n{{}}\[\]]{{1,60}})[{_MARKS}]\s*(?:[{COLONS}]|=>?)")
_CLOSE_RUN, _WHITE = re.compile(rf"[\s{re.escape(_CLOSE)}]{{0,400}}"), re.compile(r"\s+")
_COLON_AHEAD = re.compile(rf"\s{{0,80}}[{COLONS}]")
_CUT_KEY_AHEAD = re.compile(rf"[{_MARKS}][^{_MARKS}\n{{}}\[\]:,]{{0,60}}[{_MARKS}]?\s*\Z")
BARE_KEY = re.compile(rf"([^\W\d][\w$]*(?:[ \-][\w$]+){{0,3}})\s*(?:[{COLONS}]|=>?)")
_HALF_KEY = re.compile(rf"[{_MARKS}]?([^\W\d][\w$ \-]{{0,40}})[{_MARKS}]?\s*[{COLONS}]")  # one of its two marks missing
_NO_COLON_KEY = re.compile(rf"[{_MARKS}]([^{_MARKS}\n{{}}\[\]]{{1,60}})[{_MARKS}]\s*(?=[{_MARKS}{{\[\d])")
_BEFORE_KEY = re.compile(r"\s{0,80}(?:[}\]]\s{0,80}){0,4},\s{0,80}(?:\{\s{0,80})?\Z")
_AFTER_END = re.compile(r"\s{0,80}(?:[}\]]\s{0,80}){0,4},\s{0,80}(?:\{\s{0,80})?(?=\")")
_WORDS_BEFORE_END = re.compile(r"[^\"\n{}\[\]]{1,80}\][\s}]{0,80}\Z")  # [{...}, and so on]}
_VALUE_AHEAD = re.compile(r"-?\d|(?:true|false|null|None|True|False)\b|\.\.\.|\u2026")
_STOPS = {
    opener: re.compile("[" + re.escape("".join(dict.fromkeys(sure + weak))) + r"\\\n]")
    for opener, (sure, weak) in _CLOSERS.items()
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_NOT_JSON_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4}).', re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"', "'": "'", "`": "`", "\n": ""}
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_KEY = 200
MAX_STRAY_QUOTES = 2000  # in one value; more is not prose with a forgotten escape


class Place(NamedTuple):
    """Where a string stands: directly in an object or an array, and inside what."""

    in_object: bool
    has_array_above: bool
    has_object_above: bool
    depth: int
    bare_keys: bool


class StringEnd(NamedTuple):
    """`end`: index after the string. `stop`: index where its text ends. `kind`: closed, newline or unmarked (its closing
    mark is missing), escaped (its closing mark has a backslash), mixed, triple, half (a key), cut, hopeless."""

    stop: int
    end: int
    kind: str
    stray: int  # unescaped marks inside
    raw_newline: bool


def skip(text: str, pos: int) -> int:
    """Index of the next character that is neither white space nor in a comment."""
    while True:
        pos = SPACE.match(text, pos).end()
        found = _COMMENT.match(text, pos)
        if not found:
            return pos
        pos = found.end()


def is_known_key(word: str) -> bool:
    """Whether a word is one of the field names of a script, in any of the listed languages."""
    return normalise_key(word) in known_keys()


def key_follows(text: str, pos: int, bare_keys: bool) -> bool:
    """Whether a key and its colon stand at `pos` (a key cut off by the end of the text counts)."""
    if pos >= len(text):
        return True
    if is_doubled(text, pos):
        return True
    if _KEY_AHEAD.match(text, pos) or (len(text) - pos < 80 and _CUT_KEY_AHEAD.match(text, pos)):
        return True
    bare = BARE_KEY.match(text, pos, pos + 80)
    if bare and (bare_keys or is_known_key(bare[1])):
        return True
    no_colon = _NO_COLON_KEY.match(text, pos)
    return half_key(text, pos) is not None or bool(no_colon) and is_known_key(no_colon[1])


def half_key(text: str, pos: int) -> StringEnd | None:
    """A known key at `pos` of whose two quotation marks one is missing; `end` is the place of its colon."""
    found = _HALF_KEY.match(text, pos, pos + 80)
    if not found or not is_known_key(found[1]):
        return None
    return StringEnd(found.end(1), found.end() - 1, "half", 0, False)


def key_ahead(text: str, pos: int) -> str | None:
    """The quoted key that stands at `pos` with its colon, if one does."""
    found = _KEY_AHEAD.match(text, pos)
    return found[1] if found else None


def any_key_ahead(text: str, pos: int) -> str | None:
    """As `key_ahead`, for a key with or without quotation marks (with one of them doubled, too)."""
    word = key_ahead(text, pos + is_doubled(text, pos))
    if word is None:
        bare = BARE_KEY.match(text, pos, pos + 80)
        word = bare[1] if bare else None
    return word


def is_doubled(text: str, pos: int) -> bool:
    """Whether two quotation marks stand at `pos` before a known key, where one belongs."""
    if text[pos : pos + 1] not in QUOTES or text[pos + 1 : pos + 2] != text[pos]:
        return False
    word = key_ahead(text, pos + 1)
    return word is not None and is_known_key(word)


def decode(raw: str) -> str:
    """Text of a string body: JSON and Python escapes resolved, unknown ones (such as `\\(`) left as they stand."""
    if "\\" not in raw:
        return raw

    def resolve(found: re.Match) -> str:
        if found[1] or found[2]:
            return chr(int(found[1] or found[2], 16))
        return _SIMPLE.get(found[3], found[0])

    return join_surrogates(_ESCAPE.sub(resolve, raw))


def has_foreign_escapes(raw: str) -> bool:
    """Whether a string body has escapes that JSON does not know."""
    return bool(_NOT_JSON_ESCAPE.search(re.sub(r"\\\\", "", raw)))


def join_surrogates(text: str) -> str:
    """Surrogate pairs become their character; a half alone is no text and becomes U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def key_end(text: str, pos: int) -> StringEnd | None:
    """End of the quoted key that opens at `pos`; None if no colon follows any fitting mark."""
    sure, weak = _CLOSERS[text[pos]]
    limit = min(len(text), pos + 1 + MAX_KEY)
    at = pos + 1
    while True:
        found = _STOPS[text[pos]].search(text, at, limit)
        if not found:
            return StringEnd(len(text), len(text), "cut", 0, False) if limit == len(text) else half_key(text, pos)
        at = found.end()
        if found.group() == "\\":
            at += 1
        elif found.group() == "\n":
            return half_key(text, pos)
        else:
            after = skip(text, at)
            if after >= len(text):
                return StringEnd(at - 1, at, "closed", 0, False)
            if text[after] in COLONS or text[after] == "=":
                return StringEnd(at - 1, at, "closed", 0, False)
            if text[after] == found.group() and _COLON_AHEAD.match(text, after + 1) and is_known_key(text[pos + 1 : at - 1]):
                return StringEnd(at - 1, after + 1, "half", 0, False)
            if found.group() in sure:
                missing_colon = (text[after] in _STARTS or text[after].isdecimal()) and is_known_key(text[pos + 1 : at - 1])
                return StringEnd(at - 1, at, "closed", 0, False) if missing_colon else half_key(text, pos)


def doubled_mark(text: str, start: int, end: StringEnd) -> tuple[int, int]:
    """Characters to leave out at the start and the end of a value whose only stray mark stands right beside one of its
    own; an inch mark after a digit stays."""
    mark = text[end.end - 1]
    if end.stray != 1 or end.stop - start < 2 or mark not in "\"'":
        return 0, 0
    if text[start] == mark:
        return 1, 0
    return 0, int(text[end.stop - 1] == mark and not text[end.stop - 2].isdigit())


def value_end(text: str, pos: int, place: Place) -> StringEnd:
    """End of the string value that opens at `pos`."""
    opener = text[pos]
    if opener in "\"'" and text.startswith(opener * 3, pos) and not text.startswith(opener * 4, pos):
        close = text.find(opener * 3, pos + 3)
        if close > 0 and not _ends_value(text, pos + 2, place):
            return StringEnd(close, close + 3, "triple", 0, "\n" in text[pos:close])
    sure, _ = _CLOSERS[opener]
    stops = _STOPS[opener]
    at, stray, raw_newline, tried = pos + 1, 0, False, 0
    while True:
        found = stops.search(text, at)
        if not found:
            return StringEnd(len(text), len(text), "cut", stray, raw_newline)
        at = found.end()
        mark = found.group()
        if mark == "\\":
            if text[at : at + 1] == opener and _known_key_after_end(text, at + 1, place):
                return StringEnd(at, at + 1, "escaped", stray, raw_newline)
            at += 1
        elif mark == "\n":
            stop = _end_of_line_value(text, pos + 1, at - 1) if place.in_object else -1
            if stop >= 0:
                return StringEnd(stop, stop, "newline", stray, raw_newline)
            raw_newline = True
        elif mark not in sure and tried > MAX_STRAY_QUOTES:
            continue
        elif _ends_value(text, at, place, strong=mark not in sure):
            return StringEnd(at - 1, at, "closed" if mark in sure else "mixed", stray, raw_newline)
        elif mark in sure:
            stop = _end_before_key(text, pos + 1, at - 1, place)
            if stop >= 0:
                return StringEnd(stop, stop, "unmarked", stray, raw_newline)
            stray += 1
            if stray > MAX_STRAY_QUOTES:
                return StringEnd(at, at, "hopeless", stray, raw_newline)
        else:
            tried += 1


def _end_of_line_value(text: str, start: int, newline: int) -> int:
    """Where a value without its closing mark ends, if a known key (maybe in an object of its own) or the end of the
    object opens the next line; -1 if neither does."""
    after = _INDENT.match(text, newline + 1).end()
    next_object = text.startswith("{", after)
    found = _KEY_AHEAD.match(text, skip(text, after + 1) if next_object else after)
    if not (found and is_known_key(found[1])) and not _CLOSED_LINE.match(text, after):
        return -1
    stop = newline
    while stop > start and (text[stop - 1].isspace() or text[stop - 1] in COMMAS or next_object and text[stop - 1] in _CLOSE):
        stop -= 1
    return stop


def _known_key_after_end(text: str, pos: int, place: Place) -> bool:
    """Whether brackets and a comma at `pos` lead to a known key in plain marks: inside a value its marks would have
    backslashes too, so the value has ended."""
    found = _AFTER_END.match(text, pos)
    key = _KEY_AHEAD.match(text, found.end()) if found and place.in_object else None
    return bool(key) and is_known_key(key[1])


def _end_before_key(text: str, start: int, mark: int, place: Place) -> int:
    """Where a value ended whose closing mark is missing, if the mark at `mark` opens a known key (for an entry of a
    list: after the end of the list); -1 if it does not."""
    key = _KEY_AHEAD.match(text, mark)
    if not key or not is_known_key(key[1]):
        return -1
    low = max(start, mark - 200)
    found = _BEFORE_KEY.search(text[low:mark])
    if not found or low + found.start() <= start or not (place.in_object or "]" in found.group()):
        return -1
    return low + found.start()


def _in_comment(text: str, pos: int, end: int) -> bool:
    """Whether "//" or "#" at `pos` opens a comment, and not the rest of a value: `he said "go" # and ran",`."""
    rest = text[pos:end].split("\n", 1)[0].rstrip()
    return rest.count('"') % 2 == 0 or rest.startswith("/*")


def _ends_value(text: str, pos: int, place: Place, strong: bool = False) -> bool:
    """Whether what stands at `pos` can follow a finished value in this place."""
    after = skip(text, pos)
    blank = SPACE.match(text, pos).end()
    if after > blank and not _in_comment(text, blank, after):
        return False
    if after >= len(text):
        return not strong
    char = text[after]
    if char in CLOSE_OBJECT and (place.in_object or place.has_object_above):
        return _bracket_fits(text, after + 1, place, strong)
    if char in CLOSE_ARRAY and (not place.in_object or place.has_array_above):
        return _bracket_fits(text, after + 1, place, strong)
    if text.startswith("```", after):
        return not strong
    new_line = "\n" in text[pos:after]
    if char in COMMAS:
        return _comma_fits(text, skip(text, after + 1), place, strong)
    if place.in_object:
        if (char in QUOTES or new_line) and key_follows(text, after, place.bare_keys):
            return True
        return new_line and char in OPEN_OBJECT and place.has_array_above
    return new_line and char in QUOTES and not strong


def _comma_fits(text: str, after: int, place: Place, strong: bool) -> bool:
    for _ in range(8):  # surplus commas
        if text[after : after + 1] not in (",", "\uff0c", "\u060c"):
            break
        after = skip(text, after + 1)
    if after >= len(text):
        return not strong
    char = text[after]
    if char in _CLOSE:
        return _bracket_fits(text, after + 1, place, strong)
    if char in OPEN_OBJECT:
        return place.has_array_above or not place.in_object
    if place.in_object:
        ellipsis = text.startswith("...", after) and text.startswith("}", skip(text, after + 3))
        return ellipsis or key_follows(text, after, place.bare_keys)
    if strong:
        return False
    return char in _STARTS or bool(_VALUE_AHEAD.match(text, after))


def _bracket_fits(text: str, pos: int, place: Place, strong: bool) -> bool:
    after = skip(text, pos)
    if strong and (after >= len(text) or text[after] in _CLOSE):
        run = _CLOSE_RUN.match(text, pos)
        whole = len(_WHITE.sub("", run.group())) + 1 == place.depth
        return whole if run.end() >= len(text) else text[run.end()] in COMMAS
    if strong and text[after] in COMMAS:
        following = skip(text, after + 1)
        opens = text[following : following + 1] in (*OPEN_OBJECT, *OPEN_ARRAY)
        return opens or following < len(text) and key_follows(text, following, place.bare_keys)
    if after >= len(text) or text[after] in _CLOSE:
        return True
    char = text[after]
    if char in COMMAS:
        following = skip(text, after + 1)
        if following >= len(text):
            return True
        if text[following] in _STARTS or text[following] in _CLOSE or text[following] in COMMAS:
            return True
        if place.has_array_above and _WORDS_BEFORE_END.match(text, following):
            return True
        return bool(BARE_KEY.match(text, following, following + 80) or half_key(text, following) or _VALUE_AHEAD.match(text, following))
    if char in _STARTS:
        return not strong
    return (place.depth == 1 or text.startswith("```", after)) and not strong
