"""`--kernel` without a GPU: what no GPU would take either is refused, the rest is said to change nothing."""

import logging

import pytest

from meshkit.errors import ConfigError
from worker_svc import loading


def test_a_pin_is_said_to_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=loading.__name__):
        loading._read_pins("")
        assert not caplog.records
        loading._read_pins("top_entries=flashinfer, fp8_gemm=triton")
    assert "nothing changes on a CPU" in caplog.text


@pytest.mark.parametrize(("pin", "says"), [("nope=x", "no operation 'nope'"), ("fp8_gemm=marlin", "has the backends")])
def test_a_pin_that_no_gpu_takes_is_refused(pin: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loading._read_pins(pin)
