"""Writing clips and reading them back (40 §7, 80 lines 20 and 21)."""

import os
import subprocess
import sys
import weakref
from fractions import Fraction

import av
import pytest
import torch
from magi2_native.magi2_core.codecs.media import (
    Sound,
    VideoWriter,
    check_output_path,
    read_back,
    write_video,
)
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.sampling.geometry import PREVIEW_FPS, REFINED_FPS


def frames(count: int, height: int = 32, width: int = 48) -> torch.Tensor:
    shades = torch.linspace(0, 255, count).to(torch.uint8)
    return shades.view(-1, 1, 1, 1).expand(count, height, width, 3)


def sound(samples: int, channels: int = 2) -> Sound:
    return Sound(torch.sin(torch.arange(samples) * 0.05).expand(channels, -1) * 0.5)


@pytest.mark.parametrize(("count", "rate"), [(125, PREVIEW_FPS), (249, REFINED_FPS)])
def test_a_clip_reads_back_with_exactly_its_frames_and_samples(tmp_path, count, rate):
    path = write_video(tmp_path / "clip.mp4", [frames(count)], rate, sound(441000))
    facts = read_back(path)
    assert (facts.frames, facts.width, facts.height, facts.frame_rate) == (count, 48, 32, rate)
    assert (facts.samples, facts.sample_rate, facts.channels) == (441000, 44100, 2)
    assert (facts.video_seconds, facts.audio_seconds) == (count / rate, 10)
    assert (facts.video_codec, facts.pixel_format, facts.audio_codec) == ("h264", "yuv420p", "aac")


@pytest.mark.parametrize("samples", [440999, 441001, 441000 - 22050, 441000 + 22050, 1, 1024])
def test_sound_of_another_length_drops_no_frame_and_no_sample(tmp_path, samples):
    facts = read_back(write_video(tmp_path / "clip.mp4", [frames(125)], PREVIEW_FPS, sound(samples)))
    assert (facts.frames, facts.video_seconds) == (125, 10)
    assert facts.samples == samples


def test_every_frame_is_shown_for_an_equal_time(tmp_path):
    path = write_video(tmp_path / "clip.mp4", [frames(20)], PREVIEW_FPS, sound(70560))
    with av.open(str(path)) as container:
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)]
    assert times == [Fraction(2 * k, 25) for k in range(20)]


def test_a_clip_without_sound(tmp_path):
    facts = read_back(write_video(tmp_path / "clip.mp4", [frames(3)], REFINED_FPS))
    assert (facts.frames, facts.samples, facts.audio_codec) == (3, 0, "")


def test_mono_sound(tmp_path):
    facts = read_back(write_video(tmp_path / "clip.mp4", [frames(3)], REFINED_FPS, sound(5000, channels=1)))
    assert (facts.samples, facts.channels) == (5000, 1)


def test_the_picture_survives(tmp_path):
    ramp = torch.linspace(0, 255, 64).view(1, 1, 64, 1)
    picture = torch.cat([ramp, 255 - ramp, ramp * 0 + 128], dim=3).expand(2, 32, 64, 3).to(torch.uint8)
    path = write_video(tmp_path / "clip.mp4", [picture], REFINED_FPS)
    with av.open(str(path)) as container:
        decoded = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert (torch.from_numpy(decoded).int() - picture[0].int()).abs().float().mean() < 3


