"""What `make fuzz` tells schemathesis; the run itself needs two minutes and an environment of its own."""

from __future__ import annotations

import sys

from tests.fuzz.fuzz_api import configuration

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_everybody_asks_with_their_own_token() -> None:
    tokens = {"admin": "embrace_admin_-_A", "device": "embrace_device_B", "enrolment": "embrace_enrol_C"}
    made = tomllib.loads(configuration(tokens, {"job": ["1f2e"], "version": [0, 1]}))
    asked = {row["headers"]["Authorization"]: row for row in made["operations"]}
    assert asked["Bearer embrace_admin_-_A"]["include-tag"] == "admin"
    assert asked["Bearer embrace_device_B"] == {
        "include-tag": "device",
        "exclude-name": "POST /v1/devices",
        "headers": {"Authorization": "Bearer embrace_device_B"},
    }
    assert asked["Bearer embrace_enrol_C"]["include-name"] == "POST /v1/devices"
    assert made["dictionaries"] == {"job": {"values": ["1f2e"]}, "version": {"values": [0, 1]}}
    assert {name for name in made["parameters"] if name.startswith("path.")} == {"path.job", "path.version"}
