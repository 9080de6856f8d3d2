"""A damaged checkpoint is refused with all of its problems before any worker starts, by what the graph takes of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path, without=()) as graph:
        yield graph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / "magi2" / "mini"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_the_loader_lists_everything_that_every_clip_takes(graph: Graph, folder: Path) -> None:
    cut(folder / "preview" / "model-00002-of-00003.safetensors")
    (folder / "text_encoder" / "config.json").write_text("{")
    shutil.rmtree(folder / "turbo_vae")
    with pytest.raises(ValueError, match="cannot be loaded: 3 problems") as refused:
        graph.model()
    for name in ("preview/model-00002-of-00003.safetensors", "text_encoder/config.json", "turbo_vae"):
        assert str(folder / name) in str(refused.value)
    assert graph.pools == []


def test_what_the_graph_does_not_take_may_be_missing(graph: Graph, folder: Path) -> None:
    shutil.rmtree(folder / "vae")
    shutil.rmtree(folder / "refiner")
    graph.latent()


def test_the_picture_encoder_is_looked_at_when_a_picture_comes(graph: Graph, folder: Path) -> None:
    cut(folder / "vae" / "Wan2.2_VAE.pth")
    model = graph.model()
    with pytest.raises(ValueError, match=r"Wan2\.2_VAE\.pth"):
        graph.run("Magi2EncodePrompt", model=model, prompt="a cat", negative_prompt="", for_picture=True)
    assert graph.pools == [], "a prompt for a picture is not worth encoding"
    conditioning = graph.conditioning()
    with pytest.raises(ValueError, match=r"Wan2\.2_VAE\.pth"):
        graph.run("Magi2ImageConditioning", conditioning=conditioning, image=torch.rand(1, 9, 16, 3))
    assert len(graph.pools[0].calls) == 1


def test_the_refiner_is_looked_at_before_its_preview_is_made(graph: Graph, folder: Path) -> None:
    node, model = graph.nodes["Magi2Refine"], graph.model()
    lazy = [slot.id for slot in node.GET_SCHEMA().inputs if slot.lazy]
    assert node.check_lazy_status(model=model, steps=5) == lazy == ["latent", "conditioning"]
    assert node.check_lazy_status(model=model, latent={}, steps=5) == ["conditioning"]
    cut(folder / "refiner" / "model-00001-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"refiner/model-00001-of-00003\.safetensors"):
        node.check_lazy_status(model=model, steps=5)
    assert graph.pools == []
