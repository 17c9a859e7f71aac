"""What the pack as a whole promises: ids, widget order, texts, help pages, workflows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_comfy import comfy, load_pack  # noqa: F401
from pack_loader import ROOT

from tools import make_locales, make_workflows

NODES = load_pack().NODE_CLASS_MAPPINGS
IDS = ["A3BLoadModel", "A3BEncodeImage", "A3BBuildPrompt", "A3BGenerate", "A3BParsePanels"]

# Saved workflows hold widget values by position: append here, never insert, remove or reorder (U13).
ORDER = {
    "A3BLoadModel": "checkpoint expert_format vram_gb context device",
    "A3BEncodeImage": "model image size fit | images",
    "A3BBuildPrompt": "text system language label_images | images preset",
    "A3BGenerate": "model prompt preset max_new_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty seed thinking thinking_budget format panels rounds | schema regex stop",
    "A3BParsePanels": "text panel_count on_error style_prefix style_suffix base_seed size_family | stats",
}
OUTPUTS = {
    "A3BLoadModel": "model",
    "A3BEncodeImage": "images token_count",
    "A3BBuildPrompt": "prompt preview",
    "A3BGenerate": "text thinking stats",
    "A3BParsePanels": "prompt negative caption dialogue seed width height index count script report joined",
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
    }
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


@pytest.mark.parametrize("node_id", IDS)
def test_help_pages_name_every_input_and_output(node_id):
    docs = ROOT / "web" / "docs"
    for page in (docs / f"{node_id}.md", docs / node_id / "zh.md"):
        text = page.read_text(encoding="utf-8")
        for name in (*NODES[node_id].MARKERS, *NODES[node_id].RETURN_NAMES):
            assert f"`{name}`" in text or f"| {name} |" in text or f" {name} " in text, (page.name, name)


def test_the_preset_table_of_the_help_pages_is_the_one_in_the_code():
    from fake_comfy import part

    for name, numbers in part("nodes.sampling_presets").PRESETS.items():
        for page in ("A3BGenerate.md", "A3BGenerate/zh.md"):
            row = next(line for line in (ROOT / "web/docs" / page).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
            assert tuple(float(cell) for cell in row.split("|")[2:-1]) == numbers


# Workflows


@pytest.mark.parametrize("name", ["comic_script.json", "comic_script.zh.json", "comic_script.api.json"])
def test_committed_workflows_are_what_the_tool_writes(name):
    assert (make_workflows.FOLDER / name).read_text(encoding="utf-8") == make_workflows.files()[name]


def test_the_workflow_uses_every_node_of_the_pack():
    assert set(NODES) <= {node["class_type"] for node in make_workflows.api_form().values()}


def test_api_workflow_passes_each_nodes_own_rules(comfy):
    prompt = make_workflows.api_form()
    comfy.add_checkpoint(comfy.models_dir / "LLM", make_workflows.CHECKPOINT)
    for node in prompt.values():
        if node["class_type"] not in NODES:
            continue
        groups = NODES[node["class_type"]].INPUT_TYPES()
        known = {**groups["required"], **groups.get("optional", {})}
        assert set(groups["required"]) <= set(node["inputs"]) <= set(known)
        for name, value in node["inputs"].items():
            kind, options = known[name]
            if isinstance(value, list):
                source = prompt[value[0]]["class_type"]
                types = NODES[source].RETURN_TYPES if source in NODES else [t for _, t in make_workflows.CORE[source].outputs]
                assert types[value[1]] == kind, name
            elif isinstance(kind, list):
                assert value in kind, name
            else:
                assert options.get("min", value) <= value <= options.get("max", value), name


@pytest.mark.parametrize("language", make_workflows.LANGUAGES)
def test_canvas_workflow_is_consistent(language):
    graph = make_workflows.canvas_form(language)
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len({link[0] for link in graph["links"]}) == len(graph["links"]) == graph["last_link_id"]
    for link_id, source, source_slot, target, target_slot, kind in graph["links"]:
        output, entry = nodes[source]["outputs"][source_slot], nodes[target]["inputs"][target_slot]
        assert link_id in output["links"] and entry["link"] == link_id
        assert output["type"] == entry["type"] == kind or (kind == "COMBO")
        assert nodes[source]["pos"][0] < nodes[target]["pos"][0]  # reads from left to right
    for node in graph["nodes"]:
        if node["type"] in NODES:
            widgets = [n for n, m in NODES[node["type"]].MARKERS.items() if n in make_workflows.kinds()[node["type"]].widgets]
            assert len(node["widgets_values"]) == len(widgets) + ("seed" in widgets)


def test_languages_differ_in_texts_only():
    english, chinese = make_workflows.canvas_form("en"), make_workflows.canvas_form("zh")
    for first, second in zip(english["nodes"], chinese["nodes"]):
        changed = {name for name in first if first[name] != second[name]}
        story = first["type"] == "A3BBuildPrompt"
        assert changed <= ({"title", "widgets_values"} if story or first["type"] == "Note" else {"title"}), first["type"]
        if story:
            widgets = list(make_workflows.kinds()["A3BBuildPrompt"].widgets)
            pairs = zip(widgets, first["widgets_values"], second["widgets_values"])
            assert {name for name, here, there in pairs if here != there} == {"text", "language"}
    for graph in (english, chinese):
        for group in graph["groups"]:
            del group["title"]
        del graph["nodes"]
    assert english == chinese


def test_chinese_workflow_is_chinese():
    graph = make_workflows.canvas_form("zh")
    texts = [group["title"] for group in graph["groups"]] + [node["title"] for node in graph["nodes"]]
    texts += [node["widgets_values"][0] for node in graph["nodes"] if node["type"] in ("Note", "A3BBuildPrompt")]
    assert all(re.search("[\u4e00-\u9fff]", text) for text in texts)


def test_every_canvas_workflow_has_a_thumbnail():
    for name in make_workflows.files():
        if not name.endswith(".api.json"):
            assert (make_workflows.FOLDER / name).with_suffix(".jpg").read_bytes()[:2] == b"\xff\xd8", name


def test_chinese_texts_have_chinese_punctuation():
    """Half-width marks beside Chinese characters; code, names and JSON keep theirs."""
    files = [ROOT / "README.zh.md", ROOT / "locales/zh/nodeDefs.json", *(ROOT / "web/docs").glob("*/zh.md")]
    assert len(files) == 2 + len(IDS)
    for path in files:
        text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found = re.findall(r"[\u4e00-\u9fff][,;:()!?].{0,9}|.{0,9}[,;:()!?][\u4e00-\u9fff]", text)
        assert not found, (path.name, found)


def test_canvas_boxes_do_not_overlap():
    boxes = [(item.pos, item.size, item.key) for item in make_workflows.ITEMS]
    for number, ((x, y), (w, h), key) in enumerate(boxes):
        for (x2, y2), (w2, h2), other in boxes[number + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h + 30 <= y2 or y2 + h2 + 30 <= y, (key, other)


# House rules that can be checked from here


def test_only_two_files_import_comfyui():
    pattern = re.compile(r"^\s*(?:import|from) (?:comfy|folder_paths|server)\b", re.MULTILINE)
    found = {path.name for path in (ROOT / "nodes").glob("*.py") if pattern.search(path.read_text(encoding="ascii"))}
    assert found == {"host.py", "residency.py"}


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
