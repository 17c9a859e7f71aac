"""The JSON form of a script: what JSON Parse Panels puts out, Save Script writes and Load Script reads.

It is the script with the version of the form in front. The model is not asked for a version: its answers have none,
which means 1. A script of a newer pack is read as far as its fields are known, with a report line.
"""

from __future__ import annotations

import json

from .schema import SCHEMA_VERSION, VERSION_KEY, ComicScript


def script_json(script: ComicScript) -> str:
    """A script as JSON text; `parse_script` gives the same script back."""
    return json.dumps({VERSION_KEY: SCHEMA_VERSION, **script.model_dump()}, ensure_ascii=False, indent=2)
