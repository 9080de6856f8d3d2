"""Writing a clip with sound as mp4, frame by frame, and reading one back to check it (40 §7)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from ..errors import Magi2Error, MissingDependencyError, RequestError
from ..events import Events
from ..files import expand

DEFAULT_CRF = 10  # what the reference's writer uses (40 §7)
ENCODER = "libx264"
LARGEST_SIDE = 8192  # the encoder gives up above 16384
LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True)
class Sound:
    """A waveform [channels, samples] fp32, one or two channels; values beyond +-1 are clipped when written (40 §7)."""

    waveform: Tensor
    sample_rate: int = 44100

    def check(self) -> None:
        """RequestError if the waveform cannot be written."""
        if self.waveform.dim() != 2 or self.waveform.shape[0] not in LAYOUTS or self.waveform.shape[1] < 1:
            raise RequestError(
                f"The sound has the shape {tuple(self.waveform.shape)}; it must be [channels, samples] with 1 or 2"
                " channels and at least one sample."
            )
        if not torch.isfinite(self.waveform).all():
            raise RequestError("The sound holds values that are not finite numbers, so it cannot be written.")


def check_output_path(path: str | Path) -> Path:
    """The absolute path of an mp4 file that can be written there, found out by writing beside it.

    Call it before the work starts. RequestError if the name does not end in .mp4, if its folder does not exist or
    cannot be written, or if something other than a file stands there.
    """
    target = expand(path).absolute()
    if target.suffix.lower() != ".mp4":
        raise RequestError(f"The output {path} must be a name that ends in .mp4, such as clip.mp4.")
    try:
        if not target.parent.is_dir():
            raise RequestError(f"The folder {target.parent} does not exist; create it, or name another output.")
        if target.exists() and not target.is_file():
            raise RequestError(f"The output {target} exists and is not a file; name another output.")
        if target.exists() and not os.access(target, os.W_OK):
            raise RequestError(f"The output {target} exists and is write-protected; name another output.")
        probe = _temporary_name(target)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise RequestError(f"The output {target} cannot be written: {error}.") from None
    return target


def check_video(width: int, height: int, crf: int) -> None:
    """RequestError for a size or a quality that H.264 does not have; call it before the work starts."""
    if width % 2 or height % 2 or not 2 <= min(width, height) <= max(width, height) <= LARGEST_SIDE:
        raise RequestError(
            f"The video is {width}x{height} pixels; H.264 needs even sides of 2 to {LARGEST_SIDE}. Choose another size."
        )
    if not 0 <= crf <= 51:
        raise RequestError(f"The quality (CRF) is {crf}; it must be between 0, without loss, and 51, the smallest.")


def parse_frame_rate(text: str) -> Fraction:
    """Read "25" or "25/2"; RequestError for anything else."""
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if rate <= 0:
        raise RequestError(f"The frame rate is {text!r}; write frames per second, such as 25 or 25/2.")
    return rate


def _temporary_name(target: Path) -> Path:
    """A name in the same folder, so that the finished file can be renamed in one step (80 line 20)."""
    return target.parent / f".magi2-{secrets.token_hex(6)}.part"


class VideoWriter:
    """Writes an mp4 frame block by frame block; the file appears under its name only when it is finished.

        with VideoWriter(path, 448, 256, PREVIEW_FPS, sound) as writer:
            for block in blocks:
                writer.write(block)

    H.264 4:2:0, and AAC where there is sound (40 §7). A `with` block that is left by an exception, also by a cancel,
    leaves no file. metadata: texts by any names, kept beside the streams. Every frame is kept, whatever the length of
    the sound. RequestError for odd sizes.
    """

    def __init__(
        self,
        path: str | Path,
        width: int,
        height: int,
        frame_rate: Fraction,
        sound: Sound | None = None,
        crf: int = DEFAULT_CRF,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        check_video(width, height, crf)
        if sound is not None:
            sound.check()
        self.target = check_output_path(path)
        self.width, self.height, self.frame_rate, self.sound, self.crf = width, height, frame_rate, sound, crf
        self.frames, self.metadata = 0, metadata or {}
        self._part = _temporary_name(self.target)
        self._container: Any = None

    def __enter__(self) -> VideoWriter:
        self._av = _import_av()
        try:
            with self._failures():
                self._open()
        except BaseException:
            self._discard()
            raise
        return self

    def _open(self) -> None:
        # max_interleave_delta 0: packets are put in order of time however far the sound is ahead. The timescale makes
        # lengths exact to the sample.
        timescale = self.sound.sample_rate if self.sound else 90000
        flags = "+faststart+use_metadata_tags" if self.metadata else "+faststart"
        options = {"movflags": flags, "max_interleave_delta": "0", "movie_timescale": str(timescale)}
        self._container = self._av.open(str(self._part), "w", format="mp4", options=options)
        self._container.metadata.update(self.metadata)
        # 80 line 27: macroblock-tree rate control reads memory that nobody wrote, so that equal frames gave other bytes
        coding = {"crf": str(self.crf), "x264-params": "mbtree=0"}
        self._video = self._container.add_stream(ENCODER, rate=self.frame_rate, options=coding)
        self._video.width, self._video.height, self._video.pix_fmt = self.width, self.height, "yuv420p"
        if self.sound is not None:
            self._write_sound(self.sound)

    def _write_sound(self, sound: Sound) -> None:
        layout = LAYOUTS[sound.waveform.shape[0]]
        stream = self._container.add_stream("aac", rate=sound.sample_rate, layout=layout)
        samples = sound.waveform.detach().to("cpu", torch.float32).clamp(-1, 1).contiguous().numpy()
        frame = self._av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate, frame.time_base = sound.sample_rate, Fraction(1, sound.sample_rate)
        frame.pts = 0  # 40 §7: keeps the encoder's priming out of the timeline
        for packet in (*stream.encode(frame), *stream.encode(None)):
            self._container.mux(packet)

    def write(self, frames_THW3: Tensor, events: Events | None = None) -> None:
        """Encode frames [T, H, W, 3] uint8; `events.check` is called before each. RequestError for another size."""
        if frames_THW3.dtype != torch.uint8 or tuple(frames_THW3.shape[1:]) != (self.height, self.width, 3):
            raise RequestError(
                f"The frames are {tuple(frames_THW3.shape[1:])} {frames_THW3.dtype}; this video takes"
                f" ({self.height}, {self.width}, 3) uint8."
            )
        for pixels_HW3 in frames_THW3.cpu():
            if events is not None:
                events.check()
            with self._failures():
                self._write_frame(pixels_HW3)

    def _write_frame(self, pixels_HW3: Tensor) -> None:
        rgb = self._av.VideoFrame.from_ndarray(pixels_HW3.contiguous().numpy(), format="rgb24")
        # 40 §7: bicubic is closest to the conversion of the reference's writer
        frame = rgb.reformat(format="yuv420p", interpolation="BICUBIC")
        frame.pts, frame.time_base = self.frames, 1 / self.frame_rate
        for packet in self._video.encode(frame):
            self._container.mux(packet)
        self.frames += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._failures():
                    self._finish()
        finally:
            self._discard()

    def _finish(self) -> None:
        if self.frames == 0:
            raise RequestError("There are no frames to write.")
        for packet in self._video.encode(None):
            self._container.mux(packet)
        self._container.close()
        self._container = None
        os.replace(self._part, self.target)

    def _discard(self) -> None:
        """Close and remove what is left of an unfinished file; after a finished one there is nothing to do."""
        with suppress(Exception):  # the reason for giving up is what the caller must hear of
            if self._container is not None:
                self._container.close()
        self._part.unlink(missing_ok=True)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, self._av.FFmpegError) as error:
            raise Magi2Error(f"The video could not be written to {self.target}: {error}.") from error
        except self._av.codec.codec.UnknownCodecError as error:
            raise MissingDependencyError(
                f"This PyAV has no encoder {error}; install one that has: pip install --force-reinstall av."
            ) from error


def write_video(
    path: str | Path,
    blocks: Iterable[Tensor],
    frame_rate: Fraction,
    sound: Sound | None = None,
    crf: int = DEFAULT_CRF,
    events: Events | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write frame blocks [t, H, W, 3] uint8, of which one at a time is in memory, as an mp4; its absolute path.

    The size is the first block's. Nothing is left behind if `blocks` or `events.check` raises. RequestError as
    VideoWriter.
    """
    source = iter(blocks)
    block = next(source, None)
    if block is None:
        raise RequestError("There are no frames to write.")
    with VideoWriter(path, block.shape[2], block.shape[1], frame_rate, sound, crf, metadata) as writer:
        while block is not None:
            writer.write(block, events)
            del block  # before the next one is made
            block = next(source, None)
    return writer.target


