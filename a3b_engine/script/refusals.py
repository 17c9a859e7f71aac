"""Tells a model that refuses, in a value of a script, from a person of the story who cannot do something.

Sure is only a value that is nothing but a refusal, said by an I or we to the reader, and names the making of the content:
"I'm sorry, but I can't assist with that request." Less than that is `doubtful`, and stays.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .vocabulary import refusal_parts

_LONGEST = 400
_MARKS = " \t\r\n\"'*_.\u201c\u201d\u300c\u300d"
_SORRY = r"(?:(?:i'm|i am|we're|we are)\s(?:very |so |truly )?sorry|sorry|my apologies|i apologi[sz]e|unfortunately|i'm afraid|i am afraid)"
_SELF = r"as an? (?:ai|artificial intelligence|(?:large )?language model|(?:ai )?assistant)\b[^.,!?]{0,40}"
_CANNOT = (
    r"(?:i|we)(?: (?:cannot|can't|can not|could not|couldn't|won't|will not|must decline|have to decline|need to decline|decline"
    r"|must refuse|refuse|would rather not|am unable|are unable|am not able|are not able|am not comfortable"
    r"|do not feel comfortable|don't feel comfortable)|'m unable|'re unable|'m not able|'re not able|'m not comfortable|'d rather not)"
)
_MAKING = (
    r"(?:help|assist|aid|continue|comply|create|creating|generate|generating|provide|providing|fulfil|fulfill|produce|producing|write"
    r"|writing|draw|drawing|depict|depicting|describe|describing|answer|respond|complete|process|engage|do|to your|your|this|that)\b"
)
_CONTENT = (
    r"\b(?:request|requests|content|contents|image|images|imagery|picture|pictures|illustration|illustrations|story|scene|scenes|comic"
    r"|comics|script|scripts|panel|panels|prompt|prompts|material|policy|policies|guidelines|depiction|depictions)\b"
)
_AT_END = r"(?:help|assist|comply|do) ?(?:you )?(?:with )?(?:this|that|it)?\s*$"
_FIRST_PERSON = re.compile(rf"(?:{_SORRY}[\s,.;!]*(?:but )?)?(?:{_SELF}[\s,]*)?(?:{_SORRY}[\s,.;!]*(?:but )?)?{_CANNOT}\b([^.!?]{{0,160}})")
_OPENING = re.compile(rf"(?:{_SORRY}\b[\s,.;!]|{_SELF}(?:,|\s(?:i|we)\b)|(?:this|your|that) (?:request|content|prompt) (?:violates|goes against))")
_MADE, _NAMED, _ENDS = re.compile(_MAKING), re.compile(_CONTENT), re.compile(_AT_END)
_NARRATED = re.compile(
    r"\b(?:says?|said|writes?|wrote|whispers?|shouts?|cries|cried|thinks?|thought|reads?|screams?|mutters?|tells?|told"
    r"|repl(?:y|ies|ied)|answers|sobs?|she|he|her|him|his)\b"
)

_SENTENCES = re.compile("[.!?\u3002\uff01\uff1f\n]+")
_TO_THE_READER = re.compile(
    r"\b(?:i|i'm|we|you|your|please|instead|je|vous|nous|ich|sie|yo|puedo|usted|posso|\u044f|\u0432\u044b)\b"
    "|\u6211|\u60a8|\u4f60|\u8bf7|\u8acb|\u4ed6\u306e|\u304f\u3060\u3055\u3044|\u307e\u305b\u3093|\u307e\u3059"
)

_COMMA = re.compile("[,;\uff0c\uff1b\u3001]")
_REASON = re.compile(r"\s*(?:as|because|since|due|but|or|nor|and|which|including|even)\b|\s*(?:\u56e0\u4e3a|\u56e0\u70ba|\u56e0\u6b64)")
_OF_OTHERS = re.compile("[\u4ed6\u5979\u5b83\u5f7c]")  # he, she, it: somebody of the story
_STOP = "[^\u3002\uff01\uff1f!?\\n]"  # anything within a sentence


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern, re.Pattern, re.Pattern, re.Pattern]:
    """Patterns of a refusal in Chinese, in Japanese and in other languages, and of the opening of one in the first two."""
    parts = refusal_parts()
    one = {name: f"(?:{'|'.join(map(re.escape, words))})" for name, words in parts.items() if name != "others"}
    sorry = f"[\u5f88\u975e\u5e38\u5341\u5206\u771f\u7684]{{0,2}}{one['sorry_zh']}[\uff0c,\u3002\uff01!\\s]{{1,3}}(?:\u4f46|\u4e0d\u8fc7|\u4e0d\u904e)?"
    own = f"[\u4f5c\u505a][\u4e3a\u70ba].{{0,3}}{one['self_zh'].replace('AI', 'ai')}.{{0,8}}?[\uff0c,\\s]{{0,2}}"
    cannot = f"\u6211[\u4eec\u5011]?{one['cannot_zh']}"
    named = f"(?:{_STOP}{{0,24}}{one['content_zh']}|\u3002?\\Z)"
    chinese = f"(?:{sorry})?(?:{own})?{cannot}{_STOP}{{0,12}}?{one['making_zh']}{named}|{sorry}{cannot}{_STOP}{{0,8}}?{one['content_zh']}"
    japanese = f"(?:{one['sorry_ja']}[\u3001\u3002\\s]{{0,2}}){{1,2}}{_STOP}{{0,40}}{one['content_ja']}{_STOP}{{0,24}}{one['cannot_ja']}"
    others = "|".join(word.replace("\u2026", r"[^.!?\n]{0,40}?") for word in parts["others"])
    opening = f"{sorry}(?:\u6211|{one['cannot_zh']})|{own}\u6211|{cannot}[\u4e3a\u70ba]\u60a8|\u7533\u3057\u8a33(?:\u3042\u308a|\u3054\u3056\u3044)\u307e\u305b\u3093\u304c"
    return (
        re.compile(chinese),
        re.compile(japanese),
        re.compile(rf"(?:[^.!?\n]{{0,40}}[,.:]\s)?(?:mais |pero |aber |mas |ma |\u043d\u043e )?(?:{others})"),
        re.compile(opening),
    )


def is_refusal(text: str) -> bool:
    """Whether a value is surely a refusal of the model and nothing else. Never of a text that someone of the story says."""
    start = _start(text)
    found = _FIRST_PERSON.match(start)
    if found:
        told = found[1]
        named = _MADE.search(told) and _NAMED.search(told) or _ENDS.search(told)
        return bool(named) and not _NARRATED.search(told) and _goes_on(told) and _addresses(start[found.end() :])
    chinese, japanese, others, _ = _patterns()
    found = chinese.match(start) or japanese.match(start) or others.match(start)
    if not found or _OF_OTHERS.search(found.group()):
        return False
    rest = _SENTENCES.split(start[found.end() :], maxsplit=1)[0]
    return _goes_on(rest) and _addresses(start[found.end() :])


def _goes_on(sentence: str) -> bool:
    """Whether what follows a comma in the sentence of a refusal is its reason or is said to the reader."""
    tail = _COMMA.split(sentence, maxsplit=1)[1:]
    return not tail or not tail[0].strip() or bool(_TO_THE_READER.search(tail[0]) or _REASON.match(tail[0]))


def _addresses(rest: str) -> bool:
    """Whether every sentence after a refusal still speaks to the reader; the story would go on in another way."""
    sentences = _SENTENCES.split(rest)[1:] if rest[:1] not in ".!?\u3002\uff01\uff1f" else _SENTENCES.split(rest)
    return all(_TO_THE_READER.search(sentence) for sentence in sentences if sentence.strip())


def is_doubtful(text: str) -> bool:
    """Whether a value begins as a refusal might, and may also be the story's."""
    start = _start(text)
    if _OPENING.match(start):
        return bool(_MADE.search(start[:160])) and not _NARRATED.search(start[:160])
    return bool(_patterns()[3].match(start))


def _start(text: str) -> str:
    """The text in plain lower case, without marks around it; empty if it goes on long after a refusal's length, or if a
    mark of speech closes inside of it: then somebody of the story speaks."""
    text = text.strip()
    if len(text) > _LONGEST or text[:1] in "\"'\u201c\u300c" and text[-1:] not in "\"'\u201d\u300d":
        return ""
    return text.strip(_MARKS).casefold().replace("\u2019", "'")
