"""Every setting: its default, its range, its spellings; and what an error tells and hides."""

from __future__ import annotations

import os
import ssl
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import ModuleType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.app.defaults import DEFAULTS

from celery_anarchon import AnarchonError, ConfigurationError, open_backend, schemes
from celery_anarchon.backends.base import blot
from celery_anarchon.settings import NAMES, Policy, Settings, read_settings
from celery_anarchon.types import Traits

HUGE = 10**400
NO_NUMBERS = ["5", b"5", None, [], True, False, float("nan"), float("inf"), -float("inf"), 1j]
SECRET = "s3kr%2Ft"


def app_of(**conf: Any) -> Celery:
    app = Celery("settings", set_as_current=False)
    app.conf.update({"anarchon_url": "memory://", **conf})
    return app


def read(**conf: Any) -> Settings:
    return read_settings(app_of(**conf))


def refused(**conf: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(**conf)
    assert caught.value.__cause__ is None or SECRET not in repr(caught.value.__cause__)
    return str(caught.value)


def of_broker(url: Any, **conf: Any) -> str:
    """The store that the broker makes."""
    app = Celery("settings", set_as_current=False)
    app.conf.update({"broker_url": url, **conf})
    return read_settings(app).url


# -- defaults and spellings ------------------------------------------------------------------------


def test_defaults() -> None:
    settings = read()
    assert settings.prefix == "cron"
    assert settings.history == 100
    assert settings.instance.split(":")[-2] == str(os.getpid())
    assert settings.default == Policy(
        max_late=3600.0,
        keep=7200.0,
        catch_up="latest",
        lease=30.0,
        attempts=3,
        track="dispatch",
        overlap="allow",
        zone=None,
        splay=0.0,
        anchor=None,
    )
    assert settings.entries == {}
    assert settings.policy("any") is settings.default
    assert settings.zone.utcoffset(None) == timedelta(0)
    assert not settings.zone_is_host


EVERYTHING = {
    "url": "memory://x",
    "prefix": "beat",
    "instance": "here",
    "max_late": 10,
    "keep": 30,
    "catch_up": "all",
    "lease": 2,
    "attempts": 4,
    "track": "run",
    "overlap": "skip",
    "queue_wait": timedelta(minutes=2),
    "history": 7,
    "entries": {"job": {"max_late": 5}},
}


def check_everything(settings: Settings) -> None:
    assert (settings.url, settings.prefix, settings.instance) == ("memory://x", "beat", "here")
    assert settings.history == 7
    expected = Policy(10.0, 30.0, "all", 2.0, 4, "run", "skip", queue_wait=120.0)
    assert settings.default == expected
    assert settings.policy("job") == replace(expected, max_late=5.0)


def module_of(**names: Any) -> ModuleType:
    module = ModuleType("configuration")
    vars(module).update(names)
    return module


def test_everything_is_tested() -> None:
    assert set(EVERYTHING) == NAMES


def test_lower_case_by_update() -> None:
    check_everything(read(**{f"anarchon_{name}": value for name, value in EVERYTHING.items()}))


def test_lower_case_by_attribute() -> None:
    app = Celery("settings", set_as_current=False)
    for name, value in EVERYTHING.items():
        setattr(app.conf, f"anarchon_{name}", value)
    check_everything(read_settings(app))


@pytest.mark.parametrize("spell", [str.lower, str.upper])
def test_a_configuration_module(spell: Any) -> None:
    app = Celery("settings", set_as_current=False)
    names = {spell(f"anarchon_{name}"): value for name, value in EVERYTHING.items()}
    app.config_from_object(module_of(**names, other=5, OTHER=6))
    check_everything(read_settings(app))


@pytest.mark.parametrize("namespace", ["CELERY", "CELERY_", "MY_BEAT"])
def test_a_namespace_among_names_of_others(namespace: str) -> None:
    app = Celery("settings", set_as_current=False)
    prefix = namespace.rstrip("_")
    names = {f"{prefix}_ANARCHON_{name.upper()}": value for name, value in EVERYTHING.items()}
    others = {"DEBUG": True, "SECRET_KEY": "x", "ANARCHON_URL": "mars://", "ANARCHON_NIX": 1}
    app.config_from_object(module_of(**names, **others), namespace=namespace)
    check_everything(read_settings(app))


def test_a_namespace_and_an_update() -> None:
    app = Celery("settings", set_as_current=False)
    app.config_from_object(SimpleNamespace(CELERY_ANARCHON_PREFIX="one"), namespace="CELERY")
    app.conf.update(anarchon_url="memory://", anarchon_history=5)
    settings = read_settings(app)
    assert (settings.prefix, settings.history) == ("one", 5)


def test_an_unknown_name_under_a_namespace() -> None:
    app = Celery("settings", set_as_current=False)
    app.config_from_object(SimpleNamespace(CELERY_ANARCHON_URI="memory://"), namespace="CELERY")
    with pytest.raises(ConfigurationError, match=r"CELERY_ANARCHON_URI is not a setting.*_url"):
        read_settings(app)


def test_none_means_not_set() -> None:
    assert read(anarchon_max_late=None, anarchon_prefix=None, anarchon_entries=None) == read()


@pytest.mark.parametrize("name", ["uri", "splay", "timezone", "anchor", "maxlate", ""])
def test_an_unknown_setting(name: str) -> None:
    text = refused(**{f"anarchon_{name}": 1})
    assert text.startswith(f"anarchon_{name} is not a setting of celery_anarchon; there are ")
    assert all(f"anarchon_{known}" in text for known in NAMES)


def test_no_setting_of_celery_is_ours() -> None:
    assert not [name for name in DEFAULTS if name.startswith("anarchon")]


# -- ranges and kinds --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_late", "keep", "lease", "queue_wait"])
@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, 0, 0.001, 0.999, -1, HUGE, 1e300, 1e10, timedelta(0)]
)
def test_seconds_out_of_range(name: str, value: Any) -> None:
    if value is None:
        return
    text = refused(**{f"anarchon_{name}": value})
    assert text.startswith(f"anarchon_{name} = {str(value)[:5]}") or repr(value) in text
    assert "must be seconds" in text
    assert len(text) < 200


