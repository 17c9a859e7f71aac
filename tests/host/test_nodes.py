"""What a real ComfyUI says about the nodes."""

import pytest

from comfy_server import NODES

INPUTS = {
    "A3BLoadModel": ["checkpoint", "expert_format", "vram_gb", "context", "device", "keep_in_ram", "cache_experts"],
    "A3BEncodeImage": ["model", "image", "size", "fit", "images"],
    "A3BBuildPrompt": ["text", "system", "language", "label_images", "images"],
    "A3BGenerate": [
        "model",
        "prompt",
        "preset",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "thinking",
        "thinking_budget",
        "format",
        "panels",
        "rounds",
        "schema",
        "regex",
        "stop",
    ],
    "A3BParsePanels": ["text", "panel_count", "on_error", "style_prefix", "style_suffix", "base_seed", "size_family"],
    "A3BPickPanel": ["script", "number", "when_absent", "style_prefix", "style_suffix", "base_seed", "size_family", "seed_per_scene"],
    "A3BEditScript": ["script", "patch", "replace", "scope", "whole_words", "match_case", "replace_ids"],
    "A3BSaveScript": ["script", "filename_prefix"],
    "A3BLoadScript": ["file", "path"],
}
TITLES = {
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
LISTS = ["prompt", "negative", "caption", "dialogue", "seed", "width", "height", "index"]
LISTS += ["speakers", "lines", "emotions", "line_panels", "looks", "people"]


@pytest.fixture(scope="module")
def described(server):
    return server.client.object_info()


@pytest.mark.parametrize("name", NODES)
def test_node_is_listed_with_its_inputs(described, name):
    node = described[name]
    names = [*node["input"].get("required", {}), *node["input"].get("optional", {})]
    assert [found for found in names if found in INPUTS[name]] == INPUTS[name]
    assert node["display_name"] == TITLES[name]
    assert node["category"] == "A3B"


@pytest.mark.parametrize("name", NODES)
def test_every_input_and_output_has_a_tooltip(described, server, name):
    node = described[name]
    for group in node["input"].values():
        for field, entry in group.items():
            assert entry[1].get("tooltip"), f"{name}.{field}"
    if "output_tooltips" in node:  # a current ComfyUI
        assert len(node["output_tooltips"]) == len(node["output"]) and all(node["output_tooltips"])


@pytest.mark.parametrize("name", NODES)
def test_text_widgets_leave_braces_alone(described, name):
    """U06, U08: dynamic prompts would eat braces and comments."""
    for group in described[name]["input"].values():
        for field, entry in group.items():
            if entry[0] == "STRING":
                assert entry[1].get("dynamicPrompts") is False, f"{name}.{field}"


def test_panels_come_as_lists_and_as_one_text(described):
    """U10: a list for each panel value, and single strings beside them."""
    node = described["A3BParsePanels"]
    as_list = dict(zip(node["output_name"], node["output_is_list"]))
    assert [name for name, is_list in as_list.items() if is_list] == LISTS
    assert as_list["script"] is False and as_list["joined"] is False


def test_generated_text_fits_any_text_input(described):
    """U22"""
    node = described["A3BGenerate"]
    assert node["output"][node["output_name"].index("text")] == "STRING"


def test_seed_reaches_64_bits(described):
    """U01"""
    assert described["A3BGenerate"]["input"]["required"]["seed"][1]["max"] == 2**64 - 1


@pytest.mark.parametrize("name", NODES)
def test_help_page_is_served(server, name):
    assert TITLES[name] in server.client.read(f"/extensions/a3b-comic-script/docs/{name}.md").decode("utf-8")
    assert server.client.read(f"/extensions/a3b-comic-script/docs/{name}/zh.md").decode("utf-8").strip()


def test_current_front_end_finds_words_and_templates(server):
    if not server.host.supports("--user-directory"):
        pytest.skip("the ComfyUI of 2024 has neither locales nor templates")
    words = server.client.get("/i18n")
    for language in ("en", "zh"):
        assert set(NODES) <= set(words[language]["nodeDefs"]), language
    assert "comic_script" in server.client.get("/workflow_templates")["a3b-comic-script"]
