"""Where the browser is; Debian's is installed where there is none."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
APT = (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", NAMES[0]])
MISSING = "no Chromium, and Debian's cannot be installed here (that takes apt-get and root)"


def chromium() -> str | None:
    """The path of a browser, after one is installed if need, rights and a network are there."""
    with (Path(tempfile.gettempdir()) / "parcompiler-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it at once
        if _found() is None and os.geteuid() == 0 and shutil.which("apt-get"):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in APT:
                subprocess.run(
                    command, check=False, capture_output=True, env=environment, timeout=240
                )
        return _found()


def _found() -> str | None:
    """The path of a browser that is there."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)