@pytest.mark.parametrize(
    ("value", "seconds"), [(5000, 5000.0), (4999.5, 4999.5), (timedelta(hours=2), 7200.0)]
)
@pytest.mark.parametrize("name", ["max_late", "keep", "lease"])
def test_seconds_in_range(name: str, value: Any, seconds: float) -> None:
    assert getattr(read(**{f"anarchon_{name}": value}).default, name) == seconds


@pytest.mark.parametrize("name", ["max_late", "keep", "lease", "queue_wait"])
def test_a_duration_has_a_second_at_least(name: str) -> None:
    late = {"anarchon_max_late": 1, "anarchon_keep": 2} | {f"anarchon_{name}": 1 + (name == "keep")}
    assert getattr(read(**late).default, name) == 1 + (name == "keep")
    text = refused(**{f"anarchon_{name}": 0.999})
    assert text.startswith(f"anarchon_{name} = 0.999 must be seconds, 1 or more")
    if name != "keep":
        text = refused(anarchon_entries={"job": {name: timedelta(milliseconds=1)}})
        assert text.startswith(f"anarchon_entries['job'].{name} = datetime")


@pytest.mark.parametrize("name", ["attempts", "history"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, -1, 2.0, HUGE, 1_000_001])
def test_counts_out_of_range(name: str, value: Any) -> None:
    if value is None:
        return
    text = refused(**{f"anarchon_{name}": value})
    assert text.startswith(f"anarchon_{name} = ")
    assert text.endswith(" must be a whole number from 1 to 1,000,000")
    assert len(text) < 200


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("catch_up", ["latest", "none", "all"]),
        ("track", ["dispatch", "run"]),
        ("overlap", ["allow", "skip"]),
    ],
)
def test_choices(name: str, choices: list[str]) -> None:
    for choice in choices:
        track = {"anarchon_track": "run"} if choice == "skip" else {}
        assert getattr(read(**{f"anarchon_{name}": choice}, **track).default, name) == choice
    for value in ("", choices[0].upper(), [choices[0]], 1, True, {}):
        text = refused(**{f"anarchon_{name}": value})
        assert text.startswith(f"anarchon_{name} = {value!r} must be one of {choices[0]!r}")


