"""The form that POST /prompt takes."""

from __future__ import annotations

from .description import Description
from .kinds import NOTE, kinds

LANGUAGE = "en"


def api_form(description: Description) -> dict[str, dict]:
    """node id -> class, inputs (all widgets and links) and title."""
    prompt = {}
    for item in description.items:
        if item.type == NOTE:
            continue
        inputs = description.values(item, LANGUAGE)
        for name, (source, output) in item.links.items():
            inputs[name] = [str(description.number(source)), kinds()[description.item(source).type].slot(output)]
        title = description.title(item, LANGUAGE)
        prompt[str(description.number(item.key))] = {"class_type": item.type, "inputs": inputs, "_meta": {"title": title}}
    return prompt
