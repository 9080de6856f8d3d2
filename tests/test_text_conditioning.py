"""Prompts to features, pictures' vectors, and what is kept (30 §1, 4.4, 5, 7, 12)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from magi2_native.magi2_core.conditioning.compact import normalise
from magi2_native.magi2_core.conditioning.encode import encode_text
from magi2_native.magi2_core.conditioning.features import FeatureCache
from magi2_native.magi2_core.conditioning.markers import (
    check_equal_sizes,
    insert_marker,
    marker_tokens,
    parse_pictures,
    picture_order,
    pool_markers,
)
from magi2_native.magi2_core.conditioning.text_encoder import TextEncoder
from magi2_native.magi2_core.conditioning.tokenizer import Tokens
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Events, Silent
from torch import Tensor

FOLDER = Path(__file__).parent / "golden" / "cases" / "text" / "tiny_qwen35"


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


class Counting(TextEncoder):
    """An encoder that remembers how many prompts each pass over the layers had."""

    def __init__(self, folder: Path = FOLDER) -> None:
        super().__init__(folder, width=64)
        self.passes: list[int] = []

    def encode(self, prompts: Sequence[Sequence[int]], events: Events) -> list[Tensor]:
        self.passes.append(len(prompts))
        return super().encode(prompts, events)


@pytest.fixture
def encoder() -> Counting:
    return Counting()


def test_both_prompts_share_one_pass_and_keep_their_own_lengths(encoder: Counting) -> None:
    text = encode_text(encoder, "A red kite drifts.", "blurry, noisy", [], Silent())
    assert encoder.passes == [2]
    assert text.features_LD.shape == (text.tokens, 64)
    assert text.features_LD.dtype == text.null_features_LD.dtype == torch.bfloat16
    alone = encoder.encode([encoder.tokenizer("blurry, noisy").ids], Silent())[0]
    assert torch.equal(text.null_features_LD, alone)
    assert text.markers_MD.shape == (0, 64)
    assert text.warnings == ()


def test_an_empty_negative_prompt_means_no_text_tokens(encoder: Counting) -> None:
    text = encode_text(encoder, "A kite.", "", [], Silent())
    assert text.null_features_LD.shape == (0, 64)
    assert text.null_features_LD.dtype == torch.bfloat16
    assert encoder.passes == [1]


def test_a_negative_prompt_that_renders_to_nothing_means_no_text_tokens(encoder: Counting) -> None:
    assert encode_text(encoder, "A kite.", '{"global_layer": "x"}', [], Silent()).null_features_LD.shape == (0, 64)


def test_equal_prompts_are_encoded_once(encoder: Counting) -> None:
    text = encode_text(encoder, "kite", "kite", [], Silent())
    assert encoder.passes == [1]
    assert torch.equal(text.features_LD, text.null_features_LD)


def test_a_caption_in_json_is_encoded_as_its_compact_text(encoder: Counting) -> None:
    text = encode_text(encoder, '{"global_layer": {"context": "Pier"}}', "", [], Silent())
    assert text.prompt == "context: Pier"


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "The prompt is empty; describe"),
        ('{"global_layer": "x"}', "The prompt is empty once it is rendered"),
        ("kite\0", "NUL character at position 4"),
        ("kite \udc00", r"half of a surrogate pair \(U\+DC00\) at position 5"),
        ('{"global_layer": {"context": "\\ud83d"}}', "after reading it as JSON, holds half of a surrogate pair"),
        ('{"global_layer": {"context": "a\\u0000"}}', "after reading it as JSON, holds a NUL"),
    ],
)
def test_prompts_that_cannot_be_encoded_get_a_sentence(encoder: Counting, prompt: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        encode_text(encoder, prompt, "", [], Silent())
    assert encoder.passes == []


def test_the_negative_prompt_is_named_in_its_own_sentence(encoder: Counting) -> None:
    with pytest.raises(RequestError, match="The negative prompt holds a NUL"):
        encode_text(encoder, "a", "\0", [], Silent())


def test_truncation_is_reported_for_both_prompts(encoder: Counting) -> None:
    events = Lines()
    words = " ".join(f"boat{i}" for i in range(20_000))
    text = encode_text(encoder, words, "noise " * 8000, [], events)
    assert text.tokens == 7000
    assert text.truncated
    assert int(events.lines[0].split()[3]) > 20_000
    assert text.features_LD.shape == (7000, 64)
    assert [line.split(" has ")[0] for line in events.lines] == ["The prompt", "The negative prompt"]
    assert events.lines == list(text.warnings)


@pytest.mark.parametrize(
    "prompt",
    [
        "一只猫坐在窗边。",
        "猫が窓辺に座っている。",
        "고양이가 창가에 앉아 있다.",
        "قطة تجلس بجانب النافذة.",
        "🎬🚀 👩🏽‍🚀",
        "{a|b} (word:1.2) [x:y:0.5] // not a comment",
    ],
)
def test_prompts_in_every_script_reach_the_encoder_unchanged(encoder: Counting, prompt: str) -> None:
    text = encode_text(encoder, prompt, "", [], Silent())
    assert text.prompt == prompt
    assert torch.isfinite(text.features_LD).all()


@pytest.mark.parametrize("depth", [800, 100_000])
def test_json_nested_beyond_reason_is_no_failure(depth: int) -> None:
    prompt = '{"global_layer": ' + '{"a": ' * depth + "1" + "}" * depth + "}"
    assert normalise(prompt) in (prompt, "")  # plain text where Python cannot go so deep
    assert insert_marker("[" * depth) == "[" * depth + "reference_layer:The first frame refers to <Figure 1>"


# --- pictures --------------------------------------------------------------------------------------------------------


def test_a_picture_adds_the_sentence_and_gets_the_mean_of_its_marker(encoder: Counting) -> None:
    text = encode_text(encoder, "A kite drifts.", "", [1], Silent())
    assert text.prompt == "A kite drifts.reference_layer:The first frame refers to <Figure 1>"
    rows = marker_tokens(text.prompt, encoder.tokenizer(text.prompt), 1)
    assert rows
    assert rows[-1] == text.tokens - 1
    expected = text.features_LD[rows[0] :].float().mean(0).bfloat16()
    assert torch.equal(text.markers_MD, expected[None])
    assert text.warnings == ()


def test_pictures_keep_the_order_of_the_request(encoder: Counting) -> None:
    prompt = "<Figure 2> meets <Figure 10>."
    forward = encode_text(encoder, prompt, "", [1, 10, 2], Silent()).markers_MD
    back = encode_text(encoder, prompt, "", [2, 10, 1], Silent()).markers_MD
    assert torch.equal(forward, back.flip(0))
    assert not torch.equal(forward[1], forward[2])


def test_a_picture_without_marker_gets_a_zero_vector_and_a_warning(encoder: Counting) -> None:
    events = Lines()
    text = encode_text(encoder, "A kite.", "", [1, 2], events)
    assert text.markers_MD[0].any()
    assert not text.markers_MD[1].any()
    (warning,) = text.warnings
    assert "does not mention <Figure 2>" in warning
    assert events.lines == [warning]


def test_a_marker_that_is_cut_off_gets_a_zero_vector_and_a_warning(encoder: Counting) -> None:
    text = encode_text(encoder, "boat " * 8000, "", [1], Silent())
    assert not text.markers_MD.any()
    assert any("<Figure 1> lies in the part of the prompt that is cut off" in w for w in text.warnings)


def test_pictures_without_a_first_one_leave_the_first_frame_without_picture(encoder: Counting) -> None:
    text = encode_text(encoder, "<Figure 2> and <Figure 3>.", "", [2, 3], Silent())
    assert text.markers_MD.any(1).all()
    assert text.warnings == (
        "No picture is <Figure 1>, to which the first frame refers; number the pictures from 1.",
    )


def test_the_first_mention_is_pooled_even_before_the_inserted_sentence() -> None:
    prompt = insert_marker("<Figure 1> is a boat.")
    tokens = Tokens(
        ids=tuple(range(len(prompt))), offsets=tuple((i, i + 1) for i in range(len(prompt))), untruncated=len(prompt)
    )
    assert marker_tokens(prompt, tokens, 1) == list(range(10))


def test_a_token_that_overlaps_the_marker_in_part_belongs_to_it() -> None:
    tokens = Tokens(ids=(1, 2, 3), offsets=((0, 3), (3, 12), (12, 14)), untruncated=3)
    assert marker_tokens("ab <Figure 1>cd", tokens, 1) == [1, 2]
    features_LD = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
    assert pool_markers(features_LD, "ab <Figure 1>cd", tokens, [1]).tolist() == [[3.0, 4.0]]


def test_markers_are_averaged_in_float32_and_rounded_once() -> None:
    tokens = Tokens(ids=(1,) * 300, offsets=((0, 10),) * 300, untruncated=300)
    features_LD = torch.full((300, 1), 1.0078125, dtype=torch.bfloat16)
    assert pool_markers(features_LD, "<Figure 1>", tokens, [1]).item() == 1.0078125


def test_ten_pictures_come_in_string_order_or_by_number() -> None:
    keys = ["<Figure 2>", "<Figure 10>", "<Figure 1>"]
    assert picture_order(keys) == ["<Figure 10>", "<Figure 1>", "<Figure 2>"]
    assert picture_order(keys, numeric=True) == ["<Figure 1>", "<Figure 2>", "<Figure 10>"]


@pytest.mark.parametrize("argument", ['{"<Figure 1>": ', "{first.png}", '{"a": ' * 100_000])
def test_a_broken_picture_map_gets_a_sentence(argument: str) -> None:
    with pytest.raises(RequestError, match=r'write it like \{"<Figure 1>": "first.png"'):
        parse_pictures(argument)


def test_pictures_of_different_sizes_get_a_sentence() -> None:
    check_equal_sizes({"<Figure 1>": (640, 360), "<Figure 2>": (640, 360)})
    with pytest.raises(RequestError, match="<Figure 1> 640x360, <Figure 2> 360x640"):
        check_equal_sizes({"<Figure 1>": (640, 360), "<Figure 2>": (360, 640)})


# --- kept features ---------------------------------------------------------------------------------------------------


def test_an_unchanged_prompt_is_not_encoded_again(encoder: Counting) -> None:
    cache = FeatureCache()
    first = encode_text(encoder, "kite", "noise", [], Silent(), cache=cache)
    again = encode_text(encoder, "kite", "noise", [], Silent(), cache=cache)
    assert encoder.passes == [2]
    assert torch.equal(first.features_LD, again.features_LD)
    encode_text(encoder, "another kite", "noise", [], Silent(), cache=cache)
    assert encoder.passes == [2, 1]


def test_the_cache_goes_by_the_normalised_text(encoder: Counting) -> None:
    cache = FeatureCache()
    encode_text(encoder, '{"global_layer": {"context": "Pier"}}', "", [], Silent(), cache=cache)
    encode_text(encoder, '{"global_layer":{"context":"Pier", "unknown": 1}}', "", [], Silent(), cache=cache)
    assert encoder.passes == [1]


def test_features_of_another_encoder_are_not_used() -> None:
    cache = FeatureCache()
    cache.put("one", "text", torch.ones(2, 3))
    assert cache.get("other", "text") is None
    assert cache.get("one", "text") is not None


def test_the_least_recently_used_features_go_first() -> None:
    cache = FeatureCache(max_bytes=3 * 16)
    for name in "abc":
        cache.put("e", name, torch.zeros(4))
    cache.get("e", "a")
    cache.put("e", "d", torch.zeros(4))
    assert [name for name in "abcd" if cache.get("e", name) is not None] == ["a", "c", "d"]
