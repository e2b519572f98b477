"""RabbitMQ: the system's own, and 4.x unpacked beside it."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import amqp

from tests.servers.base import MissingServer, Server, find_program, free_port
from tests.servers.cache import debian_tree
from tests.servers.tls import Certificate, make_certificate

#: Debian's script of the same name on the PATH would change the user.
SCRIPT = "/usr/lib/rabbitmq/bin/rabbitmq-server"


class RabbitMQ(Server):
    """One RabbitMQ broker, without plugins, with the user ``guest``.

    Erlang's name service epmd is a private one too: by default all brokers of a machine share
    one, started by the first and left behind by the last.

    Arguments:
        config: lines of ``rabbitmq.conf``, for example ``"heartbeat = 2"``.
        tls: the port speaks TLS only; see :attr:`certificate`.
    """

    ready_within: ClassVar[float] = 60.0
    stops_within: ClassVar[float] = 20.0

    def __init__(self, *config: str, tls: bool = False) -> None:
        super().__init__()
        self.config = config
        self.certificate: Certificate | None = make_certificate(self.data) if tls else None
        self.distribution_port = free_port()
        self.epmd_port = free_port()
        #: The data folder's path for the broker.
        self.seen_at = self.data

    @classmethod
    def program(cls) -> Path:
        """Return the server's script."""
        return find_program(Path(SCRIPT).name, "rabbitmq-server", str(Path(SCRIPT).parent))

    def prepare(self) -> None:
        """Write the configuration."""
        lines = ["loopback_users.guest = true", "disk_free_limit.absolute = 10MB"]
        if self.certificate:
            lines += ["listeners.tcp = none", f"listeners.ssl.1 = 127.0.0.1:{self.port}"]
            lines += [f"ssl_options.cacertfile = {self.seen_at}/tls.crt"]
            lines += [f"ssl_options.certfile = {self.seen_at}/tls.crt"]
            lines += [f"ssl_options.keyfile = {self.seen_at}/tls.key"]
            lines += ["ssl_options.verify = verify_none"]
        else:
            lines += [f"listeners.tcp.1 = 127.0.0.1:{self.port}"]
        (self.data / "rabbitmq.conf").write_text("\n".join([*lines, *self.config, ""]))
        (self.data / "environment.conf").touch()
        (self.data / "plugins").write_text("[].\n")

    def shell(self, prefix: str = "") -> list[str | Path]:
        """Return a command that becomes the broker, with an epmd that dies with it.

        Arguments:
            prefix: stands before the two commands of RabbitMQ.
        """
        epmd = f"epmd -address 127.0.0.1 -port {self.epmd_port}"
        steps = f"setpriv --pdeathsig KILL {prefix}{epmd} &\nexec {prefix}{SCRIPT}"
        return ["sh", "-euc", steps]

    def command(self) -> list[str | Path]:
        """Return the command line."""
        return self.shell()

    def environment(self) -> dict[str, str | None]:
        """Return the settings that are no lines of ``rabbitmq.conf``."""
        return {
            "HOME": str(self.seen_at),  # the Erlang cookie
            # In this variable, so that Erlang's helper processes see it too.
            "ERL_AFLAGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_MAX_PORTS": "4096",  # a high limit of open files would cost much memory
            # Despite its name: the script becomes the broker, whose pid is then ours.
            "RABBITMQ_ALLOW_INPUT": "true",
            "RABBITMQ_NODENAME": f"n{self.nonce}@localhost",
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput",
            "RABBITMQ_CONF_ENV_FILE": f"{self.seen_at}/environment.conf",
            "RABBITMQ_CONFIG_FILE": f"{self.seen_at}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{self.seen_at}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{self.seen_at}/plugins",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{self.seen_at}/generated",
            "RABBITMQ_MNESIA_BASE": f"{self.seen_at}/mnesia",
            "RABBITMQ_LOG_BASE": f"{self.seen_at}/log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": f"{self.seen_at}/pid",
        }

    def answers(self) -> bool:
        """Return whether the broker that answers has our node name."""
        connection = self.connect()
        try:
            name = connection.server_properties["cluster_name"]
            return f"n{self.nonce}@" in (name.decode() if isinstance(name, bytes) else name)
        finally:
            connection.close()

    def connect(self, **options: Any) -> Any:
        """Return a new connected ``amqp.Connection``.

        Arguments:
            options: of ``amqp.Connection``.
        """
        if self.certificate:
            options["ssl"] = {"ca_certs": str(self.certificate.certificate)}
        connection = amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=5, **options)
        connection.connect()
        return connection

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` and return what it prints, without its banner."""
        done = subprocess.run(
            [*self.inside(), str(Path(SCRIPT).with_name("rabbitmqctl")), "-q", *arguments],
            env={**os.environ, **{k: v for k, v in self.environment().items() if v is not None}},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def inside(self) -> list[str]:
        """Return the command that runs another one where the broker's files are."""
        return []

    def connections(self) -> list[str]:
        """Return the names of the broker's client connections, by its own list."""
        return self.ctl("list_connections", "name", "--no-table-headers").splitlines()

    def vhost(self) -> str:
        """Return the URL of a new virtual host for the user ``guest``."""
        name = f"v{secrets.token_hex(4)}"
        # One call, as each takes a second.
        self.ctl(
            "eval",
            f'rabbit_vhost:add(<<"{name}">>, <<"test">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{name}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"test">>).',
        )
        return self.url(name)

    def url(self, vhost: str = "/") -> str:
        """Return the URL of a virtual host for the user ``guest``."""
        scheme = "amqps" if self.certificate else "amqp"
        return f"{scheme}://guest:guest@127.0.0.1:{self.port}/{quote(vhost, safe='')}"


class RabbitMQ4(RabbitMQ):
    """RabbitMQ 4 out of Debian's *suite*, in a folder of its own (needs root).

    Arguments:
        config: lines of ``rabbitmq.conf``.
        suite: ``"trixie"`` has 4.0, ``"forky"`` a newer one.
    """

    def __init__(self, *config: str, suite: str = "trixie", tls: bool = False) -> None:
        super().__init__(*config, tls=tls)
        self.suite = suite
        self.seen_at = Path("/data")

    @classmethod
    def tree(cls, suite: str) -> Path:
        """Return the folder with the unpacked system."""
        if os.geteuid() != 0:
            raise MissingServer("RabbitMQ 4 runs in a folder by chroot: run the tests as root")
        system = ("rabbitmq-server", "dash", "coreutils", "sed", "grep", "libc-bin", "base-files")
        return debian_tree("rabbitmq", suite, [*system, "hostname", "login", "passwd"])

    @classmethod
    def program(cls) -> Path:
        """Return the script in the folder."""
        return cls.tree("trixie") / SCRIPT.lstrip("/")

    def command(self) -> list[str | Path]:
        """Return the command: it sees the folder as its root, in mounts of its own."""
        tree = shlex.quote(str(self.tree(self.suite)))
        steps = [
            f"mkdir -p {tree}{self.seen_at} {tree}/proc {tree}/dev",
            f"mount --bind {shlex.quote(str(self.data))} {tree}{self.seen_at}",
            f"mount -t proc proc {tree}/proc",
            f"mount --bind /dev {tree}/dev",
            "exec " + shlex.join(map(str, self.shell(f"chroot {tree} "))),
        ]
        return ["unshare", "--mount", "sh", "-euc", "\n".join(steps)]

    def inside(self) -> list[str]:
        """Return the command that runs another one where the broker's files are."""
        return [
            "nsenter",
            "--mount",
            "--target",
            str(self.pid),
            "chroot",
            str(self.tree(self.suite)),
        ]
