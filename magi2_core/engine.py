"""Every stage of a clip on one rank: load, encode, sample, decode, write, release.

All ranks of a replica run the same call at the same time. What needs one rank only (text, picture, sound, files) runs
on the first; the others return at once. Arguments and results are builtins and CPU tensors, because they cross process
boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.exchange import ParallelContext, broadcast, gather_tokens, receive, send, smallest
from ..distributed.layout import TokenSplit
from .checkpoint.folder import TEXT_ENCODER, CheckpointFolder
from .checkpoint.loader import load_module
from .checkpoint.network import Network
from .codecs.frames import resize, to_uint8
from .codecs.media import Sound, VideoWriter, parse_frame_rate
from .codecs.oobleck_decoder import OobleckDecoder
from .codecs.picture import prepare_picture
from .codecs.resample import to_real_time
from .codecs.turbo_decoder import TurboDecoder
from .codecs.turbo_tiles import plan_tiles
from .codecs.turbo_windows import decode_window, gather_blocks, plan_windows
from .codecs.wan_encoder import WanEncoder, encode_picture
from .conditioning.encode import encode_text
from .conditioning.features import FeatureCache
from .conditioning.markers import check_equal_sizes, marker
from .conditioning.text_encoder import TextEncoder
from .dit.model import PreviewTransformer
from .errors import RequestError
from .events import Events
from .memory.exhausted import out_of_memory
from .memory.machine import working_budget
from .memory.plan import Plan
from .refiner.model import RefinerTransformer, refiner_parallel
from .refiner.stage import RefinerSettings, model_evaluate, refine
from .sampling.denoise import Evaluate, SamplingSettings, denoise
from .sampling.geometry import SPATIAL_STRIDE, clip_lengths, decoded_frames, latent_grid
from .sampling.guidance import GuidanceSettings
from .sampling.noise import Draw, check_noise_device, clip_noise, draw_noise, noise_generator
from .sampling.packing import Conditions, pack_request, pack_tokens, unpack
from .together import Together

Result = dict[str, Any]
CALLS = (
    "load", "release", "encode_text", "encode_image", "sample", "refine", "decode_video", "decode_audio", "write_clip",
)  # fmt: skip
STAGES = ("text_encoder", "image_encoder", "preview", "refiner", "video_decoder", "audio_decoder")
SHARED_STAGES = ("preview", "refiner", "video_decoder")  # what all ranks load together
TENSORS_APART = 16  # how far one rank may be ahead of another in loading


def make_engine(plan: Mapping[str, Any], parallel: ParallelContext | None = None) -> Engine:
    """Build the engine of one rank from a plan's builtins; nothing is loaded yet."""
    made = Plan.from_dict(plan)
    return Engine(made, parallel or ParallelContext.single(torch.device(made.devices[0])))


