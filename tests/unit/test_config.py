"""Settings: read in one place, wrong ones refused by name."""

from __future__ import annotations

import pytest

from hvd_core import Config
from hvd_core.errors import InvalidArgument


def test_settings_come_from_the_environment_and_go_back() -> None:
    env = {"HVD_FUSION_BYTES": "0", "HVD_PEER_TIMEOUT_S": "2.5", "HVD_HOST_ID": "a", "PATH": "/bin"}
    config = Config.from_env(env)
    assert (config.fusion_bytes, config.peer_timeout_s, config.host_id) == (0, 2.5, "a")
    assert Config.from_env(config.to_env()) == config
    assert Config().to_env() == {}


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"HVD_FUSION_BITES.*HVD_FUSION_BYTES"):
        Config.from_env({"HVD_FUSION_BITES": "1"})


@pytest.mark.parametrize(("key", "text"), [("HVD_FUSION_BYTES", "many"), ("HVD_PEER_TIMEOUT_S", "soon")])
def test_a_setting_that_does_not_parse_is_named(key: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}='{text}'"):
        Config.from_env({key: text})
