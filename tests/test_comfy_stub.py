"""The stub of ComfyUI says what the real 0.3.64 says; compared wherever a checkout is present."""

import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from magi2_native.tests.comfy_server.server import comfyui_python, comfyui_root
from magi2_native.tests.comfy_server.stand_ins import write_stand_ins
from magi2_native.tests.comfy_stub import host, io_types

INPUTS = ("Boolean", "Int", "Float", "String", "Combo")

PROGRAM = """
import sys, json, inspect, dataclasses
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import utils.install_util  # as main.py does first: later on another `utils` may come before it on the path
from comfy_api.latest import io, ui, InputImpl, Types, ComfyExtension
import comfy.model_management as management, folder_paths, comfy.utils
from comfy.model_patcher import ModelPatcher
import execution, server
names = lambda function: [n for n in inspect.signature(function).parameters if n not in ("self", "kwargs")]
print("SIGNATURES" + json.dumps({
    "Schema": [field.name for field in dataclasses.fields(io.Schema)],
    "inputs": {name: names(getattr(io, name).Input.__init__) for name in %r},
    "output": names(io.Image.Output.__init__),
    "node_output": names(io.NodeOutput.__init__),
    "hidden": {name: io.Hidden[name].value for name in ("unique_id", "prompt", "extra_pnginfo")},
    "types": {name: str(getattr(io, name).io_type) for name in ("Image", "Audio", "Video", "Latent", "AnyType")},
    "custom": hasattr(io.Custom("X"), "Input") and hasattr(io.Custom("X"), "Output"),
    "preview_text": ui.PreviewText("x").as_dict(),
    "components": [field.name for field in dataclasses.fields(Types.VideoComponents)],
    "save_to": names(InputImpl.VideoFromComponents.save_to),
    "management": {name: names(getattr(management, name)) for name in %r},
    "interrupt": management.InterruptProcessingException.__mro__[1].__name__,
    "folder_paths": {name: names(getattr(folder_paths, name)) for name in %r},
    "progress_bar": names(comfy.utils.ProgressBar.__init__),
    "update_absolute": names(comfy.utils.ProgressBar.update_absolute),
    "patcher": names(ModelPatcher.__init__),
    "send_sync": names(server.PromptServer.send_sync),
    "send_progress_text": names(server.PromptServer.send_progress_text),
    "get_tasks_remaining": names(execution.PromptQueue.get_tasks_remaining),
}))
"""
MANAGEMENT = ("unload_all_models", "load_models_gpu", "get_torch_device", "soft_empty_cache",
              "throw_exception_if_processing_interrupted", "interrupt_current_processing", "free_memory")
FOLDERS = ("add_model_folder_path", "get_folder_paths", "get_filename_list", "get_save_image_path",
           "get_output_directory", "get_input_directory", "get_user_directory", "get_temp_directory")


def names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = comfyui_root()
    if root is None:
        pytest.skip("no ComfyUI checkout (set COMFYUI_ROOT)")
    python = comfyui_python(root)
    stand_ins = write_stand_ins(tmp_path_factory.mktemp("stand_ins"), python)
    result = subprocess.run(
        [python, "-c", PROGRAM % (INPUTS, MANAGEMENT, FOLDERS), "main.py"], cwd=root, capture_output=True, text=True,
        env={"PYTHONPATH": f"{stand_ins}:{root}", "PATH": "/usr/bin:/bin", "HOME": str(Path.home()),
             "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.split("SIGNATURES")[1])


def test_a_schema_has_the_arguments_of_the_real_one(real: dict[str, Any]) -> None:
    assert names(io_types.Schema.__init__) == real["Schema"]


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_have_the_arguments_of_the_real_ones(real: dict[str, Any], kind: str) -> None:
    assert names(getattr(io_types.io, kind).Input.__init__) == real["inputs"][kind]


def test_outputs_have_the_arguments_of_the_real_ones(real: dict[str, Any]) -> None:
    assert names(io_types.Output.__init__) == real["output"]
    assert names(io_types.NodeOutput.__init__) == real["node_output"]


def test_types_and_hidden_values_are_called_as_the_real_ones(real: dict[str, Any]) -> None:
    assert {name: str(getattr(io_types.io, name).io_type) for name in real["types"]} == real["types"]
    assert {name: io_types.Hidden[name].value for name in real["hidden"]} == real["hidden"]
    assert real["custom"]
    assert json.loads(json.dumps(io_types.PreviewText("x").as_dict())) == real["preview_text"]


def test_a_video_takes_the_components_of_the_real_one(real: dict[str, Any]) -> None:
    assert names(io_types.VideoComponents.__init__)[:2] == real["components"][:2]
    assert set(names(io_types.VideoComponents.__init__)) == set(real["components"])
    assert names(io_types.VideoFromComponents.save_to) == real["save_to"]


def test_host_functions_take_the_arguments_of_the_real_ones(real: dict[str, Any], tmp_path: Path) -> None:
    management = host.ModelManagement(Exception)
    assert {name: names(getattr(management, name)) for name in MANAGEMENT} == real["management"]
    folders = host.FolderPaths(tmp_path)
    assert {name: names(getattr(folders, name)) for name in FOLDERS} == real["folder_paths"]
    server = host.PromptServerStub()
    bar = host.make_progress_bar(management, server)
    assert names(bar.__init__) == real["progress_bar"]
    assert names(bar.update_absolute) == real["update_absolute"]
    assert names(host.make_model_patcher().__init__) == real["patcher"]
    assert names(server.send_sync) == real["send_sync"]
    assert names(server.send_progress_text) == real["send_progress_text"]
    assert names(server.prompt_queue.get_tasks_remaining) == real["get_tasks_remaining"]
    assert real["interrupt"] == "Exception"


def test_the_stub_refuses_what_the_real_one_refuses() -> None:
    with pytest.raises(TypeError, match="search_aliases"):
        io_types.Schema(node_id="X", search_aliases=["x"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="advanced"):
        io_types.io.Int.Input("x", advanced=True)
    shared = io_types.Schema(
        node_id="X", inputs=[io_types.Input("model")], outputs=[io_types.Output("model")]
    )
    with pytest.raises(ValueError, match="not unique"):
        shared.check()
