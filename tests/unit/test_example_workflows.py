"""The example workflows: files as the tool writes them, one graph in all forms, every node of the pack in one of them."""

import json
import re

import pytest
from fake_comfy import comfy, load_pack  # noqa: F401
from pack_loader import ROOT

from tools import make_workflows
from tools.workflows import description as descriptions
from tools.workflows.api import api_form
from tools.workflows.canvas import canvas_form
from tools.workflows.kinds import CORE, NOTE, kinds
from tools.workflows.layout import TITLE_BAR, place

NODES = load_pack().NODE_CLASS_MAPPINGS
FOLDER = make_workflows.FOLDER
NAMES = descriptions.names()
CANVAS_FILES = [(name, language) for name in NAMES for language in descriptions.LANGUAGES]
FILES = make_workflows.files()
HONEST = {"en": ("demonstration model for drawn scenes, not a small Qwen", "demonstration model for drawn scenes that comes with the pack (not a small Qwen)"), "zh": ("\u4e0d\u662f\u5c0f\u53f7\u7684 Qwen",)}  # fmt: skip


def kept(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def kept_canvas(name, language):
    return kept(make_workflows.canvas_file(name, language))


def test_the_folder_holds_what_the_tool_writes():
    assert {path.name for path in FOLDER.glob("*.json")} == set(FILES)
    for name, content in FILES.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content, name


def test_the_promised_workflows_are_there():
    wanted = "comic_script describe_picture draw_panels_sdxl redraw_saved_script several_pictures text_only"
    assert NAMES == wanted.split()


def test_every_node_of_the_pack_is_in_an_example():
    used = {node["class_type"] for name in NAMES for node in kept(f"{name}.api.json").values()}
    assert set(NODES) <= used
    assert used <= set(NODES) | set(CORE)


def as_api(canvas):
    """A canvas file read back as the front end does: values by position, links from the table."""
    links = {link[0]: [str(link[1]), link[2]] for link in canvas["links"]}
    prompt = {}
    for node in canvas["nodes"]:
        if node["type"] == NOTE:
            continue
        if node["type"] in NODES:
            groups = NODES[node["type"]].INPUT_TYPES()
            entries = {**groups["required"], **groups.get("optional", {})}
            widgets = [(name, entry[1]) for name, entry in entries.items() if isinstance(entry[0], list) or not entry[0].startswith(("A3B", "IMAGE"))]
        else:
            widgets = [(name, {"control_after_generate": name in CORE[node["type"]].seeds}) for name in CORE[node["type"]].widgets]
        values, inputs = iter(node["widgets_values"]), {}
        for name, options in widgets:
            inputs[name] = next(values)
            if options.get("control_after_generate"):
                assert next(values) in ("fixed", "randomize", "increment", "decrement")
        assert list(values) == (["image"] if node["type"] == "LoadImage" else [])
        inputs |= {entry["name"]: links[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": node["title"]}}
    return prompt


@pytest.mark.parametrize("name", NAMES)
def test_canvas_and_api_forms_are_one_graph(name, comfy):
    """U13"""
    assert as_api(kept_canvas(name, "en")) == kept(f"{name}.api.json")


@pytest.mark.parametrize("name", NAMES)
def test_api_form_passes_each_nodes_own_rules(name, comfy):
    prompt = kept(f"{name}.api.json")
    comfy.add_checkpoint(comfy.models_dir / "LLM", "a3b-drawn-scenes-demo")
    saved = comfy.models_dir.parent / "output" / "a3b_comic" / "script_00001_.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}", encoding="utf-8")
    for node in prompt.values():
        if node["class_type"] not in NODES:
            continue
        groups = NODES[node["class_type"]].INPUT_TYPES()
        known = {**groups["required"], **groups.get("optional", {})}
        assert set(groups["required"]) <= set(node["inputs"]) <= set(known)
        for field, value in node["inputs"].items():
            kind, options = known[field]
            if isinstance(value, list):
                assert kinds()[prompt[value[0]]["class_type"]].outputs[value[1]][1] == kind, field
            elif isinstance(kind, list):
                assert value in kind, field
            else:
                assert options.get("min", value) <= value <= options.get("max", value), field


@pytest.mark.parametrize("name, language", CANVAS_FILES)
def test_links_of_a_canvas_agree(name, language):
    graph = kept_canvas(name, language)
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len({link[0] for link in graph["links"]}) == len(graph["links"]) == graph["last_link_id"]
    for link_id, source, source_slot, target, target_slot, kind in graph["links"]:
        output, entry = nodes[source]["outputs"][source_slot], nodes[target]["inputs"][target_slot]
        assert link_id in output["links"] and entry["link"] == link_id
        assert output["type"] == entry["type"] == kind
        # reads from left to right, and in a column from top to bottom
        assert (nodes[source]["pos"][0], nodes[source]["pos"][1]) < (nodes[target]["pos"][0], nodes[target]["pos"][1])


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_marked(name):
    for node in kept_canvas(name, "en")["nodes"]:
        if node["type"] in NODES:
            assert [output.get("shape") == 6 for output in node["outputs"]] == list(NODES[node["type"]].OUTPUT_IS_LIST)


@pytest.mark.parametrize("name", NAMES)
def test_languages_differ_in_texts_only(name):
    english, chinese = kept_canvas(name, "en"), kept_canvas(name, "zh")
    for first, second in zip(english["nodes"], chinese["nodes"]):
        changed = {key for key in first if first[key] != second[key]}
        assert changed <= {"title", "widgets_values"}, first["type"]
        if "widgets_values" in changed and first["type"] != NOTE:
            names = list(kinds()[first["type"]].widgets)
            pairs = zip(names, first["widgets_values"], second["widgets_values"])
            assert {key for key, here, there in pairs if here != there} <= {"text", "language", "patch"}
    for graph in (english, chinese):
        for group in graph["groups"]:
            del group["title"]
        del graph["nodes"]
    assert english == chinese


def texts_of(graph):
    """What a reader sees: headings, titles, notes, and the texts typed for the model."""
    found = [group["title"] for group in graph["groups"]] + [node["title"] for node in graph["nodes"]]
    found += [node["widgets_values"][0] for node in graph["nodes"] if node["type"] in (NOTE, "A3BBuildPrompt")]
    return [text for text in found if text]


@pytest.mark.parametrize("name", NAMES)
def test_chinese_workflow_is_chinese(name):
    texts = texts_of(kept_canvas(name, "zh"))
    assert all(re.search("[\u4e00-\u9fff]", text) for text in texts)
    for text in texts:
        assert not re.findall(r"[\u4e00-\u9fff][,;:()!?].{0,9}|.{0,9}[,;:()!?][\u4e00-\u9fff]", text), text
    assert not any(re.search("[\u3000-\u9fff]", text) for text in texts_of(kept_canvas(name, "en")))


@pytest.mark.parametrize("name, language", CANVAS_FILES)
def test_the_note_says_what_the_bundled_model_is(name, language):
    graph = kept_canvas(name, language)
    notes = "\n".join(node["widgets_values"][0] for node in graph["nodes"] if node["type"] == NOTE)
    if any(node["type"] == "A3BLoadModel" for node in graph["nodes"]):
        assert any(words in notes for words in HONEST[language]) and "Qwen3.5-35B-A3B-FP8" in notes
    for other in re.findall(r"\b[a-z]+_[a-z_]+\b", notes):  # a workflow, a widget or a job that a note names is there
        jobs = {*NAMES, *(widget for kind in kinds().values() for widget in kind.widgets), "enhance_image", "enhance_video", "read_text"}
        assert other in jobs or f"{other}.{language}.png" in notes, other


@pytest.mark.parametrize("name", NAMES)
def test_nodes_stand_apart_and_in_their_groups(name):
    boxes, frames = place(descriptions.read(name))
    placed = list(boxes.items())
    for number, (key, box) in enumerate(placed):
        for other, there in placed[number + 1 :]:
            beside = box.x + box.width <= there.x or there.x + there.width <= box.x
            above = box.y + box.height + TITLE_BAR < there.y or there.y + there.height + TITLE_BAR < box.y
            assert beside or above, (key, other)
        around = [frame for frame in frames if frame.x < box.x and box.x + box.width < frame.x + frame.width]
        assert len(around) == 1 and box.y + box.height < around[0].height, key
    assert all(first.x + first.width < second.x for first, second in zip(frames, frames[1:]))


@pytest.mark.parametrize("name, language", CANVAS_FILES)
def test_every_canvas_file_has_its_picture(name, language):
    from PIL import Image

    path = (FOLDER / make_workflows.canvas_file(name, language)).with_suffix(".jpg")
    assert path.stat().st_size < 300_000
    with Image.open(path) as picture:
        assert picture.format == "JPEG" and picture.width >= 1200
        frames = canvas_form(descriptions.read(name), language)["groups"]
        width = max(frame["bounding"][0] + frame["bounding"][2] for frame in frames)
        height = max(frame["bounding"][3] for frame in frames)
        # a picture of an older layout has other proportions
        assert abs(picture.width / picture.height - width / height) < 0.02 * width / height


def test_the_readmes_picture_is_of_the_comic_workflow():
    from PIL import Image

    with Image.open(ROOT / "assets" / "workflow.jpg") as large, Image.open(FOLDER / "comic_script.jpg") as small:
        assert abs(large.width / large.height - small.width / small.height) < 0.02
        assert large.width >= 2000


# Descriptions


def described(tmp_path, monkeypatch, **changes):
    """A description of two nodes, with the second one changed."""
    nodes = [{"key": "load", "type": "A3BLoadModel"}, {"key": "parse", "type": "A3BParsePanels", **changes}]
    raw = {"groups": [{"color": "#000", "columns": [nodes]}], "texts": {language: {"titles": {}, "notes": {}, "groups": ["x"]} for language in ("en", "zh")}}
    (tmp_path / "descriptions").mkdir()
    (tmp_path / "descriptions" / "it.json").write_text(json.dumps(raw), encoding="utf-8")
    (tmp_path / "texts.json").write_text((descriptions.FOLDER / "texts.json").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(descriptions, "FOLDER", tmp_path)
    return descriptions.read("it")


@pytest.mark.parametrize(
    "links",
    [{"text": "nobody.text"}, {"text": "load.text"}, {"no_such_input": "load.model"}],
    ids=["no such node", "no such output", "no such input"],
)
def test_a_link_from_or_to_nowhere_is_refused(tmp_path, monkeypatch, links):
    with pytest.raises(ValueError, match="is no link"):
        described(tmp_path, monkeypatch, links=links)


def test_two_nodes_with_one_key_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="same key"):
        described(tmp_path, monkeypatch, key="load")


def test_a_value_for_no_widget_is_refused(tmp_path, monkeypatch):
    it = described(tmp_path, monkeypatch, values={"panel_cuont": 3})
    with pytest.raises(ValueError, match="panel_cuont"):
        api_form(it)


def test_a_widget_left_without_a_value_is_refused(tmp_path, monkeypatch):
    it = described(tmp_path, monkeypatch, type="A3BLoadScript")
    with pytest.raises(ValueError, match="without a value .'file'"):
        api_form(it)


def test_titles_left_out_are_those_of_the_class(tmp_path, monkeypatch):
    it = described(tmp_path, monkeypatch, values={"panel_count": 3})
    assert [it.title(item, "en") for item in it.items] == ["Load A3B Model", "JSON Parse Panels"]
    assert api_form(it)["2"]["inputs"]["panel_count"] == 3
