"""Settings: what is read, what is refused."""

from __future__ import annotations

import math

import pytest

from hvd_core import Config
from hvd_core.errors import InvalidArgument


def test_the_environment_overrides_defaults() -> None:
    config = Config.from_env({"HVD_CHUNK_BYTES": "4096", "HVD_PEER_TIMEOUT_S": "inf", "PATH": "/bin"})
    assert (config.chunk_bytes, config.peer_timeout_s) == (4096, math.inf)
    assert config.fusion_bytes == Config().fusion_bytes


def test_an_unknown_setting_lists_the_known() -> None:
    with pytest.raises(InvalidArgument, match=r"HVD_CHUNKS; known are .*HVD_CHUNK_BYTES"):
        Config.from_env({"HVD_CHUNKS": "1"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chunk_bytes", "0"),
        ("chunk_bytes", "1.5"),
        ("fusion_bytes", "-1"),
        ("peer_timeout_s", "0"),
        ("connect_timeout_s", "-1"),
        ("stall_shutdown_s", "nan"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?i){name}"):
        Config.from_env({f"HVD_{name.upper()}": text})


def test_settings_go_back_to_the_environment() -> None:
    config = Config(fusion_bytes=0, peer_timeout_s=2.5, host_id="a")
    assert Config.from_env(config.to_env()) == config
    assert Config().to_env() == {}
