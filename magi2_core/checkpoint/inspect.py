"""A checkpoint folder checked in seconds, without loading it: what is there, what it is good for, what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .folder import CAPABILITIES, REFINER, STABLE_AUDIO, TEXT_ENCODER, TURBO, TURBO_CONFIG, WAN, CheckpointFolder
from .index import read_json, scan_folder
from .network import Network
from .problem import BadFileError, Problem, refuse

# A folder with more problems than this prints these and a count; the JSON form has them all.
_SHOWN = 40

# Folders that a checkpoint may lack: it can make less without them, but is not damaged.
_OPTIONAL = (WAN, REFINER)


@dataclass(frozen=True)
class NetworkReport:
    """One sub-folder: how many files and tensors of it are needed, their bytes on disk, and whether all are sound."""

    folder: str
    name: str
    files: int
    tensors: int
    expected_tensors: int
    parameters: int
    bytes_on_disk: int
    usable: bool


@dataclass(frozen=True)
class Report:
    """What `inspect_checkpoint` found. `problems` make the checkpoint unusable for something; `warnings` do not."""

    root: Path
    networks: tuple[NetworkReport, ...]
    capabilities: dict[str, bool]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]

    @property
    def bytes_on_disk(self) -> int:
        return sum(network.bytes_on_disk for network in self.networks)

    def to_json(self) -> dict[str, Any]:
        """The report as builtins, with every problem; files are relative to the checkpoint."""
        return {
            "checkpoint": str(self.root),
            "ok": not self.problems,
            "capabilities": self.capabilities,
            "bytes_on_disk": self.bytes_on_disk,
            "networks": [asdict(network) for network in self.networks],
            "problems": [_problem_json(problem, self.root) for problem in (*self.problems, *self.warnings)],
        }

    def render(self) -> str:
        """The report for people: a line for each network, each capability and each problem."""
        lines = [f"Checkpoint {self.root}: {_size(self.bytes_on_disk)} in the tensors that are needed"]
        for network in self.networks:
            state = "ok" if network.usable else "NOT USABLE"
            count = f"{network.tensors} of {network.expected_tensors} tensors in {network.files} files"
            lines.append(
                f"  {network.folder:<24}{state:<12}{count}, {network.parameters:,} parameters, "
                f"{_size(network.bytes_on_disk)}"
            )
        for name, possible in self.capabilities.items():
            lost = [n.folder for n in self.networks if n.folder in CAPABILITIES[name] and not n.usable]
            lines.append(f"  {name:<24}{'possible' if possible else 'not possible without ' + ', '.join(lost)}")
        lines += _listed("problem", self.problems, self.root) + _listed("warning", self.warnings, self.root)
        return "\n".join(lines)


def inspect_checkpoint(root: Path | str) -> Report:
    """Check every file, key, shape and size of a checkpoint folder by headers alone (80, line 18).

    Raises CheckpointError only if `root` is no folder; everything else that is wrong is in the report.
    """
    folder = CheckpointFolder(root)
    networks, found = [], []
    for name, open_network in folder.networks().items():
        network, problems = _network(folder, name, open_network)
        networks.append(_describe(name, network, problems))
        if name in _OPTIONAL and not (folder.root / name).exists():
            problems = [Problem(folder.root / name, "a folder", "no such folder", warning=True)]
        found += problems
    usable = {network.folder for network in networks if network.usable}
    capabilities = {name: usable.issuperset(needed) for name, needed in CAPABILITIES.items()}
    # Several networks may read the same configuration: each of its problems counts once.
    once = list(dict.fromkeys(found))
    errors, warnings = ([p for p in once if p.warning is severity] for severity in (False, True))
    return Report(folder.root, tuple(networks), capabilities, tuple(errors), tuple(warnings))


def require(root: Path | str, capabilities: Iterable[str], beyond: Iterable[str] = ()) -> None:
    """Check by headers alone that a checkpoint can make these, before workers start or weights are read (80, line 18).

    `beyond` names capabilities that have been checked already. Raises CheckpointError that names the problems of the
    sub-folders that they take; the others may be damaged.
    """
    folder = CheckpointFolder(root)
    wanted, checked = ({part for name in names for part in CAPABILITIES[name]} for names in (capabilities, beyond))
    needed = wanted - checked
    networks = folder.networks().items()
    found = [_network(folder, name, open_network)[1] for name, open_network in networks if name in needed]
    refuse(dict.fromkeys(problem for problems in found for problem in problems), f"The checkpoint {folder.root}")


def _network(folder: CheckpointFolder, name: str, open_network: Callable[[], Network]) -> tuple[Network, list[Problem]]:
    """Open one network; where its configuration is broken, check its files as far as that goes without."""
    try:
        network = open_network()
        problems = list(network.problems)
    except BadFileError as error:
        network, problems = Network(name, {}), [error.problem]
        if name not in (WAN, TURBO):
            problems += scan_folder(folder.root / name).problems
    if name == TEXT_ENCODER:
        problems += _text_problems(folder)
    return network, problems + _width_problems(folder, name)


def _describe(folder: str, network: Network, problems: list[Problem]) -> NetworkReport:
    parameters = 0
    for entry in network.entries.values():
        parameters += entry.nbytes // entry.dtype.itemsize
    return NetworkReport(
        folder=folder,
        name=network.name,
        files=len({entry.file for entry in network.entries.values()}),
        tensors=len(network.entries),
        expected_tensors=len(network.table),
        parameters=parameters,
        bytes_on_disk=network.nbytes,
        usable=not any(not problem.warning for problem in problems),
    )


def _text_problems(folder: CheckpointFolder) -> list[Problem]:
    """Problems of the tokenizer's files, which the encoder needs beside its weights (30 §2)."""
    path = folder.root / TEXT_ENCODER / "tokenizer.json"
    if not path.parent.is_dir():
        return []
    problems = []
    try:
        vocabulary = read_json(path).get("model", {}).get("vocab")
        rows = folder.text_config().vocab_size
        if not isinstance(vocabulary, dict) or not vocabulary:
            problems.append(Problem(path, "a vocabulary", repr(vocabulary)[:80], "model.vocab"))
        elif (largest := max(vocabulary.values())) >= rows:
            problems.append(Problem(path, f"token numbers below {rows}, the rows of the embedding", str(largest)))
    except BadFileError as error:
        problems.append(error.problem)
    except (AttributeError, TypeError) as error:
        problems.append(Problem(path, "a tokenizer of the tokenizers library", f"something else ({error})"))
    try:
        read_json(path.with_name("tokenizer_config.json"))
    except BadFileError as error:
        problems.append(error.problem)
    return problems