class Engine:
    """One rank's networks, each loaded when first needed and kept or swapped as the plan says."""

    def __init__(self, plan: Plan, parallel: ParallelContext) -> None:
        self.plan = plan
        self.parallel = parallel
        self.replica_rank = parallel.rank % parallel.layout.replica
        self.device = parallel.device
        self.folder = CheckpointFolder(plan.checkpoint)
        self.config = self.folder.preview_config()
        self._channels = self.config.video_in_channels, self.config.audio_in_channels
        self._loaded: dict[str, Any] = {}
        self._text_features = FeatureCache()

    def run(self, call: str, arguments: Mapping[str, Any], events: Events) -> Result:
        """Run one call by name; what `events.check` raises passes through. RequestError for an unknown call, and
        DeviceMemoryError where the device has no room for it."""
        if call not in CALLS:
            raise RequestError(f"The engine has no call {call!r}; it has {', '.join(CALLS)}.")
        try:
            with torch.inference_mode():
                result: Result = getattr(self, call)(events, **arguments)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, call, self.device, self.plan) from error
        return result

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its replica, the one that does what needs one rank only."""
        return self.replica_rank == 0

    # ---- what is on the device

    def load(self, events: Events, *, stages: Sequence[str]) -> Result:
        """Load stages ahead of their first use."""
        for stage in _known(stages):
            self._stage(stage, events)
        return {}

    def release(self, events: Events, *, stages: Sequence[str] = STAGES) -> Result:
        """Let go of stages, by default of all, and give their memory back to the device; encoded prompts are kept."""
        for stage in _known(stages):
            self._loaded.pop(stage, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def _stage(self, stage: str, events: Events) -> Any:
        """The network of a stage, loaded if it is not there."""
        self._make_room(stage, events)
        if stage not in self._loaded:
            load = getattr(self, f"_load_{stage}")
            if stage in SHARED_STAGES:  # their disks differ, and none may be done while a cancel finds another reading
                network = load(Together(events, self.parallel, every=TENSORS_APART))
                Together(events, self.parallel).check()
            else:
                network = load(events)
            self._loaded[stage] = network
        return self._loaded[stage]

    def _make_room(self, stage: str, events: Events) -> None:
        """Under "swap", let go of every network but the one of this stage.

        Ranks without a part in the stage do it too: all ranks hold the same parts of what they hold together, so that
        they load it again, and pass the check points of loading, together.
        """
        if self.plan.residency == "swap":
            self.release(events, stages=[other for other in self._loaded if other != stage])

    def _filled(self, build: Callable[[], nn.Module], network: Network, events: Events, **load: Any) -> Any:
        with torch.device("meta"):
            module = build()
        load_module(module, network, device=self.device, events=events, **load)
        return module.eval()

    def _load_text_encoder(self, events: Events) -> TextEncoder:
        folder = self.folder.root / TEXT_ENCODER
        return TextEncoder(folder, width=self.config.text_in_channels, device=self.device)

    def _load_image_encoder(self, events: Events) -> WanEncoder:
        network = self.folder.wan_encoder()
        encoder = self._filled(lambda: WanEncoder(self.folder.wan_config()), network, events)
        encoder.keep_one_frame()
        return encoder

    def _load_preview(self, events: Events) -> PreviewTransformer:
        def build() -> PreviewTransformer:
            return PreviewTransformer(self.config, self.parallel, compute_dtype=self.plan.compute_dtype)

        share = self.parallel.share(self.config.moe.num_heads, self.config.moe.num_experts)
        return self._filled(build, self.folder.preview(), events, share=share)

    def _load_refiner(self, events: Events) -> RefinerTransformer:
        config = self.folder.refiner_config()
        parallel = refiner_parallel(self.parallel, config)

        def build() -> RefinerTransformer:
            return RefinerTransformer(
                config, parallel, compute_dtype=self.plan.compute_dtype, residual=self.plan.refiner_residual_dtype
            )

        return self._filled(build, self.folder.refiner(), events)

    def _load_video_decoder(self, events: Events) -> TurboDecoder:
        # bfloat16 whatever the transformer's dtype: that is what the decoder was made with (40 §4.5)
        config = self.folder.turbo_config()
        return self._filled(lambda: TurboDecoder(config).to(torch.bfloat16), self.folder.turbo_decoder(), events)

    def _load_audio_decoder(self, events: Events) -> OobleckDecoder:
        config = self.folder.oobleck_config()
        decoder = self._filled(lambda: OobleckDecoder(config), self.folder.oobleck_decoder(), events)
        decoder.fold()
        return decoder

    # ---- conditioning

    def encode_text(self, events: Events, *, prompt: str, negative_prompt: str, figures: Sequence[int]) -> Result:
        """Both prompts to features [L, 5120] bf16, and one marker vector for each picture number (30)."""
        self._make_room("text_encoder", events)
        if not self.leads:
            return {}
        encoder = self._stage("text_encoder", events)
        text = encode_text(encoder, prompt, negative_prompt, figures, events, cache=self._text_features)
        return {
            "features": text.features_LD,
            "null_features": text.null_features_LD,
            "markers": text.markers_MD,
            "prompt": text.prompt,
            "tokens": text.tokens,
            "truncated": text.truncated,
            "warnings": list(text.warnings),
        }

    def encode_image(self, events: Events, *, pictures: Sequence[Tensor], width: int, height: int) -> Result:
        """Pictures uint8 [H, W, 3] to latents [M, 48, h, w] fp32 for a clip of width x height (40 §1)."""
        self._make_room("image_encoder", events)
        if not self.leads:
            return {}
        from PIL import Image

        pixels = [prepare_picture(Image.fromarray(each.numpy()), width, height) for each in pictures]
        check_equal_sizes({marker(figure): (x.shape[4], x.shape[3]) for figure, x in enumerate(pixels, 1)})
        encoder = self._stage("image_encoder", events)
        latents = []
        for done, picture in enumerate(pixels, 1):
            events.check()
            latents.append(encode_picture(encoder, picture).cpu())
            events.progress("encode_image", done, len(pixels))
        return {"latents": torch.cat(latents)[:, :, 0]}

    # ---- sampling

    def sample(
        self,
        events: Events,
        *,
        features: Tensor,
        null_features: Tensor,
        markers: Tensor,
        image_latents: Tensor | None,
        width: int,
        height: int,
        seed: int,
        noise_device: str,
        steps: int,
        shift: float,
        guidance: Mapping[str, Any],
    ) -> Result:
        """Noise to latents: video [48, T, H, W] and audio [L, 64], fp32 (20)."""
        settings = SamplingSettings(steps, shift, GuidanceSettings(**guidance))
        grid, audio_length = latent_grid(width, height), clip_lengths()[1]
        conditional = Conditions(features, image_latents, markers if image_latents is not None else None)
        unconditional = Conditions(
            null_features if settings.guidance.use_negative_prompt else features[:0],
            conditional.images_MChw,
            conditional.markers_MD,
        )
        if not settings.guidance.use_ref_for_uncond:
            unconditional = unconditional.without_picture_content()
        draw = self._drawer(seed, noise_device)
        model = self._stage("preview", events)
        video, audio = clip_noise(draw, grid, audio_length, *self._channels)
        evaluate = self._evaluator(model, grid, audio_length, [conditional, unconditional], events)
        events.progress("sample", 0, steps)
        video, audio = denoise(settings, video, audio, evaluate, events)
        return {"video": video[0].cpu(), "audio": audio[0].cpu()}

    def _drawer(self, seed: int, noise_device: str) -> Draw:
        """What draws the clip's noise, one tensor after the other, on this rank's device.

        On the CPU every rank draws for itself, because all get the same numbers; on GPUs the first rank draws and sends
        (20 §2). RequestError for a bad seed, or for noise of a GPU where none is used.
        """
        check_noise_device(noise_device, self.device.type)
        generator = noise_generator(seed, noise_device if noise_device == "cpu" else str(self.device))
        group = None if noise_device == "cpu" else self.parallel.replica_group
        return lambda shape: broadcast(draw_noise(shape, generator).to(self.device), group)

    def _evaluator(
        self, model: PreviewTransformer, grid: tuple[int, int, int], audio_length: int,
        branches: Sequence[Conditions], events: Events,
    ) -> Evaluate:  # fmt: skip
        """The model as a function of latents and time: both branches in one forward, or one on each cfg group."""
        split = TokenSplit.even(2, self.parallel.layout.cfg, self.parallel.position.cfg)
        branches = branches[split.rows]
        request = pack_request(grid, audio_length, branches, self.device)
        prepared = model.prepare(request.layout, self.device)

        def evaluate(video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
            velocity_TC = model(prepared, pack_tokens(request, video, audio, time), events)
            own_video, own_audio = unpack(velocity_TC, request, *self._channels)
            group = self.parallel.cfg_group
            return gather_tokens(own_video, split, group), gather_tokens(own_audio, split, group)

        return evaluate

    def refine(
        self,
        events: Events,
        *,
        video: Tensor,
        audio: Tensor,
        features: Tensor,
        null_features: Tensor,
        seed: int,
        noise_device: str,
        settings: Mapping[str, Any],
    ) -> Result:
        """A preview's latents to the refined video latent [48, 2T - 1, H, W] fp32; its sound stays the preview's (50).

        The noise continues the clip's own: first the preview's two draws from the seed, then these (20 §2, 50 §9).
        """
        options = RefinerSettings(**settings)
        frames, length = video.shape[1], audio.shape[0]
        draw = self._drawer(seed, noise_device)
        model = self._stage("refiner", events)
        clip_noise(draw, (frames, *video.shape[2:]), length, *self._channels)
        evaluate = model_evaluate(model, options, frames, length, features, null_features, events)
        events.progress("refine", 0, options.steps)
        clip = video[None].to(self.device), audio[None].to(self.device)
        refined, _ = refine(options, *clip, evaluate, draw, events)
        return {"video": refined[0].cpu()}

    # ---- decoding

    def decode_video(self, events: Events, *, video: Tensor) -> Result:
        """A latent [48, T, H, W] to frames uint8 [F, 16H, 16W, 3] (40 §4)."""
        decoder = self._stage("video_decoder", events)
        blocks = self._frame_blocks(decoder, video, Together(events, self.parallel))
        frames = gather_blocks(blocks, decoded_frames(video.shape[1]) if self.leads else 0)
        return {"frames": frames} if self.leads else {}

    def _frame_blocks(self, decoder: TurboDecoder, video: Tensor, events: Together) -> Iterator[Tensor]:
        """Finished frames uint8 [t, H, W, 3] in time order; on other ranks than the first, blocks of no frames.

        The windows of the clip go round the ranks, which changes no value (40 §4.6): each decodes one, then the first
        takes them all in their order. The ranks use the same tiles, and so pass the same check points.
        """
        z = video[None].to(self.device, torch.bfloat16)
        frames, height, width = video.shape[1:]
        windows, ranks = plan_windows(frames, decoder.config), self.parallel.layout.replica
        budget = smallest(working_budget(self.device), self.parallel.replica_group)
        tiles = plan_tiles(decoder.config, height, width, budget, torch.bfloat16)
        scale = decoder.config.spatial_ratio
        for first in range(0, len(windows), ranks):
            turn = windows[first : first + ranks]
            block = torch.empty(0, scale * height, scale * width, 3, dtype=torch.uint8)
            if self.replica_rank < len(turn):
                block = decode_window(decoder, z, turn[self.replica_rank], to_uint8, tiles, events)
            else:
                for _ in tiles:
                    events.check()
            for rank, window in enumerate(turn):
                events.check()
                yield self._handed_over(block, rank, window.frames)
                events.progress("decode_video", first + rank + 1, len(windows))

    def _handed_over(self, block: Tensor, rank: int, frames: int) -> Tensor:
        """The block of a rank on the first one, and no frames on the others."""
        if rank == 0:
            return block if self.leads else block[:0]
        if self.leads:
            return receive((frames, *block.shape[1:]), block.dtype, rank, self.parallel.replica_group)
        if self.replica_rank == rank:
            send(block, 0, self.parallel.replica_group)
        return block[:0]

    def decode_audio(self, events: Events, *, audio: Tensor) -> Result:
        """A latent [L, 64] to a waveform [2, samples] fp32 at 44100 Hz (40 §5)."""
        self._make_room("audio_decoder", events)
        if not self.leads:
            return {}
        decoder = self._stage("audio_decoder", events)
        wave = decoder(audio.T[None].to(self.device, torch.float32), events)[0]
        events.progress("decode_audio", 1, 1)
        return {"waveform": to_real_time(wave).cpu(), "sample_rate": decoder.config.sample_rate}

    def write_clip(
        self, events: Events, *, video: Tensor, waveform: Tensor | None, sample_rate: int, path: str, crf: int,
        fps: str, size: Sequence[int] | None = None,
    ) -> Result:  # fmt: skip
        """Decode a latent [48, T, H, W] straight into an mp4 file, with its sound unless that is None: one window of
        frames is in memory at a time (40 §7). `size` (width, height) rescales the frames. Nothing is left under the
        final name if it fails or is cancelled.
        """
        rate, together = parse_frame_rate(fps), Together(events, self.parallel)
        sound = None if waveform is None else Sound(waveform, sample_rate)
        width, height = size or (SPATIAL_STRIDE * video.shape[3], SPATIAL_STRIDE * video.shape[2])
        with ExitStack() as stack:  # only the first rank's file system has a say

            def begin(_: Events) -> VideoWriter:
                return stack.enter_context(VideoWriter(path, width, height, rate, sound, crf))

            def write(block: Tensor, alone: Events) -> None:
                assert writer is not None
                for frame in block.split(1):  # a check point before each, whatever its size
                    writer.write(resize(frame, width, height) if size else frame, alone)

            writer = together.alone(begin)
            decoder = self._stage("video_decoder", events)
            for block in self._frame_blocks(decoder, video, together):
                together.alone(partial(write, block))
            together.alone(lambda _: stack.close())
        return {}


def _known(stages: Sequence[str]) -> Sequence[str]:
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise RequestError(f"There is no stage {unknown[0]!r}; the stages are {', '.join(STAGES)}.")
    return stages
