"""Classifier-free guidance and its options, for one pair of branches (20 §5)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError


def _option(default: Any, text: str) -> Any:
    """A field with the sentence that describes it to users, in nodes and on the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class GuidanceSettings:
    """Every option of the guidance, under the reference's names; the defaults are the shipped ones (20 §5.1).

    Raises RequestError for values that cannot be used.
    """

    video_txt_guidance_scale: float = _option(
        5.0, "How strongly the picture follows the prompt, away from the negative prompt."
    )
    audio_txt_guidance_scale: float = _option(
        7.0, "How strongly the sound follows the prompt, away from the negative prompt."
    )
    use_negative_prompt: bool = _option(
        True, "Show the negative prompt to the unconditional branch. Off: it has no text at all."
    )
    use_ref_for_uncond: bool = _option(
        True, "Show the picture to the unconditional branch too. Off: it sees zeros there."
    )
    use_cfg_trick: bool = _option(False, "Give the first latent frames a lower video guidance.")
    cfg_trick_start_frame: int = _option(
        13, "How many latent frames, counted from the first, get the lower guidance (a clip has 32)."
    )
    cfg_trick_value: float = _option(2.0, "The guidance of those frames; it can only lower the video guidance.")
    use_dynamic_cfg: bool = _option(False, "Limit the video guidance in the later steps.")
    dynamic_cfg_start_t: int = _option(
        500, "Timestep below which the limit holds (1000 is pure noise, 0 the finished clip)."
    )
    dynamic_cfg_cutoff_value: float = _option(2.0, "The limit: no frame gets more video guidance below that timestep.")
    use_skimmed_cfg_linear: bool = _option(
        False, "Tame the guidance where it would overshoot (skimmed guidance), for video and sound."
    )
    skimmed_cfg_scale: float = _option(3.0, "The guidance that remains where it would overshoot.")
    cfg_rescale: float = _option(0.0, "Bring the contrast back towards the unguided one; useful from 0 (off) to 1.")

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if not isinstance(value, bool) and not -sys.float_info.max <= value <= sys.float_info.max:
                raise RequestError(f"{option.name} is {value}; it must be a finite number.")
        for name in ("cfg_trick_start_frame", "skimmed_cfg_scale", "cfg_rescale"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.cfg_trick_start_frame != int(self.cfg_trick_start_frame):
            raise RequestError(f"cfg_trick_start_frame is {self.cfg_trick_start_frame}; it must be a whole number.")
        if not 0 <= self.dynamic_cfg_start_t <= 1000:
            raise RequestError(f"dynamic_cfg_start_t is {self.dynamic_cfg_start_t}; it must be a timestep, 0 to 1000.")


HELP: dict[str, str] = {option.name: option.metadata["help"] for option in fields(GuidanceSettings)}


def frame_scale(settings: GuidanceSettings, frames: int, device: torch.device) -> Tensor:
    """Guidance scale of each latent frame of the video: fp32 [1], or [1, 1, T, 1, 1] with the trick (20 §5.1)."""
    value = float(settings.video_txt_guidance_scale)
    if not settings.use_cfg_trick:
        return torch.tensor([value], dtype=torch.float32, device=device)
    scale = torch.full((1, 1, frames, 1, 1), value, dtype=torch.float32, device=device)
    scale[:, :, : int(settings.cfg_trick_start_frame)] = min(float(settings.cfg_trick_value), value)
    return scale


def cut_scale(scale: Tensor, settings: GuidanceSettings, timestep: int) -> Tensor:
    """The video's scale at an integer timestep, after the dynamic cutoff (20 §5.1)."""
    if settings.use_dynamic_cfg and timestep < settings.dynamic_cfg_start_t:
        return scale.clamp(max=settings.dynamic_cfg_cutoff_value)
    return scale


def guide_pair(pair: Tensor, scale: Tensor | float, latent: Tensor, settings: GuidanceSettings) -> Tensor:
    """Guided velocity of one modality: skim, combine, rescale, in this order (20 §5.4).

    pair: [2, C, T, H, W] or [2, L, C], row 0 conditional, row 1 unconditional. scale: fp32 tensor that broadcasts, or a
    number, which leaves a bf16 pair in bf16. latent: what the model was fed at this step. The result has one row.
    """
    conditional, unconditional = pair[:1], pair[1:]
    against = unconditional
    if settings.use_skimmed_cfg_linear:
        against = skim(conditional, unconditional, scale, latent, settings.skimmed_cfg_scale)
    guided = combine(conditional, against, scale)
    if settings.cfg_rescale > 0:
        guided = rescale(guided, conditional, settings.cfg_rescale)
    return guided


def combine(conditional: Tensor, unconditional: Tensor, scale: Tensor | float) -> Tensor:
    """u + g (c - u), in this form (20 §5)."""
    return unconditional + scale * (conditional - unconditional)


def skim(conditional: Tensor, unconditional: Tensor, scale: Tensor | float, latent: Tensor, skimmed: float) -> Tensor:
    """The unconditional velocity, pulled towards the conditional one where guidance would overshoot (20 §5.2)."""
    g = torch.as_tensor(scale, dtype=conditional.dtype, device=conditional.device)
    stronger = g > 1
    if not stronger.any() or not unconditional.any():
        return unconditional
    w = (skimmed - 1) / torch.where(stronger, g - 1, torch.ones_like(g))

    def overshoots(a: Tensor, b: Tensor) -> Tensor:
        denoised = latent - ((latent - b) + g * ((latent - a) - (latent - b)))
        agrees = torch.sign(a - b) == torch.sign(a)
        agrees &= torch.sign(a) == torch.sign(a * g - b * (g - 1))
        return agrees & (torch.sign(denoised) == torch.sign(denoised - latent)) & stronger

    def mix(u: Tensor) -> Tensor:
        return conditional * (1 - w) + u * w

    first = torch.where(overshoots(conditional, unconditional), mix(unconditional), unconditional)
    # the second pass exchanges the roles in the test only, and mixes with the result of the first
    return torch.where(overshoots(first, conditional), mix(first), first)


def rescale(guided: Tensor, conditional: Tensor, strength: float) -> Tensor:
    """Bring each channel's spread back towards the conditional velocity's, by `strength` (20 §5.3)."""
    axes = (2, 3, 4) if guided.ndim == 5 else (1,)
    wanted, got = (x.float().std(dim=axes, correction=0, keepdim=True) for x in (conditional, guided))
    factor = strength * (wanted / got.clamp(min=1e-6)) + (1 - strength)
    return guided * factor.to(guided.dtype)
