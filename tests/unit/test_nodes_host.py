"""nodes/host.py: folders, devices, progress and text, against a fake ComfyUI."""

import logging
import sys
import types

import pytest
import torch
from fake_comfy import Interrupted, comfy, part  # noqa: F401

host = part("nodes.host")
errors = part("a3b_engine.errors")


def test_names_are_relative_posix_paths_of_every_root_with_the_demo_first(comfy, tmp_path):
    """F17: a root from extra_model_paths.yaml is searched like the others."""
    extra = tmp_path / "other disk"
    comfy.folders["LLM"][0].append(str(extra))
    comfy.folders["text_encoders"] = ([str(tmp_path / "encoders")], set())
    comfy.add_checkpoint(extra, "Qwen/Qwen3.5-35B-A3B-FP8")
    comfy.add_checkpoint(tmp_path / "encoders", "mine")
    comfy.add_checkpoint(host.DEMO_FOLDER, "a3b-random-demo")
    assert host.checkpoint_names() == ["a3b-random-demo", "Qwen/Qwen3.5-35B-A3B-FP8", "mine"]


def test_clip_folders_of_the_2024_host_are_searched(comfy, tmp_path):
    comfy.folders["clip"] = ([str(tmp_path / "clip")], set())
    folder = comfy.add_checkpoint(tmp_path / "clip", "q")
    assert host.checkpoint_folder("q") == folder


def test_a_root_that_is_a_checkpoint_itself_bears_its_own_name(comfy, tmp_path):
    folder = comfy.add_checkpoint(tmp_path, "Qwen3.5")
    comfy.folders["LLM"][0].append(str(folder))
    assert host.checkpoint_folder("Qwen3.5") == folder


def test_the_first_root_wins_a_name(comfy, tmp_path):
    first = comfy.add_checkpoint(comfy.models_dir / "LLM", "same")
    comfy.folders["LLM"][0].append(str(tmp_path / "second"))
    comfy.add_checkpoint(tmp_path / "second", "same")
    assert host.checkpoint_folder("same") == first


@pytest.mark.parametrize("saved", ["Qwen\\A3B-FP8", "Qwen/A3B-FP8", "qwen/a3b-fp8"])
def test_names_of_other_systems_match(comfy, saved):
    """F20"""
    folder = comfy.add_checkpoint(comfy.models_dir / "LLM", "Qwen/A3B-FP8")
    assert host.checkpoint_folder(saved) == folder


@pytest.mark.parametrize("hostile", ["../../etc", "..\\LLM\\q", "/etc/passwd", "C:\\q", "q/..", "q\0", "."])
def test_only_listed_names_resolve(comfy, hostile):
    comfy.add_checkpoint(comfy.models_dir / "LLM", "q")
    with pytest.raises(errors.CheckpointError, match="^checkpoint: "):
        host.checkpoint_folder(hostile)


def test_nothing_found_says_how_to_get_the_files(comfy):
    assert host.checkpoint_names() == [host.NOTHING_FOUND]
    with pytest.raises(errors.CheckpointError) as caught:
        host.checkpoint_folder(host.NOTHING_FOUND)
    target = comfy.models_dir / "LLM" / "Qwen3.5-35B-A3B-FP8"
    assert f'hf download Qwen/Qwen3.5-35B-A3B-FP8 --local-dir "{target}"' in str(caught.value)
    assert str(comfy.models_dir / "LLM") in str(caught.value)


def test_the_model_folder_is_announced_once_beside_user_roots(comfy, tmp_path):
    comfy.folders["LLM"] = ([str(tmp_path / "yaml")], set())
    host.register_model_folder()
    host.register_model_folder()
    assert comfy.folders["LLM"][0] == [str(tmp_path / "yaml"), str(comfy.models_dir / "LLM")]


def test_outside_comfyui_nothing_is_announced(monkeypatch):
    monkeypatch.setitem(sys.modules, "folder_paths", None)
    host.register_model_folder()


@pytest.mark.parametrize("name", ["my pack", "\u6f2b\u753b", "pack (copy)", "pack.1", "a@b", "50%", "a[1]", "a\nb", "a\n", ""])
def test_a_folder_name_that_hides_the_help_pages_is_told(caplog, name):
    host.check_folder_name(name)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"A3B: the pack's folder is named {name!a}.") and "rename the folder" in message and "restart" in message
    assert message.isascii() and "\n" not in message


