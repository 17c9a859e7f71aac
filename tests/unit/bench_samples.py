"""What the tests of the benchmark share: a tiny shape and its engine, and settings that take seconds on a CPU."""

import pytest

from a3b_engine.bench.made_up import made_up_parts
from a3b_engine.bench.measure import BenchSettings
from a3b_engine.bench.shape import ModelShape
from a3b_engine.engine import Engine
from a3b_engine.options import EngineOptions

TINY = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=32, delta_key_heads=2, delta_value_heads=4, delta_head_dim=16, experts=8,
    experts_per_token=2, expert_inner=32, text_tokens=3000, vocab=3072, max_tokens=1024, mrope_section=(2, 1, 1), vision_depth=2,
    vision_hidden=32, vision_inner=64, vision_heads=2, vision_positions=64,
)  # fmt: skip
QUICK = BenchSettings(
    contexts=(64, 150), prompt=96, new=12, repeat=2, peak_context=120, picture_px=64, text_tokens=16, system_tokens=80, grammar_tokens=40,
    panels=2, rounds=1, copy_bytes=1 << 20, profile_steps=4,
)  # fmt: skip
CPU = EngineOptions.checked("cpu")


@pytest.fixture(scope="module")
def tiny():
    engine = Engine.from_parts(made_up_parts(TINY))
    engine.load_weights()
    yield engine
    engine.close()
