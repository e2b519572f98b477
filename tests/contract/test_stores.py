"""Every store in the table keeps every contract in its row."""

from __future__ import annotations

import pytest

from tests.contract.stores import STORES, Row


def _test_class(name: str, row: Row) -> type:
    members = {
        "__module__": __name__,
        "store": pytest.fixture(staticmethod(row.store)),
        "pytestmark": [pytest.mark.server(*row.servers)],
    }
    return type(f"Test_{name}", row.contracts, members)


for _name, _row in STORES.items():
    globals()[f"Test_{_name}"] = _test_class(_name, _row)
