"""Servers that end, small shared memory, broken packages, foreign requests (60 §6, §11, 80)."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.stages.latent import write_latent
from magi2_native.tests.comfy_server.client import (
    files,
    latent_bytes,
    node_of,
    run,
    small_prompt,
    submit,
    wait,
    wait_for_stage,
)
from magi2_native.tests.comfy_server.server import Server

RESTART_BUTTON = '''
import os, sys
from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS = {}

@PromptServer.instance.routes.post("/restart")
async def restart(request):
    os.execv(sys.executable, [sys.executable, *sys.argv])
'''


def workers_in_mid_step(server: Server) -> list[psutil.Process]:
    wait_for_stage(server, submit(server, small_prompt(steps=900)), "sample")
    workers = server.workers()
    assert len(workers) >= 2
    return workers


def assert_ended(workers: list[psutil.Process], seconds: float = 5) -> None:
    """No worker runs any more. After an execv nobody waits for them, so a zombie may stay: it holds nothing."""
    deadline = time.monotonic() + seconds
    while alive := [worker for worker in workers if worker.is_running() and not is_zombie(worker)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.1)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "torch" in name or "magi2" in name}


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "execv"])
def test_a_server_that_ends_in_mid_step_leaves_no_worker(
    start_comfy: Callable[..., Server], comfy_base: Callable[[], Path], how: str
) -> None:
    base = comfy_base()
    button = base / "custom_nodes" / "restart_button"
    button.mkdir(parents=True)
    (button / "__init__.py").write_text(RESTART_BUTTON)
    before = shared_memory()
    server = start_comfy(base=base)
    workers = workers_in_mid_step(server)
    if how == "execv":
        with pytest.raises((http.client.HTTPException, OSError)):
            server.request("/restart", {})
    else:
        server.process.send_signal(getattr(signal, how))
    assert_ended(workers)
    assert shared_memory() <= before


def test_a_server_that_is_stopped_by_ctrl_c_ends_at_once(start_comfy: Callable[..., Server]) -> None:
    server = start_comfy()
    workers = workers_in_mid_step(server)
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    server.process.wait(15)
    assert time.monotonic() - started < 15
    assert_ended(workers)


def test_64_mb_of_shared_memory_are_enough_for_67_mb_of_frames(
    start_comfy: Callable[..., Server], comfy_base: Callable[[], Path]
) -> None:
    unshare = shutil.which("unshare")
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    wrapper = [unshare or "", "--mount", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow a mount of its own")
    base = comfy_base()
    (base / "output").mkdir()
    write_latent(
        {"video": torch.randn(48, 32, 20, 35), "audio": torch.randn(250, 64), "meta": {}}, base / "output" / "big"
    )
    template = small_prompt()
    loader, decode, save = (node_of(template, name) for name in ("Magi2LoadCheckpoint", "Magi2Decode", "SaveVideo"))
    prompt = {
        loader: template[loader],
        "load": {"class_type": "Magi2LoadLatent", "inputs": {"latent": "big"}},
        decode: {"class_type": "Magi2Decode", "inputs": {"model": [loader, 0], "latent": ["load", 0]}},
        save: template[save],
    }
    server = start_comfy(base=base, wrapper=wrapper)
    finished = wait(server, submit(server, prompt), 280)
    assert finished.status == "success", finished.error
    facts = read_back(files(server, finished)[save])
    assert (facts.frames, facts.width, facts.height) == (125, 560, 320)


def break_packages(folder: Path, names: tuple[str, ...], error: str) -> dict[str, str]:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise {error}")
    return {"PYTHONPATH": str(folder)}


def test_broken_optional_packages_do_not_matter(start_comfy: Callable[..., Server], tmp_path: Path) -> None:
    error = "OSError('libcudart.so.13: cannot open shared object file')"
    server = start_comfy(environment=break_packages(tmp_path, ("openai", "diffusers"), error))
    assert "IMPORT FAILED" not in server.log
    run(server, small_prompt())


def test_a_broken_package_that_is_needed_is_named_when_it_is_needed(
    start_comfy: Callable[..., Server], tmp_path: Path
) -> None:
    # transformers imports flash_attn where it finds one, and so does ComfyUI, which survives an ImportError only
    server = start_comfy(environment=break_packages(tmp_path, ("flash_attn",), "ImportError('made for another torch')"))
    assert "IMPORT FAILED" not in server.log
    assert "Magi2EncodePrompt" in server.get("/object_info")
    finished = wait(server, submit(server, small_prompt()))
    assert finished.status == "error"
    assert "transformers" in finished.error
    assert "made for another torch" in finished.error


def test_workers_never_run_comfyui_again_nor_see_its_modules(comfy: Server) -> None:
    banners = comfy.log.count("ComfyUI version")
    run(comfy, small_prompt(seed=41))
    assert comfy.log.count("ComfyUI version") == banners == 1
    for worker in comfy.workers():
        assert "main.py" not in " ".join(worker.cmdline())


@pytest.mark.parametrize("path", ["/magi2/stop", "/api/magi2/stop", "/magi2/unload", "/magi2/settings"])
def test_requests_from_other_sites_are_refused_also_where_comfyui_lets_them_pass(comfy: Server, path: str) -> None:
    headers = {"Host": "10.0.0.5:8188", "Origin": "http://evil.example", "Content-Type": "application/json"}
    assert raw_post(comfy, path, headers) == 403
    # a form needs no preflight, so its content type alone is reason enough
    assert raw_post(comfy, path, {"Host": "10.0.0.5:8188", "Content-Type": "text/plain"}) == 403
    same = {"Host": "10.0.0.5:8188", "Origin": "http://10.0.0.5:8188", "Content-Type": "application/json"}
    assert raw_post(comfy, path, same) == 200


def raw_post(server: Server, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", path, body="{}", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_changes_by_get_are_not_possible(comfy: Server) -> None:
    for path in ("/magi2/stop", "/magi2/start", "/magi2/unload", "/magi2/settings"):
        assert comfy.request(path)[0] in (404, 405)


def test_the_status_tells_no_paths(comfy: Server) -> None:
    run(comfy, small_prompt(seed=42))
    status = json.dumps(comfy.get("/magi2/status"))
    assert str(comfy.base) not in status
    assert "/root" not in status
    assert str(Path.home()) not in status


def test_prompts_over_and_over_leave_memory_flat(comfy: Server) -> None:
    def resident() -> list[int]:
        return sorted(worker.memory_info().rss for worker in comfy.workers())

    reference = latent_bytes(comfy, run(comfy, small_prompt(seed=500)))
    run(comfy, small_prompt(seed=501))
    before = resident()
    for seed in range(502, 508):
        run(comfy, small_prompt(seed=seed))
    grown = [after - first for after, first in zip(resident(), before, strict=True)]
    assert max(grown) < 30e6, f"{[round(each / 1e6) for each in grown]} MB more"
    assert latent_bytes(comfy, run(comfy, small_prompt(seed=500))) == reference
