"""The training network is the engine's model: same logits, same answers; and it learns, stops and goes on."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from a3b_engine.config import ModelConfig
from a3b_engine.engine import Engine
from a3b_engine.model.deltanet import delta_rule_chunked
from a3b_engine.model.positions import ImagePlace, mrope_positions
from a3b_engine.prompt import Prompt
from a3b_engine.sampling import SamplingParams
from tools.demo_model.make_random import write_settings, write_tokenizer
from tools.demo_model.training.delta_rule import delta_rule, unit_lower_inverse
from tools.demo_model.training.feeder import to_device
from tools.demo_model.training.generate import greedy
from tools.demo_model.training.lessons import make_batch, read_slot, write_slot
from tools.demo_model.training.network import batch_positions, initial_weights
from tools.demo_model.training.recipe import Recipe, demo_config
from tools.demo_model.training.session import Options, Session
from tools.demo_model.training.store import read_weights, save_weights
from tools.demo_model.training.tokens import BPE_SIZE, Encoder, trait_weights, training_texts
from tools.demo_model.training.trainer import Trainer
from tools.demo_model.world import sample

CPU = torch.device("cpu")
GRID = (12, 12)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    ids = write_tokenizer(folder, training_texts(60), BPE_SIZE)
    return folder, ids


@pytest.fixture(scope="module")
def trained(tokenizer):
    """A small network behind three steps on four lessons of different lengths."""
    folder, ids = tokenizer
    config = demo_config(ids, small=True)
    encoder = Encoder(folder, GRID[0] * GRID[1])
    lessons = [sample(11, kind="question"), sample(12, kind="inventory"), sample(13, kind="describe"), sample(14, kind="script_short")]
    trainer = Trainer(ModelConfig.from_dict(config), replace(Recipe(), rate=3e-3, warmup_steps=1), CPU)
    weights = np.ones(trainer.network.config.text.vocab_size, dtype=np.float32)
    encoded = [encoder.encode(lesson) for lesson in lessons]
    batch = to_device(make_batch(encoded, lessons, weights, encoder.pad_id), GRID, CPU)
    losses = [float(trainer.step(batch, 0.0)) for _ in range(3)]
    return trainer, config, encoder, lessons, encoded, batch, losses


@pytest.fixture(scope="module")
def engine(trained, tokenizer, tmp_path_factory):
    trainer, config = trained[:2]
    folder = tmp_path_factory.mktemp("exported")
    save_weights(folder, trainer.network.weights, config, "fp32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer[0] / name).read_bytes())
    write_settings(folder, tokenizer[1])
    return Engine.load(folder)


def test_loss_falls(trained):
    losses = trained[-1]
    assert losses[2] < losses[0] - 0.5


def test_logits_are_the_engines(trained, engine):
    trainer, _, _, lessons, encoded, batch, _ = trained
    with torch.no_grad():
        hidden = trainer.network.forward(batch.ids, batch.pictures, batch.starts, batch.positions)
    for row, (one, lesson) in enumerate(zip(encoded, lessons)):
        ids = one.prompt + one.answer
        expected = engine.logits(ids, engine.encode_image(lesson.picture))
        ours = trainer.network.text.logits(hidden[row, : len(ids)]).detach()
        assert (ours - expected).abs().max() <= 2e-4
        assert expected.std() > 0.1


def test_prompt_is_what_the_engine_renders(trained, engine):
    lessons, encoded = trained[3:5]
    for one, lesson in zip(encoded, lessons):
        rendered = engine.render(Prompt(user=lesson.user, system=lesson.system, images=engine.encode_image(lesson.picture)))
        assert rendered.token_ids == one.prompt
        assert rendered.image_spans[0].start == one.start


def test_greedy_answers_of_a_batch_are_the_engines(trained, engine):
    trainer, _, encoder, lessons, encoded, _, _ = trained
    answers = greedy(
        trainer.network, encoded, [lesson.picture for lesson in lessons], end_id=encoder.end_id, allowed=encoder.tokenizer.size, most=12
    )
    for lesson, answer in zip(lessons, answers):
        prompt = Prompt(user=lesson.user, system=lesson.system, images=engine.encode_image(lesson.picture))
        expected = engine.generate(prompt, SamplingParams(max_new_tokens=12, temperature=0.0))
        assert encoder.tokenizer.decode(answer) == expected.text


def test_batch_marks_answers_only(trained):
    _, _, encoder, _, encoded, batch, _ = trained
    assert batch.targets.tolist() == [token for one in encoded for token in one.answer]
    flat = batch.ids.flatten()
    inner = batch.targets != encoder.end_id
    assert torch.equal(flat[batch.where + 1][inner], batch.targets[inner])
    assert batch.ids[0, batch.starts[0]] == encoder.image_id and batch.ids[0, batch.starts[0] - 1] != encoder.image_id


def test_delta_rule_is_the_engines():
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    for tokens in (1, 63, 64, 150):
        q, k = (torch.nn.functional.normalize(random(2, tokens, 3, 8), dim=-1) for _ in range(2))
        v, g, b = random(2, tokens, 3, 5), -random(2, tokens, 3).abs(), torch.sigmoid(random(2, tokens, 3))
        out, state = delta_rule(q, k, v, g, b)
        for row in range(2):
            expected, last = delta_rule_chunked(q[row], k[row], v[row], g[row], b[row], torch.zeros(3, 8, 5))
            torch.testing.assert_close(out[row], expected, atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(state[row], last, atol=2e-6, rtol=1e-5)


def test_inverse_and_its_gradient():
    lower = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).tril(-1)
    torch.testing.assert_close(unit_lower_inverse(lower), torch.linalg.inv(torch.eye(8, dtype=torch.float64) + lower))
    assert torch.autograd.gradcheck(lambda a: unit_lower_inverse(a.tril(-1)), lower.requires_grad_())
    # equal keys that never decay: the hardest system, whose inverse stays small although the powers of A do not
    equal = torch.ones(64, 64).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + equal.double()).float()
    torch.testing.assert_close(unit_lower_inverse(equal), exact, atol=1e-5, rtol=1e-5)


def test_positions_are_the_engines():
    ours = batch_positions([5, 40], 300, GRID)
    for row, start in enumerate((5, 40)):
        assert torch.equal(ours[:, row], mrope_positions(300, [ImagePlace(start, *GRID)])[0])


def test_common_words_are_tokens(tokenizer):
    tokenizer = Encoder(tokenizer[0], 144).tokenizer
    for word in (" purple", " umbrella", " panels", "characters", " visual"):
        assert len(tokenizer.encode_plain(word)) <= 2, word
    weights = trait_weights(tokenizer, 2048, 3.0)
    assert weights[tokenizer.encode_plain(" red")[0]] == 3.0 and 10 < (weights > 1).sum() < 600


def test_published_size_fits():
    ids = {name: 2000 + number for number, name in enumerate(("<|endoftext|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"))}
    weights = initial_weights(ModelConfig.from_dict(demo_config(ids)), 0)
    parameters = sum(weight.numel() for weight in weights.values())
    assert 2 * parameters < 45_000_000
    assert not any(not weight.isfinite().all() for weight in weights.values())


def test_slots_carry_arrays(tmp_path):
    path = tmp_path / "a.slot"
    path.write_bytes(bytes(4096))
    arrays = {"ids": np.arange(6, dtype=np.int64).reshape(2, 3), "pictures": np.full((1, 5), 7, np.uint8), "weights": np.ones(3, np.float32)}
    headers = write_slot(path, arrays)
    back = read_slot(np.memmap(path, dtype=np.uint8, mode="r"), headers)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


def test_training_stops_and_goes_on(tmp_path):
    recipe = replace(Recipe(), group=4, batch_lessons=2, batch_tokens=3000, warmup_steps=1)
    options = Options(
        out=tmp_path / "out", work=tmp_path / "work", minutes=10, piece_minutes=10, workers=1, device="cpu", small=True, tokenizer_lessons=10, recipe=recipe
    )
    first = Session(options)
    with first.feeder() as feeder:
        first.train(feeder, max_steps=2)
    first.finish(0)
    second = Session(replace(options, resume=True))
    assert second.trainer.steps == 2 and second.elapsed == first.elapsed > 0 and second.next_group >= 1
    for name, weight in first.trainer.network.weights.items():
        assert torch.equal(weight, second.trainer.network.weights[name]), name
    moments = [next(iter(one.trainer.optimizer.state.values()))["exp_avg"] for one in (first, second)]
    assert torch.equal(*moments)
    (options.work / "state.pt").unlink()  # another machine: only the results came along
    third = Session(replace(options, resume=True))
    assert third.trainer.steps == 2 and third.elapsed == pytest.approx(first.elapsed, abs=0.1)
    stored = read_weights(options.out)[1]
    for name, weight in third.trainer.network.weights.items():
        torch.testing.assert_close(weight.detach(), first.trainer.network.weights[name].detach(), atol=1e-2, rtol=1e-2)
        assert torch.equal(weight.detach(), stored[name].view(weight.shape)), name


@pytest.mark.skipif(sys.platform == "win32", reason="one system is enough for a run of the whole command")
def test_smoke_command(tmp_path, repository):
    import subprocess

    command = [sys.executable, str(repository / "tools/demo_model/training/train.py"), "--smoke", "--small", "--workers", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out"), "--device", "cpu"], capture_output=True, text=True, timeout=300, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "exported" in done.stdout and "resumed behind step 12 of 12" in done.stdout
