"""Every store in the table keeps every contract in its row."""

from __future__ import annotations

import pytest

from tests.contract.stores import STORES

for _name, _row in STORES.items():
    globals()[f"Test_{_name}"] = type(
        f"Test_{_name}",
        _row.contracts,
        {"store": pytest.fixture(staticmethod(_row.store)), "__module__": __name__},
    )
