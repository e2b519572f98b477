"""The tests that every claim store passes, for authors of stores.

A test module of a store has a fixture ``store`` and a class for what the store can do::

    import pytest
    from celery_anarchon.contract import LeaseContract, LeaseRaceContract, Store

    @pytest.fixture
    def store(tmp_path):
        with Store(f"mystore:///{tmp_path}/claims") as store:
            yield store

    class TestMyStore(LeaseContract, LeaseRaceContract):
        pass

The classes, from what all stores promise to what only some do:

=======================  =====================================================================
``ClaimContract``        one winner per run, whoever asks (``ClaimOnlyContract``: no leases)
``ResendContract``       a claim sent again is recognised by its token
``JobMemoryContract``    first-seen, last slots and chains
``HistoryContract``      the latest runs
``WorkerContract``       runs that wait for a worker, and end with it
``LeaseContract``        all of the above, with leases
``RaceContract``         the first two among many processes
``LeaseRaceContract``    the same, with take-overs
``KillContract``         processes that die at any moment, with leases
``RestartContract``      the store itself stops and starts (``LeaseRestartContract``: with leases)
``ModelContract``        random operations, answered as ``memory://`` answers them
=======================  =====================================================================

A store lists what it promises; nothing is skipped.
"""

import pytest

# What a test compares is shown only for modules that pytest knew before they were imported.
for _name in ("asking", "claims", "history", "jobs", "leases", "model", "races", "workers"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")

from celery_anarchon.contract.claims import (  # noqa: E402
    ClaimContract,
    ClaimOnlyContract,
    ResendContract,
)
from celery_anarchon.contract.history import HistoryContract  # noqa: E402
from celery_anarchon.contract.jobs import JobMemoryContract  # noqa: E402
from celery_anarchon.contract.leases import LeaseContract  # noqa: E402
from celery_anarchon.contract.model import ModelContract  # noqa: E402
from celery_anarchon.contract.names import ODD_NAMES  # noqa: E402
from celery_anarchon.contract.races import (  # noqa: E402
    KillContract,
    LeaseRaceContract,
    LeaseRestartContract,
    RaceContract,
    RestartContract,
)
from celery_anarchon.contract.store import Address, Store  # noqa: E402
from celery_anarchon.contract.workers import WorkerContract  # noqa: E402

__all__ = (
    "ODD_NAMES",
    "Address",
    "ClaimContract",
    "ClaimOnlyContract",
    "HistoryContract",
    "JobMemoryContract",
    "KillContract",
    "LeaseContract",
    "LeaseRaceContract",
    "LeaseRestartContract",
    "ModelContract",
    "RaceContract",
    "ResendContract",
    "RestartContract",
    "Store",
    "WorkerContract",
)