@pytest.mark.parametrize("name", ["a3b-comic-script", "main", "A3B_Comic-Script2"])
def test_other_folder_names_are_left_alone(caplog, name):
    host.check_folder_name(name)
    assert caplog.records == []


def test_devices(comfy, monkeypatch, caplog):
    """V09, V10"""
    assert host.device_names() == ["auto", "cpu"]
    assert host.resolve_device("auto") == torch.device("cpu")
    management = sys.modules["comfy.model_management"]
    management.cpu_state = management.CPUState.GPU
    management.get_torch_device = lambda: torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert host.device_names() == ["auto", "cpu", "cuda:0", "cuda:1"]
    assert host.resolve_device("cuda:1") == torch.device("cuda", 1)
    with caplog.at_level(logging.WARNING):
        assert host.resolve_device("cuda:5") == torch.device("cuda", 0)
    assert "'cuda:5' is not present here" in caplog.text and "cuda:0 instead" in caplog.text


def test_searched_folders_in_messages_are_two_with_models_llm_first(comfy, tmp_path):
    comfy.folders["LLM"] = ([str(tmp_path / "yaml"), str(tmp_path / "more"), str(comfy.models_dir / "LLM")], set())
    with pytest.raises(errors.CheckpointError) as caught:
        host.checkpoint_folder("other")
    assert f"found under {comfy.models_dir / 'LLM'}, {tmp_path / 'yaml'}, ...; nothing" in str(caught.value)


@pytest.mark.parametrize("bad", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:x", ""])
def test_nonsense_is_no_device_name(bad):
    assert not host.is_device_name(bad)


def token(text, count, thinking=False):
    return types.SimpleNamespace(text=text, count=count, thinking=thinking, limit=9)


def test_every_token_moves_the_bar(comfy):
    progress = host.TokenProgress(9)
    for count in range(1, 4):
        progress(token("x", count))
    assert comfy.bars == [(1, 9), (2, 9), (3, 9)]


def test_cancel_is_seen_at_the_next_token(comfy):
    """N01"""
    progress = host.TokenProgress(9)
    progress(token("x", 1))
    comfy.interrupt = True
    with pytest.raises(Interrupted):
        progress(token("x", 2))
    comfy.interrupt = True
    with pytest.raises(Interrupted):
        host.check_interrupt()
    assert host.check_interrupt() is False


def test_text_is_streamed_sparsely_to_the_queueing_browser(comfy, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(host.time, "monotonic", lambda: now[0])
    progress = host.TokenProgress(9)
    for index in range(40):
        progress(token("abc", index))
        now[0] += 0.01
    assert [len(text) for text, _, _ in comfy.texts] == [3, 3 * 16, 3 * 31]
    assert {(node, client) for _, node, client in comfy.texts} == {("17", "browser-1")}
    progress.finish("the end")
    assert comfy.texts[-1] == ("the end", "17", "browser-1")


def test_streamed_text_is_tail_capped_and_drops_finished_thinking(comfy, monkeypatch):
    monkeypatch.setattr(host, "TEXT_INTERVAL", 0)
    progress = host.TokenProgress(9)
    progress(token("z" * 9000, 1, thinking=True))
    assert comfy.texts[-1][0] == "z" * host.TEXT_TAIL
    progress(token("answer", 2))
    assert comfy.texts[-1][0] == "answer"


def test_no_text_without_a_client_or_on_the_2024_host(comfy, monkeypatch):
    server = sys.modules["server"].PromptServer.instance
    monkeypatch.setattr(type(server), "client_id", None)
    progress = host.TokenProgress(9)
    progress(token("x", 1))
    monkeypatch.setitem(sys.modules, "comfy_execution.utils", None)
    progress = host.TokenProgress(9)
    progress(token("x", 1))
    progress.finish("x")
    assert comfy.texts == []


def test_loading_moves_a_bar_and_can_be_cancelled(comfy):
    report = host.loading_progress()
    report(1, 4)
    assert comfy.bars == [(1, 4)]
    comfy.interrupt = True
    with pytest.raises(Interrupted):
        report(2, 4)
