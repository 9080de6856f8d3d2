"""Saving a 1080p clip takes a bounded amount of memory, however long it is (40 §7, 60 §3)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, because the highest mark of a process never falls again.
PROGRAM = """
import json, sys
import torch
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.miniatures import tiny_engine

def kilobytes(name):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(name + ":")]
    return int(line.split()[1])

checkpoint, path, latents = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = tiny_engine(checkpoint)
engine.run("load", {"stages": ["video_decoder"]}, Silent())
video, waveform = torch.randn(48, latents, 68, 120), torch.zeros(2, 441_000)
before = kilobytes("VmRSS")  # the latents are in it
clip = {"video": video, "waveform": waveform, "sample_rate": 44_100, "path": path, "crf": 10, "fps": "25"}
engine.run("write_clip", clip, Silent())
print(json.dumps({"beyond": 1024 * (kilobytes("VmHWM") - before)}))
"""


def bytes_beyond_the_latents(checkpoint: Path, path: Path, latents: int) -> int:
    """What a process that decodes and writes a clip of 1920x1088 needs at most, beside its latents.

    A whole clip has 63 latents and takes minutes on a CPU:

        python -m magi2_native.tests.test_save_memory CHECKPOINT 63
    """
    command = [sys.executable, "-P", "-c", PROGRAM, str(checkpoint), str(path), str(latents)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return int(json.loads(result.stdout.splitlines()[-1])["beyond"])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_1080p_clip_is_saved_within_one_and_a_half_gigabytes(tiny: Path, tmp_path: Path) -> None:
    from magi2_native.magi2_core.codecs.media import read_back

    # Two windows of the decoder, the second of full length: more of them are decoded one after the other.
    assert bytes_beyond_the_latents(tiny, tmp_path / "clip.mp4", 15) < 1.5e9
    facts = read_back(tmp_path / "clip.mp4")
    assert (facts.frames, facts.width, facts.height) == (57, 1920, 1088)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        beyond = bytes_beyond_the_latents(Path(sys.argv[1]), Path(folder) / "clip.mp4", int(sys.argv[2]))
        print(f"{beyond / 1e9:.2f} GB beyond the latents")
