"""An image prompt that stands alone, made of the fields of a panel.

Each panel is encoded by itself: a name means nothing to an image model, so the looks of the characters are written
out wherever their names stand. The script itself keeps its words; `Composer.notes` says what was added to a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .drawable import BLANK, stated
from .looks import TRIM, Cast, Described, Mention, write_out
from .schema import DEFAULT_SHOT, Character, ComicScript, Panel
from .vocabulary import find_shots

SHOT_WORDS = {
    "extreme_close": "extreme close-up",
    "close": "close-up",
    "medium": "medium shot",
    "full": "full body shot",
    "wide": "wide shot",
    "establishing": "establishing shot, wide view of the place",
    "over_shoulder": "over-the-shoulder shot",
    "pov": "first-person view",
}
_SPACES = re.compile(r"\s+")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_WORD = re.compile(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]")
_CAMERA = re.compile(
    r"\b(?:shot|view|angle|portrait|framing|framed|lens|panorama)\b|\u955c\u5934|\u93e1\u982d|\u89c6\u89d2|\u8996\u89d2", re.IGNORECASE
)
_CLAUSE = re.compile("[,.;\n\uff0c\u3002\uff1b]")
_LOOKED_AT = 600  # characters of a visual prompt in which its framing is looked for


class Composer:
    """Composes the prompts of one script; `notes` holds what was added and what could not be written out."""

    def __init__(self, script: ComicScript, style_prefix: str = "", style_suffix: str = "") -> None:
        self.script = script
        self.prefix = style_prefix
        self.suffix = style_suffix
        self.notes: list[str] = []
        self.cast = Cast(script.characters)

    def prompt(self, panel: Panel) -> str:
        """The style prefix, then the panel's own visual prompt or one composed from its fields, then the suffix."""
        body = self._own(panel) if panel.visual_prompt.strip(BLANK) else [*self._pieces(panel), self.script.style]
        return join_pieces([self.prefix, *body, self.suffix])

    # -- from the fields -------------------------------------------------------------------------------------------

    def _pieces(self, panel: Panel) -> list[str]:
        listed, whole = self._listed(panel), set()

        def allowed(mention: Mention) -> bool:
            return not mention.possessive or mention.person.id in listed | whole  # "Tom's workshop" does not show Tom

        texts = [(text, self.cast.mentions(text, listed)) for text in (panel.action, stated(panel.micro_expression), stated(panel.background))]
        told = [write_out(text, mentions, whole, allowed) for text, mentions in texts]
        people = [self._look(word, panel) for word in panel.characters if self._identity(word) not in whole]
        shown = whole | listed
        doubtful = {m.person.id: m.person for _, mentions in texts for m in mentions if not m.sure and m.person.id not in shown}
        people += self._unsure(panel, doubtful.values())
        return [SHOT_WORDS[panel.shot], *people, *told, stated(panel.light), *panel.props]

    def _unsure(self, panel: Panel, people: Collection[Character]) -> list[str]:
        """The looks of those whose names stand there only in words that may mean something else."""
        for person in people:
            self._note(panel, f"{person.name or person.id} may be a name or a word of the text; the text is left, the look is put before it")
        return [person.look for person in people]

    def _listed(self, panel: Panel) -> set[str]:
        return {self._identity(word) for word in panel.characters}

    def _identity(self, word: str) -> str:
        person = self.cast.get(word)
        return person.id if person else word

    def _look(self, word: str, panel: Panel) -> str:
        person = self.cast.get(word)
        if person is None:
            return word  # not one of the cast: "an old man", "the crowd"
        if not person.look.strip():
            self._note(panel, f"{person.id} has no look, so the prompt does not show this character")
        return person.look

    # -- from the panel's own visual prompt ------------------------------------------------------------------------

    def _own(self, panel: Panel) -> list[str]:
        """The visual prompt, with what is certain to be missing: the looks of those it names, the framing.

        A look is missing when most of its words are. It is certain that a named person is to be seen when the panel
        lists this person, or lists nobody and the name stands plainly; a name that a list lacks may be on a wall.
        """
        text, listed = panel.visual_prompt.strip(), self._listed(panel)
        described, mentions = Described(text), self.cast.mentions(text, listed)
        named = {mention.person.id: mention.person for mention in mentions if mention.sure}
        plain = {mention.person.id for mention in mentions if mention.sure and not mention.possessive}
        bare = [person for person in named.values() if not described.covers(person.look)]
        certain = {person.id for person in bare if person.id in listed or person.id in plain and not panel.characters}
        whole: set[str] = set()

        def allowed(mention: Mention) -> bool:
            identity = mention.person.id
            return identity in certain and (not mention.possessive or identity in listed | whole)

        written = write_out(text, mentions, whole, allowed)
        looks = [person.look for person in bare if person.id in certain - whole]
        for person in bare:
            done = "it is written out in the prompt" if person.id in certain else "the panel does not list this character, so the name is left"
            self._note(panel, f"visual_prompt names {person.name or person.id} without the look; {done}")
        doubtful = {mention.person.id: mention.person for mention in mentions if not mention.sure and mention.person.id not in named}
        looks += self._unsure(panel, [person for person in doubtful.values() if not described.covers(person.look)])
        for identity in sorted(listed - set(named) - {mention.person.id for mention in mentions}):
            person = self.cast.get(identity)
            if person and person.look.strip() and not described.covers(person.look):
                self._note(panel, f"{identity} is in the panel, but visual_prompt neither names nor describes this character")
        return [*self._framing(panel, text), *looks, written]

    def _framing(self, panel: Panel, text: str) -> list[str]:
        """The shot words, where the prompt says nothing of the framing. Medium is what is drawn without any, and also
        what stands for a shot that was not given."""
        start = text[:_LOOKED_AT]
        if panel.shot == DEFAULT_SHOT or _CAMERA.search(start) or any(find_shots(part) for part in _CLAUSE.split(start)):
            return []
        self._note(panel, f'visual_prompt does not say the shot; "{SHOT_WORDS[panel.shot]}" is put before it in the prompt')
        return [SHOT_WORDS[panel.shot]]

    def _note(self, panel: Panel, what: str) -> None:
        self.notes.append(f"panel {panel.index}: {what}")


def join_pieces(pieces: list[str]) -> str:
    """Pieces that hold anything, on one line, joined by commas."""
    lines = [_SPACES.sub(" ", piece).strip() for piece in pieces]
    kept = [line for line in lines if line.strip(TRIM)]
    return ", ".join([*(line.rstrip(TRIM) for line in kept[:-1]), *kept[-1:]])


def clip_tokens(text: str) -> int:
    """About how many CLIP tokens a prompt takes (a text encoder of SD1.5 or SDXL reads 75 in one window)."""
    return sum(1 if len(word) < 9 else 1 + len(word) // 8 for word in _WORD.findall(text)) + len(_CJK.findall(text))
