"""`magi2 run`: execute an API workflow made of our nodes, LoadImage and SaveVideo, without any ComfyUI."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from ..magi2_core.errors import Magi2Error, RequestError, check_choice
from ..magi2_core.events import Events
from ..stages.folders import Folders
from ..stages.manager import manager
from ..stages.values import Model
from .files import output_folder
from .steps import GIVEN, STEPS, Input
from .workflow import Workflow, check_links, is_link

# What a value that is written in the workflow must be, and its name for people.
CONSTANTS: dict[str, tuple[tuple[type, ...], str]] = {
    "INT": ((int,), "a whole number"), "FLOAT": ((int, float), "a number"), "STRING": ((str,), "text"),
    "BOOLEAN": ((bool,), "true or false"),
}  # fmt: skip
LONGEST_CHAIN = 100  # a run goes back along it, one call inside the other


@dataclass
class _Run:
    workflow: Workflow
    folders: Folders
    events: Events
    on_file: Callable[[Path], None]
    results: dict[str, tuple[Any, ...]] = field(default_factory=dict)


# ---- before anything runs


def check_workflow(workflow: Workflow) -> list[str]:
    """The ids of the nodes to run for, after refusing everything that the workflow alone tells.

    Raises RequestError for unknown nodes (all of them, by name), unknown or missing inputs, values and links of a wrong
    type, links that lead nowhere or in a circle, and a workflow that saves nothing.
    """
    unknown = sorted({node["class_type"] for node in workflow.values()} - set(STEPS))
    if unknown:
        raise RequestError(
            f"`magi2 run` does not know {', '.join(unknown)}. It runs {', '.join(sorted(STEPS))}; queue other nodes on"
            " a ComfyUI server with `magi2 queue`."
        )
    check_links(workflow)
    for node_id in workflow:
        _check_inputs(node_id, workflow)
    _check_chains(workflow)
    ends = [node_id for node_id, node in workflow.items() if STEPS[node["class_type"]].ends]
    if not ends:
        raise RequestError("The workflow saves nothing; add a SaveVideo or Magi2SaveLatent node.")
    return ends


def _name(node_id: str, workflow: Workflow) -> str:
    return f"{workflow[node_id]['class_type']} (node {node_id})"


def _check_inputs(node_id: str, workflow: Workflow) -> None:
    node, name = workflow[node_id], _name(node_id, workflow)
    step = STEPS[node["class_type"]]
    inputs = step.inputs()
    if strange := sorted(set(node["inputs"]) - set(inputs)):
        raise RequestError(f"{name} has no input {', '.join(strange)}; it has {', '.join(inputs)}.")
    missing = [
        key for key, slot in inputs.items() if slot.default is inspect.Parameter.empty and key not in node["inputs"]
    ]
    if missing:
        raise RequestError(f"{name} lacks its input {', '.join(missing)}.")
    for key, value in node["inputs"].items():
        if is_link(value):
            _check_link(f"{key} of {name}", inputs[key], value, workflow)
            continue
        _check_constant(f"{key} of {name}", inputs[key], value)
        if key in step.choices:
            check_choice(f"{key} of {name}", value, step.choices[key])


def _check_link(what: str, slot: Input, link: list[Any], workflow: Workflow) -> None:
    source, number = link
    outputs = STEPS[workflow[source]["class_type"]].output_types()
    if not 0 <= number < len(outputs):
        raise RequestError(f"{what} is linked to output {number} of {_name(source, workflow)}, which it has not.")
    given = _type_given(link, workflow)
    if not slot.types & {"*", given} and given != "*":
        raise RequestError(
            f"{what} takes {_words(slot.types)}, but output {number} of {_name(source, workflow)} is {given}."
        )


def _type_given(link: list[Any], workflow: Workflow) -> str:
    """The type of the output that a link names; of one that passes an input on, the type of that input."""
    for _ in range(LONGEST_CHAIN):
        node = workflow[link[0]]
        outputs = STEPS[node["class_type"]].output_types()
        given = outputs[link[1]] if 0 <= link[1] < len(outputs) else "*"
        passed_on = [value for value in node["inputs"].values() if is_link(value)]
        if given != "*" or not passed_on:
            return given
        link = passed_on[0]
    return "*"


def _check_constant(what: str, slot: Input, value: Any) -> None:
    if "*" in slot.types or (value is None and "NONE" in slot.types):
        return
    wanted = [CONSTANTS[each] for each in sorted(slot.types) if each in CONSTANTS]
    if not wanted:
        raise RequestError(f"{what} is {value!r}; it must be linked to a node that gives {_words(slot.types)}.")
    # to Python a bool is a whole number
    if not any(isinstance(value, kinds) and isinstance(value, bool) is (bool in kinds) for kinds, _ in wanted):
        raise RequestError(f"{what} is {value!r}; it must be {' or '.join(words for _, words in wanted)}.")


def _words(types: frozenset[str]) -> str:
    return " or ".join(sorted(types - {"NONE"}))


def _check_chains(workflow: Workflow) -> None:
    sources = {
        node_id: [value[0] for value in node["inputs"].values() if is_link(value)] for node_id, node in workflow.items()
    }
    length: dict[str, int] = {}
    try:
        for node_id in TopologicalSorter(sources).static_order():
            length[node_id] = 1 + max((length[source] for source in sources[node_id]), default=0)
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise RequestError(f"The links of the workflow run in a circle: {circle}.") from None
    if (longest := max(length.values(), default=0)) > LONGEST_CHAIN:
        raise RequestError(f"The workflow chains {longest} nodes one after the other; at most {LONGEST_CHAIN} are run.")


# ---- the run


def run_workflow(
    workflow: Workflow, folders: Folders, events: Events, on_file: Callable[[Path], None] = lambda path: None
) -> list[Path]:
    """Run a workflow to its end and return the files that it wrote; `on_file` hears of each as soon as it is there.

    Whatever can be refused is refused before workers start, and the workers end with the run, whatever happens.
    """
    ends = check_workflow(workflow)
    written: list[Path] = []

    def note(path: Path) -> None:
        written.append(path)
        on_file(path)

    run = _Run(workflow, folders, events, note)
    try:
        _prepare(ends, run)
        with output_folder(folders.output) as temp:
            run.folders = replace(folders, temp=temp)
            for number, node_id in enumerate(ends):
                try:
                    _execute(node_id, run)
                except Exception:  # a dead worker, too; but not Ctrl-C
                    _save_what_is_there(ends[number + 1 :], run)
                    raise
    finally:
        manager.stop()
    return written


def _save_what_is_there(ends: list[str], run: _Run) -> None:
    """After a failure: what was computed for other nodes is not lost with it."""
    for node_id in ends:
        links = {value[0] for value in run.workflow[node_id]["inputs"].values() if is_link(value)}
        if links <= run.results.keys():
            with suppress(Magi2Error):  # the first failure is what the user hears of
                _execute(node_id, run)


def _prepare(ends: list[str], run: _Run) -> None:
    """Run the nodes that need no workers, say what will run where, and make all checks that can be made by then."""
    used = _used(ends, run.workflow)
    for node_id in used:
        node = run.workflow[node_id]
        if STEPS[node["class_type"]].early and not any(map(is_link, node["inputs"].values())):
            _execute(node_id, run)
    for outputs in run.results.values():
        if isinstance(outputs[0], Model):
            run.events.log(outputs[0].plan.describe())
    for node_id in used:
        _check_known(node_id, run)


def _used(ends: list[str], workflow: Workflow) -> list[str]:
    """The nodes that something which is saved depends on, in the workflow's order."""
    used, waiting = set(ends), list(ends)
    while waiting:
        links = {value[0] for value in workflow[waiting.pop()]["inputs"].values() if is_link(value)}
        waiting += links - used
        used |= links
    return [node_id for node_id in workflow if node_id in used]


