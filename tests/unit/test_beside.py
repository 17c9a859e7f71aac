"""The scripts that time other programs beside the engine, as far as a CPU and a tiny model take them."""

import io
import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMERS, LLAMA_CPP = (ROOT / "benchmarks" / name for name in ("beside_transformers.py", "beside_llama_cpp.py"))


def script(path, *arguments):
    return subprocess.run([sys.executable, str(path), *map(str, arguments)], capture_output=True, text=True, encoding="utf-8", timeout=300)


@pytest.fixture(scope="module")
def llama_cpp():
    import importlib.util

    spec = importlib.util.spec_from_file_location("beside_llama_cpp", LLAMA_CPP)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_transformers_is_timed_and_prints_one_object():
    pytest.importorskip("transformers")
    done = script(TRANSFORMERS, "--tiny", "--device", "cpu", "--prompt", 16, "--new", 4, "--repeat", 1, "--experts", "grouped_mm", "eager")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["transformers"] and report["machine"]["torch"] and report["machine"]["date"].endswith("UTC")
    assert report["whole"] is False and report["parameters"] > 100_000 and set(report["optional_kernels"]) >= {"causal-conv1d"}
    assert [row["experts"] for row in report["results"]] == ["grouped_mm", "eager"]
    for row in report["results"]:
        assert row["decode_tokens_per_s"] > 0 and row["first_token_ms"] > 0


def test_transformers_without_a_card_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA card")
    done = script(TRANSFORMERS)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.strip().splitlines()[-1].startswith("torch sees no CUDA card")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_a_random_gguf_can_be_read_again(llama_cpp, tmp_path, kind):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    path = tmp_path / "tiny.gguf"
    done = script(LLAMA_CPP, "write", path, "--tiny", "--type", kind)
    assert done.returncode == 0, done.stderr[-2000:]
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert json.loads(done.stdout)["tensors"] == len(tensors) and json.loads(done.stdout)["bytes"] == path.stat().st_size
    for entry in llama_cpp.entries(llama_cpp.TINY):
        tensor = tensors[entry.name]
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape  # GGUF counts from the fastest dimension
        assert tensor.tensor_type.name == (kind.upper() if entry.fill is None else "F32")
    norm = tensors["blk.0.attn_norm.weight"].data
    assert (norm == 1).all()
    codes = tensors["blk.0.ffn_up_exps.weight"]
    weights = gguf.quants.dequantize(codes.data, codes.tensor_type)
    assert 0.001 < abs(weights).mean() < 0.1


def test_the_published_shape_as_gguf_has_its_parameters(llama_cpp):
    count = sum(math.prod(entry.shape) for entry in llama_cpp.entries(llama_cpp.ModelShape()))
    assert count == pytest.approx(34.66e9, rel=0.002)  # the language model of 35B-A3B
    names = [entry.name for entry in llama_cpp.entries(llama_cpp.ModelShape())]
    assert len(names) == len(set(names)) and sum(name.endswith("attn_q.weight") for name in names) == 10


def test_only_what_is_needed_is_unpacked(llama_cpp, tmp_path):
    archive = tmp_path / "llama_cpp_python-1.tar.gz"
    files = {
        "p-1/vendor/llama.cpp/CMakeLists.txt": "top", "p-1/vendor/llama.cpp/src/a.cpp": "a", "p-1/vendor/llama.cpp/models/big.gguf": "no",
        "p-1/vendor/llama.cpp/tools/llama-bench/main.cpp": "b", "p-1/vendor/llama.cpp/tools/server/s.cpp": "no", "p-1/src/x.py": "no",
        "p-1/vendor/llama.cpp/src/../../../../evil": "no",
    }  # fmt: skip
    with tarfile.open(archive, "w:gz") as out:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            out.addfile(member, io.BytesIO(text.encode("ascii")))
    done = script(LLAMA_CPP, "unpack", archive, tmp_path / "source")
    assert done.returncode == 0 and json.loads(done.stdout)["files"] == 3
    found = sorted(path.relative_to(tmp_path / "source").as_posix() for path in (tmp_path / "source").rglob("*") if path.is_file())
    assert found == ["CMakeLists.txt", "PACKAGE.txt", "src/a.cpp", "tools/CMakeLists.txt", "tools/llama-bench/main.cpp"]
    assert not (tmp_path / "evil").exists()
    other = tmp_path / "other.tar.gz"
    tarfile.open(other, "w:gz").close()
    refused = script(LLAMA_CPP, "unpack", other, tmp_path / "nothing")
    assert refused.returncode == 1 and "source package of llama-cpp-python" in refused.stderr


def test_rows_of_llama_bench_become_one_object(llama_cpp):
    common = {"build_commit": "abc", "build_number": 7, "backends": "CUDA", "gpu_info": "a card", "model_type": "m", "model_size": 9, "n_depth": 0}
    rows = [
        {**common, "n_prompt": 512, "n_gen": 0, "avg_ts": 5925.123, "stddev_ts": 1.0},
        {**common, "n_prompt": 0, "n_gen": 128, "avg_ts": 226.0, "stddev_ts": 0.5},
    ]
    report = llama_cpp.summary(rows, ["llama-bench", "-m", "x"])
    assert [(row["what"], row["tokens"], row["tokens_per_s"]) for row in report["results"]] == [("prefill", 512, 5925.12), ("decode", 128, 226.0)]
    assert report["build"] == "abc" and report["device"] == "a card" and report["command"] == ["-m", "x"] and report["date"].endswith("UTC")


def test_a_folder_without_the_program_is_named(llama_cpp, tmp_path):
    with pytest.raises(SystemExit, match="no llama-bench"):
        llama_cpp.program_in(tmp_path)
