"""One network of a checkpoint: the tensors that it needs, where each lies on disk, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .index import Entry, Scan, compare
from .legacy import load_state_dict
from .problem import BadFileError, Problem, refuse
from .reader import SafetensorsReader, TensorReader, TensorsReader
from .spec import TensorSpec

BANDS = "pre_adapter.rope.bands"
"""The one tensor of the transformers that follows from a formula, and may be missing from a file (10 §12.1)."""


@dataclass
class Network:
    """A network's table of tensors and what its folder holds of them; keys are the names in the module.

    `problems` may be anything from a stray key to a missing folder: `open` refuses if one of them is an error.
    """

    name: str
    table: dict[str, TensorSpec]
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    reader: Callable[[], TensorReader] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the tensors that the network needs."""
        return sum(entry.nbytes for entry in self.entries.values())

    def open(self) -> TensorReader:
        """A reader of this network's tensors, to be used as a context manager; CheckpointError if any is damaged."""
        refuse(self.problems, f"The {self.name}")
        if self.reader is not None:
            return self.reader()
        return SafetensorsReader(self.entries)


def network(
    name: str,
    scan: Scan,
    table: Mapping[str, TensorSpec],
    *,
    stored: Callable[[str], str] = str,
    unused: Callable[[str], bool] = lambda key: False,
    optional: Collection[str] = (),
) -> Network:
    """Match a scanned folder with the table of a network.

    `stored` gives the name in the file of a name in the module; `unused` tells of a stored name that it belongs to
    another model in the same file; names in `optional` may be missing.
    """
    by_stored = {stored(key): (key, spec) for key, spec in table.items()}
    own = {key: entry for key, entry in scan.entries.items() if key in by_stored or not unused(key)}
    problems = compare(
        Scan(scan.source, own, scan.listed, scan.problems),
        {key: spec for key, (_, spec) in by_stored.items()},
        {stored(key) for key in optional},
    )
    entries = {key: scan.entries[name] for name, (key, _) in by_stored.items() if name in scan.entries}
    return Network(name, dict(table), entries, [*scan.problems, *problems])


def scan_pickle(path: Path) -> Scan:
    """Scan the tensors of a pickled checkpoint; a file that cannot be read is a problem of the result."""
    scan = Scan(path)
    try:
        tensors = load_state_dict(path)
    except BadFileError as error:
        scan.problems.append(error.problem)
        return scan
    scan.entries = {key: Entry(path, tensor.dtype, tuple(tensor.shape), 0) for key, tensor in tensors.items()}
    scan.listed = set(scan.entries)
    return scan


def pickle_reader(path: Path, stored: Mapping[str, str]) -> Callable[[], TensorReader]:
    """What opens a pickled checkpoint for reading, by module names."""

    def open_reader() -> TensorReader:
        tensors = load_state_dict(path)
        return TensorsReader({key: tensors[name] for key, name in stored.items() if name in tensors})

    return open_reader
