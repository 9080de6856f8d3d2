"""Files of a workflow that runs without ComfyUI: pictures in, clips out, named as ComfyUI names them."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ..magi2_core.errors import RequestError
from ..magi2_core.files import replacing
from ..stages.folders import Folders, check_prefix, resolve_inside
from ..stages.values import DecodedClip


def read_image(name: str, folders: Folders) -> Tensor:
    """A picture of the input folder as IMAGE fp32 [1, H, W, 3]: orientation applied, alpha dropped (40 §1)."""
    import numpy as np

    from ..magi2_core.codecs.picture import read_picture

    path = resolve_inside(name.removesuffix(" [input]"), (folders.input,), "picture")
    return torch.from_numpy(np.array(read_picture(path))).unsqueeze(0) / 255


@contextmanager
def new_file(prefix: str, suffix: str, output: Path) -> Iterator[Path]:
    """The next free `prefix_00001_suffix` below `output`, for the block to write; RequestError as `check_prefix`.

    Until the block ends a hidden file beside it keeps other runs with the same folder from taking that name.
    """
    relative = check_prefix(_dated(prefix))
    folder = output / relative.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"The folder {folder} cannot be made: {error.strerror or error}.") from error
    pattern = re.compile(re.escape(relative.name) + r"_(\d+)_")
    numbers = [int(match.group(1)) for file in folder.iterdir() if (match := pattern.match(file.name))]
    for number in count(max(numbers, default=0) + 1):
        path = folder / f"{relative.name}_{number:05}_{suffix}"
        claim = path.with_name(f".{path.name}.claim")
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            if not path.exists():  # or else another run has finished it since the look around
                yield path
                return
        finally:
            claim.unlink(missing_ok=True)


def _dated(prefix: str) -> str:
    """%year%, %month%, %day%, %hour%, %minute% and %second% as ComfyUI replaces them."""
    formats = {"year": "%Y", "month": "%m", "day": "%d", "hour": "%H", "minute": "%M", "second": "%S"}
    now = time.localtime()
    return re.sub(f"%({'|'.join(formats)})%", lambda match: time.strftime(formats[match[1]], now), prefix)


@contextmanager
def output_folder(output: Path) -> Iterator[Path]:
    """Make the folder of the results, and in it one for temporary files, so that a clip that was decoded into a file is
    on the right disk. RequestError if nothing can be written there. A folder that is new and stays empty is removed."""
    new = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        temp = TemporaryDirectory(prefix=".magi2-", dir=output)
    except OSError as error:
        raise RequestError(f"The output folder {output} cannot be written: {error.strerror or error}.") from error
    try:
        with temp as name:
            yield Path(name)
    finally:
        if new:
            with suppress(OSError):
                output.rmdir()


def unused(path: Path) -> Path:
    """The path itself if nothing is there, or else name-2, name-3 and so on."""
    names = chain([path], (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(each for each in names if not each.exists())


def write_video(clip: DecodedClip, path: Path) -> None:
    """Write frames and sound as mp4 (40 §7), or give a clip that is a file already its name."""
    from ..magi2_core.codecs import media

    if clip.file is not None:
        with replacing(path) as part:  # copied, not moved: a second node may want the clip too
            shutil.copyfile(clip.file, part)
        return
    assert clip.frames is not None, "only a clip with a picture is a VIDEO"
    sound = None if clip.waveform is None else media.Sound(clip.waveform, clip.sample_rate)
    media.write_video(path, [clip.frames], clip.fps, sound)
