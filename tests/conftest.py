"""Fixtures that more than one test file needs."""

import os
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-golden` replaces the golden rows by what the code gives now; review the diff."""
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite tests/golden/*.json")
    parser.addoption(
        "--all-lossless",
        action="store_true",
        help="every architecture x policy x depth x slots of tests/test_lossless.py (hours)",
    )


@pytest.fixture(scope="session")
def shared() -> Path:
    """Third-party traces and prompts: SPECTER_SHARED, else `shared` beside the checkout."""
    configured = os.environ.get("SPECTER_SHARED")
    folder = Path(configured) if configured else CHECKOUT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder}: set SPECTER_SHARED to run this test")
    return folder


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the source tree."""
    return CHECKOUT
