"""The newest released PostgreSQL, out of Debian's next release."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.servers.base import MissingServer
from tests.servers.cache import debian_tree
from tests.servers.postgresql import PostgreSQL

#: A program's first argument is its own path, by which it finds the other one and its files.
WRAPPER = """\
#!/bin/sh
exec '{loader}' --library-path '{libraries}' --argv0 "$0" "$0.elf" "$@"
"""


class NewestPostgreSQL(PostgreSQL):
    """One server of Debian forky's PostgreSQL, with the loader and libraries of that release.

    It runs from a copy in its own folder: the system user ``postgres`` may not be able to reach
    the one with the tests.
    """

    @classmethod
    def program(cls) -> Path:
        """Return ``postgres`` in the unpacked system."""
        tree = debian_tree("postgresql", "forky", ["postgresql"])
        found = next(tree.glob("usr/lib/postgresql/*/bin/postgres"), None)
        if found is None:
            raise MissingServer(f"there is no postgres in {tree}; remove that folder")
        return found

    def folder(self) -> Path:
        """Return the folder of the copied programs."""
        return self.data.joinpath("usr", *self.program().parts[-5:-1])

    def prepare(self) -> None:
        """Copy the server and what it needs, then make the cluster."""
        system = self.program().parents[4]
        loader = next(system.glob("lib/*-linux-gnu/ld-linux-*.so.*"))
        libraries = self.data / "usr/lib" / loader.parent.name
        libraries.mkdir(parents=True)
        for library in loader.parent.glob("*.so.*"):
            shutil.copy(library, libraries)
        for part in ("lib/postgresql", "share/postgresql"):
            shutil.copytree(system / part, self.data / "usr" / part, symlinks=True)
        wrapper = WRAPPER.format(loader=libraries / loader.name, libraries=libraries)
        for name in ("initdb", "postgres"):
            program = self.folder() / name
            program.rename(f"{program}.elf")
            program.write_text(wrapper)
            program.chmod(0o755)
        subprocess.run(["chmod", "-R", "a+rX", self.data / "usr"], check=True)  # whatever the umask
        super().prepare()
