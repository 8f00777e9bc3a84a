"""The OpenAPI page of the HTTP port, against requests that schemathesis makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("schemathesis")

import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.harness.served_here import serving

# Of each operation, and as many requests that the page does not allow. It takes three seconds: most
# of them to make requests.
TRIED = 6
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def test_all_answers_are_declared_and_no_request_is_a_fault() -> None:
    with serving() as here, requests.Session() as session:
        schema = schemathesis.openapi.from_url(f"{here.url}/openapi.json")
        found = list(schema.get_all_operations())
        operations = [each.ok() for each in found if isinstance(each, Ok)]
        assert len(operations) == len(found)
        asked = [each for each in operations if each.method == "post"]
        assert len(asked) >= 4
        for operation in operations:
            modes = list(GenerationMode) if operation in asked else [GenerationMode.POSITIVE]
            for mode in modes:

                @settings(
                    max_examples=TRIED if operation in asked else 2,
                    derandomize=True,
                    database=None,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def tried(case: Any) -> None:
                    # What is wrong with the rest is looked at only if the model is served.
                    if case.path_parameters and "name" in case.path_parameters:
                        case.path_parameters["name"] = "case"
                    case.call_and_validate(checks=CHECKS, timeout=30, session=session)

                tried()
        counted = here.served.counts.requests
    assert counted[200] > len(operations) - len(asked)
    assert counted[422] > 2 * TRIED
    assert 500 not in counted
