"""Somebody removes the server's runtime folder while it serves, as cleaners of temporary files do."""

from __future__ import annotations

import contextlib
import shutil

import httpx

from tests.running import Running, serve, wait_for


def answers(running: Running) -> bool:
    """Whether a request is answered. A worker that is replaced closes idle connections, perhaps when the client begins
    a request."""
    with contextlib.suppress(httpx.TransportError):
        return running.infer("one", [1.0], shape=[1, 1]).status_code == 200
    return False


def test_a_server_whose_runtime_folder_is_removed_says_so_and_serves_again_and_ends_when_told() -> None:
    with serve({"deployments": {"one": {"model": "faulty:Faulty", "warmup_batch_sizes": []}}}) as running:
        (folder,) = running.folder.iterdir()
        mode = folder.stat().st_mode
        shutil.rmtree(folder)
        wait_for(lambda: f"the runtime folder {folder} was removed" in running.log.read_text(), 60, "the log line")
        wait_for(lambda: answers(running), 180, "an answer")
        assert folder.stat().st_mode == mode
        for path in ("/metrics", "/v2/status"):
            assert running.get(path).status_code == 200
        assert running.stop() == 0
        assert not folder.exists()


def test_counts_are_told_while_their_files_are_missing() -> None:
    with serve({"deployments": {"one": {"model": "faulty:Faulty", "warmup_batch_sizes": []}}}) as running:
        (folder,) = running.folder.iterdir()
        shutil.rmtree(folder / "metrics")
        for path in ("/metrics", "/v2/status"):
            assert running.get(path).status_code == 200
        wait_for((folder / "metrics" / "supervisor").exists, 60, "the counts' file")
        # Over another connection: the worker is replaced now, and closes those that no request is on.
        running.client.close()
        running.client = httpx.Client(timeout=60, trust_env=False)
        assert running.infer("one", [1.0], shape=[1, 1]).status_code == 200
