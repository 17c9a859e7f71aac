"""`python -m a3b_engine generate` asks the model for what the nodes ask it for with the same choices."""

import dataclasses

import pytest
from fake_comfy import comfy, part  # noqa: F401
from node_runs import run, widgets

from a3b_engine.__main__ import main
from a3b_engine.engine import Engine
from a3b_engine.runtime.answer import Answer, Timings, Usage

STORY = "A fox finds a map. {{panels}} {as typed}"


@dataclasses.dataclass
class Asked:
    prompt: object = None
    sampling: object = None
    rules: dict = dataclasses.field(default_factory=dict)

    def generate(self, prompt, sampling, *, schema=None, regex=None, **_):
        self.prompt, self.sampling, self.rules = prompt, sampling, {"schema": schema, "regex": regex}
        return Answer("{}", "", "stop", Usage(1, 0, 1, 0), Timings(0.0, 0.0, 0.0, 0.0), 0, True)


@pytest.fixture
def by_command(random_checkpoint, monkeypatch):
    asked = Asked()
    monkeypatch.setattr(Engine, "generate", lambda engine, *arguments, **keywords: asked.generate(*arguments, **keywords))

    def by_command(*options):
        assert main(["generate", "--model", str(random_checkpoint), "--device", "cpu", "--prompt", STORY, *options]) == 0
        return asked

    return by_command


@pytest.fixture
def by_nodes(comfy, random_checkpoint, monkeypatch):
    asked = Asked()
    engine = part("a3b_engine.engine").Engine
    monkeypatch.setattr(engine, "generate", lambda engine, *arguments, **keywords: asked.generate(*arguments, **keywords))
    comfy.folders["LLM"][0].append(str(random_checkpoint.parent))
    handle = run("A3BLoadModel", **{**widgets("A3BLoadModel"), "checkpoint": random_checkpoint.name})[0]

    def by_nodes(build, generate):
        prompt = run("A3BBuildPrompt", **{**widgets("A3BBuildPrompt"), "text": STORY, **build})[0]
        run("A3BGenerate", **{**widgets("A3BGenerate"), "model": handle, "prompt": prompt, **generate})
        return asked

    yield by_nodes
    part("nodes.residency").open_engine(handle).close()


# options of the command, widgets of Build, widgets of Generate
SAME = {
    "a preset alone": (["--preset", "manga"], {"preset": "manga"}, {}),
    "counts": (["--preset", "manhua", "--comic", "6", "--rounds", "2"], {"preset": "manhua"}, {"panels": 6, "rounds": 2}),
    "comic alone": (["--comic"], {"preset": "western"}, {}),
    "no preset": (["--comic", "3", "--preset", "none"], {}, {"format": "comic script", "panels": 3}),
    "own text": (["--comic", "2", "--system", "Be brief: {{panels}}."], {"system": "Be brief: {{panels}}."}, {"format": "comic script", "panels": 2}),
    "both": (["--preset", "children", "--system", "Be kind."], {"preset": "children", "system": "Be kind."}, {}),
    "short": (["--preset", "manga", "--short"], {"preset": "manga"}, {"format": "short comic script"}),
    "in Chinese": (["--comic", "--preset", "storyboard", "--language", "Chinese"], {"preset": "storyboard", "language": "Chinese"}, {}),
    "two languages": (
        ["--comic", "--language", "French", "--prompt-language", "German"], {"preset": "western", "language": "French", "prompt_language": "German"}, {},
    ),
    "blank text": (["--comic", "--system", " \n"], {"preset": "western", "system": " \n"}, {}),
    "a form of one's own": (["--system", "Be brief.", "--regex", "[a-z]+"], {"system": "Be brief."}, {"format": "regex", "regex": "[a-z]+"}),
    "a job with a form": (["--preset", "tags", "--regex", "[a-z]+"], {"preset": "tags"}, {"format": "regex", "regex": "[a-z]+"}),
    "a job": (["--preset", "translate", "--language", "Spanish"], {"preset": "translate", "language": "Spanish"}, {}),
    "a language alone": (["--language", "Korean"], {"language": "Korean"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_command_asks_for_the_same_as_the_nodes(by_command, by_nodes, name):
    options, build, generate = SAME[name]
    command, nodes = by_command(*options), by_nodes(build, generate)
    assert (command.prompt.system, command.prompt.user, command.prompt.form) == (nodes.prompt.system, nodes.prompt.user, nodes.prompt.form)
    assert command.rules == nodes.rules
    if command.rules["schema"] is not None:  # free text: the command has numbers of its own
        numbers = dataclasses.asdict(command.sampling) | {"thinking_budget": nodes.sampling.thinking_budget}  # thinking is off
        assert numbers == dataclasses.asdict(nodes.sampling)


def test_numbers_that_are_given_win(by_command):
    asked = by_command("--comic", "--temperature", "0", "--top-k", "7", "--max-new-tokens", "99").sampling
    assert (asked.temperature, asked.top_k, asked.min_p, asked.max_new_tokens) == (0.0, 7, 0.05, 99)
    asked = by_command().sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.max_new_tokens) == (0.7, 0.8, 20, 0.0, 1024)


def test_a_file_without_text_is_no_system_text(by_command, tmp_path):
    (tmp_path / "empty.txt").write_text("\ufeff\n", encoding="utf-8")
    asked = by_command("--comic", "--system", f"@{tmp_path / 'empty.txt'}").prompt
    assert asked.system and asked.system == by_command("--comic").prompt.system


@pytest.mark.parametrize("options", [["--preset", "noir"], ["--comic", "--language", "Klingon"], ["--comic", "four"]])
def test_unknown_names_are_refused_with_the_known_ones(random_checkpoint, capsys, options):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--model", str(random_checkpoint), "--prompt", "x", *options])
    assert options[-2] in capsys.readouterr().err