def test_a_lower_crf_makes_a_larger_file(tmp_path):
    noise = torch.randint(0, 256, (5, 64, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    sizes = [write_video(tmp_path / f"{crf}.mp4", [noise], REFINED_FPS, crf=crf).stat().st_size for crf in (1, 10, 40)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[2]


def test_sound_is_clipped_to_one(tmp_path):
    loud = Sound(torch.sin(torch.arange(44100) * 0.05).expand(2, -1) * 4)
    path = write_video(tmp_path / "clip.mp4", [frames(3)], REFINED_FPS, loud)
    with av.open(str(path)) as container:
        peak = max(abs(frame.to_ndarray()).max() for frame in container.decode(audio=0))
    assert 0.9 < peak < 1.3  # the codec overshoots a little


def test_the_same_clip_gives_the_same_bytes(tmp_path):
    first, second = (write_video(tmp_path / f"{k}.mp4", [frames(25)], PREVIEW_FPS, sound(88200)) for k in (1, 2))
    assert first.read_bytes() == second.read_bytes()


def test_blocks_are_encoded_as_they_come_and_let_go(tmp_path):
    seen = []

    def blocks():
        for k in range(3):
            assert all(reference() is None for reference in seen), "an earlier block is still held"
            block = frames(4).clone()
            seen.append(weakref.ref(block))
            yield block
            del block
            assert k == len(seen) - 1

    assert read_back(write_video(tmp_path / "clip.mp4", blocks(), REFINED_FPS)).frames == 12


@pytest.mark.parametrize("name", ["a clip.mp4", "Überfahrt 映画.mp4", "one:two.mp4", "100%d.MP4", "back\\slash.mp4"])
def test_any_file_name_is_written_as_it_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert write_video(name, [frames(2)], REFINED_FPS).name == name
    assert os.listdir(tmp_path) == [name]
    assert read_back(name).frames == 2


class Stop(BaseException):
    pass


def test_a_cancelled_save_leaves_no_file(tmp_path):
    class Cancel(Silent):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 6:
                raise Stop

    events = Cancel()
    with pytest.raises(Stop):
        write_video(tmp_path / "clip.mp4", [frames(10)], REFINED_FPS, sound(17640), events=events)
    assert os.listdir(tmp_path) == []
    assert events.checks == 6, "the check comes before every frame"


def test_a_failure_of_the_source_leaves_the_earlier_file(tmp_path):
    path = write_video(tmp_path / "clip.mp4", [frames(2)], REFINED_FPS)
    before = path.read_bytes()

    def blocks():
        yield frames(3)
        raise KeyError("decoder")

    with pytest.raises(KeyError):
        write_video(path, blocks(), REFINED_FPS)
    assert os.listdir(tmp_path) == ["clip.mp4"]
    assert path.read_bytes() == before


def test_a_disk_that_fills_up_is_told_and_leaves_no_file(tmp_path):
    script = (
        "import resource, sys, torch\n"
        "from magi2_native.magi2_core.codecs.media import write_video\n"
        "from magi2_native.magi2_core.sampling.geometry import REFINED_FPS\n"
        "from magi2_native.magi2_core.errors import Magi2Error\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    write_video(sys.argv[1], [torch.randint(0, 256, (30, 128, 128, 3), dtype=torch.uint8)], REFINED_FPS)\n"
        "except Magi2Error as error:\n"
        "    sys.exit(7 if 'could not be written to' in str(error) else 8)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path / "clip.mp4")], check=False, timeout=120)
    assert result.returncode == 7
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("width", "height"), [(47, 32), (48, 31), (0, 32)])
def test_odd_sizes_are_refused(tmp_path, width, height):
    with pytest.raises(RequestError, match=f"{width}x{height} pixels; H.264 needs even sides"):
        VideoWriter(tmp_path / "clip.mp4", width, height, REFINED_FPS)


@pytest.mark.parametrize("crf", [-1, 52])
def test_a_quality_out_of_range_is_refused(tmp_path, crf):
    with pytest.raises(RequestError, match=str(crf)):
        VideoWriter(tmp_path / "clip.mp4", 48, 32, REFINED_FPS, crf=crf)


@pytest.mark.parametrize(
    ("waveform", "said"),
    [
        (torch.zeros(3, 100), r"\(3, 100\)"),
        (torch.zeros(1, 2, 100), r"\(1, 2, 100\)"),
        (torch.zeros(2, 0), "at least one sample"),
        (torch.full((2, 100), float("nan")), "not finite"),
    ],
    ids=["three channels", "batch", "empty", "nan"],
)
def test_sound_that_cannot_be_written_is_refused(tmp_path, waveform, said):
    with pytest.raises(RequestError, match=said):
        VideoWriter(tmp_path / "clip.mp4", 48, 32, REFINED_FPS, Sound(waveform))


def test_frames_of_another_size_or_kind_are_refused(tmp_path):
    with VideoWriter(tmp_path / "clip.mp4", 48, 32, REFINED_FPS) as writer:
        writer.write(frames(1))
        with pytest.raises(RequestError, match=r"\(34, 48, 3\)"):
            writer.write(frames(1, height=34))
        with pytest.raises(RequestError, match="float32"):
            writer.write(frames(1).float())


def test_a_clip_without_frames_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(RequestError, match="no frames"):
        write_video(tmp_path / "clip.mp4", [], REFINED_FPS)
    with pytest.raises(RequestError, match="no frames"), VideoWriter(tmp_path / "clip.mp4", 48, 32, REFINED_FPS):
        pass
    assert os.listdir(tmp_path) == []


def test_an_output_path_is_checked_before_the_work(tmp_path):
    good = check_output_path(tmp_path / "clip.mp4")
    assert good == tmp_path / "clip.mp4"
    assert os.listdir(tmp_path) == [], "the check must leave nothing behind"
    (tmp_path / "folder.mp4").mkdir()
    for path, said in (
        (tmp_path / "clip.avi", "must be a name that ends in .mp4"),
        (tmp_path / "absent" / "clip.mp4", "does not exist"),
        (tmp_path / "folder.mp4", "is not a file"),
        (tmp_path / ("x" * 300 + ".mp4"), "cannot be written"),
        ("/proc/clip.mp4", "cannot be written"),
    ):
        with pytest.raises(RequestError, match=said):
            check_output_path(path)


def test_an_output_in_the_working_folder_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_output_path("clip.mp4") == tmp_path / "clip.mp4"


def test_a_file_that_is_no_clip_is_named(tmp_path):
    (tmp_path / "text.mp4").write_text("not a video")
    for name in ("text.mp4", "absent.mp4"):
        with pytest.raises(RequestError, match=f"{name} cannot be read as a video"):
            read_back(tmp_path / name)


