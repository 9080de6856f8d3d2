"""The layout of a checkpoint folder: where each network lies, how it is configured, and what it is good for.

<root>/magi2_preview.json, magi2_refiner.json    architecture; absent means the released one
<root>/preview/                                  the transformer that makes video and sound together
<root>/refiner/                                  the second stage, for 1080p
<root>/text_encoder/                             Qwen3.5 with its tokenizer
<root>/vae/                                      Wan 2.2 encoder, for reference pictures
<root>/turbo_vae/                                video decoder
<root>/stable-audio-open-1.0/                    sound decoder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..codecs.oobleck_decoder import OOBLECK_PREFIX, OobleckConfig, oobleck_decoder_tensors
from ..codecs.turbo_decoder import TURBO_PREFIX, TurboConfig, turbo_decoder_tensors
from ..codecs.wan_encoder import WanEncoderConfig, wan_encoder_tensors
from ..conditioning.parameters import SKIPPED_LAYERS, TextEncoderConfig, text_encoder_tensors
from ..config import PreviewConfig, RefinerConfig
from ..dit.parameters import preview_tensors
from ..errors import CheckpointError
from ..refiner.parameters import refiner_tensors
from .index import Scan, read_json, scan_file, scan_folder
from .legacy import turbo_names
from .network import BANDS, Network, network, pickle_reader, scan_pickle
from .problem import BadFileError, Problem

PREVIEW = "preview"
REFINER = "refiner"
TEXT_ENCODER = "text_encoder"
WAN = "vae"
TURBO = "turbo_vae"
STABLE_AUDIO = "stable-audio-open-1.0"
FOLDERS = (PREVIEW, TEXT_ENCODER, TURBO, STABLE_AUDIO, WAN, REFINER)

WAN_FILE = "Wan2.2_VAE.pth"
TURBO_FILE = "checkpoint.ckpt"
TURBO_CONFIG = "TurboV3-Wan22-TinyShallow_7_7.json"

# What a checkpoint can make, and the sub-folders that it takes.
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "T2VA": (PREVIEW, TEXT_ENCODER, TURBO, STABLE_AUDIO),
    "I2VA": (PREVIEW, TEXT_ENCODER, TURBO, STABLE_AUDIO, WAN),
    "1080p": (PREVIEW, TEXT_ENCODER, TURBO, STABLE_AUDIO, REFINER),
}

Config = TypeVar("Config")


class CheckpointFolder:
    """A checkpoint on disk. Configurations and networks are read when asked for, by headers alone."""

    def __init__(self, root: Path | str):
        """CheckpointError if `root` is not a folder."""
        self.root = Path(root).expanduser().absolute()
        if not self.root.is_dir():
            found = "is a file" if self.root.exists() else "does not exist"
            raise CheckpointError(f"The checkpoint folder {self.root} {found}; give the folder that holds preview/.")

    def preview_config(self) -> PreviewConfig:
        """Architecture of the preview transformer; BadFileError if its JSON is broken."""
        return _architecture(self.root / "magi2_preview.json", PreviewConfig, PreviewConfig.from_json)

    def refiner_config(self) -> RefinerConfig:
        """Architecture of the refiner; BadFileError if its JSON is broken."""
        return _architecture(self.root / "magi2_refiner.json", RefinerConfig, RefinerConfig.from_json)

    def text_config(self) -> TextEncoderConfig:
        """Sizes of the text encoder; BadFileError if its JSON is broken."""
        return _read_config(self.root / TEXT_ENCODER / "config.json", TextEncoderConfig.from_json)

    def turbo_config(self) -> TurboConfig:
        """Architecture of the video decoder; BadFileError if its JSON is broken."""
        return _read_config(self.root / TURBO / TURBO_CONFIG, TurboConfig.from_json)

    def wan_config(self) -> WanEncoderConfig:
        """Widths of the picture encoder, read off its tensors: it has no configuration file."""
        return _wan_config(_legacy_or_converted(self.root / WAN / WAN_FILE)[0])

    def oobleck_config(self) -> OobleckConfig:
        """Architecture of the sound decoder; BadFileError if its JSON is broken."""
        return _read_config(self.root / STABLE_AUDIO / "model_config.json", OobleckConfig.from_json)

    def preview(self) -> Network:
        """The preview transformer: bands may be missing, because they follow from a formula (10 §12.2)."""
        return preview_network(self.root / PREVIEW, self.preview_config())

    def refiner(self) -> Network:
        """The refiner (50 §4)."""
        table = refiner_tensors(self.refiner_config())
        return network("refiner", scan_folder(self.root / REFINER), table, optional={BANDS})

    def text_encoder(self) -> Network:
        """The text layers that are run (30 §4.2)."""
        return text_network(self.root / TEXT_ENCODER, self.text_config())

    def wan_encoder(self) -> Network:
        """The picture encoder; the same file's decoder is not needed (40 §3.1)."""
        scan, legacy = _legacy_or_converted(self.root / WAN / WAN_FILE)
        table = wan_encoder_tensors(_wan_config(scan))
        found = network("Wan 2.2 encoder", scan, table, unused=lambda key: key.startswith(("decoder.", "conv2.")))
        if legacy:
            found.reader = pickle_reader(scan.source, {key: key for key in table})
        return found

    def turbo_decoder(self) -> Network:
        """The video decoder out of its training checkpoint (40 §4.2)."""
        scan, legacy = _legacy_or_converted(self.root / TURBO / TURBO_FILE)
        table = turbo_decoder_tensors(self.turbo_config())
        names = turbo_names(scan.entries)
        stored = {key: names.get(TURBO_PREFIX + key, TURBO_PREFIX + key) for key in table}
        decoder = set(names.values())
        found = network("Turbo decoder", scan, table, stored=stored.__getitem__, unused=lambda key: key not in decoder)
        if legacy:
            found.reader = pickle_reader(scan.source, stored)
        return found

    def oobleck_decoder(self) -> Network:
        """The sound decoder; the diffusion model in the same file is not needed (40 §5.1)."""
        scan = scan_folder(self.root / STABLE_AUDIO)
        table = oobleck_decoder_tensors(self.oobleck_config())
        return network(
            "Oobleck decoder",
            scan,
            table,
            stored=lambda key: OOBLECK_PREFIX + key,
            unused=lambda key: not key.startswith(OOBLECK_PREFIX),
        )

    def networks(self) -> dict[str, Callable[[], Network]]:
        """What opens the network of each sub-folder."""
        return {
            PREVIEW: self.preview,
            TEXT_ENCODER: self.text_encoder,
            TURBO: self.turbo_decoder,
            STABLE_AUDIO: self.oobleck_decoder,
            WAN: self.wan_encoder,
            REFINER: self.refiner,
        }


