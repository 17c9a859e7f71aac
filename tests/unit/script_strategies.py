"""Hypothesis strategies for whole scripts, with texts that are hard on JSON, file names and markup."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from a3b_engine.script.schema import READING_DIRECTIONS, SHOTS

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
TRICKY = ['"', "'", "\\", "\n", ",", ":", "{", "}", "[[", "]]", "/*", "*", "_", "\n\n", "\u2028", "@", ".", "#", "=", "=>", "None", "\U0001f62d", "\u6797"]
texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.lists(st.one_of(st.sampled_from(TRICKY), st.text("ab \u62ac\u5934", max_size=3)), max_size=6).map("".join),
)


@st.composite
def scripts(draw):
    """A script as a model would write it, every field drawn."""
    count = draw(st.integers(1, 3))
    people = [{"id": f"p{n}", "name": draw(texts), "look": draw(texts)} for n in range(draw(st.integers(0, 2)))]
    words = ("action", "micro_expression", "background", "light", "caption", "sfx", "scene_tag", "visual_prompt", "negative")
    panels = [
        {
            "index": n,
            "shot": draw(st.sampled_from(SHOTS)),
            "characters": draw(st.lists(texts.filter(str.strip) | st.just("p0"), max_size=2)),
            "props": draw(st.lists(texts.filter(str.strip), max_size=2)),
            **{name: draw(texts) for name in words},
            "action": "act " + draw(texts),
        }
        for n in range(1, count + 1)
    ]
    rows = [
        {"panel": draw(st.integers(1, count)), "speaker": draw(texts), "line": "say " + draw(texts), "emotion_tag": draw(texts)}
        for _ in range(draw(st.integers(0, 3)))
    ]
    page = {"title": draw(texts), "style": draw(texts), "reading_direction": draw(st.sampled_from(READING_DIRECTIONS))}
    return {**page, "characters": people, "dialogue": rows, "panels": panels}
