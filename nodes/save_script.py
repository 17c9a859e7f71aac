"""Save Script: a comic script as JSON and as readable text in ComfyUI's output folder."""

from __future__ import annotations

from typing import Annotated

from ..a3b_engine.script.document import script_json
from ..a3b_engine.script.files import save_pair
from ..a3b_engine.script.fountain import fountain_text
from . import host
from .annotations import Output, Shown, Text, node
from .script_text import whole_script


@node(
    "A3BSaveScript",
    "Save Script",
    category="A3B",
    output_node=True,
    search=("save json", "save text", "fountain", "export script", "comic script"),
)
def A3BSaveScript(
    script: Annotated[str, Text(tooltip="The script output of JSON Parse Panels, or any comic script as JSON, damaged or not.")] = "",
    filename_prefix: Annotated[
        str,
        Text(
            multiline=False,
            tooltip="Beginning of the file names, with folders below ComfyUI's output folder: comic/page. %title%, %year%, %month%, %day%, "
            "%hour%, %minute% and %second% are filled in. A number follows, so that no file is overwritten.",
        ),
    ] = "comic/script",
) -> tuple[
    Annotated[str, Output("STRING", "script", "The script as it was saved.")],
    Annotated[str, Output("STRING", "file", 'Name of the JSON file for Load Script: "comic/script_00001_.json [output]".')],
    Annotated[str, Output("STRING", "json_path", "Full path of the JSON file.")],
    Annotated[str, Output("STRING", "text_path", "Full path of the readable file, in Fountain syntax for screenwriting programs.")],
]:
    """Saves a comic script twice: as JSON, which Load Script reads back unchanged, and as a screenplay for people to read."""
    found, _ = whole_script(script, "script")
    text = script_json(found)
    root = host.output_folder()
    json_path, text_path = save_pair(root, filename_prefix, found.title, (text, fountain_text(found)))
    name = json_path.relative_to(root).as_posix()
    return Shown((text, f"{name} [output]", str(json_path), str(text_path)), f"{name}\n{text_path.relative_to(root).as_posix()}")
