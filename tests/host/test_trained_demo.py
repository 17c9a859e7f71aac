"""The demo as a user runs it: the bundled model, pictures and stories; what comes out is about them."""

import json

import pytest

from comfy_server import shown_text, succeeded, watch, witnessed
from tools.draw_demo_pictures import SCENES
from tools.runner.demo import LANGUAGES, checkpoint_choice, picture_of
from tools.runner.paths import ASSETS, DEMO_MODEL
from tools.runner.workflow import Workflow

LISTS = {"prompt": 0, "caption": 2, "dialogue": 3}


def test_the_bundled_model_is_the_first_choice(server):
    field = server.client.object_info("A3BLoadModel")["A3BLoadModel"]["input"]["required"]["checkpoint"]
    choices = field[0] if isinstance(field[0], list) else field[1]["options"]
    assert choices[0] == DEMO_MODEL.name == checkpoint_choice(server.client, DEMO_MODEL.name)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_panels_are_about_the_picture_and_the_story(server, language):
    workflow, scene = Workflow.load(), SCENES[language]
    workflow.set("LoadImage", image=server.client.upload_image(picture_of(language)))
    story = (ASSETS / f"demo_story.{language}.txt").read_text(encoding="utf-8").strip()
    workflow.set("A3BBuildPrompt", text=f"{story}\n[[IMG]]", language=LANGUAGES[language])
    entry = succeeded(server, watch(workflow, "A3BParsePanels", LISTS))
    values = witnessed(entry, LISTS)
    prompts, people = values["prompt"], scene.people
    assert len(prompts) == 4
    for number, person in enumerate(people):
        look = f"{person.kind} in {person.colour}" if person.kind in ("girl", "boy") else f"{person.colour} {person.kind}"
        for words in (look, f"{person.garment_colour} {person.garment}", f"on the {person.position}", person.prop, f"{person.expression} face"):
            assert words in prompts[number], (words, prompts[number])
    assert all(scene.place in prompt for prompt in prompts)
    script = json.loads(shown_text(entry, workflow, "A3BGenerate"))
    names = [person.called(language) for person in people]
    assert [character["name"] for character in script["characters"]] == names
    assert scene.thing in script["panels"][0]["props"] and scene.thing in prompts[0]
    spoken = "\n".join(values["dialogue"])
    assert all(f"{name}: " in spoken for name in names)
    assert any("\u4e00" <= letter <= "\u9fff" for letter in "".join(row["line"] for row in script["dialogue"])) == (language == "zh")