@pytest.mark.parametrize("name", ["prefix", "instance"])
@pytest.mark.parametrize("value", ["", 0, 5, b"x", ["x"]])
def test_texts(name: str, value: Any) -> None:
    text = refused(**{f"anarchon_{name}": value})
    assert text == f"anarchon_{name} = {value!r} must be a text that is not empty"


def test_keep_must_be_longer_than_max_late() -> None:
    assert read(anarchon_max_late=10).default.keep == 20
    assert read(anarchon_max_late=10, anarchon_keep=10.5).default.keep == 10.5
    for keep in (10, 9.9):
        text = refused(anarchon_max_late=10, anarchon_keep=keep)
        assert text.startswith(f"anarchon_keep = {keep:g} s must be longer than anarchon_max_late")
    text = refused(anarchon_keep=100)
    assert "anarchon_max_late (3600 s)" in text


def test_the_starting_deadline_of_celery_is_the_default_of_max_late() -> None:
    assert read(beat_cron_starting_deadline=100).default.max_late == 100
    assert read(beat_cron_starting_deadline=100).default.keep == 200
    assert read(beat_cron_starting_deadline=100, anarchon_max_late=5).default.max_late == 5
    # It is not asked where ours is set.
    assert read(beat_cron_starting_deadline=-1, anarchon_max_late=5).default.max_late == 5
    assert refused(beat_cron_starting_deadline=0).startswith("beat_cron_starting_deadline = 0 must")
    assert "beat_cron_starting_deadline = 'x'" in refused(beat_cron_starting_deadline="x")


def test_skip_needs_runs_that_are_tracked() -> None:
    text = refused(anarchon_overlap="skip")
    assert text.startswith("anarchon_overlap = 'skip' needs anarchon_track = 'run'")
    text = refused(anarchon_entries={"job": {"overlap": "skip"}})
    assert text.startswith("anarchon_entries['job'].overlap = 'skip' needs anarchon_entries['job']")
    both = {"overlap": "skip", "track": "run"}
    assert read(anarchon_entries={"job": both}).policy("job").overlap == "skip"


# -- entries -----------------------------------------------------------------------------------


def test_overrides_lie_on_top_of_the_defaults() -> None:
    anchor = datetime(2026, 1, 1, tzinfo=timezone.utc)
    settings = read(
        anarchon_max_late=100,
        anarchon_attempts=5,
        anarchon_entries={
            "a": {"max_late": timedelta(minutes=1), "splay": 30, "timezone": "Asia/Tokyo"},
            "b": {"lease": 3, "anchor": anchor, "catch_up": "none"},
            "c": {},
        },
    )
    assert settings.policy("a") == Policy(
        max_late=60.0, keep=150.0, attempts=5, splay=30.0, zone=ZoneInfo("Asia/Tokyo")
    )
    assert settings.policy("b") == Policy(
        max_late=100.0, keep=200.0, attempts=5, lease=3.0, anchor=anchor, catch_up="none"
    )
    assert settings.policy("c") == settings.policy("d") == settings.default


@pytest.mark.parametrize(
    "entries", [[], 0, "job", [("job", {})], {"job": None}, {"job": ["lease"]}]
)
def test_entries_are_dicts(entries: Any) -> None:
    text = refused(anarchon_entries=entries)
    assert text.startswith("anarchon_entries")
    assert " is not a dict of " in text


@pytest.mark.parametrize("name", ["keep", "history", "url", "zone", "Lease", "", 5])
def test_an_unknown_override(name: Any) -> None:
    text = refused(anarchon_entries={"a job": {name: 5}})
    assert text.startswith(f"anarchon_entries['a job'].{name} is not an override; there are anchor")