def preview_network(folder: Path, config: PreviewConfig) -> Network:
    """The preview transformer of a folder of safetensors that stands by itself."""
    return network("preview transformer", scan_folder(folder), preview_tensors(config), optional={BANDS})


def text_network(folder: Path, config: TextEncoderConfig, skipped_layers: int = SKIPPED_LAYERS) -> Network:
    """A text encoder of a folder that stands by itself; the topmost layers, the vision tower and the heads are not
    needed."""
    table = text_encoder_tensors(config, skipped_layers)
    return network("text encoder", scan_folder(folder), table, unused=_not_text)


def _architecture(path: Path, released: Callable[[], Config], parse: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Read the `arch_config` of a released JSON; without the file the architecture is the released one."""
    if not path.exists():
        return released()

    def parse_section(content: Mapping[str, Any]) -> Config:
        if not isinstance(content.get("arch_config"), dict):
            raise CheckpointError("there is no arch_config object in it")
        return parse(content["arch_config"])

    return _read_config(path, parse_section)


def _read_config(path: Path, parse: Callable[[Mapping[str, Any]], Config]) -> Config:
    content = read_json(path)
    try:
        return parse(content)
    except (CheckpointError, TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise BadFileError(Problem(path, "a configuration of this model", f"one that is not: {error}")) from error


def _legacy_or_converted(legacy: Path) -> tuple[Scan, bool]:
    """Scan the safetensors form of a legacy file if it is there, else the file; tell whether it is the pickle."""
    converted = legacy.with_suffix(".safetensors")
    if converted.exists():
        return scan_file(converted), False
    if legacy.exists() or legacy.is_symlink():
        return scan_pickle(legacy), True
    found = "neither file" if legacy.parent.is_dir() else "no such folder"
    return Scan(legacy.parent, problems=[Problem(legacy.parent, f"{converted.name} or {legacy.name}", found)]), False


def _wan_config(scan: Scan) -> WanEncoderConfig:
    """The encoder has no configuration file: its width is a quarter of the last norm's, the rest is fixed (40 §3.2)."""
    last = scan.entries.get("encoder.head.0.gamma")
    if last is None or not last.shape or last.shape[0] < 4:
        return WanEncoderConfig()
    return WanEncoderConfig(dim=last.shape[0] // 4)


def _not_text(key: str) -> bool:
    """Parts of the multimodal release beside the text layers that are run, which the table names (30 §2)."""
    return key.startswith(("model.language_model.", "model.visual.", "lm_head.", "mtp."))
