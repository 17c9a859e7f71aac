"""From any text to a comic script, with a status and a report: `parse_script`.

Order of the attempts: the text as JSON, untouched; the values found in it (after the thinking, in or out of fences,
between sentences), each as JSON, untouched; our own rules (`reader.py`); the block form of YAML and Markdown tables
(`outline.py`, `tables.py`); panels written as sentences (`prose.py`); `json-repair` with its result checked (`repair.py`).
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import ScriptError
from . import causes
from .fields import Built, Fields
from .locate import MAX_CANDIDATES, Candidate, Scan, clean, refused_at, scan, strict
from .outline import outlines
from .prose import panels_in_prose, split_panel
from .reader import Fuel
from .repair import last_resort
from .report import Report
from .samples import is_placeholder, is_schema
from .schema import ComicScript
from .shapes import Shape, join, shape
from .tables import tables
from .vocabulary import aliases, corrections, normalise_key

MAX_TEXT = 4_000_000
_PAGE_KEYS = ("page", "page_number", "page_no", "chapter", "part", "\u9875", "\u9801")
_ENTITIES = re.compile(r"[{\[,]\s{0,80}&(?:quot|#34|#x22|#39|apos);")
_KEY = re.compile(r"[{\[,]\s{0,80}[\"']")
_PROGRAM = re.compile(r"\w+(?:\(|=)['\"\w]")


@dataclass
class ParseResult:
    """What came out of a text.

    status: `ok` (a JSON value of the text, with nothing changed and no required value missing), `repaired` (something
    was changed, mapped, moved, defaulted or left out: see the report), `truncated` (the end is missing), `failed`
    (no script). script: None only if failed. report: lines `info|repair|warning: place: what`; places are paths such
    as `panels[1].shot` in the source, counted from 0. cause: one sentence if truncated or failed, else "".
    partial: indexes of the panels the end of the text cut off. expected_panels: as given.
    """

    status: str
    script: ComicScript | None
    report: list[str] = field(default_factory=list)
    cause: str = ""
    partial: tuple[int, ...] = ()
    expected_panels: int | None = None


def parse_script(text: str, *, expected_panels: int | None = None) -> ParseResult:
    """Read a comic script from any text. Raises ScriptError only if `text` is not a str."""
    if not isinstance(text, str):
        raise ScriptError(f"text: a string is expected, found {type(text).__name__}. Connect the text of the answer.")
    parser = _Parser(text, expected_panels or None)
    try:
        return parser.run()
    except RecursionError:
        cause = f"The JSON is nested too deeply to be a script. The text begins: {causes.excerpt(text)}"
        return ParseResult("failed", None, [f"warning: {cause}"], cause, (), expected_panels or None)


@dataclass
class _Found:
    candidate: Candidate
    shape: Shape


class _Parser:
    def __init__(self, text: str, expected: int | None) -> None:
        self.expected = expected
        self.report = Report()
        self.fuel = Fuel()
        self.placeholder = self.schema = self.refused = False
        self.whole = False  # the text is JSON as a whole: no other form is looked for in it
        self.cut_by_size = len(text) > MAX_TEXT
        self.text, done = clean(text[:MAX_TEXT])
        for changed, what in done:
            (self.report.repair if changed else self.report.info)("", what)
        if self.cut_by_size:
            self.report.warning("", f"the text has {len(text)} characters; only the first {MAX_TEXT} are read")

    def run(self) -> ParseResult:
        found = self.find()
        usable = self.usable(found)
        chosen = self.from_layout(found, self.choose(usable)) or self.from_prose(found, usable) or self.from_last_resort(found)
        if chosen is None:
            return self.failed(found)
        shape_, candidates = chosen
        parts = split_panel(shape_.panels[0]) if len(shape_.panels) == 1 else []
        if parts:
            shape_.values["panels"] = parts
            shape_.repairs.append(("panels[0]", "sentences headed by panel numbers are read as panels"))
        for place, what in [note for c in candidates for note in c.notes] + shape_.repairs:
            self.report.repair(place, what)
        for place, what in shape_.remarks:
            self.report.info(place, what)
        truncated = any(c.truncated for c in candidates)
        open_ids = frozenset().union(*(c.open_ids for c in candidates)) if candidates else frozenset()
        fields = Fields(self.report, open_ids)
        built = fields.build(shape_)
        if fields.refused and fields.refused == len(built.script.panels):
            self.refused = True
            return self.failed(found)
        if not self.has_content(built):
            found.cut_off = found.cut_off or truncated
            return self.failed(found)
        return self.result(found, built, truncated or self.cut_by_size)

    def result(self, found: Scan, built: Built, truncated: bool) -> ParseResult:
        script = built.script
        if not script.panels:
            remark = self.report.warning if self.expected else self.report.info
            remark("panels", "missing; the text holds dialogue only")
        elif self.expected and len(script.panels) != self.expected:
            self.report.warning("panels", f"{self.expected} expected, {len(script.panels)} found; none is added or left out")
        cause = ""
        if truncated:
            cause = causes.truncation(found, len(script.panels) - len(built.partial), len(built.partial))
        status = "truncated" if truncated else "repaired" if self.report.changed else "ok"
        return ParseResult(status, script, self.report.lines(), cause, built.partial, self.expected)

    def failed(self, found: Scan) -> ParseResult:
        cause = causes.failure(found, placeholder=self.placeholder, schema=self.schema, refused=self.refused)
        self.report.warning("", cause)
        return ParseResult("failed", None, self.report.lines(), cause, (), self.expected)

    # -- finding ------------------------------------------------------------------------------------------------

    def find(self) -> Scan:
        try:
            value, notes = strict(self.text)
        except (ValueError, RecursionError) as error:
            refused = refused_at(self.text, error)
            if _ENTITIES.search(self.text) and not _KEY.search(self.text):
                self.text, refused = html.unescape(self.text), -1
                self.report.repair("", "HTML entities are read as the characters they stand for")
            found = scan(self.text, self.fuel, lambda value: is_schema(value) or shape(value, self.fuel) is not None, refused)
            self.report_wrapping(found)
            return found
        self.whole = isinstance(value, (dict, list))
        return Scan(self.text, [Candidate(value, 0, len(self.text), notes)])

    def report_wrapping(self, found: Scan) -> None:
        if found.thinking != "none":
            self.report.info("", "the thinking block is passed over")
        spans = [(c.start, c.end) for c in found.candidates]
        if not spans:
            return
        starts = [found.answer_start] + [end for _, end in spans]
        ends = [start for start, _ in spans] + [len(self.text)]
        around = "".join(self.text[start:end] for start, end in zip(starts, ends) if start < end)
        if "```" in around:
            self.report.info("", "the fence around the JSON is passed over")
        if around.replace("```json", "").replace("```", "").strip():
            self.report.info("", "the text around the JSON is passed over")
        if found.broken:
            self.report.warning("", f"an object that starts at character {found.broken[0]} cannot be read as a whole; only parts of it are")
        if len(spans) >= MAX_CANDIDATES:
            self.report.warning("", found.trouble)

    def usable(self, found: Scan) -> list[_Found]:
        usable: list[_Found] = []
        passed = 0
        for candidate in found.candidates:
            if is_schema(candidate.value):
                self.schema = True
                continue
            form = shape(candidate.value, self.fuel)
            if form is None:
                passed += isinstance(candidate.value, dict) and bool(candidate.value)
                continue
            if is_placeholder(form):
                self.placeholder = True
                continue
            if any(candidate.value == other.candidate.value for other in usable[-8:]):
                self.report.info("", "the same object stands there more than once; it is taken once")
                continue
            usable.append(_Found(candidate, form))
        if usable and passed:
            self.report.info("", f"{passed} JSON objects hold no part of a script; passed over")
        if usable and (self.schema or self.placeholder):
            self.report.info("", "a schema or sample with placeholders is passed over")
        return usable

    # -- choosing -----------------------------------------------------------------------------------------------

    def choose(self, usable: list[_Found]) -> tuple[Shape, list[Candidate]] | None:
        scripts = [item for item in usable if item.shape.kind == "script" and item.shape.panels]
        if not scripts:
            if not any(item.shape.panels or item.shape.values.get("dialogue") for item in usable):
                return None  # characters alone are no script; they are looked at again beside panels in prose
            return join(item.shape for item in usable), [item.candidate for item in usable]
        if len(scripts) > 1 and _numbered_apart(scripts):
            used = scripts
        else:
            used = [max(enumerate(scripts), key=lambda entry: self.rank(scripts, *entry))[1]]
        have = {name for item in used for name, entry in item.shape.values.items() if entry not in (None, "", [], {})}
        single: set[str] = set()  # what comes as one object an entry, each of which counts
        for item in usable:
            names = set(item.shape.values)
            if item not in used and "panels" not in names and not names & (have - single):
                used.append(item)
                single |= names - have if item.shape.kind != "script" else set()
                have |= names
        left = len(usable) - len(used)
        if left:
            self.report.warning("", f"{left} other JSON objects stand in the text and are not used")
        return join(item.shape for item in used), [item.candidate for item in used]

    def rank(self, scripts: list[_Found], n: int, item: _Found) -> tuple:
        """Of several scripts the one with the expected number counts, then one that is not taken back, then the longest."""
        count = len(item.shape.panels)
        return count == self.expected, not self.is_taken_back(scripts, n), count, n

    def is_taken_back(self, scripts: list[_Found], n: int) -> bool:
        """Whether a whole script follows, after words of correction or because this one breaks off."""
        if n + 1 >= len(scripts) or scripts[-1].candidate.truncated:
            return False
        own, following = scripts[n].candidate, scripts[n + 1].candidate
        between = self.text[own.end : following.start]
        corrected = bool(corrections().search(between[:2000])) or n + 2 < len(scripts) and self.is_taken_back(scripts, n + 1)
        return own.truncated or corrected

    def has_content(self, built: Built) -> bool:
        return bool(built.script.panels) and built.says or bool(built.script.dialogue)

    # -- other forms --------------------------------------------------------------------------------------------

    def from_layout(self, found: Scan, chosen: tuple[Shape, list[Candidate]] | None) -> tuple[Shape, list[Candidate]] | None:
        """A script in the form of YAML or of tables, if it holds no fewer panels than the JSON in the text (which may
        be small lists inside of it); else what was chosen."""
        if self.whole or chosen and chosen[0].kind == "script" and chosen[0].panels:
            return chosen
        for readings in (outlines(found.answer, self.fuel), tables(found.answer)):
            parts = [(form, reading) for reading in readings if (form := shape(reading.value, self.fuel))]
            parts = [(form, reading) for form, reading in parts if not is_schema(reading.value) and form.kind == "script"]
            form = join(part for part, _ in parts) if parts else None
            if form is None or not form.panels or len(form.panels) < len(chosen[0].panels if chosen else []):
                continue
            if not any(_names_panels(reading.value) for _, reading in parts) and len(panels_in_prose(found.answer)) >= len(form.panels):
                continue  # "Panel 1" as a heading over lines that look like an outline
            if is_placeholder(form):
                self.placeholder = True
                continue
            return form, [Candidate(r.value, 0, 0, r.notes, r.truncated, r.open_ids) for _, r in parts]
        return chosen

    def from_prose(self, found: Scan, usable: list[_Found]) -> tuple[Shape, list[Candidate]] | None:
        texts = [text for candidate in found.candidates for text in _leaves(candidate.value)]
        best = max((panels_in_prose(text) for text in texts[:64]), key=len, default=[])
        people = [item for item in usable if set(item.shape.values) == {"characters"}]
        if not best and not (self.schema or self.placeholder) and (people or "{" not in found.answer):
            best = panels_in_prose(found.answer)
        if not best:
            return None
        told = Shape({"panels": best}, repairs=[("panels", "sentences headed by panel numbers are read as panels")])
        return join([told, *(item.shape for item in people)]), [item.candidate for item in people]

    def from_last_resort(self, found: Scan) -> tuple[Shape, list[Candidate]] | None:
        if self.schema or self.placeholder or found.cut_off or self.whole:
            return None
        value = last_resort(found.answer)
        form = shape(value, self.fuel) if value is not None else None
        if form is None or is_placeholder(form) or any(isinstance(p, str) and _PROGRAM.match(p) for p in form.panels):
            return None
        form.repairs.insert(0, ("", "read by json-repair; every text of it stands in the source"))
        closed = found.answer.rstrip().rstrip("`").rstrip().endswith(("}", "]"))
        return form, [Candidate(value, 0, 0, truncated=not closed)]


def _leaves(value: Any) -> list[str]:
    """The first texts in a value, not deep."""
    waiting, texts = [(value, 0)], []
    while waiting and len(texts) < 64:
        item, depth = waiting.pop(0)
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, (dict, list)) and depth < 3:
            waiting += [(inner, depth + 1) for inner in list(item.values() if isinstance(item, dict) else item)[:64]]
    return texts


def _names_panels(value: Any) -> bool:
    return isinstance(value, dict) and any(aliases("script").get(normalise_key(key)) == "panels" for key in value)


def _numbered_apart(scripts: list[_Found]) -> bool:
    """Whether several objects hold different panels or pages of one script, by their numbers."""
    numbers = [p.get("index", p.get("panel")) if isinstance(p, dict) else None for item in scripts for p in item.shape.panels]
    pages = [next((v for k, v in item.shape.extras.items() if normalise_key(k) in _PAGE_KEYS), None) for item in scripts]
    return any(
        None not in counted and all(isinstance(n, int) for n in counted) and len(set(counted)) == len(counted)
        for counted in (numbers, pages)
    )
