"""Redis: a single server, a Sentinel set, a Cluster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis as client
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.processes import wait_for
from tests.servers.base import Server, ServerSet, find_program, free_port
from tests.servers.tls import Certificate, make_certificate

#: Every fresh database of a test run has a number of its own.
DATABASES = 10_000


class Redis(Server):
    """One Redis server. It keeps its data over a restart only with *appendonly*.

    Arguments:
        arguments: more of the server's command line, for example ``"--maxmemory", "10mb"``.
        password: of the default user (``requirepass``).
        users: ACL rules, for example ``"app on >secret ~cron:* +@all"``.
        appendonly: every acknowledged write is in the file before its reply.
        tls: the port speaks TLS only; see :attr:`certificate`.
        unix_socket: also listen on :attr:`socket`.
    """

    def __init__(
        self,
        *arguments: str,
        password: str | None = None,
        users: Sequence[str] = (),
        appendonly: bool = False,
        tls: bool = False,
        unix_socket: bool = False,
    ) -> None:
        super().__init__()
        self.arguments = arguments
        self.password = password
        self.users = users
        self.appendonly = appendonly
        self.certificate: Certificate | None = make_certificate(self.data) if tls else None
        self.socket: Path | None = self.data / "redis.sock" if unix_socket else None
        self._databases = itertools.count(1)

    @classmethod
    def program(cls) -> Path:
        """Return the system's own ``redis-server``."""
        return find_program("redis-server", "redis-server")

    @classmethod
    def launcher(cls) -> list[str | Path]:
        """Return what runs the program: itself, or a loader with the program as argument."""
        return [cls.program()]

    def command(self) -> list[str | Path]:
        """Return the command line."""
        line = [
            *self.launcher(),
            *("--bind", "127.0.0.1", "--dir", self.data, "--save", ""),
            *("--databases", str(DATABASES), "--port", "0" if self.certificate else str(self.port)),
        ]
        if self.certificate:
            line += ["--tls-port", str(self.port), "--tls-auth-clients", "no"]
            line += ["--tls-cert-file", self.certificate.certificate]
            line += ["--tls-ca-cert-file", self.certificate.certificate]
            line += ["--tls-key-file", self.certificate.key]
        if self.password:
            line += ["--requirepass", self.password]
        if self.appendonly:
            line += ["--appendonly", "yes", "--appendfsync", "always"]
        if self.socket:
            line += ["--unixsocket", self.socket]
        for rule in self.users:
            line += ["--user", *rule.split()]
        return [*line, *self.arguments]

    def answers(self) -> bool:
        """Return whether the process that answers is the one that was started."""
        with self.client() as connection:
            return bool(connection.info("server")["process_id"] == self.pid)

    def client(self, db: int = 0, **options: Any) -> Any:
        """Return a new ``redis.Redis`` of the default user; strings out, no retries.

        Arguments:
            db: number of the database.
            options: of ``redis.Redis``; they override the ones set here.
        """
        defaults: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "db": db}
        defaults |= {"password": self.password, "decode_responses": True}
        defaults |= {"socket_timeout": 5.0, "retry": Retry(NoBackoff(), 0)}
        if self.certificate:
            defaults |= {"ssl": True, "ssl_ca_certs": str(self.certificate.certificate)}
        return client.Redis(**(defaults | options))

    def url(self, db: int = 0, *, user: str = "", password: str | None = None) -> str:
        """Return the URL of a database, by default for the default user.

        With TLS the query names the authority's file (``ssl_ca_certs``).
        """
        secret = self.password if password is None else password
        login = f"{quote(user)}:{quote(secret, safe='')}@" if secret else ""
        if self.certificate:
            query = f"?ssl_cert_reqs=required&ssl_ca_certs={self.certificate.certificate}"
            return f"rediss://{login}127.0.0.1:{self.port}/{db}{query}"
        return f"redis://{login}127.0.0.1:{self.port}/{db}"

    def socket_url(self, db: int = 0) -> str:
        """Return the URL of a database by the unix socket."""
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis+socket://{login}{self.socket}?virtual_host={db}"

    def fresh_db(self) -> int:
        """Return the number of a database that nobody has used."""
        return next(self._databases)

    def fresh(self) -> str:
        """Return the URL of a database that nobody has used."""
        return self.url(self.fresh_db())


