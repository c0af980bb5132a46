"""The process that becomes vLLM's server: `python -m inferscale.engine.vllm.child --model MODEL --flags`.

It ends with the process that started it, however that one ends: its standard input is a pipe that
nobody writes to, and that the kernel closes.
"""

from __future__ import annotations

import os
import signal
import threading
import time

GRACE_SECONDS = 5.0


def main() -> None:
    """Serve until told to stop."""
    threading.Thread(target=_follow_parent, name="inferscale-parent", daemon=True).start()
    # Not the `vllm` command: that of the CPU's build looks for the other build's metadata.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _follow_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)  # vLLM's own children too: the starter made this process lead a group
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
