"""Parts what is wrong with a text from what to do about it.

A cause (`causes.py`) ends in advice for whoever lets a model write the text: raise the token limit, use the format.
A node that reads a file has no such widgets, so each node puts its own advice behind the fact.
"""

from __future__ import annotations

import re

BEGINS = " The text begins: "
# First words of a sentence that gives advice; `repeats itself` and `If thinking` state a reason with the advice in it.
_ADVICE = re.compile(
    r"(?<=[.?!:])\s+(?:(?:Raise|Ask|Use|Change|Choose|Connect|Mend|Answer|Look|Set|Switch|Try)\b"
    r"|If thinking was on|(?:It|The end) repeats itself: use)"
)


def split_cause(message: str) -> tuple[str, str, str]:
    """(the fact; the advice; the start of the raw text, with a space in front): advice and start may be ""."""
    head, begins, start = message.partition(BEGINS)
    found = _ADVICE.search(head)
    return head[: found.start()] if found else head, head[found.start() :].strip() if found else "", begins + start
