"""The text encoder of a miniature checkpoint: a small tokenizer and configuration of the released kind (30 §2, §3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..conditioning.parameters import TextEncoderConfig
from ..errors import MissingDependencyError

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# The split of the Qwen3.5 tokenizer: contractions, letters with marks, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Enough text for merges of the kind that prompts use; any other text still has its bytes.
_CORPUS = """
A red fox runs along the frozen river while snow falls slowly through the evening light. The camera follows from the
side, holds on the fox, then pans up to the mountains. Wind, distant water and soft footsteps in the snow.
An old woman in a blue coat sits by the window of a small train and says quietly: "We are almost there." Rain runs down
the glass, the wheels click, warm light from the lamp, shallow depth of field, medium shot at eye level.
Two children throw a yellow ball across a green field; the dog jumps, catches it and brings it back. They laugh.
A street market at night: steam rises from the pots, a man cuts noodles, neon signs in the rain, music from a radio.
Close-up of hands that shape wet clay on a wheel, slow motion, the sound of the wheel, soft natural light from the left.
The waves of the sea break on black rocks under a grey sky; gulls call; the camera moves forward, wide shot, low angle.
<Figure 1> starts as shown. The subject turns to the viewer, smiles and walks out of the picture with a steady motion.
{"description": "a scene", "subjects": ["<subject 1>", "<object 1>"], "timeline": ["00:00.0-00:05.0"]}
worst quality, low quality, blurry, static, distorted, jpeg artifacts, watermark, text, extra fingers, noise, silence
一只猫坐在窗边，看着外面的雨。镜头缓慢推进，温暖的灯光。猫が窓辺に座っている。고양이가 창가에 앉아 있다.
Ein Hund läuft über die Brücke; la lumière du matin; el sonido del agua; музыка звучит тихо вдали.
"""


def write_tokenizer(folder: Path, merges: int) -> int:
    """Train a byte-level BPE tokenizer with at most `merges` merges, write its files, and return its size.

    It has the structure of the released one: NFC, the Qwen split, bytes, special tokens after the vocabulary. The same
    arguments give the same file.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise MissingDependencyError(
            f"Writing a miniature needs the package tokenizers, which cannot be imported ({error}). "
            "Install it with: pip install tokenizers"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.get_vocab_size(with_added_tokens=True)


def write_text_config(folder: Path, config: TextEncoderConfig) -> None:
    """Write the multimodal `config.json` around the sizes of the text model."""
    rotary = max(2, config.head_dim // 4)
    sections = [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6]
    text = {
        "model_type": "qwen3_5_text",
        **{name: getattr(config, name) for name in TextEncoderConfig.__dataclass_fields__},
        "layer_types": list(config.types),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
    }
    content = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": VISION | {"out_hidden_size": config.hidden_size},
    }
    write_json(folder / "config.json", content)


# Sizes of the vision tower, which is there because the release has one; nothing reads its weights.
VISION: dict[str, Any] = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
