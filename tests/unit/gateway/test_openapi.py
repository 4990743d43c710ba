"""The served OpenAPI document: complete, true, and fuzzed by schemathesis against a gateway with a scripted mesh."""

import asyncio
import json
import subprocess
import sys

import jsonschema
import msgspec
import pytest

from gateway import routes
from gateway.openapi import EXAMPLES

# 501 is an answer here: what is documented and not there says so. Everything else from 500 on is a failure.
SETTINGS = """[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", "501"]
"""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


async def test_the_document_lists_every_route_and_validates_its_own_examples(served):
    status, document, headers = await served.get("/openapi.json")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    paths = {path for route in routes.ROUTES for path in route.paths}
    assert paths <= set(document["paths"]) and "/v1/models/{id}" in document["paths"]
    schemas = document["components"]["schemas"]
    for name, example in EXAMPLES.items():
        resolver = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(resolver).validate(example)
        assert schemas[name]["properties"], name
    for route in routes.ROUTES:
        if route.body is not None:
            fields = {field.encode_name for field in msgspec.structs.fields(route.body)}
            assert fields == set(schemas[route.body.__name__]["properties"]), route.paths


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/tokenize"])
async def test_the_examples_work(served, path):
    _, document, _ = await served.get("/openapi.json")
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]["works"]["value"]
    async with served.session.post(served.url + path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text


async def fuzz(served, folder, *options):
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run", f"{served.url}/openapi.json",
        "--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--warnings", "off", "--no-color", *options,
        "--request-timeout", "20", "--generation-database", "none", "--exclude-path", "/health_generate",
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-6000:]
    return out.decode()


@pytest.mark.timeout(240)
async def test_fuzzing_finds_no_server_error(served, mesh, tmp_path):
    """Nothing hangs either: the fixture checks that no generation is left running."""
    mesh.say = lambda start, choice: mesh.text("Yes.")
    out = await fuzz(served, tmp_path, "--max-time", "60", "--max-examples", "200", "--seed", "7")
    print(out[-1500:])


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_fuzzing_for_ten_minutes(served, mesh, tmp_path):
    mesh.say = lambda start, choice: mesh.text("Yes.")
    await fuzz(served, tmp_path, "--max-time", "600", "--max-examples", "2000")


def test_the_document_is_valid_json_of_bounded_size():
    document = routes.document((*routes.ROUTES, routes._MODEL, routes._RESPONSE, routes._CANCEL, routes._ITEMS))
    assert len(document) < 256 * 1024 and json.loads(document)["openapi"] == "3.1.0"
