"""The random demo checkpoint: official layout, made on the spot, the same for the same seed."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_samples import load, plan_of

from a3b_engine.checkpoint.index import CheckpointIndex
from a3b_engine.config import ModelConfig

MAKER = Path(__file__).resolve().parents[2] / "tools" / "demo_model" / "make_random.py"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("a3b_test_make_random", MAKER)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    assert sys.path == before
    return module


@pytest.fixture(scope="module")
def folder(maker, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("demo") / "a3b-random-demo"
    state = torch.random.get_rng_state()
    assert maker.make_random_checkpoint(target) == target
    assert torch.equal(torch.random.get_rng_state(), state)
    return target


@pytest.fixture(scope="module")
def tokenizer(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_same_seed_same_bytes_other_seed_other_weights(maker, folder, tmp_path):
    again = digests(maker.make_random_checkpoint(tmp_path / "again"))
    assert again == digests(folder)
    assert digests(maker.make_random_checkpoint(tmp_path / "again")) == again  # over itself
    other = digests(maker.make_random_checkpoint(tmp_path / "other", seed=1))
    assert {name for name in other if other[name] != again[name]} == {name for name in other if name.endswith(".safetensors")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"]


def test_it_is_the_official_fp8_layout(folder):
    index = CheckpointIndex.open(folder)
    assert len(index.files) >= 3 and index.total_bytes < 5_000_000
    name = "model.language_model.layers.3.mlp.experts.7.down_proj.weight"
    assert (index.tensors[name].dtype, index.tensors[f"{name}_scale_inv"].shape) == ("F8_E4M3", (1, 1))
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja", "model.safetensors.index.json"}  # fmt: skip
    plan = plan_of(folder)
    assert plan.has_vision and plan.unused == []
    config = ModelConfig.from_folder(folder)
    assert config.text.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.text.num_experts, config.text.num_experts_per_tok, config.vision.depth) == (8, 2, 2)


def test_weights_have_sane_sizes(folder):
    weights = load(folder, torch.float32, dequantize=True)
    for name, weight in weights.items():
        assert weight.isfinite().all(), name
        if weight.ndim >= 2 and "conv1d" not in name:
            assert 0.02 <= weight.std() <= 0.06, name
    assert (weights["norm.weight"] == 0).all() and (weights["layers.0.linear_attn.norm.weight"] == 1).all()
    decay = weights["layers.0.linear_attn.A_log"].exp()
    assert decay.min() >= 0.99 and decay.max() <= 16.1


def test_tokenizer_ids_and_padding(folder, tokenizer):
    config = ModelConfig.from_folder(folder)
    size = tokenizer.get_vocab_size()
    assert 1500 <= size <= 2000 and config.text.vocab_size % 64 == 0 and 0 < config.text.vocab_size - size <= 64
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(size - len(added), size))  # behind the BPE, without gaps
    by_content = {token.content: (number, token.special) for number, token in added.items()}
    assert by_content["<|endoftext|>"] == (min(added), True) and by_content["<|im_end|>"][1]
    assert not by_content["<think>"][1] and not by_content["<tool_call>"][1]
    assert config.image_token_id == by_content["<|image_pad|>"][0]
    assert set(config.eos_token_ids) == {by_content["<|im_end|>"][0], by_content["<|endoftext|>"][0]}
    assert by_content["</think>"][0] < config.text.vocab_size


@pytest.mark.parametrize(
    "text", ["", "plain English, 42 panels!", "\u7b2c\u4e00\u683c\uff1a\u96e8\u591c", '{"panels": [{"shot": "close"}]}', "\U0001f600 \t\r\n x", "na\u00efve"]
)
def test_tokenizer_encodes_any_text_and_gives_it_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_learnt_the_field_names_and_composes(tokenizer):
    assert len(tokenizer.encode('"visual_prompt"').ids) <= 4
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids  # NFC
    assert len(tokenizer.encode("12345").ids) == 5  # digits one by one, as in the published tokenizer
    assert tokenizer.encode("<|im_start|>user").tokens[0] == "<|im_start|>"


def render(folder, messages, **options) -> str:
    import jinja2.sandbox

    def fail(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, raise_exception=fail, **options)


def test_chat_template_conventions(folder):
    picture = [{"type": "image"}, {"type": "text", "text": " What is this?\n"}]
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": picture}]
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|> What is this?<|im_end|>\n"
    )
    assert render(folder, messages) == turns
    answer = turns + "<|im_start|>assistant\n"
    assert render(folder, messages, add_generation_prompt=True, enable_thinking=True) == answer + "<think>\n"
    for options in ({}, {"enable_thinking": False}):
        assert render(folder, messages, add_generation_prompt=True, **options) == answer + "<think>\n\n</think>\n\n"
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert render(folder, history) == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in history)


@pytest.mark.parametrize("roles", [["user", "system"], ["system"], [], ["user", "wizard"]])
def test_chat_template_refuses(folder, roles):
    import jinja2

    with pytest.raises(jinja2.TemplateError):
        render(folder, [{"role": role, "content": "x"} for role in roles])


def test_files_are_utf8_json(folder):
    for path in folder.glob("*.json"):
        assert isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
