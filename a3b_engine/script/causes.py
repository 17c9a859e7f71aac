"""Why a text holds no script, in one sentence a person can act on, with the start of the text."""

from __future__ import annotations

import re

from .locate import Scan
from .report import quote
from .vocabulary import is_error_message, sounds_like_refusal

_EXCERPT = 160
_LOOKS_LIKE_JSON = re.compile(r"[{\[]\s{0,40}[\"'\u201c\w]")

_EMPTY_LIST = r"\[\s{0,80}(?:\{\s{0,80}\}[\s,]{0,80}){0,64}\]"
_EMPTY_JSON = re.compile(rf"(?:^|\n)\s*(?:{_EMPTY_LIST}|\{{\s*(?:\"\w{{1,40}}\"\s*:\s*(?:{_EMPTY_LIST}|\{{\s*\}}|\"\"|null)\s*)?\}}|null)\s*(?:```)?\s*\Z")
_ERROR_OBJECT = re.compile(r"(?:```json\s*)?\{\s*\"errors?\"\s*:")
_REFUSAL_KEY = re.compile(r"(?:```json\s*)?\{\s*\"refusal\"\s*:\s*\"[^\"]")
_TAGS = re.compile(r"<\w{1,40}[ >]")


def excerpt(text: str) -> str:
    """The start of a raw text as one line."""
    return quote(text.strip(), _EXCERPT) if text.strip() else "(empty)"


def repeats_itself(text: str) -> bool:
    """Whether the end of a text is one short piece over and over."""
    tail = text.rstrip()[-1200:]
    return any(len(tail) >= size * 6 and tail.endswith(tail[-size:] * 6) for size in range(4, 200))


def failure(found: Scan, *, placeholder: bool, schema: bool, refused: bool = False) -> str:
    """The likeliest reason that no script was read, and the start of the raw text."""
    return f"{_reason(found, placeholder, schema, refused)} The text begins: {excerpt(found.text)}"


def _reason(found: Scan, placeholder: bool, schema: bool, refused: bool) -> str:
    answer = found.answer.strip()
    loop = " It repeats itself: use the sampling values of the model card." if repeats_itself(found.text) else ""
    if not found.text.strip():
        return (
            "The text is empty. If thinking was on, the token limit was probably reached while thinking:"
            " raise max_new_tokens, set a thinking budget, or switch thinking off."
        )
    if found.thinking == "open":
        return (
            "The token budget was spent thinking: the thinking block is never closed and no answer follows."
            f" Raise max_new_tokens, set a thinking budget, or switch thinking off.{loop}"
        )
    if found.thinking == "closed" and not answer:
        return f"The thinking block is closed, but no answer follows it. Raise max_new_tokens or switch thinking off.{loop}"
    if schema and not refused:
        return "The JSON in the text is a schema (a description of the format), not a script. Ask again, or use the format widget."
    if placeholder and not refused:
        return 'The JSON in the text is a sample with placeholders ("...", "<text>") only, not a script. Ask again.'
    if found.cut_off:
        return f"The text is cut off before anything of the script is whole (token limit). Raise max_new_tokens.{loop}"
    if refused or _REFUSAL_KEY.match(answer) or sounds_like_refusal(answer):
        return "The model refused or could not answer: there is no script in its text. Change the story or the system text."
    if loop:
        return f"There is no script in the text.{loop}"
    if is_error_message(answer) or _ERROR_OBJECT.match(answer):
        return "The text is the error message of a server or program, not an answer. Mend that first."
    if _EMPTY_JSON.search(answer):
        return "The JSON in the text is empty: it holds no panels. Ask again, or use the format widget."
    if _LOOKS_LIKE_JSON.search(answer):
        detail = f" ({found.trouble})" if found.trouble else ""
        return f"There is JSON in the text, but no panels that can be read{detail}. Ask for a list named panels, or use the format widget."
    if answer.endswith((":", "\uff1a", "```json", "```", "json")) and "\n\n\n" not in answer:
        return "The text ends before the JSON begins (token limit, or a stop string). Raise max_new_tokens, or look at stop."
    if answer.endswith(("?", "\uff1f")):
        return "There is no JSON in the text: the model asks back. Answer its question in the prompt, or use the format widget."
    if _TAGS.match(answer):
        return "There is no JSON in the text: it is written in tags (XML). Ask for JSON with a list named panels."
    return "There is no JSON in the text. Use the comic script format, or ask for JSON with a list named panels."


def truncation(found: Scan, whole: int, partial: int) -> str:
    """The sentence for a script whose end is missing."""
    loop = " The end repeats itself: use the sampling values of the model card." if repeats_itself(found.text) else ""
    return (
        f"The text ends before the script is closed (token limit): {whole} panels are whole, {partial} cut off."
        f" Raise max_new_tokens or ask for fewer panels.{loop} The text begins: {excerpt(found.text)}"
    )
