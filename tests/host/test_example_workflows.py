"""Every example workflow in a real ComfyUI: its classes and links are known there, and it runs as it is."""

import json
import struct

import pytest

from comfy_server import PANELS, ROOT, example_workflow, finished, saved_images, shown_text, succeeded, watch, witnessed
from tools.runner.client import PromptRejected, run_error
from tools.runner.workflow import Workflow

FORMS = sorted((ROOT / "example_workflows").glob("*.api.json"))
ELSEWHERE = {"checkpoint", "image", "file", "ckpt_name"}  # lists of files that a user has
SCRIPT = {
    "title": "Rain",
    "panels": [
        {"index": 1, "shot": "wide", "visual_prompt": "a pier in bright daylight"},
        {"index": 2, "shot": "close", "visual_prompt": "a hand at daylight"},
        {"index": 3, "shot": "medium", "visual_prompt": "a lamp"},
    ],
}


@pytest.fixture(scope="module")
def described(server):
    return server.client.object_info()


def size_of(server, image):
    """Width and height of a saved picture, from the head of the PNG."""
    return struct.unpack(">II", server.client.view(image)[16:24])


def output_files(server, entry, workflow):
    """The texts of the two files that Save Script wrote: JSON (parsed) and screenplay."""
    script, screenplay = shown_text(entry, workflow, "A3BSaveScript").splitlines()
    folder = server.work / "output"
    return json.loads((folder / script).read_text(encoding="utf-8")), (folder / screenplay).read_text(encoding="utf-8")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name.split(".")[0])
def test_classes_inputs_and_links_are_known(described, form):
    graph = json.loads(form.read_text(encoding="utf-8"))
    for key, node in graph.items():
        known = described[node["class_type"]]["input"]
        entries = {**known.get("required", {}), **known.get("optional", {})}
        assert set(known.get("required", {})) <= set(node["inputs"]) <= set(entries), (key, node["class_type"])
        for name, value in node["inputs"].items():
            kind, options = entries[name][0], entries[name][1] if len(entries[name]) > 1 else {}
            if isinstance(value, list):
                assert described[graph[value[0]]["class_type"]]["output"][value[1]] == kind, (key, name)
            elif isinstance(kind, list) or kind == "COMBO":
                assert name in ELSEWHERE or value in (kind if isinstance(kind, list) else options["options"]), (key, name)
            elif kind in ("INT", "FLOAT"):
                assert options["min"] <= value <= options["max"], (key, name)


def test_text_only_writes_edits_and_keeps_a_script(server):
    workflow = example_workflow(server, "text_only", seed=111)
    entry = succeeded(server, workflow)
    written = json.loads(shown_text(entry, workflow, "A3BGenerate"))
    script, screenplay = output_files(server, entry, workflow)
    assert [panel["index"] for panel in script["panels"]] == list(range(1, PANELS + 1))
    assert script["title"] == "The last lamp" != written["title"]
    assert script["dialogue"] == written["dialogue"] and "The last lamp" in screenplay


def test_several_pictures_stand_where_the_story_names_them(server):
    outputs = {"preview": 1}
    workflow = watch(example_workflow(server, "several_pictures", seed=112), "A3BBuildPrompt", outputs)
    entry = succeeded(server, workflow)
    preview = witnessed(entry, outputs)["preview"][0]
    first, second = (preview.index(f"Picture {number}: [picture {number}: 12x12 tokens]") for number in (1, 2))
    assert preview.index("the heroine: Picture 1") < first < preview.index("she lives in: Picture 2") < second
    script, _ = output_files(server, entry, workflow)
    assert len(script["panels"]) == PANELS


