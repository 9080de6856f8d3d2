"""The second stage: a finished preview latent, stretched, noised once and denoised again in a few steps (50 §9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RequestError, check_choice
from ..events import Events
from ..sampling.denoise import SamplingSettings, denoise
from ..sampling.geometry import SPATIAL_STRIDE
from ..sampling.guidance import GuidanceSettings, frame_scale
from ..sampling.noise import Draw
from .blocks import WindowSettings
from .model import RELEASED_WINDOW, RefinerTransformer
from .prepare import pack_refiner, unpack_refiner
from .window_attention import BACKENDS

NOISE_LEVELS = 1000

# (video [1, C, T, H, W], sound [1, L, C], whether with the prompt) -> velocities of the same shapes
Evaluate = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RefinerSettings:
    """How the second stage works; the defaults are the released ones (50 §2). Raises RequestError for bad values.

    width, height: of the refined frames; multiples of 16 (1080 would become 1072). shift: None means the preview's.
    noise_value: place in the noise table, 0 adds none, 999 leaves nothing of the preview. audio_noise_scale: below 0
    the refiner sees no sound, at 0 it sees the finished sound, above 0 it refines a noised copy; the decoded sound is
    the preview's in every case. The cfg trick counts frames of the refined latent. attention: the backend of the window
    attention.
    """

    width: int = 1920
    height: int = 1088
    steps: int = 5
    shift: float | None = 5.0
    noise_value: int = 220
    video_txt_guidance_scale: float = 2.0
    audio_txt_guidance_scale: float = 5.0
    audio_noise_scale: float = -1.0
    use_cfg_trick: bool = False
    cfg_trick_start_frame: int = 13
    cfg_trick_value: float = 2.0
    attention: str = "auto"

    def __post_init__(self) -> None:
        if min(self.width, self.height) < SPATIAL_STRIDE:
            raise RequestError(f"The refined size is {self.width}x{self.height}; both sides need at least 16 pixels.")
        if not 0 <= self.noise_value < NOISE_LEVELS:
            raise RequestError(f"noise_value is {self.noise_value}; it must be 0 to {NOISE_LEVELS - 1}.")
        if not math.isfinite(self.audio_noise_scale):
            raise RequestError(f"audio_noise_scale is {self.audio_noise_scale}; it must be a finite number.")
        check_choice("The attention of the refiner", self.attention, BACKENDS)
        self.sampling()

    def sampling(self) -> SamplingSettings:
        """The settings of the loop."""
        guidance = GuidanceSettings(
            video_txt_guidance_scale=self.video_txt_guidance_scale,
            audio_txt_guidance_scale=self.audio_txt_guidance_scale,
            use_cfg_trick=self.use_cfg_trick,
            cfg_trick_start_frame=self.cfg_trick_start_frame,
            cfg_trick_value=self.cfg_trick_value,
        )
        return SamplingSettings(self.steps, SamplingSettings.shift if self.shift is None else self.shift, guidance)

    def grid(self, preview_frames: int) -> tuple[int, int, int]:
        """Latent grid (t, h, w) of the refined clip; sizes between multiples of 16 are floored (50 §9.1)."""
        return 2 * preview_frames - 1, self.height // SPATIAL_STRIDE, self.width // SPATIAL_STRIDE


def stretch(video_1CTHW: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Stretch a latent [1, C, T, H, W] fp32 over time and space, corners on corners (50 §9.2)."""
    return F.interpolate(video_1CTHW.float(), size=grid, mode="trilinear", align_corners=True)