def _width_problems(folder: CheckpointFolder, name: str) -> list[Problem]:
    """Problems where a network's configuration does not fit the preview transformer's."""
    try:
        return [
            Problem(path, f"{expected}, which the preview transformer has", str(found), key)
            for path, key, expected, found in _widths(folder, name)
            if found != expected
        ]
    except CheckpointError:
        return []  # a broken configuration is reported with the network that it belongs to


def _widths(folder: CheckpointFolder, name: str) -> Iterator[tuple[Path, str, int, int]]:
    preview = folder.preview_config()
    path = folder.root / name
    if name == TEXT_ENCODER:
        yield path / "config.json", "hidden_size", preview.text_in_channels, folder.text_config().hidden_size
    if name == TURBO:
        yield path / TURBO_CONFIG, "latent_channels", preview.video_in_channels, folder.turbo_config().latent_channels
    if name == STABLE_AUDIO:
        latent = folder.oobleck_config().latent_dim
        yield path / "model_config.json", "latent_dim", preview.audio_in_channels, latent
    if name == REFINER and path.is_dir():
        refiner = folder.refiner_config()
        for field in ("video_in_channels", "audio_in_channels", "text_in_channels"):
            yield folder.root / "magi2_refiner.json", field, getattr(preview, field), getattr(refiner, field)


def _listed(kind: str, problems: tuple[Problem, ...], root: Path) -> list[str]:
    lines = [f"  {kind}: {problem.sentence(root)}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN} more; the JSON form lists them all")
    return lines


def _problem_json(problem: Problem, root: Path) -> dict[str, Any]:
    file = problem.file.relative_to(root) if problem.file.is_relative_to(root) else problem.file
    severity = "warning" if problem.warning else "error"
    return {
        "file": file.as_posix(),
        "key": problem.key,
        "expected": problem.expected,
        "found": problem.found,
        "severity": severity,
    }


def _size(count: int) -> str:
    return (
        f"{count:,} bytes" if count < 10**6 else f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"
    )