def test_an_override_out_of_range_is_named() -> None:
    for name, value in [("lease", 0), ("max_late", -1), ("attempts", 0), ("splay", -0.1)]:
        text = refused(anarchon_entries={"job": {name: value}})
        assert text.startswith(f"anarchon_entries['job'].{name} = {value} must be ")


def test_a_run_waits_in_a_queue_until_it_is_late_or_as_long_as_is_said() -> None:
    settings = read(anarchon_entries={"a": {"max_late": 60}, "b": {"queue_wait": 5}})
    assert [settings.policy(job).longest_wait for job in "abc"] == [60.0, 5.0, 3600.0]
    assert read(anarchon_queue_wait=7).policy("any").longest_wait == 7.0
    assert "anarchon_queue_wait = 0" in refused(anarchon_queue_wait=0)


def test_a_splay_counts_on_top_of_being_late() -> None:
    policy = read(anarchon_entries={"job": {"splay": 7200}}).policy("job")
    assert policy.keep == 2 * 3600 + 7200
    text = refused(anarchon_keep=4000, anarchon_entries={"job": {"splay": 500}})
    assert text.startswith("anarchon_keep = 4000 s must be longer than anarchon_entries['job'].max")
    assert "splay (500 s)" in text
    assert read(anarchon_entries={"job": {"splay": 0}}).policy("job").splay == 0


@pytest.mark.parametrize(
    "zone",
    ["UTC", "Europe/Berlin", ZoneInfo("Asia/Tokyo"), timezone.utc, timezone(timedelta(1 / 9))],
)
def test_zones(zone: Any) -> None:
    policy = read(anarchon_entries={"job": {"timezone": zone}}).policy("job")
    assert policy.zone == (ZoneInfo(zone) if isinstance(zone, str) else zone)


@pytest.mark.parametrize(
    "zone", ["", "Mars", "../../../etc/passwd", "/etc/localtime", "\0", None, 5, b"UTC", [], {}]
)
def test_no_zones(zone: Any) -> None:
    text = refused(anarchon_entries={"job": {"timezone": zone}})
    assert text.startswith(f"anarchon_entries['job'].timezone = {zone!r} is not a time zone; for")


@pytest.mark.parametrize(
    "anchor", [0, 5, -5.5, datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))]
)
def test_anchors(anchor: Any) -> None:
    assert read(anarchon_entries={"job": {"anchor": anchor}}).policy("job").anchor == anchor


@pytest.mark.parametrize(
    "anchor", [datetime(2026, 1, 1), "2026-01-01", True, HUGE, 1e300, float("nan"), timedelta(1)]
)
def test_no_anchors(anchor: Any) -> None:
    text = refused(anarchon_entries={"job": {"anchor": anchor}})
    assert text.startswith("anarchon_entries['job'].anchor = ")
    assert text.endswith(" must be an aware datetime, or seconds since the epoch")
    assert len(text) < 200


def test_a_job_that_is_not_in_the_schedule() -> None:
    settings = read(anarchon_entries={"jop": {}})
    with pytest.raises(ConfigurationError, match=r"anarchon_entries: 'jop'.*it has 'job', 'other'"):
        settings.check_jobs(["other", "job"])
    with pytest.raises(ConfigurationError, match=r"'jop' is not in beat_schedule; it has no entr"):
        settings.check_jobs([])
    settings.check_jobs(["jop"])


@pytest.mark.parametrize("schedule", [[], None, "x", 5])
def test_the_schedule_is_a_dict(schedule: Any) -> None:
    assert refused(beat_schedule=schedule).startswith("beat_schedule is a ")


@pytest.mark.parametrize("name", [5, None, b"job", ("a", "b")])
def test_a_job_name_is_a_text(name: Any) -> None:
    text = refused(beat_schedule={name: {"task": "t", "schedule": 1}})
    assert text == f"beat_schedule: the job name {name!r} must be a text"


