"""One hypothesis profile for all: the same examples on every machine, and no deadlines on shared cores."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "asyncrl", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("asyncrl")


def pytest_configure(config: pytest.Config) -> None:
    """sentencepiece (SWIG) warns while it is imported; as an error that is a segmentation fault at Python's exit."""
    config.addinivalue_line("filterwarnings", r"ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
