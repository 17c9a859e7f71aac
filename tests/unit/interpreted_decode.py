"""The decode step and the steps of an answer by kernels, against the plain model. Not collected by itself:
test_kernels_decode.py runs it under Triton's interpreter, where nothing is captured."""

import pytest
import torch
from interpreted import mend_interpreter

mend_interpreter()
from a3b_engine.checkpoint.names import expected_tensors, kept_in_float32, may_stay_scaled  # noqa: E402
from a3b_engine.config import ModelConfig  # noqa: E402
from a3b_engine.kernels import support  # noqa: E402
from a3b_engine.kernels.fp8_gemv import random_fp8  # noqa: E402
from a3b_engine.model.text import TextModel  # noqa: E402
from a3b_engine.runtime import decode, device_steps, runner  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402
from a3b_engine.runtime.decode import DecodeStep  # noqa: E402
from a3b_engine.runtime.forward import forward_chunks  # noqa: E402
from a3b_engine.runtime.runner import Runner  # noqa: E402
from a3b_engine.runtime.steps import PlainSteps  # noqa: E402
from a3b_engine.sampling import SamplingParams  # noqa: E402

CPU = torch.device("cpu")
WHERE = support.target("cpu")
# One layer of each kind and small numbers of everything: the interpreter takes milliseconds for each program of a launch.
TEXT = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "eos_token_id": 40,
    "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
IDS = {"image_token_id": 41, "video_token_id": 42, "vision_start_token_id": 43, "vision_end_token_id": 44}
REAL = 45  # tokens; ids from here on are padding
CONFIG = ModelConfig.from_dict({"model_type": "qwen3_5_moe", "text_config": TEXT, **IDS})
VOCAB = CONFIG.text.vocab_size
PROMPT = [(7 * i + 3) % 40 for i in range(11)]


def make_model(form: str, dtype: torch.dtype = torch.float32) -> TextModel:
    """Random weights, the large ones FP8 ("fp8", "fp8 with the head") or all of them dense."""
    weights = {}
    for seed, (name, shape) in enumerate(expected_tensors(CONFIG).items()):
        generator = torch.Generator().manual_seed(seed)
        if form.startswith("fp8") and may_stay_scaled(name) and (name != "lm_head.weight" or form == "fp8 with the head"):
            weights[name] = random_fp8(shape, (128, 128), CPU, seed=seed)
            weights[name].scale.fill_(3e-3)
        else:
            weights[name] = (torch.randn(shape, generator=generator) * 0.2).to(torch.float32 if kept_in_float32(name) else dtype)
    return TextModel(CONFIG.text, weights)


@pytest.fixture(autouse=True)
def kernels_of_the_step_only(monkeypatch):
    """The self-tests have tests of their own, and so have the kernels of prefill."""
    monkeypatch.setattr(runner, "all_usable", lambda kernels, device: kernels == decode.KERNELS)


@pytest.fixture(scope="module")
def model():
    return make_model("fp8")


def prefilled(model, tokens, **options):
    state = SequenceState(CONFIG.text, 64, CPU, model.embedding.dtype, **options)
    *_, hidden = forward_chunks(model, CONFIG, state, tokens)
    return state, hidden[-1:]


def by_kernels(model, tokens):
    """A step over a sequence of `tokens`, its buffers poisoned wherever nothing may be read."""
    state, _ = prefilled(model, tokens, capacity=32)
    state.settle()
    for layer in state.layers:
        if hasattr(layer, "buffer"):
            layer.buffer[:, state.length :] = torch.nan
    token = torch.zeros(1, dtype=torch.int64)
    step = DecodeStep(model, state, token, WHERE)
    for buffer in (step._projected, step._mixed, step._stream, step.logits, step._rings):
        buffer.fill_(torch.nan)
    step.enter()
    return step, state, token


def error(ours, expected):
    return support.relative_error(ours, expected)


@pytest.mark.parametrize("form, length", [("fp8", 1), ("fp8 with the head", 11), ("dense", 3)])
def test_steps_equal_the_plain_model(form, length):
    model = make_model(form)
    plain, _ = prefilled(model, PROMPT[:length])
    step, state, token = by_kernels(model, PROMPT[:length])
    for number in (5, 20, 5):
        *_, hidden = forward_chunks(model, CONFIG, plain, [number])
        token.fill_(number)
        step.launch()
        assert error(step.logits, model.logits(hidden)[0]) < 1e-5
    assert (state.length, state.next_position) == (plain.length, plain.next_position) == (length + 3, length + 3)


@pytest.mark.parametrize("form", ["fp8 with the head", "dense"])
def test_the_last_row_of_a_prompt_gives_the_first_logits(form):
    model = make_model(form)
    step, _, _ = by_kernels(model, PROMPT)
    _, hidden = prefilled(model, PROMPT)
    step.begin_behind(hidden)
    assert error(step.logits, model.logits(hidden)[0]) < 1e-5


