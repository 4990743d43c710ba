"""Browsers: pages of named origins may ask and read, others get no such word, preflights need no key."""

import pytest

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://app.example"
ASK = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def preflight(served, path=CHAT, headers=None):
    async with served.session.options(served.url + path, headers=headers or ASK) as response:
        return response.status, dict(response.headers)


@pytest.mark.parametrize("origins, shown", [((PAGE + "/", "http://other"), PAGE), (("*",), "*")])
async def test_a_named_page_may_ask_and_read(serve_with, tmp_path, origins, shown):
    keys = tmp_path / "keys"
    keys.write_text("alice sk-test-0123456789abcdef\n")
    keys.chmod(0o600)
    async with serve_with(cors_origins=origins, api_key_file=keys) as served:
        status, headers = await preflight(served)
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, shown)
        assert headers["Access-Control-Allow-Methods"] == "POST"
        assert headers["Access-Control-Allow-Headers"] == "authorization" and headers["Vary"] == "Origin"
        assert (await preflight(served, "/v1/models"))[1]["Access-Control-Allow-Methods"] == "GET"
        key = {"Origin": PAGE, "Authorization": "Bearer sk-test-0123456789abcdef"}
        for body in (BODY, {**BODY, "stream": True}):
            async with served.session.post(served.url + CHAT, json=body, headers=key) as response:
                assert response.status == 200 and response.headers["Access-Control-Allow-Origin"] == shown
                assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
                await response.read()
        status, _, headers = await served.post(CHAT, BODY, headers={"Origin": PAGE})
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, shown), "pages read errors too"


async def test_others_are_told_nothing(served, serve_with):
    assert (await preflight(served))[0] == 405
    assert "Access-Control-Allow-Origin" not in (await served.post(CHAT, BODY, headers={"Origin": PAGE}))[2]
    async with serve_with(cors_origins=("https://other.example",)) as strict:
        status, headers = await preflight(strict)
        assert status == 405 and "Access-Control-Allow-Origin" not in headers
        assert "Access-Control-Allow-Origin" not in (await strict.post(CHAT, BODY, headers={"Origin": PAGE}))[2]
    async with serve_with(cors_origins=("*",)) as loose:
        assert "Access-Control-Allow-Origin" not in (await loose.post(CHAT, BODY))[2]
        assert (await preflight(loose, "/nothing"))[0] == 404
        assert (await preflight(loose, headers={"Origin": PAGE}))[0] == 405, "not a preflight"
