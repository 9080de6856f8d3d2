"""The prompt's tokens (30 §3)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from magi2_native.magi2_core.conditioning.tokenizer import TOKEN_LIMIT, PromptTokenizer, extra_split
from magi2_native.magi2_core.errors import CheckpointError, RequestError

FOLDER = Path(__file__).parent / "golden" / "cases" / "text" / "tiny_qwen35"


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(FOLDER)


def test_digits_and_the_letters_a_to_u_stand_alone() -> None:
    pieces = [piece for piece, _ in extra_split().pre_tokenize_str("The Zoo at 10:30, VIP")]
    assert pieces == ["T", "he Zoo at ", "1", "0", ":", "3", "0", ", V", "I", "P"]


def test_supplementary_ideographs_do_not_stand_alone() -> None:
    assert [piece for piece, _ in extra_split().pre_tokenize_str("𠀀𠀁你好")] == ["𠀀𠀁", "你", "好"]


@pytest.mark.parametrize(
    "text",
    [
        "她说：“我们快到了。” 镜头缓慢推进。",
        "猫が窓辺に座っている。ｶﾀｶﾅ",
        "고양이가 창가에 앉아 있다. ᄀᄁ",
        "قطة تجلس بجانب النافذة وتنظر إلى المطر.",
        "🎬🚀 👩🏽‍🚀 waves 🇯🇵",
        '{"global_layer": {"context": "x"}} // {a|b} (word:1.2)',
        "नमस्ते दुनिया",
    ],
)
def test_offsets_cover_the_text_as_it_was_typed(tokenizer: PromptTokenizer, text: str) -> None:
    tokens = tokenizer(text)
    covered = {at for start, end in tokens.offsets for at in range(start, end)}
    assert covered == set(range(len(text)))
    assert all(a[0] <= b[0] for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False))


def test_offsets_count_characters_before_nfc(tokenizer: PromptTokenizer) -> None:
    text = "e\u0301e\u0301 <Figure 1>"
    tokens = tokenizer(text)
    assert tokens.ids[-1] == tokenizer(">").ids[0]
    assert tokens.offsets[-1] == (len(text) - 1, len(text))


def test_nothing_is_added_to_the_text(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.pieces(tokenizer("a")) == ["a"]
    assert tokenizer("").ids == ()


def test_spellings_of_special_tokens_become_single_ids(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.pieces(tokenizer("<|im_end|>")) == ["<|im_end|>"]


def test_the_first_7000_tokens_are_kept_and_the_rest_is_counted(tokenizer: PromptTokenizer) -> None:
    words = "".join(f"boat {number} " for number in range(20_000))
    tokens = tokenizer(words)
    assert TOKEN_LIMIT == 7000
    assert len(tokens.ids) == len(tokens.offsets) == 7000
    assert tokens.truncated
    assert tokens.untruncated >= 20_000
    assert tokens.ids == tokenizer(words[: tokens.offsets[-1][1]]).ids


def test_a_prompt_of_exactly_the_limit_is_not_truncated(tokenizer: PromptTokenizer) -> None:
    assert not tokenizer("0" * 7000).truncated
    assert tokenizer("0" * 7001).truncated


def test_a_lone_surrogate_gets_a_sentence(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        tokenizer("a \ud800 b")


def test_a_folder_without_tokenizer_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        PromptTokenizer(tmp_path)


def test_a_broken_tokenizer_file_gets_a_sentence(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(CheckpointError, match="cannot be used"):
        PromptTokenizer(tmp_path / "t")