@dataclass(frozen=True)
class MediaFacts:
    """What a media file really holds, counted by decoding all of it."""

    frames: int
    width: int
    height: int
    frame_rate: Fraction
    video_codec: str
    pixel_format: str
    video_seconds: Fraction
    samples: int = 0
    sample_rate: int = 0
    channels: int = 0
    audio_codec: str = ""
    audio_seconds: Fraction = Fraction(0)


def read_back(path: str | Path) -> MediaFacts:
    """Decode a clip and count its frames and samples. RequestError if it cannot be read or holds no video.

    AAC is stored in packets of 1024 samples; the samples counted are those that the file's timeline presents, without
    the encoder's priming and the filling of the last packet. Without sound there are 0 samples, rate and channels.
    """
    av = _import_av()
    try:  # "file:" keeps a colon in a name from being read as a protocol
        with av.open(f"file:{path}") as container:
            if not container.streams.video:
                raise RequestError(f"{path} holds no video.")
            video = container.streams.video[0]
            audio = container.streams.audio[0] if container.streams.audio else None
            frames = decoded = 0
            for frame in container.decode(*(stream for stream in (video, audio) if stream is not None)):
                if isinstance(frame, av.VideoFrame):
                    frames += 1
                else:
                    decoded += frame.samples
            picture = dict[str, Any](
                frames=frames, width=video.width, height=video.height, frame_rate=video.average_rate,
                video_codec=video.codec_context.name, pixel_format=video.pix_fmt,
                video_seconds=video.duration * video.time_base,
            )  # fmt: skip
            if audio is None:
                return MediaFacts(**picture)
            seconds = audio.duration * audio.time_base
            return MediaFacts(
                **picture, samples=min(decoded, round(seconds * audio.rate)), sample_rate=audio.rate,
                channels=audio.channels, audio_codec=audio.codec_context.name, audio_seconds=seconds,
            )  # fmt: skip
    except (OSError, av.FFmpegError) as error:
        raise RequestError(f"{path} cannot be read as a video: {error}.") from None


def _import_av() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(f"Writing a video needs the package av (PyAV): {error}.") from None
    return av