@cache
def noise_table() -> Tensor:
    """The share of the signal that is left at each of the 1000 noise levels, fp32 on the CPU (50 §9.3)."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, NOISE_LEVELS, dtype=torch.float64) ** 2
    signal = (1 - betas).cumprod(0).float().sqrt()
    first, last = signal[0].clone(), signal[-1].clone()
    return (signal - last) * (first / (first - last))


def add_noise(video: Tensor, noise_value: int, draw: Draw) -> Tensor:
    """Mix noise into a latent, its variance preserved: s·x + sqrt(1 - s²)·n; level 0 draws nothing (50 §9.3)."""
    if noise_value == 0:
        return video
    signal = noise_table()[noise_value]
    return signal * video + (1 - signal**2).sqrt() * draw(tuple(video.shape)).to(video.device)


def refine(
    settings: RefinerSettings, video: Tensor, audio: Tensor, evaluate: Evaluate, draw: Draw, events: Events
) -> tuple[Tensor, Tensor]:
    """Refine a preview: `steps` steps of two forwards each, or of one where the guidance is 0 throughout.

    video [1, C, T, H, W] and audio [1, L, C], fp32: the preview's latents. Returns the refined video
    [1, C, 2T-1, height/16, width/16] and what became of the sound: [1, 0, C] in the released setting. Decode the
    preview's own sound. `draw` is called for the video's noise first, then for the sound's, each only if it is needed.
    `events.check` is called before every forward; RequestError and NonFiniteError as `denoise`.
    """
    sampling = settings.sampling()
    x = add_noise(stretch(video, settings.grid(video.shape[2])), settings.noise_value, draw)
    shown, stepped = _sound(settings.audio_noise_scale, audio.float(), draw)
    scale = frame_scale(sampling.guidance, x.shape[2], torch.device("cpu"))
    unguided = not scale.any()

    def evaluate_pair(video: Tensor, audio: Tensor, _time: float) -> tuple[Tensor, Tensor]:
        seen = audio if stepped else shown
        branches: list[tuple[Tensor, Tensor]] = []
        for with_prompt in (False,) if unguided else (True, False):
            if branches:
                events.check()
            branches.append(evaluate(video, seen, with_prompt))
        pairs = [torch.cat([part[0], part[-1]]) for part in zip(*branches, strict=True)]
        return pairs[0], pairs[1]

    video, audio = denoise(sampling, x, shown if stepped else shown[:, :0], evaluate_pair, events, stage="refine")
    return video, audio if stepped else shown


def model_evaluate(
    model: RefinerTransformer,
    settings: RefinerSettings,
    preview_frames: int,
    preview_sound: int,
    prompt_LD: Tensor,
    negative_LD: Tensor,
    events: Events,
    *,
    window: WindowSettings = RELEASED_WINDOW,
) -> Evaluate:
    """The `evaluate` of a loaded transformer for one request; lays out both sequences once.

    prompt, negative: text features [L, 5120], of any lengths, L may be 0. preview_frames, preview_sound: lengths of the
    preview's latents. `events.check` is called between layers. RequestError as `RefinerTransformer.prepare`.
    """
    device = model.pre_adapter.video_embedder.weight.device
    sound = preview_sound if settings.audio_noise_scale >= 0 else 0
    texts = {True: prompt_LD.to(device, torch.float32), False: negative_LD.to(device, torch.float32)}
    prepared = {
        which: model.prepare(
            settings.grid(preview_frames), len(text_LD), device, audio=sound, window=window,
            backend=settings.attention,
        )
        for which, text_LD in texts.items()
    }
    channels = model.config.video_in_channels, model.config.audio_in_channels

    def evaluate(video: Tensor, audio: Tensor, with_prompt: bool) -> tuple[Tensor, Tensor]:
        mine = prepared[with_prompt]
        tokens = pack_refiner(mine, video.to(device), audio.to(device), texts[with_prompt])
        velocities = unpack_refiner(model(mine, tokens, events), mine, *channels)
        return velocities[0].to(video.device), velocities[1].to(audio.device)

    return evaluate


def _sound(scale: float, audio: Tensor, draw: Draw) -> tuple[Tensor, bool]:
    """The sound that the refiner sees at first, and whether it is denoised (50 §9.4)."""
    if scale < 0:
        return audio[:, :0], False
    if scale == 0:
        return audio, False
    return scale * draw(tuple(audio.shape)).to(audio.device) + (1 - scale) * audio, True
