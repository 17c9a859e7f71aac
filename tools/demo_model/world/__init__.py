"""The drawn world of the trained demo model: pictures, story outlines and the scripts that fit them, all by seed.

`sample(seed, held_out=False)` gives a `Lesson`; `score(answer, lesson.facts)` says which facts an answer has right.
Needs Pillow, numpy and pydantic; no torch.
"""

from .facts import FORM_FACTS, PICTURE_FACTS, STORY_FACTS, add, score
from .lessons import WEIGHTS, Lesson, sample

__all__ = ["FORM_FACTS", "PICTURE_FACTS", "STORY_FACTS", "WEIGHTS", "Lesson", "add", "sample", "score"]
