"""The loop that turns noise into a clip's latents (20 §4, §5.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..events import Events
from .guidance import GuidanceSettings, cut_scale, frame_scale, guide_pair
from .schedule import make_schedule
from .unipc import UniPC

# (video [1, C, T, H, W], audio [1, L, C], time tau) -> (video [2, C, T, H, W], audio [2, L, C]): the velocities of both
# branches, row 0 conditional, row 1 unconditional
Evaluate = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SamplingSettings:
    """How the preview stage samples; the defaults are the shipped ones (20 §9). Raises RequestError for bad values."""

    steps: int = 100
    shift: float = 7.0
    guidance: GuidanceSettings = field(default_factory=GuidanceSettings)

    def __post_init__(self) -> None:
        make_schedule(self.steps, self.shift)


def denoise(
    settings: SamplingSettings,
    video_noise: Tensor,
    audio_noise: Tensor,
    evaluate: Evaluate,
    events: Events,
    stage: str = "sample",
) -> tuple[Tensor, Tensor]:
    """Sample a clip: `steps` calls of `evaluate`, each followed by one tick of progress with a preview.

    video_noise [1, C, T, H, W] and audio_noise [1, L, C], fp32; the results have their shapes. A modality without
    elements is left as it is. `events.check` is called before every forward, and what it raises passes through; `stage`
    is the name under which progress is reported.
    Raises NonFiniteError if a latent stops being finite, naming the step.
    """
    schedule = make_schedule(settings.steps, settings.shift)
    guidance = settings.guidance
    video, audio = video_noise, audio_noise
    video_solver, audio_solver = UniPC(schedule), UniPC(schedule)
    scale = frame_scale(guidance, video.shape[2], video.device)
    for step, timestep in enumerate(schedule.timesteps):
        events.check()
        video_pair, audio_pair = evaluate(video, audio, schedule.time(step))
        if video.numel():
            guided = guide_pair(video_pair, cut_scale(scale, guidance, timestep), video, guidance)
            video = video_solver.step(guided, video)
        if audio.numel():
            guided = guide_pair(audio_pair, float(guidance.audio_txt_guidance_scale), audio, guidance)
            audio = audio_solver.step(guided, audio)
        require_finite(step, video=video, audio=audio)
        # the estimate of the clean clip shows more than the noisy latent; at the last step they are the same
        preview = video_solver.prediction[0] if video.numel() else None
        events.progress(stage, step + 1, schedule.steps, preview)
    return video, audio


def require_finite(step: int, **latents: Tensor) -> None:
    """Raise NonFiniteError if a latent holds NaN or infinity after a step, counted from 0."""
    for name, latent in latents.items():
        if not torch.isfinite(latent).all():
            raise NonFiniteError(
                f"non-finite latent at step {step + 1}: the {name} latent holds NaN or infinity. Try guidance scales"
                " nearer to the defaults, without rescaling or skimming; if it happens at step 1 with default settings,"
                " a weight file is damaged: run `magi2 inspect` on the checkpoint."
            )