class _Sentinel(Redis):
    """One sentinel that watches *master*."""

    def __init__(self, master: Redis, name: str, quorum: int) -> None:
        super().__init__()
        self.watches = {"monitor": f"{name} 127.0.0.1 {master.port} {quorum}"}
        self.watches |= {"down-after-milliseconds": f"{name} 500"}
        self.watches |= {"failover-timeout": f"{name} 5000"}
        if master.password:
            self.watches |= {"auth-pass": f"{name} {master.password}"}

    def prepare(self) -> None:
        """Write the configuration: a sentinel keeps its state in that file."""
        lines = [f"bind 127.0.0.1\nport {self.port}\ndir {self.data}\n"]
        lines += [f"sentinel {key} {value}\n" for key, value in self.watches.items()]
        (self.data / "sentinel.conf").write_text("".join(lines))

    def command(self) -> list[str | Path]:
        """Return the command line."""
        return [*self.launcher(), self.data / "sentinel.conf", "--sentinel"]


class RedisSentinel(ServerSet):
    """One master, one replica and three sentinels, of which two decide.

    Arguments:
        password: of master and replica; the sentinels have none.
        name: of the master, for the sentinels.
    """

    program = Redis.program

    def __init__(self, *, password: str | None = None, name: str = "mymaster") -> None:
        self.name = name
        now = ("--repl-diskless-sync-delay", "0")
        self.master = Redis(*now, password=password, appendonly=True)
        replica_of = ["--replicaof", "127.0.0.1", str(self.master.port)]
        if password:
            replica_of += ["--masterauth", password]
        self.replica = Redis(*replica_of, password=password, appendonly=True)
        self.sentinels = [_Sentinel(self.master, name, 2) for _ in range(3)]
        self.members = [self.master, self.replica, *self.sentinels]

    def launch(self) -> None:
        """Start the sentinels last: they ask the master for its replicas only every 10 s."""
        self.master.start()
        self.replica.start()
        wait_for(self._in_sync, 10.0, "the replica to be in sync", log=self.replica.tail)
        for sentinel in self.sentinels:
            sentinel.launch()

    def _in_sync(self) -> bool:
        return bool(self.replica.client().info("replication")["master_link_status"] == "up")

    def formed(self) -> bool:
        """Return whether every sentinel knows the replica and the other sentinels."""
        states = [s.client().sentinel_master(self.name) for s in self.sentinels]
        return all(s["num-other-sentinels"] == 2 and s["num-slaves"] == 1 for s in states)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each sentinel."""
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    def url(self) -> str:
        """Return the URL of the master by its sentinels."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        login = f":{quote(self.master.password, safe='')}@" if self.master.password else ""
        return f"sentinel://{login}{hosts}/{self.name}/0"

    def current_master(self) -> int:
        """Return the port of the server that the living sentinels call master."""
        living = next(sentinel for sentinel in self.sentinels if sentinel.running)
        return int(living.client().sentinel_get_master_addr_by_name(self.name)[1])

    def wait_for_the_replica(self) -> None:
        """Wait until it is the master for the sentinels too, which learn of it one by one."""
        promoted = self.replica.port
        wait_for(lambda: self.current_master() == promoted, 20.0, "the replica to be the master")


class RedisCluster(ServerSet):
    """Three masters that share the slots, without replicas.

    Arguments:
        kind: of the nodes.
    """

    program = Redis.program

    def __init__(self, kind: type[Redis] = Redis) -> None:
        self.bus_ports = [free_port() for _ in range(3)]
        cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port")
        self.nodes = [kind(*cluster, str(bus), "--databases", "1") for bus in self.bus_ports]
        self.members = self.nodes

    def form(self) -> None:
        """Deal out the slots and introduce the nodes to each other."""
        bounds = [0, 5461, 10923, 16384]
        for index, node in enumerate(self.nodes):
            one = node.client()
            one.execute_command("CLUSTER SET-CONFIG-EPOCH", index + 1)
            one.execute_command("CLUSTER ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        for node, bus in zip(self.nodes[1:], self.bus_ports[1:], strict=True):
            self.nodes[0].client().execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)

    def formed(self) -> bool:
        """Return whether every node sees all slots and all nodes."""
        for node in self.nodes:
            info = node.client().cluster("INFO")
            if info["cluster_state"] != "ok" or info["cluster_known_nodes"] != "3":
                return False
        return True

    def url(self) -> str:
        """Return the URL of the cluster by its first node."""
        return f"redis-cluster://127.0.0.1:{self.nodes[0].port}"
