"""What a user asks: texts, pictures and where the pictures stand in the text.

`[[IMG]]` stands for the next picture, `[[IMG:2]]` for the second one. Pictures no marker names go before the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from .errors import PromptError
from .tokenizer import without_surrogates

ROLES = ("user", "assistant", "system")

# Full-width colon too: it is what a Chinese keyboard types. No bracket inside, so that each try ends at the next one.
_MARKER = re.compile("\\[\\[[^\\S\\n]*IMG[^\\S\\n]*(?:[:\uff1a]([^\\[\\]\\n]*))?\\]\\]", re.IGNORECASE)


@dataclass(frozen=True)
class Prompt:
    """One request.

    user: the text to answer, with `[[IMG]]` markers. system: instructions, put first whatever the order of `history`.
    images: pictures in input order (ImageFeatures, or anything countable here). history: earlier turns, oldest first,
    each {"role": "user" | "assistant" | "system", "content": str}. label_images: write "Picture N: " before each picture,
    N being its place in `images`. form: what the instructions ask for, as a hint to the caller ("comic script", "text",
    or "" for unknown); it never reaches the model.
    """

    user: str = ""
    system: str = ""
    images: Sequence[Any] = ()
    history: Sequence[Mapping[str, str]] = ()
    label_images: bool = False
    form: str = ""

    def __post_init__(self) -> None:
        for name in ("user", "system"):
            if not isinstance(getattr(self, name), str):
                raise PromptError(f"The {name} text must be a string, found {type(getattr(self, name)).__name__}.")
        for name in ("images", "history"):
            value = getattr(self, name)
            if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
                raise PromptError(f"Prompt {name} must be a list, found {type(value).__name__}.")
            object.__setattr__(self, name, tuple(value))


def place_images(text: str, n_images: int) -> list[str | int]:
    """Cut `text` at its image markers.

    Returns the parts in reading order: strings (never empty) and 0-based indices of images. A numbered marker names its
    image (1-based, any number of times); the others take, in order, the images no numbered marker names. Images that are
    left over come first. Raises PromptError with the numbers when there are more markers than images.
    """
    pieces: list[str | int | None] = []  # None: a marker without a number
    end = 0
    for match in _MARKER.finditer(text):
        pieces.append(text[end : match.start()])
        pieces.append(None if match[1] is None else _image_number(match, n_images) - 1)
        end = match.end()
    pieces.append(text[end:])

    named = {piece for piece in pieces if isinstance(piece, int)}
    waiting = [index for index in range(n_images) if index not in named]
    unnumbered = pieces.count(None)
    if unnumbered > len(waiting):
        markers = sum(not isinstance(piece, str) for piece in pieces)
        raise PromptError(
            f"The prompt has {_count(markers, 'marker')}, {_count(n_images, 'image')}: "
            "connect more images or remove markers."
        )
    taken, left_over = iter(waiting[:unnumbered]), waiting[unnumbered:]
    placed = [next(taken) if piece is None else piece for piece in pieces]
    return [*left_over, *(piece for piece in placed if piece != "")]


def build_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The turns of `prompt` in template order: at most one system turn, first; the new user turn last.

    A turn is {"role", "content"}; content is a string, or for a user turn with pictures a list of {"type": "text",
    "text": str} and {"type": "image", "index": int}. Assistant turns with thinking have it in "reasoning_content".
    Raises PromptError for misplaced markers, wrong counts, bad roles and a prompt with nothing to answer.
    """
    system = [_text(prompt.system, "system text")]
    turns: list[dict[str, Any]] = []
    for number, turn in enumerate(prompt.history, start=1):
        role, content = _history_turn(turn, number)
        if role == "system":
            system.append(content)
        elif role == "assistant":
            turns.append({"role": role, **_without_thinking(content)})
        else:
            turns.append({"role": role, "content": content})
    system_text = "\n\n".join(text for text in system if text.strip())

    user = _text(prompt.user, "user text", markers=True)
    if not user.strip():
        user = ""
    parts = place_images(user, len(prompt.images))
    if any(isinstance(part, int) for part in parts):
        turns.append({"role": "user", "content": _content_items(parts, prompt.label_images)})
    elif user:
        turns.append({"role": "user", "content": user})
    elif not (turns and turns[-1]["role"] == "user"):
        if not system_text:
            raise PromptError("The prompt is empty: fill in the user text, the system text, or connect an image.")
        turns.append({"role": "user", "content": ""})
    if system_text:
        turns.insert(0, {"role": "system", "content": system_text})
    return turns


def _content_items(parts: list[str | int], label_images: bool) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            items.append({"type": "text", "text": part})
            continue
        if label_images:
            items.append({"type": "text", "text": f"Picture {part + 1}: "})
        items.append({"type": "image", "index": part})
    return items


def _image_number(match: re.Match[str], n_images: int) -> int:
    digits = match[1].strip()
    if not digits.isdecimal():
        raise PromptError(
            f"The marker {match[0]!r} is not understood: write [[IMG]] for the next image or [[IMG:2]] for the second one."
        )
    number = int(digits) if len(digits) <= 9 else n_images + 1
    if not 1 <= number <= n_images:
        raise PromptError(
            f"The marker {match[0]!r} names image {digits[:20]}, but the prompt has {_count(n_images, 'image')}."
        )
    return number


def _history_turn(turn: Any, number: int) -> tuple[str, str]:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if role not in ROLES or not isinstance(content, str):
        raise PromptError(
            f"History turn {number} must be {{'role': one of {', '.join(ROLES)}, 'content': text}}, "
            f"found role {role!r} with content of type {type(content).__name__}."
        )
    return role, _text(content, f"history turn {number} ({role})")


def _text(text: str, where: str, *, markers: bool = False) -> str:
    found = None if markers else _MARKER.search(text)
    if found:
        raise PromptError(f"The {where} holds the image marker {found[0]!r}; markers belong in the user text.")
    return without_surrogates(text)


def _without_thinking(content: str) -> dict[str, str]:
    """Separate the leading thinking block of an earlier answer: templates drop or re-wrap it through its own key."""
    head, closing, answer = content.partition("</think>")
    opened = head.lstrip().startswith("<think>")
    if not closing or ("<think>" in head and not opened):
        return {"content": content}  # no block, or a tag that is part of the answer's own text
    thinking = head.lstrip().removeprefix("<think>") if opened else head
    return {"content": answer.lstrip("\n"), "reasoning_content": thinking.strip("\n")}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