def test_describe_picture_answers_both_questions(server):
    workflow = example_workflow(server, "describe_picture", format="as the preset asks", max_new_tokens=12, seed=113)
    entry = succeeded(server, workflow)
    asked = [key for key, node in workflow.graph.items() if node["class_type"] == "A3BGenerate"]
    answers = ["".join(entry["outputs"][key]["text"]) for key in asked]
    assert len(asked) == 2 and all(answers) and answers[0] != answers[1]
    assert not any(answer.lstrip().startswith("{") for answer in answers)  # plain text, no grammar


def test_redraw_saved_script_draws_all_panels_and_one_again(server):
    workflow = example_workflow(server, "redraw_saved_script")
    workflow.set("A3BParsePanels", panel_count=0)
    file = server.work / "output" / workflow.inputs("A3BLoadScript")["file"].removesuffix(" [output]")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(SCRIPT), encoding="utf-8")
    prompts = {"prompt": 0}
    entry = succeeded(server, watch(workflow, "A3BParsePanels", prompts))
    cards, again = (entry["outputs"][workflow.node(name)]["images"] for name in ("SaveImage", "PreviewImage"))
    assert [size_of(server, image) for image in cards] == [(1216, 832), (896, 1152), (1024, 1024)]
    assert [size_of(server, image) for image in again] == [(896, 1152)]
    drawn = witnessed(entry, prompts)["prompt"]
    assert [text in prompt for text, prompt in zip(("a pier in bright moonlight", "a hand at moonlight", "a lamp"), drawn)] == [True] * 3
    assert not any("daylight" in prompt for prompt in drawn)


def test_draw_panels_waits_for_the_image_model_only(server):
    """What ComfyUI says before the run names the missing checkpoint file and nothing else; the script is written even so."""
    workflow = example_workflow(server, "draw_panels_sdxl", seed=114)
    answer = server.client.post("/prompt", {"prompt": workflow.graph})
    loader = workflow.node("CheckpointLoaderSimple")
    assert list(answer["node_errors"]) == [loader]
    errors = answer["node_errors"][loader]["errors"]
    assert [(error["type"], error["extra_info"]["input_name"]) for error in errors] == [("value_not_in_list", "ckpt_name")]
    assert answer["node_errors"][loader]["dependent_outputs"] == [workflow.node("SaveImage")]
    entry = server.client.wait(answer["prompt_id"])
    assert run_error(entry) == "" and saved_images(entry) == []
    assert len(output_files(server, entry, workflow)[0]["panels"]) == PANELS


def test_draw_panels_runs_once_per_panel(server):
    """CLIP Text Encode, Empty Latent Image, VAE Decode and Save Image of ComfyUI; the checkpoint and the sampler are stand-ins."""
    workflow = example_workflow(server, "draw_panels_sdxl", seed=115)
    sampler = workflow.node("KSampler")
    workflow.graph[sampler]["class_type"] = "A3BTestSampler"
    workflow.graph[workflow.node("CheckpointLoaderSimple")]["class_type"] = "A3BTestImageModel"
    lists = {"prompt": 0, "negative": 1, "seed": 4, "width": 5, "height": 6}
    entry = succeeded(server, watch(workflow, "A3BParsePanels", lists))
    panels = witnessed(entry, lists)
    asked = [json.loads(text) for text in entry["outputs"][sampler]["text"]]
    assert len(asked) == PANELS and len(set(panels["prompt"])) == PANELS
    for name in lists:
        assert [run[name] for run in asked] == panels[name], name
    assert {(run["model"], run["batch"]) for run in asked} == {("sd_xl_base_1.0.safetensors", 1)}
    sizes = [size_of(server, image) for image in saved_images(entry)]
    assert sizes == list(zip(panels["width"], panels["height"]))


def test_a_script_that_is_gone_is_named_before_the_run(server):
    workflow = Workflow.load(ROOT / "example_workflows" / "redraw_saved_script.api.json")
    workflow.set("A3BLoadScript", file="a3b_comic/gone_00001_.json [output]")
    with pytest.raises(PromptRejected, match="gone_00001_"):
        finished(server, workflow)
