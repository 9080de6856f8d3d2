"""What can be wrong with a checkpoint, as data: one list of these is what `inspect` shows and the loader refuses by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

SHOWN = 8


@dataclass(frozen=True)
class Problem:
    """One fault of one file; `key` is the tensor or the field concerned.

    A warning does not keep the model from running.
    """

    file: Path
    expected: str
    found: str
    key: str | None = None
    warning: bool = False

    def sentence(self, root: Path | None = None) -> str:
        """The problem in one line; `root` is taken off the file's path."""
        file = self.file
        if root is not None and file.is_relative_to(root):
            file = file.relative_to(root)
        where = f"{file}: {self.key}" if self.key else str(file)
        return f"{where}: expected {self.expected}, found {self.found}"


class BadFileError(CheckpointError):
    """A file that cannot be used at all; carries its problem."""

    def __init__(self, problem: Problem):
        super().__init__(f"{problem.sentence()}.")
        self.problem = problem


def refuse(problems: Iterable[Problem], what: str) -> None:
    """Raise CheckpointError that lists the first eight problems by name (10 §12.2); do nothing if none is an error."""
    errors = [problem for problem in problems if not problem.warning]
    if not errors:
        return
    lines = [f"  {problem.sentence()}" for problem in errors[:SHOWN]]
    if len(errors) > SHOWN:
        lines.append(f"  and {len(errors) - SHOWN} more")
    noun = "one problem" if len(errors) == 1 else f"{len(errors)} problems"
    raise CheckpointError(f"{what} cannot be loaded: {noun}. `magi2 inspect` lists them all.\n" + "\n".join(lines))
