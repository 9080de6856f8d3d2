"""The text encoder: which layers run, in what precision, from where (30 §4, §12)."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from magi2_native.magi2_core.checkpoint import network
from magi2_native.magi2_core.checkpoint.reader import SafetensorsReader
from magi2_native.magi2_core.conditioning import text_encoder
from magi2_native.magi2_core.conditioning.parameters import TextEncoderConfig, text_encoder_tensors, text_section
from magi2_native.magi2_core.conditioning.text_encoder import TextEncoder
from magi2_native.magi2_core.errors import CheckpointError, MissingDependencyError, RequestError
from magi2_native.magi2_core.events import Silent
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "golden" / "cases" / "text" / "tiny_qwen35"
PROMPTS = [[5, 17, 5, 200, 3], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 8]


class Recorder(Silent):
    """Events that remember, and that can cancel at a given check."""

    def __init__(self, cancel_at: int | None = None) -> None:
        self.checks = 0
        self.reports: list[tuple[str, int, int]] = []
        self.lines: list[str] = []
        self._cancel_at = cancel_at

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self.reports.append((stage, done, total))

    def log(self, text: str) -> None:
        self.lines.append(text)

    def check(self) -> None:
        self.checks += 1
        if self.checks == self._cancel_at:
            raise KeyboardInterrupt


def tiny(folder: Path = FOLDER, **options: object) -> TextEncoder:
    return TextEncoder(folder, width=64, **options)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(FOLDER, tmp_path / "text_encoder"))


def rewrite(folder: Path, change: object) -> None:
    """Write the checkpoint's tensors again, as one shard, after `change(tensors)`."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
        file.unlink()
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def transformers_features(ids: list[int], dtype: torch.dtype) -> Tensor:
    """The whole model by transformers itself: the third hidden state from the end."""
    from transformers import Qwen3_5TextModel

    model = Qwen3_5TextModel.from_pretrained(FOLDER, dtype=dtype).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-3][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_the_stream_two_layers_below_the_top_bit_for_bit(dtype: torch.dtype) -> None:
    features = tiny(dtype=dtype).encode([PROMPTS[2]], Silent())[0]
    assert features.dtype == dtype
    assert torch.equal(features, transformers_features(PROMPTS[2], dtype))


def test_prompts_encoded_together_equal_prompts_encoded_alone() -> None:
    encoder = tiny()
    together = encoder.encode(PROMPTS, Silent())
    alone = [encoder.encode([ids], Silent())[0] for ids in PROMPTS]
    assert [tuple(t.shape) for t in together] == [(5, 64), (1, 64), (80, 64)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_streaming_reads_each_layer_once_for_all_prompts_and_only_used_embedding_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers: list[SafetensorsReader] = []

    class Watched(SafetensorsReader):
        def __init__(self, entries: dict) -> None:
            super().__init__(entries)
            readers.append(self)

    monkeypatch.setattr(network, "SafetensorsReader", Watched)
    encoder = tiny()
    encoder.encode(PROMPTS, Silent())
    layers = sum(entry.nbytes for key, entry in encoder.network.entries.items() if ".layers." in key)
    distinct_rows = sum(len(set(ids)) for ids in PROMPTS)
    (reader,) = readers
    assert reader.bytes_read == layers + distinct_rows * 64 * 2


def test_only_one_streamed_layer_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    alive: list[weakref.ref] = []
    most = 0
    own = TextEncoder._read_layer

    def watched(self: TextEncoder, *arguments: object) -> object:
        nonlocal most
        layer = own(self, *arguments)  # type: ignore[arg-type]
        alive.append(weakref.ref(layer))
        most = max(most, sum(ref() is not None for ref in alive))
        return layer

    monkeypatch.setattr(TextEncoder, "_read_layer", watched)
    tiny().encode(PROMPTS, Silent())
    assert len(alive) == 4
    assert most == 1


def test_the_layers_above_the_output_and_the_other_towers_are_never_read(folder: Path) -> None:
    expected = tiny().encode(PROMPTS, Silent())

    def drop(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            wanted = "embed_tokens" in key or any(f"language_model.layers.{i}." in key for i in range(4))
            if not wanted:
                del tensors[key]

    rewrite(folder, drop)
    assert all(torch.equal(a, b) for a, b in zip(tiny(folder).encode(PROMPTS, Silent()), expected, strict=True))


def test_every_weight_is_rounded_to_bfloat16_also_those_kept_in_float32(folder: Path) -> None:
    key = "model.language_model.layers.0.linear_attn.A_log"
    with safe_open(FOLDER / "model-00001-of-00002.safetensors", "pt") as file:
        stored = file.get_tensor(key)
    assert stored.dtype == torch.float32
    assert not torch.equal(stored, stored.bfloat16().float())
    expected = tiny().encode(PROMPTS, Silent())
    rewrite(folder, lambda tensors: tensors.update({key: stored.bfloat16()}))
    assert all(torch.equal(a, b) for a, b in zip(tiny(folder).encode(PROMPTS, Silent()), expected, strict=True))


def test_attention_is_causal_without_a_mask() -> None:
    encoder = tiny(dtype=torch.float32)
    ids = PROMPTS[2]
    long, short = encoder.encode([ids, ids[:30]], Silent())
    torch.testing.assert_close(long[:30], short, atol=2e-5, rtol=2e-5)


def test_progress_is_reported_and_cancel_is_checked_between_layers() -> None:
    events = Recorder()
    tiny().encode(PROMPTS, events)
    assert events.reports == [("encode_text", i + 1, 4) for i in range(4)]
    assert events.checks == 4


def test_cancel_stops_between_two_layers_and_leaves_the_encoder_usable() -> None:
    encoder, events = tiny(), Recorder(cancel_at=3)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(PROMPTS, events)
    assert events.reports[-1] == ("encode_text", 2, 4)
    assert len(encoder.encode(PROMPTS, Silent())) == 3


def test_a_prompt_without_tokens_gets_a_sentence() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        tiny().encode([[1], []], Silent())


def test_a_tokenizer_of_another_model_gets_a_sentence() -> None:
    with pytest.raises(CheckpointError, match="token 648, but the text encoder has 648 embeddings"):
        tiny().encode([[648]], Silent())


def test_another_hidden_size_than_the_transformer_takes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"hidden size 64, .* width 5120 \(text_in_channels\)"):
        TextEncoder(FOLDER, width=5120)


@pytest.mark.parametrize("kind", ["qwen3", "llama", None])
def test_another_kind_of_model_is_refused(folder: Path, kind: str | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(CheckpointError, match="this model's text encoder is 'qwen3_5'"):
        tiny(folder)


def test_missing_and_misshapen_tensors_are_refused_by_name(folder: Path) -> None:
    missing = "model.language_model.layers.3.self_attn.q_norm.weight"
    wrong = "model.language_model.layers.1.mlp.up_proj.weight"

    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[missing]
        tensors[wrong] = tensors[wrong][:-1].clone()

    rewrite(folder, damage)
    with pytest.raises(CheckpointError) as error:
        tiny(folder)
    assert missing in str(error.value)
    assert wrong in str(error.value)
    assert "[96, 64]" in str(error.value)


def test_a_cut_shard_is_refused(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        tiny(folder)


@pytest.mark.parametrize(("content", "sentence"), [(None, "no such file"), ("{", "not JSON"), ("[]", "a JSON list")])
def test_an_unreadable_config_gets_a_sentence(folder: Path, content: str | None, sentence: str) -> None:
    file = folder / "config.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        tiny(folder)


def test_an_old_transformers_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(MissingDependencyError, match=r"transformers 5\.2 or newer .* version 4\.57\.1 is installed"):
        tiny()


def test_an_absent_transformers_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'transformers>=5\.2'"):
        tiny()


def test_a_broken_neighbour_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("transformers.models.qwen3_5.modeling_qwen3_5")

    def explode(name: str) -> object:
        raise OSError("libtorchaudio.so: undefined symbol")

    broken.__getattr__ = explode  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    with pytest.raises(MissingDependencyError, match="cannot be imported: libtorchaudio"):
        text_encoder._import_qwen()


@pytest.mark.parametrize("layers", [4, 8])
def test_the_tensor_table_is_that_of_transformers_own_layers(layers: int) -> None:
    """At the released sizes (only with fewer layers), by the names and shapes of the library's own modules."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    ours = TextEncoderConfig(num_hidden_layers=layers)
    sizes = {name: getattr(ours, name) for name in TextEncoderConfig.__dataclass_fields__ if name != "layer_types"}
    with torch.device("meta"):
        model = Qwen3_5TextModel(Qwen3_5TextConfig(**sizes, layer_types=list(ours.types), pad_token_id=0))
    theirs = {f"model.language_model.{key}": tuple(value.shape) for key, value in model.state_dict().items()}
    del theirs["model.language_model.norm.weight"]
    table = text_encoder_tensors(ours, skipped_layers=0)
    assert {key: spec.shape for key, spec in table.items()} == theirs


def test_the_released_encoder_has_the_published_size() -> None:
    table = text_encoder_tensors(TextEncoderConfig())
    parameters = sum(torch.Size(spec.shape).numel() for spec in table.values())
    assert parameters == 24_869_066_528


def test_layer_types_follow_from_the_interval_when_the_config_lists_none() -> None:
    types = TextEncoderConfig().types
    assert [i for i, kind in enumerate(types) if kind == "full_attention"] == list(range(3, 64, 4))


def test_config_defaults_are_never_taken_from_the_library() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    del config["text_config"]["linear_num_value_heads"]
    with pytest.raises(CheckpointError, match="has no 'linear_num_value_heads'"):
        TextEncoderConfig.from_json(config)
    assert text_section(config)["hidden_size"] == 64


def test_the_identity_changes_with_the_weights_the_tokenizer_and_the_precision(folder: Path) -> None:
    first = tiny(folder).identity
    assert tiny(folder).identity == first
    assert tiny(folder, dtype=torch.float32).identity != first
    assert tiny(folder, skipped_layers=1).identity != first
    tokenizer = folder / "tokenizer.json"
    content = tokenizer.read_text()
    tokenizer.write_text(content + " ")
    assert tiny(folder).identity != first
    tokenizer.write_text(content)
    assert tiny(folder).identity == first
    rewrite(folder, lambda tensors: None)
    assert tiny(folder).identity != first
