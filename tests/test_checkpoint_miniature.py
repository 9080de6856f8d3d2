"""Miniature checkpoints: the released layout in small, repeatable, and alive in every stage."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from magi2_native.magi2_core.checkpoint.folder import CheckpointFolder
from magi2_native.magi2_core.checkpoint.inspect import inspect_checkpoint
from magi2_native.magi2_core.checkpoint.loader import load_module
from magi2_native.magi2_core.checkpoint.miniature import MiniatureSize, write_miniature
from magi2_native.magi2_core.checkpoint.miniature_extras import wan_decoder_shapes
from magi2_native.magi2_core.checkpoint.network import Network
from magi2_native.magi2_core.codecs.latent_scale import denormalise
from magi2_native.magi2_core.codecs.oobleck_decoder import OobleckDecoder
from magi2_native.magi2_core.codecs.turbo_decoder import TurboDecoder
from magi2_native.magi2_core.codecs.wan_encoder import WanEncoder, WanEncoderConfig, encode_picture
from magi2_native.magi2_core.conditioning.text_encoder import TextEncoder
from magi2_native.magi2_core.dit.model import PreviewTransformer
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.sampling.packing import Conditions, pack_request, pack_tokens, unpack
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

GRID, AUDIO = (2, 4, 4), 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_miniature(tmp_path_factory.mktemp("checkpoint") / "a miniature")


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def filled(module: torch.nn.Module, network: Network) -> torch.nn.Module:
    load_module(module, network)
    return module.eval()


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / a.norm()).item()


# ---- writing


def test_the_default_is_about_thirty_megabytes(root: Path):
    assert 25e6 < sum(len(content) for content in files(root).values()) < 35e6


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(root: Path, tmp_path: Path):
    first, again, other = files(root), files(write_miniature(tmp_path / "0")), files(write_miniature(tmp_path / "1", 1))
    assert first == again
    assert first.keys() == other.keys()
    weights = {name for name in first if name.endswith((".safetensors", ".pth", ".ckpt"))}
    assert {name for name in first if first[name] != other[name]} == weights | {"miniature.json"}


def test_an_existing_miniature_is_kept_and_anything_else_is_not_overwritten(tmp_path: Path):
    size = MiniatureSize(hidden_size=192, experts=6)
    root = write_miniature(tmp_path / "mini", 3, size, only=["preview"])
    stamp = (root / "preview").stat().st_mtime_ns
    assert write_miniature(root, 3, size, only=["preview"]) == root
    assert (root / "preview").stat().st_mtime_ns == stamp
    with pytest.raises(RequestError, match="holds another miniature"):
        write_miniature(root, 4, size, only=["preview"])
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").touch()
    with pytest.raises(RequestError, match="is not empty"):
        write_miniature(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_taken_and_a_path_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert (write_miniature(tmp_path / "empty", only=["vae"]) / "vae").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written"):
        write_miniature(tmp_path / "file" / "mini", only=["vae"])


def test_a_cancelled_miniature_leaves_nothing(tmp_path: Path):
    class Stop(Silent):
        def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_miniature(tmp_path / "mini", events=Stop())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["preview", "vae", "turbo_vae", "stable-audio-open-1.0", "text_encoder"])
def test_a_disk_without_room_is_named_and_nothing_is_left(tmp_path: Path, part: str):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(RequestError, match="cannot be written: File too large"):
            write_miniature(tmp_path / "mini", size=MiniatureSize(hidden_size=192, layers=2), only=[part])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (MiniatureSize(hidden_size=200), "multiple of 192"),
        (MiniatureSize(refiner_hidden=96), "multiple of 64"),
        (MiniatureSize(layers=1), "2 layers"),
        (MiniatureSize(experts=5), "6 are chosen"),
        (MiniatureSize(wan_width=0), "wan_width"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, size: MiniatureSize, message: str):
    with pytest.raises(RequestError, match=message):
        write_miniature(tmp_path / "mini", size=size)
    assert list(tmp_path.iterdir()) == []


def test_dimensions_are_options(tmp_path: Path):
    size = MiniatureSize(
        hidden_size=192, layers=4, experts=8, expert_width=32, text_width=32, text_layers=5, text_merges=100,
        refiner_hidden=128, refiner_layers=3, wan_width=4, turbo_width=4, oobleck_width=4,
    )  # fmt: skip
    root = write_miniature(tmp_path / "mini", size=size)
    report = inspect_checkpoint(root)
    assert (report.problems, report.warnings) == ((), ())
    config = CheckpointFolder(root).preview_config()
    assert (config.num_layers, config.moe.num_experts, config.text_in_channels) == (4, 8, 32)
    assert config == size.preview()
    assert CheckpointFolder(root).refiner_config() == size.refiner()


# ---- the released layout


def test_every_parallel_layout_of_the_release_is_possible(root: Path):
    config = CheckpointFolder(root).preview_config()
    assert (config.heads, config.kv_heads, config.moe.num_heads, config.moe.top_k) == (24, 24, 12, 6)
    for width in (config.hidden_size, config.dense_width, config.moe.shared_expert_intermediate_size):
        assert width % 4 == 0
    assert config.moe_head_dim % 16 == 0


def test_the_transformers_come_in_several_shards_with_an_index(root: Path):
    for folder in ("preview", "refiner", "text_encoder"):
        index = json.loads((root / folder / "model.safetensors.index.json").read_text())
        shards = {path.name: load_file(path) for path in (root / folder).glob("*.safetensors")}
        assert len(shards) > 1
        assert index["weight_map"] == {key: name for name, tensors in shards.items() for key in tensors}
        assert index["metadata"]["total_size"] == sum(t.nbytes for part in shards.values() for t in part.values())


def test_the_picture_file_is_a_plain_zip_pickle_with_its_decoder(root: Path):
    # 40 §3.1
    path = root / "vae/Wan2.2_VAE.pth"
    assert path.read_bytes()[:2] == b"PK"
    state = torch.load(path, weights_only=True)
    groups = ("encoder.", "conv1.", "conv2.", "decoder.")
    assert [sum(key.startswith(group) for key in state) for group in groups] == [84, 2, 2, 108]
    assert len(state) == 196
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_the_unused_decoder_has_the_released_shapes():
    # 40 §0: 704,688,668 parameters in all, 149,627,776 + 9,312 of them used.
    shapes = wan_decoder_shapes(256)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 704_688_668 - 149_627_776 - 9_312


def test_the_decoder_file_is_a_training_checkpoint(root: Path):
    # 40 §4.2
    content = torch.load(root / "turbo_vae/checkpoint.ckpt", weights_only=True)
    state = content["ema_state_dict"]
    assert all(key.startswith("module.") for key in state)
    heads = [key for key in state if key.startswith("module.aligned_feature_projection_heads.")]
    assert (len(heads), len(state)) == (8, 88)
    assert len(content["state_dict"]) < 80


def test_the_sound_file_holds_other_models_too(root: Path):
    keys = load_file(root / "stable-audio-open-1.0/model.safetensors").keys()
    decoder = [key for key in keys if key.startswith("pretransform.model.decoder.")]
    assert len(decoder) == 182
    assert {key.split(".")[0] for key in keys} == {"model", "conditioner", "pretransform"}


def test_the_text_folder_is_a_multimodal_release(root: Path):
    # 30 §2
    folder = root / "text_encoder"
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert {"text_config", "vision_config"} <= config.keys()
    assert (
        config["text_config"]["layer_types"] == ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2
    )
    stored = {key: t.dtype for path in folder.glob("*.safetensors") for key, t in load_file(path).items()}
    assert any(key.startswith("model.visual.") for key in stored)
    assert {"lm_head.weight", "mtp.fc.weight", "model.language_model.norm.weight"} <= stored.keys()
    assert stored["model.language_model.layers.0.linear_attn.A_log"] == torch.float32
    assert stored["model.language_model.embed_tokens.weight"] == torch.bfloat16


def test_transformers_itself_loads_the_text_folder_without_missing_keys(root: Path):
    from transformers import Qwen3_5ForConditionalGeneration

    _, info = Qwen3_5ForConditionalGeneration.from_pretrained(root / "text_encoder", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"mtp.fc.weight", "mtp.norm.weight"}


@pytest.mark.parametrize(
    "text", ["A red fox, 12 seconds.", "猫が窓辺に座っている", "\U0001f98a\u200d\ufffd\x00\u0301", "مرحبا", " \n\t "]
)
def test_the_tokenizer_takes_any_text_and_gives_it_back(root: Path, text: str):
    tokenizer = Tokenizer.from_file(str(root / "text_encoder/tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_knows_words_and_special_tokens(root: Path):
    tokenizer = Tokenizer.from_file(str(root / "text_encoder/tokenizer.json"))
    assert len(tokenizer.encode(" the camera holds on the fox").ids) < 12
    assert tokenizer.encode("a<|im_end|>").tokens == ["a", "<|im_end|>"]
    rows = CheckpointFolder(root).text_config().vocab_size
    assert tokenizer.get_vocab_size() == rows


# ---- what it makes


@pytest.fixture(scope="module")
def model(root: Path) -> torch.nn.Module:
    folder = CheckpointFolder(root)
    with torch.device("meta"):
        module = PreviewTransformer(folder.preview_config())
    return filled(module, folder.preview())


@pytest.fixture(scope="module")
def encoder(root: Path) -> TextEncoder:
    return TextEncoder(root / "text_encoder", width=64)


def velocity(
    model: torch.nn.Module, encoder: TextEncoder, prompt: str, seed: int = 0, picture: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (text_LD,) = encoder.encode([encoder.tokenizer(prompt).ids], Silent())
    marker = None if picture is None else torch.zeros(1, 64)
    request = pack_request(GRID, AUDIO, [Conditions(text_LD.float(), picture, marker)])
    generator = torch.Generator().manual_seed(seed)
    video, audio = (torch.randn(shape, generator=generator) for shape in ((1, 48, *GRID), (1, AUDIO, 64)))
    prepared = model.prepare(request.layout, "cpu")
    return unpack(model(prepared, pack_tokens(request, video, audio, 0.9)), request, 48, 64)


def test_the_transformer_hears_the_prompt_the_seed_and_the_picture(model: torch.nn.Module, encoder: TextEncoder):
    video, audio = velocity(model, encoder, "A red fox runs along the river.")
    for part in (video, audio):
        assert torch.isfinite(part).all()
        assert 0.3 < part.std().item() < 3
    picture = torch.randn(1, 48, 2, 2, generator=torch.Generator().manual_seed(5))
    for other in (
        velocity(model, encoder, "An old woman sits by the window."),
        velocity(model, encoder, "A red fox runs along the river.", seed=1),
        velocity(model, encoder, "A red fox runs along the river.", picture=picture),
    ):
        assert relative(video, other[0]) > 0.05
        assert relative(audio, other[1]) > 0.05


def test_all_experts_are_used(model: torch.nn.Module, encoder: TextEncoder, root: Path):
    # 70 §1: at real sizes no expert can be skipped.
    chosen: set[int] = set()
    config = CheckpointFolder(root).preview_config()
    gate = model.state_dict()["block.layers.1.mlp.moe_mlp.gate"].view(12, config.moe.num_experts, -1)
    bias = model.state_dict()["block.layers.1.mlp.moe_mlp.router.expert_bias"].view(12, 1, -1)
    x_HTd = torch.randn(12, 2000, gate.shape[-1], generator=torch.Generator().manual_seed(0))
    scores = (x_HTd @ gate.transpose(1, 2)).sigmoid() + bias
    for head, experts in enumerate(scores.topk(6, dim=-1).indices):
        chosen |= {head * config.moe.num_experts + int(expert) for expert in experts.unique()}
    assert len(chosen) == 12 * config.moe.num_experts


def test_pictures_frames_and_sound_are_varied_and_in_range(root: Path):
    folder = CheckpointFolder(root)
    with torch.device("meta"):
        wan = WanEncoder(WanEncoderConfig(dim=8))
        turbo = TurboDecoder(folder.turbo_config()).to(torch.bfloat16)
        oobleck = OobleckDecoder(folder.oobleck_config())
    filled(wan, folder.wan_encoder())
    filled(turbo, folder.turbo_decoder())
    filled(oobleck, folder.oobleck_decoder()).fold()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        latent = encode_picture(wan, torch.rand(1, 3, 1, 64, 96, generator=generator) * 2 - 1)
        assert 0.3 < latent.std().item() < 3
        z = torch.randn(1, 48, 3, 4, 6, generator=generator)
        frames = turbo(denormalise(z.bfloat16()), True).float()
        assert 0.2 < frames.std().item() < 1
        assert (frames.abs() > 1).float().mean() < 0.1
        sound = oobleck(torch.randn(1, 64, 10, generator=generator))
        assert 0.05 < sound.std().item() < 0.5
        assert sound.abs().max() < 1.5
        assert sound.mean().abs() < sound.std()