def _check_known(node_id: str, run: _Run) -> None:
    """Make a node's checks, as far as its inputs are written in the workflow, left out, or there already."""
    node = run.workflow[node_id]
    step = STEPS[node["class_type"]]
    inputs = step.inputs()
    known = {name: slot.default for name, slot in inputs.items() if name not in node["inputs"]}
    for name, value in node["inputs"].items():
        if not is_link(value) or value[0] in run.results:
            known[name] = _value(value, node_id, name, run)
    for check in step.checks:
        names = [name for name in inspect.signature(check).parameters if name in inputs]
        if all(name in known for name in names):
            check(**{name: known[name] for name in names})


def _execute(node_id: str, run: _Run) -> tuple[Any, ...]:
    if node_id not in run.results:
        node = run.workflow[node_id]
        step = STEPS[node["class_type"]]
        inputs = {name: _value(value, node_id, name, run) for name, value in node["inputs"].items()}
        run.events.check()
        wanted = inspect.signature(step.function).parameters
        given = {name: getattr(run, name) for name in GIVEN if name in wanted}
        result = step.function(**inputs, **given)
        if isinstance(result, Path):
            run.on_file(result)
        run.results[node_id] = step.split(result)
    return run.results[node_id]


def _value(value: Any, node_id: str, name: str, run: _Run) -> Any:
    if not is_link(value):
        return value
    result = _execute(value[0], run)[value[1]]
    if result is None and not STEPS[run.workflow[node_id]["class_type"]].inputs()[name].types & {"*", "NONE"}:
        raise RequestError(
            f"{name} of {_name(node_id, run.workflow)} is linked to output {value[1]} of"
            f" {_name(value[0], run.workflow)}, which was not made this time; see that node's settings."
        )
    return result
