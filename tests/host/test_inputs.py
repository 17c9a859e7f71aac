"""Wrong and unusual inputs, posted as an API client would."""

import pytest

from comfy_server import (
    RANDOM_MODEL,
    NESTED_NAME,
    comic_workflow,
    finished,
    shown_text,
    succeeded,
    text_workflow,
    watch,
    witnessed,
)
from tools.runner.client import PromptRejected, run_error


def complaint(server, workflow):
    """What the person sees: from validation, or from the run."""
    try:
        return run_error(finished(server, workflow))
    except PromptRejected as error:
        return error.sentence()


def test_more_markers_than_pictures(server):
    workflow = comic_workflow(server).set("A3BBuildPrompt", text="[[IMG]] meets [[IMG]]")
    words = complaint(server, workflow)
    assert "PromptError" in words and "2 markers" in words and "1 image" in words


def test_unknown_checkpoint(server):
    words = complaint(server, text_workflow(server).set("A3BLoadModel", checkpoint="No-Such-Model"))
    assert "No-Such-Model" in words and RANDOM_MODEL.name in words


def test_blank_number(server):
    """U14: the widget is named, and no traceback is shown."""
    lines = len(server.log_text().splitlines())
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(text_workflow(server).set("A3BGenerate", max_new_tokens="").graph)
    assert "max_new_tokens" in caught.value.sentence()
    assert "Traceback" not in "\n".join(server.log_text().splitlines()[lines:])


@pytest.mark.parametrize("name", ["temperature", "max_new_tokens", "panels"])
def test_number_out_of_range(server, name):
    with pytest.raises(PromptRejected) as caught:
        server.client.queue(text_workflow(server).set("A3BGenerate", **{name: 10**7}).graph)
    assert name in caught.value.sentence()


def test_largest_seed(server):
    """U01"""
    workflow = text_workflow(server, seed=2**64 - 1)
    assert len(shown_text(succeeded(server, workflow), workflow, "A3BGenerate")) == 40


@pytest.mark.parametrize("slash", ["\\", "/"])
def test_path_of_either_system(server, slash):
    """F20, F17: a checkpoint in a sub-folder of a registered root, its name with a space and Chinese characters."""
    workflow = text_workflow(server, seed=71).set("A3BLoadModel", checkpoint=f"{NESTED_NAME}{slash}{RANDOM_MODEL.name}")
    assert len(shown_text(succeeded(server, workflow), workflow, "A3BGenerate")) == 40


def test_path_outside_the_roots(server):
    words = complaint(server, text_workflow(server).set("A3BLoadModel", checkpoint="../../etc"))
    assert "checkpoint" in words and "Traceback" not in words


def test_braces_and_comments_arrive_as_typed(server):
    """U06, U08"""
    text, system = "see https://a.test/x /* keep me */ {one|two}", 'Return {"panels":[]} // always'
    workflow = text_workflow(server, text=text).set(
        "A3BBuildPrompt", system=system, language="as in the text", preset="none"
    )
    outputs = {"preview": 1}
    preview = witnessed(succeeded(server, watch(workflow, "A3BBuildPrompt", outputs)), outputs)["preview"][0]
    assert text in preview and system in preview


@pytest.mark.parametrize("field, value", [("regex", "(unclosed"), ("regex", "")])
def test_bad_regex(server, field, value):
    words = complaint(server, text_workflow(server, regex=value))
    assert "regex" in words and "Traceback" not in words


def test_bad_schema(server):
    words = complaint(server, text_workflow(server, schema="{not json").set("A3BGenerate", format="JSON schema"))
    assert "schema" in words and "Traceback" not in words


def test_empty_prompt(server):
    words = complaint(server, text_workflow(server, text="   ").set("A3BBuildPrompt", system="", preset="none"))
    assert "PromptError" in words


@pytest.mark.parametrize("width, height, batch", [(1, 1, 1), (64, 1024, 1), (384, 384, 3)])
def test_pictures_of_any_shape(server, width, height, batch):
    workflow = comic_workflow(server, format="regex", regex="[a-z]{5}", seed=81)
    del workflow.graph[workflow.node("A3BParsePanels")]
    keep = ("A3BLoadModel", "A3BEncodeImage", "A3BBuildPrompt", "A3BGenerate")
    workflow.graph = {workflow.node(name): workflow.graph[workflow.node(name)] for name in keep}
    workflow.graph["picture"] = {
        "class_type": "EmptyImage",
        "inputs": {"width": width, "height": height, "batch_size": batch, "color": 0x3366CC},
    }
    workflow.set("A3BEncodeImage", image=["picture", 0])
    workflow.set("A3BBuildPrompt", text="What is this?" + " [[IMG]]" * batch)
    assert len(shown_text(succeeded(server, workflow), workflow, "A3BGenerate")) == 5
