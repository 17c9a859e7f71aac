"""Looks in the place of names: in prompts of the model's own and in composed ones."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3b_engine.script.compose import Composer
from a3b_engine.script.looks import Cast, Described
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.schema import Character, ComicScript
from a3b_engine.script.spellings import SpellingPattern

RIN = {"id": "rin", "name": "Rin", "look": "girl of ten, red hair, yellow raincoat"}
TOM = {"id": "tom", "name": "Tom", "look": "an old man, grey beard"}
LIN = {"id": "lin", "name": "\u6797\u5c0f\u96e8", "look": "\u5341\u5c81\u5973\u5b69\uff0c\u7ea2\u53d1\uff0c\u9ec4\u8272\u96e8\u8863"}
WHOLE = RIN["look"]


def prompt(visual_prompt, *characters, shot="medium", **fields):
    """The prompt of one panel, and the notes on it."""
    panel = {"index": 1, "shot": shot, "visual_prompt": visual_prompt, "characters": list(characters), **fields}
    script = ComicScript.model_validate({"characters": [RIN, TOM, LIN], "panels": [panel]})
    composer = Composer(script)
    text = composer.prompt(script.panels[0])
    assert script.panels[0].visual_prompt == visual_prompt  # the script keeps its words
    return text, composer.notes


def test_a_name_of_the_panel_becomes_the_look_and_a_note():
    text, notes = prompt("Rin runs along the pier, Rin is late", "rin")
    assert text == f"{WHOLE} runs along the pier, girl of ten is late"
    assert notes == ["panel 1: visual_prompt names Rin without the look; it is written out in the prompt"]


def test_two_names_stay_with_what_they_do():
    assert prompt("Rin hands Tom a letter", "rin", "Tom")[0] == f"{WHOLE} hands an old man, grey beard a letter"


@pytest.mark.parametrize(
    "described",
    [
        f"Rin, {WHOLE}, runs",
        "Rin, a ten year old girl with red hair in a raincoat, runs",  # most words of the look
        "girl of ten, RED HAIR, yellow raincoat: Rin runs",
        "a girl runs along the pier",
    ],
)
def test_a_described_person_is_left_as_the_model_wrote_it(described):
    text, notes = prompt(described, "rin")
    assert text == described and not any("written out" in note for note in notes)


def test_part_of_a_look_is_no_look():
    assert prompt("Rin in a raincoat", "rin")[0] == f"{WHOLE} in a raincoat"


def test_a_name_the_panel_does_not_list_is_left_and_noted():
    text, notes = prompt("Tom holds a picture of Rin", "tom")
    assert text == "an old man, grey beard holds a picture of Rin"
    assert "names Rin without the look; the panel does not list this character" in notes[1]


def test_without_a_list_a_plain_name_counts_and_a_possessive_does_not():
    assert prompt("Rin runs")[0] == f"{WHOLE} runs"
    assert prompt("Rin's umbrella on a bench")[0] == "Rin's umbrella on a bench"
    assert prompt("Rin runs, Rin's umbrella falls")[0] == f"{WHOLE} runs, girl of ten's umbrella falls"


@pytest.mark.parametrize("quotes", ['""', "\u201c\u201d", "\u300c\u300d", "\u300e\u300f", "\u00ab\u00bb"])
def test_a_name_on_a_sign_is_lettering(quotes):
    sign = f"a sign saying {quotes[0]}Ask Rin{quotes[1]} in the rain"
    assert prompt(sign, "rin")[0] == sign
    assert prompt("", "rin", action=f"points at {quotes[0]}Rin{quotes[1]}")[0].endswith(f"points at {quotes[0]}Rin{quotes[1]}")


@pytest.mark.parametrize("apostrophe", ["'", "\u2019"])
def test_a_possessive_of_one_who_is_there_gets_the_look_in_front(apostrophe):
    assert prompt(f"Rin{apostrophe}s hand on a door", "rin")[0] == f"{WHOLE}, girl of ten{apostrophe}s hand on a door"


def test_articles_do_not_meet():
    script = {"characters": [{"id": "pilot", "look": "a tall woman, red scarf"}], "panels": [{"characters": ["pilot"], "visual_prompt": "the pilot in a crowd"}]}
    assert panel_lists(ComicScript.model_validate(script)).prompt == ["the tall woman, red scarf in a crowd"]


def test_chinese_names_and_looks():
    text, _ = prompt("\u6797\u5c0f\u96e8\u5728\u7801\u5934\u5954\u8dd1", "lin")
    assert text == LIN["look"] + "\u5728\u7801\u5934\u5954\u8dd1"
    described = "\u6797\u5c0f\u96e8\uff0c\u7ea2\u53d1\u5973\u5b69\uff0c\u7a7f\u9ec4\u8272\u96e8\u8863"
    assert prompt(described, "lin")[0] == described


def test_names_inside_words_are_none():
    assert prompt("Rinse the cups, tomorrow", "rin", "tom")[0] == "Rinse the cups, tomorrow"


def test_a_listed_person_the_prompt_does_not_show_is_noted_only():
    text, notes = prompt("a hand on a door", "rin", "a crowd")
    assert text == "a hand on a door" and notes == ["panel 1: rin is in the panel, but visual_prompt neither names nor describes this character"]


@pytest.mark.parametrize("shot, words", [("close", "close-up"), ("pov", "first-person view"), ("over_shoulder", "over-the-shoulder shot")])
def test_shot_words_come_first_where_the_prompt_has_none(shot, words):
    text, notes = prompt("a lamp at night", shot=shot)
    assert text == f"{words}, a lamp at night" and words in notes[0]


@pytest.mark.parametrize(
    "text", ["close up of a lamp", "a lamp, low angle", "portrait of a lamp", "\u7279\u5199\uff0c\u4e00\u76cf\u706f", "a lamp, from afar, wide shot"]
)
def test_a_prompt_that_says_its_framing_is_left(text):
    assert prompt(text, shot="close") == (text, [])


def test_medium_is_also_what_stands_for_no_shot_and_adds_nothing():
    assert prompt("a lamp at night") == ("a lamp at night", [])


def test_composed_fields_write_a_look_once():
    text, _ = prompt("", "rin", action="Rin runs", micro_expression="Rin frowns", background="Tom's workshop", shot="wide")
    assert text == f"wide shot, {WHOLE} runs, girl of ten frowns, Tom's workshop"


# Names that are words, or parts of words, as well


def drawn(people, listed=(), **fields):
    """The prompt of one panel with a cast of {id: (name, look)}, and the notes on it."""
    cast = [{"id": key, "name": name, "look": look} for key, (name, look) in people.items()]
    script = ComicScript.model_validate({"characters": cast, "panels": [{"index": 1, "characters": list(listed), **fields}]})
    composer = Composer(script)
    return composer.prompt(script.panels[0]), composer.notes


WOOD, MOON = "\u6797", "\u6708"
SHORT_NAMES = {"lin": (WOOD, "\u9ed1\u53d1\u5c11\u5973"), "yue": (MOON, "\u767d\u53d1\u5973\u5b50")}
INTO_THE_FOREST = f"{WOOD}\u8d70\u8fdb\u68ee{WOOD}\uff0c{MOON}\u5149\u6d12\u4e0b"  # Lin walks into the forest, moonlight falls


@pytest.mark.parametrize("field, start", [("action", "medium shot, "), ("visual_prompt", "")])
def test_a_name_of_one_character_is_not_replaced_inside_words(field, start):
    text, notes = drawn(SHORT_NAMES, **{field: INTO_THE_FOREST})
    assert text == f"{start}{SHORT_NAMES['lin'][1]}, {INTO_THE_FOREST}"
    assert notes == [f"panel 1: {WOOD} may be a name or a word of the text; the text is left, the look is put before it"]
    listed, _ = drawn(SHORT_NAMES, ["yue"], **{field: INTO_THE_FOREST})
    assert listed == f"{start}{SHORT_NAMES['yue'][1]}, {INTO_THE_FOREST}"


def test_a_name_of_one_character_alone_is_replaced():
    text, _ = drawn(SHORT_NAMES, ["lin"], visual_prompt=f"\u96e8\u4e2d\uff0c{WOOD}\uff0c\u68ee{WOOD}")
    assert text == f"\u96e8\u4e2d\uff0c{SHORT_NAMES['lin'][1]}\uff0c\u68ee{WOOD}"
    assert drawn(SHORT_NAMES, ["lin"], action=f"{MOON}\uff0c\u661f")[0].endswith(f"{MOON}\uff0c\u661f")  # the moon, stars


@pytest.mark.parametrize(
    "name, inside, alone",
    [
        ("\u30b1\u30f3", "\u30c1\u30b1\u30f3", "\u30b1\u30f3\u304c\u8d70\u308b"),
        ("\u30b1\u30f3", "\u30b1\u30f3\u30bf", "\u30b1\u30f3\u30fb\u30bf\u30ca\u30ab"),
        ("\u306f\u306a", "\u306f\u306a\u3059", "\u306f\u306a\u306f\u6b69\u304f"),
        ("\uc9c0\uc6b0", "\uc9c0\uc6b0\uac1c", "\uc9c0\uc6b0\uac00"),
        ("\u0420\u0438\u043d", "\u0420\u0438\u043d\u0430\u0442", "\u0420\u0438\u043d \u0431\u0435\u0436\u0438\u0442"),
        ("Zo\u00eb", "Zo\u00ebller", "Zo\u00eb runs"),
        ("Rin", "Rinse", "Rin\u8d70\u8fdb\u68ee\u6797"),
    ],
)
def test_names_keep_to_the_borders_of_their_own_script(name, inside, alone):
    assert drawn({"k": (name, "tall boy")}, action=inside)[0] == f"medium shot, {inside}"
    assert drawn({"k": (name, "tall boy")}, action=alone)[0] == f"medium shot, tall boy{alone.removeprefix(name)}"


RED = {"red": ("Red", "girl in a hooded cape")}
SCARLET = {"red": ("Scarlet", "girl in a hooded cape")}
ROBOT = {"robot": ("robot", "a tin man")}


def test_an_id_that_is_the_name_in_small_letters_is_no_spelling():
    assert drawn(RED, action="Red picks red flowers beside a red mushroom")[0] == "medium shot, girl in a hooded cape picks red flowers beside a red mushroom"
    assert drawn(RED, visual_prompt="red flowers by the road") == ("red flowers by the road", [])
    text, notes = drawn(RED, ["red"], visual_prompt="red flowers by the road")
    assert text == "girl in a hooded cape, red flowers by the road" and "may be a name or a word" in notes[0]


@pytest.mark.parametrize(
    "people, listed, text, prompt",
    [
        (SCARLET, ["red"], "at dusk, red is in the wood", "at dusk, girl in a hooded cape is in the wood"),
        (SCARLET, ["red"], "red picks red flowers", "girl in a hooded cape, red picks red flowers"),
        (SCARLET, ["red"], "a red-haired dog", "girl in a hooded cape, a red-haired dog"),
        (SCARLET, [], "red picks red flowers", "red picks red flowers"),
        (ROBOT, ["robot"], "the robot in the rain", "the tin man in the rain"),
        (ROBOT, ["robot"], "robot factory at night", "a tin man, robot factory at night"),
        (ROBOT, ["robot"], "a toy robot", "a tin man, a toy robot"),
        (ROBOT, [], "the robot waves", "a tin man, the robot waves"),
        (ROBOT, [], "the robot's arm", "the robot's arm"),
        (ROBOT, ["a crowd"], "the robot waves", "the robot waves"),
    ],
)
def test_a_word_in_small_letters_is_replaced_only_where_it_can_be_nothing_else(people, listed, text, prompt):
    assert drawn(people, listed, visual_prompt=text)[0] == prompt


def test_punctuation_is_no_visual_prompt():
    assert drawn(RED, visual_prompt=" ... ", action="a dog runs")[0] == "medium shot, a dog runs"


def test_no_look_no_name():
    assert Cast([]).mentions("Rin") == [] and Cast([Character(id="Rin", name="Rin")]).mentions("Rin") == []
    assert not Described("a b").covers("x")


def test_a_hostile_cast_takes_bounded_time():
    people = [{"id": f"p{n}", "name": f"Name{n}", "look": f"look {n} " + "word " * 30} for n in range(256)]
    panels = [{"index": n, "characters": [f"p{m}" for m in range(256)], "visual_prompt": "Name1 p2 \"Rin\" " * 30} for n in range(1, 101)]
    script = ComicScript.model_validate({"characters": people, "panels": panels})
    begin = time.process_time()
    out = panel_lists(script)
    assert time.process_time() - begin < 5
    assert len(out.report) < 200 and any("left out" in line for line in out.report)


@given(st.lists(st.text("AB .|\u6797\u30b1(", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=6), st.text("AB .|\u6797\u30b1(", max_size=30))
def test_names_are_found_as_by_a_plain_search(names, text):
    people = [Character(id=name, name=name, look=f"look{place}") for place, name in enumerate(names)]
    usable = sorted({name for name in names if len(name) > 1 or name in "\u6797\u30b1"}, key=len, reverse=True)

    def joined(letter, edge):
        """Whether two letters that touch may belong to one word."""
        return letter == edge if edge == "\u30b1" else letter in "AB" and edge != "\u6797" if letter else False

    found, at = [], 0
    while at < len(text):
        for name in usable:
            before, after = text[at - 1 : at] if at else "", text[at + len(name) : at + len(name) + 1]
            if text.startswith(name, at) and not joined(before, name[0]) and (len(name) == 1 or not joined(after, name[-1])):
                found.append(name)
                at += len(name)
                break
        else:
            at += 1
    assert [text[start:end] for start, end in SpellingPattern(usable).spans(text)] == found
    spans = [(mention.start, mention.end) for mention in Cast(people).mentions(text, {name for name in usable if name in text})]
    assert all(text[start:end] in usable for start, end in spans)


def test_one_megabyte_with_the_largest_cast():
    people = [{"id": f"p{n}", "name": f"Name{n}", "look": f"look {n}"} for n in range(256)]
    people += [{"id": "robot", "name": "Iron", "look": "tin man"}, {"id": "l", "name": WOOD, "look": "girl"}]
    for text in ("robot " * 150_000, WOOD * 500_000, "the Name is p here " * 50_000, "\u201c" * 1_000_000, '"Name1"' * 150_000):
        script = {"characters": people, "panels": [{"index": 1, "shot": "close", "characters": ["p1", "robot", "l"], "visual_prompt": text}]}
        begin = time.process_time()
        panel_lists(ComicScript.model_validate(script))
        assert time.process_time() - begin < 5
