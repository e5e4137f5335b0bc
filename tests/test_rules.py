"""Parameters of policies: their types, their ranges."""

import pytest

from specter_sim.policies.catalogue import EVICTION, PREFETCH
from specter_sim.setup.rules import params_of
from specter_traces.errors import UsageError


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(value: float) -> None:
    for info in (*EVICTION.values(), *PREFETCH.values()):
        for name, param in info.params.items():
            if type(param.default) is float:
                with pytest.raises(UsageError, match=rf"{name} .*(finite|must lie in)"):
                    params_of(info, {name: value})


def test_a_flag_is_no_number() -> None:
    info = next(info for info in EVICTION.values() if "decay" in info.params)
    with pytest.raises(UsageError, match=r"decay .* must be float, got True"):
        params_of(info, {"decay": True})
