"""API workflows as files: read, checked for form, and changed from the command line (60 §9)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..magi2_core.errors import RequestError
from ..magi2_core.files import parse_json

Workflow = dict[str, dict[str, Any]]


def read_workflow(path: Path) -> Workflow:
    """Read an API workflow: {node id: {"class_type", "inputs"}}. RequestError for anything else."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"The workflow {path} cannot be read: {error}.") from error
    if isinstance(content, dict) and isinstance(content.get("nodes"), list):
        raise RequestError(
            f"{path.name} is a workflow for the page. Use its API twin, or export one in ComfyUI with"
            " Workflow > Export (API)."
        )
    if isinstance(content, dict) and isinstance(content.get("prompt"), dict):
        content = content["prompt"]
    well_formed = isinstance(content, dict) and content and all(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in content.values()
    )
    if not well_formed:
        raise RequestError(f"{path.name} is no API workflow: every entry needs a class_type and inputs.")
    return content


def set_inputs(workflow: Workflow, assignments: Iterable[str]) -> list[tuple[str, str]]:
    """Apply `node.input=value` assignments; the node is named by id, title or class, the value is JSON or else text.

    Returns (node id, input) of those that were not in the workflow before. RequestError if the node is not there or not
    unique, or is linked to another node at that input.
    """
    new = []
    for assignment in assignments:
        target, equals, text = assignment.partition("=")
        node_name, dot, name = target.rpartition(".")
        if not equals or not dot or not node_name or not name:
            raise RequestError(f"{assignment!r} cannot be set; write node.input=value, for example 5.seed=7.")
        node_id = find_node(workflow, node_name.strip())
        node = workflow[node_id]
        try:
            value = parse_json(text)
        except ValueError:
            value = text
        if isinstance(value, (list, dict)):
            value = text
        if isinstance(node["inputs"].get(name), str) and not isinstance(value, str):
            value = text  # a prompt "42" stays a text
        if is_link(node["inputs"].get(name)):
            raise RequestError(f"{name} of {node_name} comes from another node; it cannot be set.")
        if name not in node["inputs"]:
            new.append((node_id, name))
        node["inputs"][name] = value
    return new


def find_node(workflow: Workflow, name: str) -> str:
    """The id of the node with this id, title or class; RequestError if there is none or more than one."""
    if name in workflow:
        return name
    matches = [node_id for node_id, node in workflow.items() if name in (node["class_type"], title(node))]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(f"{node_id} ({node['class_type']})" for node_id, node in workflow.items())
    problem = f"{len(matches)} nodes are called {name!r}" if matches else f"No node is called {name!r}"
    raise RequestError(f"{problem}. The workflow has {listed}.")


def check_links(workflow: Workflow) -> None:
    """RequestError for a link to a node that is not in the workflow."""
    for node_id, node in workflow.items():
        for name, value in node["inputs"].items():
            if is_link(value) and value[0] not in workflow:
                raise RequestError(
                    f"{name} of {node['class_type']} (node {node_id}) is linked to node {value[0]}, which is not in the"
                    " workflow."
                )


def title(node: dict[str, Any]) -> Any:
    """The title that somebody gave the node, None without one."""
    meta = node.get("_meta")  # ComfyUI's page writes it, and its server does not read it
    return meta.get("title") if isinstance(meta, dict) else None


def is_link(value: Any) -> bool:
    """Whether an input's value is a link to another node's output: [node id, slot]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)
