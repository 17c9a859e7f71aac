"""What the pack as a whole promises: ids, widget order, texts, help pages."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_comfy import comfy, load_pack  # noqa: F401
from pack_loader import ROOT

from tools import make_locales, make_script_tables

NODES = load_pack().NODE_CLASS_MAPPINGS
IDS = ["A3BLoadModel", "A3BEncodeImage", "A3BBuildPrompt", "A3BGenerate", "A3BParsePanels"]
IDS += ["A3BPickPanel", "A3BEditScript", "A3BSaveScript", "A3BLoadScript"]

# Saved workflows hold widget values by position: append here, never insert, remove or reorder (U13).
ORDER = {
    "A3BLoadModel": "checkpoint expert_format vram_gb context device | keep_in_ram cache_experts",
    "A3BEncodeImage": "model image size fit | images",
    "A3BBuildPrompt": "text system language label_images | images preset prompt_language",
    "A3BGenerate": "model prompt preset max_new_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty seed thinking thinking_budget format panels rounds | schema regex stop",
    "A3BParsePanels": "text panel_count on_error style_prefix style_suffix base_seed size_family | stats seed_per_scene",
    "A3BPickPanel": "script number when_absent style_prefix style_suffix base_seed size_family seed_per_scene",
    "A3BEditScript": "script patch replace scope whole_words match_case replace_ids",
    "A3BSaveScript": "script filename_prefix",
    "A3BLoadScript": "file | path",
}
OUTPUTS = {
    "A3BLoadModel": "model memory",
    "A3BEncodeImage": "images token_count",
    "A3BBuildPrompt": "prompt preview",
    "A3BGenerate": "text thinking stats",
    "A3BParsePanels": "prompt negative caption dialogue seed width height index count script report joined "
    "speakers lines emotions line_panels looks people cast",
    "A3BPickPanel": "prompt negative caption dialogue seed width height speakers looks people index count report",
    "A3BEditScript": "script report",
    "A3BSaveScript": "script file json_path text_path",
    "A3BLoadScript": "script title count report",
}


def test_ids_and_titles():
    pack = load_pack()
    assert list(NODES) == IDS
    assert pack.NODE_DISPLAY_NAME_MAPPINGS == {
        "A3BLoadModel": "Load A3B Model",
        "A3BEncodeImage": "Encode Image 384px",
        "A3BBuildPrompt": "Build [[IMG]] Prompt",
        "A3BGenerate": "Generate",
        "A3BParsePanels": "JSON Parse Panels",
        "A3BPickPanel": "Pick Panel",
        "A3BEditScript": "Edit Script",
        "A3BSaveScript": "Save Script",
        "A3BLoadScript": "Load Script",
    }
    assert all(node.SEARCH_ALIASES for node in NODES.values())
    assert (ROOT / pack.WEB_DIRECTORY).is_dir()
    assert {name for name in vars(pack) if name.isupper()} == set(pack.__all__)


@pytest.mark.parametrize("node_id", IDS)
def test_widgets_and_outputs_keep_their_order(node_id, comfy):
    inputs = NODES[node_id].INPUT_TYPES()
    order = " ".join(inputs["required"]) + (" | " + " ".join(inputs["optional"]) if "optional" in inputs else "")
    assert order == ORDER[node_id]
    assert " ".join(NODES[node_id].RETURN_NAMES) == OUTPUTS[node_id]


@pytest.mark.parametrize("node_id", IDS)
def test_everything_is_explained(node_id, comfy):
    node = NODES[node_id]
    for group in node.INPUT_TYPES().values():
        for name, (kind, options) in group.items():
            assert len(options["tooltip"]) > 8, name
            assert kind != "STRING" or options["dynamicPrompts"] is False, name
    assert all(len(tooltip) > 8 for tooltip in node.OUTPUT_TOOLTIPS)
    assert len(node.DESCRIPTION) > 60 and "UNIQUE_ID" not in str(node.INPUT_TYPES())


def test_seed_takes_all_64_bits(comfy):
    """U01"""
    seed = NODES["A3BGenerate"].INPUT_TYPES()["required"]["seed"][1]
    assert (seed["min"], seed["max"], seed["control_after_generate"]) == (0, 2**64 - 1, True)


@pytest.mark.parametrize("node_id", IDS)
def test_defaults_are_choices_and_in_range(node_id, comfy):
    for group in NODES[node_id].INPUT_TYPES().values():
        for name, (kind, options) in group.items():
            if "default" in options and isinstance(kind, list):
                assert options["default"] in kind, name
            elif "min" in options:
                assert options["min"] <= options["default"] <= options["max"], name


@pytest.mark.parametrize("language", ["en", "zh"])
def test_locales_cover_every_input_and_output(language):
    definitions = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["nodeCategories"]["A3B"]
    assert list(definitions) == IDS
    for node_id, node in NODES.items():
        entry = definitions[node_id]
        assert list(entry["inputs"]) == list(node.MARKERS)
        assert list(entry["outputs"]) == [str(slot) for slot in range(len(node.RETURN_NAMES))]
        texts = [entry["display_name"], entry["description"]]
        texts += [text for part in ("inputs", "outputs") for item in entry[part].values() for text in (item["name"], item["tooltip"])]
        assert all(texts)


def test_english_locale_is_what_the_tool_writes():
    assert make_locales.FILE.read_text(encoding="utf-8") == make_locales.content()


HELP = {"en": ("## Inputs", "## Outputs"), "zh": ("## \u8f93\u5165", "## \u8f93\u51fa")}


def help_section(node_id, language, heading):
    page = ROOT / "web" / "docs" / (f"{node_id}.md" if language == "en" else f"{node_id}/zh.md")
    _, _, rest = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert rest, f"{page} has no part {heading}"
    return rest.partition("\n## ")[0]


def label(node_id, name):
    """The name of an input on a Chinese canvas, without what stands in brackets."""
    definitions = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    return definitions[node_id]["inputs"][name]["name"].partition("\uff08")[0]


@pytest.mark.parametrize("language", HELP)
@pytest.mark.parametrize("node_id", IDS)
def test_help_pages_have_a_row_for_every_input_and_name_every_output(node_id, language):
    """Tooltips are short; the page is where a widget is explained. The Chinese one says which widget of the canvas it is."""
    inputs, outputs = (help_section(node_id, language, heading) for heading in HELP[language])
    rows = [line.split(" |")[0] for line in inputs.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(NODES[node_id].MARKERS)
    assert not [name for name in NODES[node_id].RETURN_NAMES if f"`{name}`" not in outputs]
    if language == "zh":
        cells = {name: row for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert not [name for name, row in cells.items() if label(node_id, name) not in ("JSON schema", name) and label(node_id, name) not in row]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_of_nodes_in_the_readme_has_every_input_and_output(language):
    """By the names that are on the canvas."""
    lines = (ROOT / ("README.md" if language == "en" else "README.zh.md")).read_text(encoding="utf-8").splitlines()
    definitions = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    for node_id, entry in definitions.items():
        row = next(line for line in lines if line.startswith(f"| **{entry['display_name']}"))
        _, _, inputs, outputs, _ = row.split("|")
        for cell, items in ((inputs, entry["inputs"]), (outputs, entry["outputs"])):
            names = [item["name"].partition("\uff08")[0] for item in items.values()]
            wanted = [f"`{name}`" if language == "en" else name for name in names]
            assert not [name for name in wanted if name not in cell], node_id


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_field_table_of_the_help_pages_is_the_schema(language):
    written = make_script_tables.PAGES[language].read_text(encoding="utf-8")
    assert written == make_script_tables.page(language)
    fields = re.findall(r"^\| `([\w\[\].]+)` \|", written[written.index(make_script_tables.BEGIN) :], re.MULTILINE)
    places = {"": "ComicScript", "characters[]": "Character", "dialogue[]": "DialogueLine", "panels[]": "Panel"}
    assert make_script_tables.MODELS.keys() == places.keys()
    wanted = [f"{place}.{name}".lstrip(".") for place, model in make_script_tables.MODELS.items() for name in model.model_fields]
    assert fields == ["version", *wanted]


def test_the_preset_table_of_the_help_pages_is_the_one_in_the_code():
    from fake_comfy import part

    for name, numbers in part("a3b_engine.sampling_presets").PRESETS.items():
        for page in ("A3BGenerate.md", "A3BGenerate/zh.md"):
            row = next(line for line in (ROOT / "web/docs" / page).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
            assert tuple(float(cell) for cell in row.split("|")[2:-1]) == numbers


def test_chinese_texts_have_chinese_punctuation():
    """Half-width marks beside Chinese characters; code, names and JSON keep theirs."""
    files = [ROOT / "README.zh.md", ROOT / "locales/zh/nodeDefs.json", *(ROOT / "web/docs").glob("*/zh.md")]
    assert len(files) == 2 + len(IDS)
    for path in files:
        text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found = re.findall(r"[\u4e00-\u9fff][,;:()!?].{0,9}|.{0,9}[,;:()!?][\u4e00-\u9fff]", text)
        assert not found, (path.name, found)


# House rules that can be checked from here


def test_only_two_files_import_comfyui():
    pattern = re.compile(r"^\s*(?:import|from) (?:comfy|folder_paths|server)\b", re.MULTILINE)
    found = {path.name for path in (ROOT / "nodes").glob("*.py") if pattern.search(path.read_text(encoding="ascii"))}
    assert found == {"host.py", "residency.py"}


def test_importing_from_a_folder_whose_templates_cannot_be_found_is_told_once(tmp_path, caplog):
    """Templates and help pages of such a folder answer 404; the nodes load all the same."""
    name, folder = "custom_nodes/my pack", tmp_path / "my pack"
    skipped = shutil.ignore_patterns("__pycache__")
    for part in ("nodes", "a3b_engine"):
        shutil.copytree(ROOT / part, folder / part, ignore=skipped)
    shutil.copy(ROOT / "__init__.py", folder)
    before = set(sys.modules)
    try:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for added in set(sys.modules) - before:
            if added.startswith(name):
                del sys.modules[added]
    assert list(module.NODE_CLASS_MAPPINGS) == IDS
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'my pack'" in message and "rename the folder" in message


def test_importing_the_pack_is_light():
    """No CUDA start-up, no heavy library, no ComfyUI; checked in a fresh interpreter. U20: an ASCII locale."""
    code = (
        "import importlib.util, sys, pathlib\n"
        f"root = pathlib.Path({str(ROOT)!r})\n"
        "spec = importlib.util.spec_from_file_location('x y', root / '__init__.py', submodule_search_locations=[str(root)])\n"
        "sys.modules['x y'] = m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "[node() for node in m.NODE_CLASS_MAPPINGS.values()]\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([n for n in ('transformers', 'cv2', 'llguidance', 'PIL', 'comfy') if n in sys.modules])\n"
    )
    environment = {"LC_ALL": "C", "PATH": "", "PYTHONUTF8": "0", "SYSTEMROOT": __import__("os").environ.get("SYSTEMROOT", "")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(sys.executable).parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