def test_prefill_goes_on_where_steps_ended_and_steps_where_prefill_ended(model):
    plain, _ = prefilled(model, PROMPT)
    step, state, token = by_kernels(model, PROMPT)

    def compare(count):
        for number in range(count):
            *_, hidden = forward_chunks(model, CONFIG, plain, [number + 20])
            token.fill_(number + 20)
            step.launch()
        assert error(step.logits, model.logits(hidden)[0]) < 1e-5

    compare(2)
    step.leave()
    *_, ours = forward_chunks(model, CONFIG, state, [9, 8, 7, 6, 5])
    *_, expected = forward_chunks(model, CONFIG, plain, [9, 8, 7, 6, 5])
    assert error(ours, expected) < 1e-5
    state.settle()
    step.enter()
    compare(1)


def test_image_positions_move_the_rotation_and_not_the_row(model):
    plain, _ = prefilled(model, PROMPT)
    step, state, token = by_kernels(model, PROMPT)
    plain.next_position = state.next_position = 4
    step.enter()
    for number in (5, 6):
        *_, hidden = forward_chunks(model, CONFIG, plain, [number])
        token.fill_(number)
        step.launch()
        assert error(step.logits, model.logits(hidden)[0]) < 1e-5


def test_two_byte_models_stay_near_float32():
    """bfloat16 rounds at every border in the plain path; the kernels round less and must not be further from float32."""
    reference, rounded = make_model("fp8"), make_model("fp8", torch.bfloat16)
    exact, plain = (prefilled(m, PROMPT)[0] for m in (reference, rounded))
    step, _, token = by_kernels(rounded, PROMPT)
    for number in (5, 20):
        expected, theirs = (m.logits([*forward_chunks(m, CONFIG, s, [number])][-1])[0] for m, s in ((reference, exact), (rounded, plain)))
        token.fill_(number)
        step.launch()
        assert error(step.logits, expected) <= 1.3 * error(theirs, expected) + 1e-3


def answers(model, sampling, script, kernels):
    """Tokens of an answer. script: what happens at each step: a number of forced tokens, "draw", "sure" or a mask."""
    works = Runner(model, CONFIG, REAL, 64)
    assert works.decodes_by_kernels
    works.decodes_by_kernels = kernels
    steps, _ = works.start(PROMPT, [], sampling, 64, lambda: None)
    assert isinstance(steps, PlainSteps) is not kernels
    out = []
    for act in script:
        if isinstance(act, int):
            tokens = [(act + i) % 40 for i in range(act)]
        else:
            mask = torch.zeros(-(-VOCAB // 32), dtype=torch.int32) if isinstance(act, tuple) else None
            for token in act if mask is not None else ():
                mask[token // 32] |= 1 << token % 32
            tokens = [steps.draw(mask, sure=act == "sure")]
        out += tokens
        if tokens[-1] in CONFIG.eos_token_ids:
            break
        steps.feed(tokens)
    works.finish()
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.5, top_k=0, top_p=0.9, frequency_penalty=0.5, seed=5),
    ],
    ids=["greedy", "sorted"],
)
def test_an_answer_has_the_tokens_of_the_plain_path(model, sampling, monkeypatch):
    monkeypatch.setattr(device_steps, "ONE_BY_ONE", 3)
    script = ["sure", "draw", 2, "sure", (5, 9, 20), 4, "draw", (39,), "sure"]
    assert answers(model, sampling, script, True) == answers(model, sampling, script, False)


def test_buffers_serve_the_next_answer_and_grow_for_a_longer_one(model):
    works = Runner(model, CONFIG, REAL, 4096)
    greedy = SamplingParams(temperature=0.0)

    def answer(prompt, tokens):
        steps, kept = works.start(prompt, [], greedy, tokens, lambda: None)
        out = []
        for _ in range(2):
            out.append(steps.draw(None, sure=True))
            steps.feed(out[-1:])
        works.finish()
        return out, kept

    first, kept = answer(PROMPT, 64)
    buffers = works._buffers
    assert kept == 0 and buffers.capacity == 2048
    assert answer(list(reversed(PROMPT)), 64)[0] != first
    again, kept = answer(PROMPT, 64)  # the whole prompt was kept
    assert (again, kept) == (first, len(PROMPT)) and works._buffers is buffers
    assert answer(PROMPT, 3000)[0] == first and works._buffers.capacity == 4096
    held = works.nbytes()
    assert held["sequence"] and held["decode"] and held["prefixes"]
    assert works.release() == sum(held.values()) and not any(works.nbytes().values())
    assert answer(PROMPT, 64)[0] == first


def test_a_model_the_kernels_cannot_take_runs_without_them():
    weights_of = make_model("dense")
    weights_of.layers[0].mixer.__dict__["qkv"] = weights_of.layers[0].mixer.qkv.double()
    assert not Runner(weights_of, CONFIG, REAL, 64).decodes_by_kernels


@pytest.mark.parametrize("count", [device_steps.STAGING, device_steps.STAGING + 1])
def test_as_many_forced_tokens_as_a_grammar_likes(model, count):
    """A schema with a long constant forces all of it at once."""
    buffers = device_steps.DeviceBuffers(model, CONFIG, REAL, 64, WHERE)
    tokens = [number % 40 for number in range(count)]
    for _ in range(2):
        assert buffers.to_device(tokens).tolist() == tokens
