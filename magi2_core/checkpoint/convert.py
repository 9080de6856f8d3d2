"""The two pickled files of a release, rewritten as safetensors beside them (80, line 19)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError
from ..events import SILENT, Events
from ..files import replacing
from .folder import TURBO, TURBO_FILE, WAN, WAN_FILE, CheckpointFolder
from .index import DTYPES
from .legacy import load_state_dict, turbo_names
from .network import Network
from .problem import BadFileError, Problem
from .writer import save_tensors


def convert(
    root: Path | str, events: Events = SILENT, on_file: Callable[[Path], None] = lambda path: None
) -> list[Path]:
    """Write `vae/Wan2.2_VAE.safetensors` and `turbo_vae/checkpoint.safetensors`; return the files written.

    `on_file` hears of each as soon as it is there.

    The originals stay. A file that is already there, and one whose original is not, is skipped. Raises CheckpointError
    for a pickle that is damaged or needs code to be run, and for any of these files that lacks a tensor of its network;
    RequestError if the folder cannot be written.
    """
    folder = CheckpointFolder(root)
    sources = {folder.root / WAN / WAN_FILE: folder.wan_encoder, folder.root / TURBO / TURBO_FILE: folder.turbo_decoder}
    written = []
    for done, (source, open_network) in enumerate(sources.items()):
        target = source.with_suffix(".safetensors")
        events.check()
        if target.exists():
            _check(open_network(), target, f". Remove it, then convert {source.name} anew")
            events.log(f"{target} is already there.")
        elif not source.exists():
            events.log(f"{source} is not there; nothing to convert.")
        else:
            _check(open_network(), source)
            tensors = _needed(source)
            with replacing(target) as partial:
                save_tensors(tensors, partial)
            written.append(target)
            on_file(target)
        events.progress("convert", done + 1, len(sources))
    return written


def _check(network: Network, file: Path, advice: str = "") -> None:
    """CheckpointError, with the first problem, if the file is not what the network can be loaded from."""
    errors = [problem.sentence(file.parent) for problem in network.problems if not problem.warning]
    if errors:
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        raise CheckpointError(f"{file} does not hold the {network.name}: {errors[0]}{more}{advice}.")


def _needed(source: Path) -> dict[str, Tensor]:
    """The tensors to keep: of the training checkpoint only the decoder, under the names of a release; of the VAE all,
    because other programs recognise the file by its decoder (40 §3.7)."""
    tensors = load_state_dict(source)
    if source.name == TURBO_FILE:
        tensors = {name: tensors[key] for name, key in turbo_names(tensors).items()}
    # safetensors takes neither strides nor two names of one storage.
    seen: set[int] = set()
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise BadFileError(Problem(source, f"a dtype of {', '.join(DTYPES)}", str(tensor.dtype), key))
        shared = tensor.data_ptr() in seen or tensor.untyped_storage().nbytes() != tensor.nbytes
        seen.add(tensor.data_ptr())
        tensors[key] = tensor.contiguous().clone() if shared else tensor.contiguous()
    return tensors
