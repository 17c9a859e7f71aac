"""What the runner does where kernels are missing or fail: the plain path, one log line, the same answer."""

import logging
import sys

import pytest
import torch
from engine_samples import GREEDY

from a3b_engine import Prompt
from a3b_engine.kernels import support
from a3b_engine.runtime.runner import Runner


class OutOfResources(Exception):
    """As Triton raises where a card lacks shared memory."""


OutOfResources.__module__ = "triton.runtime.errors"


class Failing:
    """A fast model that fails at its first prompt."""

    def __init__(self, model, problem):
        self.embed, self._problem, self.calls = model.embed, problem, 0

    def forward(self, x, positions, states):
        self.calls += 1
        raise self._problem


@pytest.fixture
def runner(engine, monkeypatch):
    runner = Runner(engine._text, engine.config, engine.tokenizer.size, engine.context)
    monkeypatch.setattr(engine, "_runner", runner)
    return runner


def test_a_kernel_that_cannot_be_built_is_given_up_with_one_line(engine, runner, caplog):
    expected = engine.generate(Prompt(user="Tell me"), GREEDY).text
    runner.release()
    failing = runner._forward = Failing(engine._text, OutOfResources("shared memory: required 300000, limit 101376\nsecond line"))
    assert runner.prefills_by_kernels
    with caplog.at_level(logging.WARNING):
        assert engine.generate(Prompt(user="Tell me"), GREEDY).text == expected
        assert engine.generate(Prompt(user="Tell me"), GREEDY).text == expected
    (record,) = caplog.records
    assert "OutOfResources: shared memory: required 300000, limit 101376" in record.getMessage() and "second" not in record.getMessage()
    assert failing.calls == 1 and not runner.prefills_by_kernels


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), RuntimeError("CUDA error"), torch.cuda.OutOfMemoryError("no room")])
def test_other_errors_are_not_taken_for_a_kernel_s(engine, runner, problem):
    runner._forward = Failing(engine._text, problem)
    with pytest.raises(type(problem)):
        engine.generate(Prompt(user="Tell me"), GREEDY)
    assert runner.prefills_by_kernels


def test_kernels_that_cannot_be_imported_are_not_used(engine, monkeypatch, caplog):
    """An older Triton may lack what a kernel is written in: reading the module then raises whatever it likes."""
    monkeypatch.setattr("a3b_engine.runtime.runner.target", lambda device: support.Target(torch.device("cpu"), (8, 6), 80, False, False))
    monkeypatch.setitem(sys.modules, "a3b_engine.runtime.decode", None)
    monkeypatch.delattr("a3b_engine.runtime.decode", raising=False)
    with caplog.at_level(logging.WARNING):
        runner = Runner(engine._text, engine.config, engine.tokenizer.size, engine.context)
    assert not runner.decodes_by_kernels and not runner.prefills_by_kernels
    assert "plain PyTorch is used" in caplog.text


class Cuda:
    """torch.cuda as `support` sees it."""

    def __init__(self, capability=(8, 6), multiprocessors=80):
        self.capability, self.multiprocessors = capability, multiprocessors

    def get_device_capability(self, device):
        return self.capability

    def get_device_properties(self, device):
        return type("Properties", (), {"multi_processor_count": self.multiprocessors})


@pytest.fixture
def card(monkeypatch):
    def put(capability=(8, 6), triton=True):
        monkeypatch.setattr(support, "_targets", {})
        monkeypatch.setattr(support.torch, "cuda", Cuda(capability))
        if not triton:
            monkeypatch.setitem(sys.modules, "triton", None)
        return torch.device("cuda", 0)

    return put


@pytest.mark.parametrize("capability, words", [((7, 5), "compute capability 7.5 is below 8.0"), ((6, 1), "6.1")])
def test_a_card_too_old_is_told_once(card, caplog, capability, words):
    pytest.importorskip("triton")
    device = card(capability)
    with caplog.at_level(logging.WARNING):
        assert support.target(device) is None and support.target(device) is None
    (record,) = caplog.records
    assert words in record.getMessage() and "the plain path is used" in record.getMessage()


def test_a_card_that_does_not_answer_is_told_once(card, caplog, monkeypatch):
    pytest.importorskip("triton")

    def silent(self, device):
        raise RuntimeError("driver")

    monkeypatch.setattr(Cuda, "get_device_capability", silent)
    device = card()
    with caplog.at_level(logging.WARNING):
        assert support.target(device) is None
    assert "RuntimeError" in caplog.records[0].getMessage()


def test_no_triton_is_told_once(card, caplog):
    device = card(triton=False)
    with caplog.at_level(logging.WARNING):
        assert support.target(device) is None and not support.usable("router", device) and not support.all_usable(("router", "sampler"), device)
    (record,) = caplog.records
    assert "Triton cannot be imported" in record.getMessage()


def test_an_unknown_newer_card_gets_kernels(card):
    pytest.importorskip("triton")
    found = support.target(card((13, 0)))
    assert found.capability == (13, 0) and found.fp8_native and not found.interpreted
