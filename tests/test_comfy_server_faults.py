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
from magi2_native.tests.comfy_server.client import (
    files,
    latent_bytes,
    node_of,
    run,
    small_prompt,
    submit,
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


def test_64_mb_of_shared_memory_are_enough_or_the_error_says_what_is_needed(start_comfy: Callable[..., Server]) -> None:
    unshare = shutil.which("unshare")
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    wrapper = [unshare or "", "--mount", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow a mount of its own")
    server = start_comfy(wrapper=wrapper)
    # 125 frames of 448x256 are 43 MB, and 110 MB as half a minute of sound and latents pass by as well
    finished = run(server, small_prompt(width=448, height=256, steps=1))
    assert files(server, finished)[node_of(small_prompt(), "SaveVideo")].stat().st_size > 0


def test_broken_optional_packages_do_not_matter(start_comfy: Callable[..., Server], tmp_path: Path) -> None:
    broken = "OSError('libcudart.so.13: cannot open shared object file')"
    # ComfyUI itself imports flash_attn, and survives only an ImportError of it
    for name, error in (("flash_attn", "ImportError('wrong torch')"), ("openai", broken), ("diffusers", broken)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}")
    server = start_comfy(environment={"PYTHONPATH": str(tmp_path)})
    assert "IMPORT FAILED" not in server.log
    run(server, small_prompt())


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