@pytest.mark.parametrize(
    ("conf", "host"),
    [
        ({}, False),
        ({"enable_utc": False}, True),
        ({"enable_utc": False, "timezone": "Europe/Berlin"}, False),
    ],
)
def test_the_zone_of_the_host_is_told(conf: dict[str, Any], host: bool) -> None:
    assert read(**conf).zone_is_host is host


# -- what a store can't do -------------------------------------------------------------------------


def traits(**own: Any) -> Traits:
    words = dict.fromkeys(("remembers", "atomic_step", "crash", "guarantee"), "")
    given = {"leases": False, "remembers_jobs": False, "own_clock": False, "max_keep": None, **own}
    return Traits(**given, **words)


def test_a_store_without_leases_tracks_no_runs() -> None:
    for conf, where in [
        ({"anarchon_track": "run"}, "anarchon_track"),
        ({"anarchon_entries": {"job": {"track": "run"}}}, "anarchon_entries['job'].track"),
    ]:
        settings = read(**conf)
        settings.check_store(traits(leases=True))
        with pytest.raises(ConfigurationError) as caught:
            settings.check_store(traits())
        assert str(caught.value).startswith(f"{where} = 'run' needs a store with leases")
        assert "which anarchon_url = 'memory://' is not" in str(caught.value)


def test_a_lease_that_outlasts_keep_is_doubted() -> None:
    assert read().doubts(traits(leases=True)) == []
    settings = read(anarchon_max_late=5, anarchon_lease=20, anarchon_entries={"job": {"lease": 9}})
    [doubt] = settings.doubts(traits(leases=True))
    assert doubt.startswith("anarchon_lease = 20 s is not less than keep = 10 s")
    assert settings.doubts(traits()) == []


def test_a_store_that_forgets_too_soon() -> None:
    settings = read(anarchon_entries={"job": {"splay": 100}})
    settings.check_store(traits(max_keep=7400))
    with pytest.raises(ConfigurationError, match=r"\['job'\]\.keep = 7300 s.*7300 s\); lower"):
        settings.check_store(traits(max_keep=7300))
    with pytest.raises(ConfigurationError, match=r"^anarchon_keep = 7200 s"):
        settings.check_store(traits(max_keep=7199))


def test_seconds_are_told_as_digits() -> None:
    settings = read(anarchon_max_late=1_234_567.5, anarchon_keep=5_000_000)
    with pytest.raises(ConfigurationError, match=r"keep = 5000000 s.*\(4294907 s\)"):
        settings.check_store(traits(max_keep=4_294_907))
    text = refused(anarchon_max_late=1_234_567.5, anarchon_keep=1_234_567)
    assert "anarchon_keep = 1234567 s must be longer than anarchon_max_late (1234567.5 s)" in text


# -- the URL, given ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["", "x", 5, b"memory://", "://x", "redis//h", "5://x", ["memory://"]]
)
def test_no_urls(url: Any) -> None:
    text = refused(anarchon_url=url)
    assert text.startswith("anarchon_url = ")
    assert "is not a URL; for example 'redis://localhost:6379/0'" in text


