"""Writing checkpoints: FP8 blocks, sharding, the official layout and skip list."""

import json

import pytest
import torch
from checkpoint_samples import official_weights, tiny_config, write_sample

from a3b_engine.checkpoint.index import INDEX_NAME, CheckpointIndex
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.checkpoint.write import quantize_fp8_block, write_checkpoint
from a3b_engine.config import ModelConfig
from a3b_engine.errors import CheckpointError


def test_quantized_values_are_the_nearest_the_rounded_scale_allows():
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 0.03
    codes, scale = quantize_fp8_block(weight)
    assert (codes.dtype, scale.dtype, tuple(codes.shape), tuple(scale.shape)) == (torch.float8_e4m3fn, torch.bfloat16, (300, 200), (3, 2))
    amax = weight[128:256, :128].abs().max()
    assert scale[1, 0] == (amax / 448).bfloat16()
    plain = ScaledWeight(codes, scale.float(), (128, 128)).dequantize(torch.float32)
    step = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or 2^-10 scale units below the smallest normal.
    assert ((plain - weight).abs() <= torch.maximum(weight.abs() / 16, step * 2.0**-10) + 1e-9).all()
    # Coding against the unrounded scale would be worse.
    exact = weight.float() / step
    assert torch.equal(codes.float(), exact.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_zero_blocks_get_scale_one_and_extremes_stay_finite():
    weight = torch.zeros(128, 256)
    weight[0, 200] = 3e38
    codes, scale = quantize_fp8_block(weight)
    assert scale.tolist() == [[1.0, scale[0, 1].item()]] and codes.float().isfinite().all()
    assert codes[0, 200].float() == 448


def test_stacks_are_quantized_matrix_by_matrix():
    weight = torch.randn(3, 130, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_fp8_block(weight)
    for number in range(3):
        one_codes, one_scale = quantize_fp8_block(weight[number])
        assert torch.equal(codes[number].view(torch.uint8), one_codes.view(torch.uint8)) and torch.equal(scale[number], one_scale)


@pytest.mark.parametrize("experts", ["per_expert", "fused"])
def test_fp8_layout_is_the_official_one(tmp_path, experts):
    folder = write_sample(tmp_path, format="fp8", experts=experts)
    tensors = CheckpointIndex.open(folder).tensors
    for name, info in tensors.items():
        fp8 = any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "shared_expert.", ".experts."))
        fp8 = fp8 and not name.endswith("scale_inv")
        assert info.dtype == ("F8_E4M3" if fp8 else "BF16"), name
        if fp8:
            scale = f"{name}_scale_inv"
            assert tensors[scale].shape[-2:] == tuple(-(-size // 128) for size in info.shape[-2:])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "fp8" and quantization["weight_block_size"] == [128, 128]
    skipped = quantization["modules_to_not_convert"]
    for module in ("lm_head", "model.embed_tokens", "model.visual", "model.language_model.layers.0.mlp.gate",
                   "model.language_model.layers.0.linear_attn.in_proj_a", "model.language_model.layers.1.self_attn.q_norm"):  # fmt: skip
        assert module in skipped
    assert not any(module.endswith(("q_proj", "out_proj", "down_proj")) for module in skipped)
    ModelConfig.from_folder(folder)


def test_multi_token_prediction_is_converted_like_the_official_one(tmp_path):
    tensors = {**official_weights(tiny_config()), "mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.self_attn.q_proj.weight": torch.ones(64, 64)}
    written = CheckpointIndex.open(write_sample(tmp_path, tensors=tensors, format="fp8")).tensors
    assert (written["mtp.fc.weight"].dtype, written["mtp.layers.0.self_attn.q_proj.weight"].dtype) == ("BF16", "F8_E4M3")


def test_shards_and_index_agree(tmp_path):
    folder = write_sample(tmp_path, max_shard_bytes=30_000)
    index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert index["metadata"]["total_size"] == CheckpointIndex.open(folder).total_bytes
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


def test_the_safetensors_library_reads_what_we_write(tmp_path):
    from safetensors.torch import load_file

    folder = write_sample(tmp_path, format="fp32", experts="per_expert")
    assert all(torch.equal(load_file(folder / "model.safetensors")[name], tensor) for name, tensor in official_weights(tiny_config()).items())


def test_other_weights_in_the_folder_are_never_mixed_in(tmp_path):
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="other.safetensors"):
        write_checkpoint(tmp_path, official_weights(tiny_config()), tiny_config())
    assert [path.name for path in tmp_path.iterdir()] == ["other.safetensors"]


def test_unknown_format_is_a_programming_error(tmp_path):
    with pytest.raises(ValueError, match="int3"):
        write_checkpoint(tmp_path, {}, {}, format="int3")
