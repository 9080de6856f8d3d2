"""Memory while loading: what is loaded, and little else. Measured in a process of its own on a gigabyte."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from magi2_native.magi2_core.checkpoint.folder import PREVIEW
from magi2_native.magi2_core.checkpoint.miniature import MiniatureSize, write_miniature
from magi2_native.magi2_core.dit.parameters import preview_tensors

LOAD = """
import json, re, sys, torch
from magi2_native.magi2_core.checkpoint.folder import CheckpointFolder
from magi2_native.magi2_core.checkpoint.loader import load_tensors
dtype = {"stored": None, "float16": torch.float16}[sys.argv[2]]
network = CheckpointFolder(sys.argv[1]).preview()
dtypes = {key: dtype or spec.dtype for key, spec in network.table.items()}
with network.open() as reader:
    tensors = load_tensors(network, reader, dtypes)
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"peak": peak, "loaded": sum(tensor.nbytes for tensor in tensors.values())}))
"""

# About a gigabyte in the preview folder alone.
LARGE = MiniatureSize(hidden_size=768, layers=5, experts=96, expert_width=512)


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = write_miniature(tmp_path_factory.mktemp("large") / "gigabyte", size=LARGE, only=[PREVIEW])
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("dtype", ["stored", "float16"])
def test_the_peak_is_the_loaded_bytes_the_largest_tensor_and_half_a_gigabyte_at_most(gigabyte: Path, dtype: str):
    # The second case reads through staging buffers, because every large tensor is cast on its way.
    result = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(gigabyte), dtype], capture_output=True, text=True, check=True
    )
    measured = json.loads(result.stdout)
    table = preview_tensors(LARGE.preview()).values()
    largest = max(prod(spec.shape) * spec.dtype.itemsize for spec in table)
    assert measured["loaded"] > 980_000_000
    assert measured["peak"] < measured["loaded"] + largest + 500_000_000