def test_an_unknown_scheme() -> None:
    text = refused(anarchon_url=f"mars://u:{SECRET}@h/0")
    assert text.startswith(
        "anarchon_url = 'mars://u:**@h/0': no backend for the scheme 'mars'; use"
    )
    assert all(f"{scheme}://" in text for scheme in schemes())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/0?strategy=nix", ["strategy = 'nix'", "lease, stream-id, idmp, script"]),
        ("redis://h/0?nix=1", ["unknown option 'nix'", "strategy"]),
        ("sqlite:///x?nix=1", ["unknown option", "x?nix=1"]),
    ],
)
def test_an_unknown_option_or_strategy(url: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(anarchon_url=url).open_backend()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "scheme", ["redis", "rediss", "sentinel", "redis-cluster", "sqlite", "mars"]
)
@pytest.mark.parametrize(
    "secret", ["s3/kret", "s3?kret", "s3#kret", "s3@kret", "s3/kr@et", "s3[kret"]
)
@pytest.mark.parametrize("tail", ["127.0.0.1:1/m", "h:x/0", "/tmp/x", "h:1/0?nix=1&strategy=nix"])
def test_a_raw_secret_is_not_shown(scheme: str, secret: str, tail: str) -> None:
    """A password in which ``/``, ``?``, ``#`` or ``[`` is not encoded makes no host and no path."""
    url = f"{scheme}://u:{secret}@{tail}"
    with pytest.raises(AnarchonError) as caught:
        open_backend(url)
    texts = f"{caught.value} {caught.value.__cause__!r} {blot(url)}"
    assert not [part for part in ("s3", "kret", "kr@", "@et") if part in texts]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h/0", "redis://h/0"),
        ("redis://u@h/0", "redis://u@h/0"),
        (f"redis://u:{SECRET}@h:1/0?strategy=idmp", "redis://u:**@h:1/0?strategy=idmp"),
        (f"redis://:{SECRET}@h/0", "redis://:**@h/0"),
        (f"redis://h/0?password={SECRET}&db=1", "redis://h/0?password=**&db=1"),
        (f"sentinel://h/m?sentinel_password={SECRET}", "sentinel://h/m?sentinel_password=**"),
        (f"u:{SECRET}@h", "**@h"),
        ("sqlite:////var/a@b/c.db", "sqlite:////var/a@b/c.db"),
        ("x", "x"),
    ],
)
def test_blot(url: str, shown: str) -> None:
    assert blot(url) == shown


def test_no_repr_shows_the_password() -> None:
    settings = read(anarchon_url=f"redis://u:{SECRET}@127.0.0.1:1/0")
    assert SECRET not in repr(settings)
    assert SECRET not in repr(settings.open_backend())


# -- the URL, from the broker ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broker", "store"),
    [
        ("redis://", "redis://localhost:6379/0"),
        ("redis://localhost", "redis://localhost:6379/0"),
        ("redis://h:1/7", "redis://h:1/7"),
        ("redis://u@h", "redis://u@h:6379/0"),
        ("redis://[::1]:2/3", "redis://[::1]:2/3"),
        ("redis://:p%40%2F%3A%25%3F%23@h:1/3", "redis://:p%40%2F%3A%25%3F%23@h:1/3"),
        ("redis://u%3A:p@h:1/3", "redis://u%3A:p@h:1/3"),
        ("redis+socket:///run/a%20b%3F.sock", "redis+socket:///run/a%20b%3F.sock?db=0"),
        ("redis+socket:///run/r.sock?virtual_host=3", "redis+socket:///run/r.sock?db=3"),
        ("redis+socket://:p%40@/r.sock?db=2", "redis+socket://:p%40@/r.sock?db=2"),
        ("rediss://:p@h:1/0?ssl_cert_reqs=CERT_NONE", "rediss://:p@h:1/0?ssl_cert_reqs=none"),
        ("rediss://:p@h:1/0?ssl_cert_reqs=required", "rediss://:p@h:1/0?ssl_cert_reqs=required"),
        (["redis://:p@a/1", "redis://b/2"], "redis://:p@a:6379/1"),
        ("redis://:p@a/1;redis://b/2", "redis://:p@a:6379/1"),
    ],
)
def test_redis_as_broker_is_the_store(broker: Any, store: str) -> None:
    assert of_broker(broker) == store
    # It must be readable again, and mean the same.
    open_for_looks = read(anarchon_url=store).open_backend()
    assert f"Backend {blot(store)} " in repr(open_for_looks)
    open_for_looks.close()


