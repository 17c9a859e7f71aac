"""nodes/annotations.py: signatures become V1 node classes."""

from typing import Annotated, Optional

import pytest
from fake_comfy import part

annotations = part("nodes.annotations")
Choice, Flag, Float, Hidden, Int, Output, Shown, Socket, Text, node = (
    getattr(annotations, name)
    for name in ("Choice", "Flag", "Float", "Hidden", "Int", "Output", "Shown", "Socket", "Text", "node")
)
TEXT = Annotated[str, Output("STRING", "text", "What came out.")]


def example(**options):
    @node("Example", "An Example", category="Test", **options)
    def made(
        model: Annotated[object, Socket("MODEL", tooltip="m")],
        count: Annotated[int, Int(1, 9, 2, tooltip="c")] = 3,
        weight: Annotated[float, Float(0.0, 1.0, 0.1, tooltip="w", advanced=True)] = 0.5,
        seed: Annotated[int, Int(0, 2**64 - 1, control=True, tooltip="s")] = 0,
        mode: Annotated[str, Choice(("a", "b"), tooltip="m")] = "b",
        flag: Annotated[bool, Flag(tooltip="f")] = False,
        words: Annotated[str, Text(tooltip="t", optional=True)] = "hi",
        extra: Annotated[object, Socket("IMAGE", tooltip="e", optional=True)] = None,
        workflow: Annotated[dict, Hidden("PROMPT")] = None,
    ) -> tuple[TEXT, Annotated[list, Output("INT", "numbers", "Many.", is_list=True)]]:
        """Shows
        everything."""
        return words * count, [seed]

    return made


def test_hints_as_python_3_10_gives_them():
    """There a default of None makes an annotation optional, and the node would have no input of that name."""
    hint = Annotated[tuple, Socket("IMAGES", tooltip="i", optional=True)]
    assert annotations._as_declared(Optional[hint]) == hint
    assert annotations._as_declared(hint) is hint and annotations._as_declared(Optional[int]) == Optional[int]


def test_inputs_carry_types_ranges_defaults_and_tooltips():
    inputs = example().INPUT_TYPES()
    assert inputs["required"]["count"] == ("INT", {"tooltip": "c", "min": 1, "max": 9, "step": 2, "default": 3})
    assert inputs["required"]["weight"][1]["advanced"] is True
    assert inputs["required"]["weight"][1]["round"] == 0.1
    assert inputs["required"]["seed"][1]["control_after_generate"] is True
    assert inputs["required"]["mode"] == (["a", "b"], {"tooltip": "m", "default": "b"})
    assert inputs["required"]["flag"][0] == "BOOLEAN"
    assert inputs["required"]["model"] == ("MODEL", {"tooltip": "m"})
    assert inputs["optional"]["extra"] == ("IMAGE", {"tooltip": "e"})
    assert inputs["hidden"] == {"workflow": "PROMPT"}


def test_text_widgets_leave_braces_and_comments_alone():
    """U06, U08"""
    assert example().INPUT_TYPES()["optional"]["words"][1]["dynamicPrompts"] is False


def test_outputs_description_and_flags():
    made = example(output_node=True, search=("x",))
    assert made.RETURN_TYPES == ("STRING", "INT")
    assert made.RETURN_NAMES == ("text", "numbers")
    assert made.OUTPUT_IS_LIST == (False, True)
    assert made.OUTPUT_TOOLTIPS == ("What came out.", "Many.")
    assert made.DESCRIPTION == "Shows\neverything."
    assert made.OUTPUT_NODE and made.SEARCH_ALIASES == ["x"] and made.CATEGORY == "Test"
    assert not hasattr(made, "IS_CHANGED") and not hasattr(made, "VALIDATE_INPUTS")


def test_execute_uses_python_defaults_for_missing_optional_inputs():
    made = example()
    assert getattr(made(), made.FUNCTION)(model=None, count=2, seed=5) == ("hihi", [5])


def test_choices_are_asked_each_time():
    names = ["one"]

    @node("Example", "Example", category="Test")
    def made(name: Annotated[str, Choice(lambda: names, tooltip="n")]) -> tuple[TEXT]:
        return (name,)

    assert made.INPUT_TYPES()["required"]["name"][0] == ["one"]
    names.append("two")
    assert made.INPUT_TYPES()["required"]["name"][0] == ["one", "two"]


def test_fingerprint_takes_what_it_names_and_validate_keeps_its_argument_names():
    import inspect

    made = example(fingerprint=lambda count, extra: (count, extra), validate=lambda mode: mode == "a" or "no")
    assert made.IS_CHANGED(model=None, count=4, seed=1) == (4, None)
    assert inspect.getfullargspec(made.VALIDATE_INPUTS).args == ["mode"]  # how ComfyUI reads them
    assert made.VALIDATE_INPUTS(mode="b") == "no"


def test_shown_text_goes_to_ui_and_values_to_result():
    @node("Example", "Example", category="Test")
    def made(text: Annotated[str, Text(tooltip="t")]) -> tuple[TEXT]:
        return Shown((text,), text.upper())

    assert made().execute(text="a") == {"ui": {"text": ("A",)}, "result": ("a",)}


def test_wrong_number_of_values_is_an_error():
    @node("Example", "Example", category="Test")
    def made(text: Annotated[str, Text(tooltip="t")]) -> tuple[TEXT]:
        return text, text

    with pytest.raises(TypeError, match="declares 1 outputs and returned 2"):
        made().execute(text="a")


def test_signatures_that_would_confuse_widget_order_are_refused():
    with pytest.raises(TypeError, match="required inputs come first"):

        @node("Example", "Example", category="Test")
        def late(
            a: Annotated[str, Text(tooltip="t", optional=True)] = "",
            b: Annotated[int, Int(0, 1, tooltip="t")] = 0,
        ) -> tuple[TEXT]:
            return (a,)

    with pytest.raises(TypeError, match="needs a default"):

        @node("Example", "Example", category="Test")
        def bare(a: Annotated[str, Text(tooltip="t", optional=True)]) -> tuple[TEXT]:
            return (a,)

    with pytest.raises(TypeError, match="exactly one of"):

        @node("Example", "Example", category="Test")
        def unmarked(a: str = "") -> tuple[TEXT]:
            return (a,)