@pytest.mark.parametrize(
    ("options", "query"),
    [
        (True, ""),
        (
            {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/a b"},
            "required&ssl_ca_certs=%2Fa+b",
        ),
        ({"ssl_cert_reqs": 0, "ssl_keyfile": None}, "none"),
        ({"ssl_cert_reqs": "CERT_OPTIONAL", "ssl_check_hostname": False}, "optional&ssl_check_hos"),
    ],
)
def test_broker_use_ssl(options: Any, query: str) -> None:
    url = of_broker("redis://:p@h:1/0", broker_use_ssl=options)
    assert url.startswith("rediss://:p@h:1/0" + (f"?ssl_cert_reqs={query}" if query else ""))
    read(anarchon_url=url).open_backend().close()


def test_the_write_url_of_the_broker_counts() -> None:
    write = "redis://write:1/0"
    assert of_broker("redis://read:1/0", broker_write_url=write) == write


def test_sentinel_as_broker_is_the_store() -> None:
    master = {"master_name": "my master"}
    hosts = "sentinel://:p%40@a:1/2;sentinel://:p%40@b;sentinel://[::1]:3"
    assert of_broker(hosts, broker_transport_options=master) == (
        "sentinel://:p%40@a:1,b:26379,[::1]:3/my%20master/2"
    )
    url = of_broker(
        "sentinel://a:1",
        broker_transport_options={**master, "sentinel_kwargs": {"password": SECRET, "x": 1}},
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_NONE},
    )
    assert url.startswith("sentinel://a:1/my%20master/0?ssl_cert_reqs=none&sentinel_password=")
    assert url.endswith("&ssl=true")
    backend = read(anarchon_url=url).open_backend()
    assert SECRET not in repr(backend)
    backend.close()


@pytest.mark.parametrize(
    "broker",
    [
        "memory://",
        "filesystem://",
        f"sentinel://:{SECRET}@h:1/0",
        f"sqla+postgresql://u:{SECRET}@h/db",
    ],
)
def test_other_brokers_hold_no_claims(broker: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        of_broker(broker)
    assert str(caught.value).startswith("anarchon_url is not set, and ")
    assert "set " in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "s3kr" not in str(caught.value)


@pytest.mark.parametrize("store", [None, "memory://"])
@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("ampq://u:s3kr@h", ["'ampq://u:**@h'", "Did you mean amqp?", "use amqp://"]),
        ("nats://u:s3kr@h", ["'nats://u:**@h'", "belongs in anarchon_url"]),
        ("sqs://u:s3kr@", ["'sqs://u:**@'", "not installed", "botocore"]),
        ("amqp://u:s3kr@h:99999/v", ["'amqp://u:**@h:99999/v'", "a port up to 65535"]),
        ("amqp://u:s3kr@h:x/v", ["'amqp://u:**@h:x/v'", "a port up to 65535"]),
        ("redis://:s3kr@h:99999/0", ["'redis://:**@h:99999/0'", "a port up to 65535"]),
        ("amqp://h:1,i:2", ["'amqp://h:1,i:2'", "';' between them"]),
        ("amqp://h,i", ["'amqp://h,i'", "';' between them"]),
        ("amqp://h;amqp://u:s3kr@i:99999", ["amqp://u:**@i:99999'", "a port up to"]),
        (["amqp://h", "amqp://u:s3kr@i:x"], ["'amqp://u:**@i:x'", "a port up to"]),
        (["amqp://h", "mars://u:s3kr@i"], ["'mars://u:**@i'", "No such transport: mars"]),
        ("redis://u:s3[kr@h/0", ["'redis://**@h/0'", "'[' as %5B"]),
        ("rediss://h?ssl_cert_reqs=maybe", ["ssl_cert_reqs=maybe'", "optional or none"]),
    ],
)
def test_a_broker_that_can_not_be(broker: Any, words: list[str], store: str | None) -> None:
    """It is told at the start, wherever the claims are."""
    for name in ("broker_url", "broker_write_url"):
        text = refused(**{name: broker, "anarchon_url": store})
        assert text.startswith(f"{name} = ")
        assert all(word in text for word in words), text
        assert "s3" not in text


def test_a_timezone_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="Mars/Phobos"):
        read(anarchon_url="memory://", timezone="Mars/Phobos")
