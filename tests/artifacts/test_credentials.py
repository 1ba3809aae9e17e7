"""Masking of credentials in records: what is masked, and what is left alone."""

from __future__ import annotations

import hashlib

import pytest

from mens_exp.artifacts.credentials import looks_like_one, screened

# Built at run time, so that no file contains anything that looks like a secret.
RANDOM = "q7Zp2Lk9Vx4Tn8Rw1Yb6"
MARKED = "q7Zp!2Lk9Vx@4T#n8Rw%1Yb6"


@pytest.mark.parametrize(
    "text",
    [
        "https://user:" + "pw@host/path",
        "postgresql://admin:" + "hunter2@db:5432/runs",
        "https://user:" + "p@" + RANDOM + "@host/path",  # unescaped, as people paste it
        "https://user:" + RANDOM + "/" + RANDOM + "@host/path",
        "//user:" + RANDOM + "@host/path",
        "machine host login user password " + RANDOM,
        "train --hub-token " + RANDOM,
        "X-Api-Key: " + RANDOM,
        '{"SecretAccessKey": "' + RANDOM + '"}',
        '{"accessToken": "' + RANDOM + '"}',
        "password=" + MARKED,
        "login with --client-secret " + MARKED,
        "https://account/container?sv=2020&sig=" + RANDOM[:9] + "%2B" + RANDOM[9:] + "%3D",
        "https://bucket/file?X-Amz-Signature=" + hashlib.sha256(b"x").hexdigest(),
        "https://" + RANDOM + "@github.com/lab/code.git",
        "hf_" + RANDOM * 2,
        "AKIA" + "IOSFODNN7QQQQQQQ",
        "api_key=" + RANDOM,
        "export OPENAI_API_KEY='" + RANDOM + "'",
        '{"token": "' + RANDOM + '"}',
        "Authorization: Bearer " + RANDOM,
        "DefaultEndpoints;AccountKey=" + RANDOM * 4 + "==;",
        "https://host/file?X-Amz-Signature=" + RANDOM,
        "npm_" + RANDOM + RANDOM[:16],
        "pypi-" + RANDOM * 3,
        "dapi" + "0f" * 16,
        "https://hooks.slack.com/services/T012/B345/" + RANDOM,
        "https://discord.com/api/webhooks/123456/" + RANDOM * 3,
        '{"auths": {"host": {"auth": "' + RANDOM + '=="}}}',
    ],
)
def test_a_credential_is_masked_wherever_it_stands(text):
    """In a list, as a value and inside other text; the mask states the credential's length."""
    told = looks_like_one(text)
    assert told is not None
    assert "characters)" in told
    record = {"notes": [f"before {text} after"], "n": 3}
    safe = screened(record)
    assert safe["n"] == 3
    assert safe["notes"][0].startswith("before ")
    assert safe["notes"][0].endswith(" after")
    for secret in (
        "user:pw",
        "hunter2",
        RANDOM,
        "Lk9Vx",
        "8Rw",
        "IOSFODNN7QQQQQQQ",
        "0f0f0f",
        "2d711642b",
    ):
        assert secret not in str(safe)


@pytest.mark.parametrize("name", ["token", "api-key", "accessToken", "client.secret", "PASSWORD"])
def test_a_random_value_under_a_name_of_a_secret_is_masked(name):
    """The key's name decides; under another name the same value is an identifier."""
    assert RANDOM not in str(screened({name: RANDOM}))
    assert screened({"run_id": RANDOM}) == {"run_id": RANDOM}


@pytest.mark.parametrize(
    "value",
    [
        "https://huggingface.co/lab/model",
        "ssh://git@github.com/lab/code.git",
        "http://localhost:8000/models/a@main",
        "https://host/lab/code@main:rows.jsonl",
        "file:///runs/a:b/c@main",
        "a keyboard, a broken design=" + "tokenizer/version2/config",
        "/home/user/data/rows.jsonl",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "eos_token=<|im_end|>",
        "token=$TOKEN_OF_THE_HUB_1",
        "token=/a/b/c/d/e/f/g/h/i1",
        hashlib.sha256(b"x").hexdigest(),
        "a token that is expected here: nothing of the kind",
        "2026-11-23T17:47:02.123Z",
    ],
)
def test_what_is_no_credential_is_left_as_it_is(value):
    """Paths, hashes, ids and ordinary words in records stay unchanged."""
    assert looks_like_one(value) is None
    record = {"tokenizer_sha256": value, "base_model": value, "notes": [f"of {value}"]}
    assert screened(record) == record


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "password", "client_secret"])
def test_a_key_that_looks_like_a_hash_is_masked_beside_a_sure_name(name):
    """W&B's API keys looked like a commit hash for years."""
    key = hashlib.sha1(b"x", usedforsecurity=False).hexdigest()
    assert key not in str(screened([f"{name}={key}", {name: key}]))


def test_a_content_hash_under_an_unsure_name_is_no_credential():
    """Records consist of commits and digests, so an ambiguous name does not mask one."""
    for value in (hashlib.sha1(b"x", usedforsecurity=False).hexdigest(), "e" * 64):
        assert screened({"token": value, "key": f"token={value}"}) == {
            "token": value,
            "key": f"token={value}",
        }


def test_a_token_inside_a_password_is_masked_with_all_of_it():
    """The whole password is masked, including the text around the token."""
    password = f"before-hf_{RANDOM * 2}-behind"
    safe = screened(f"https://user:{password}@host")
    assert "behind" not in safe
    assert "before" not in safe
    assert safe.endswith("characters)@host")


def test_a_private_key_is_masked_to_its_end():
    """The lines after the first one are the key itself, so they are masked too."""
    kind = "RSA PRIVATE" + " KEY-----"
    key = f"-----BEGIN {kind}\n{RANDOM}\n{RANDOM}\n-----END {kind}"
    assert RANDOM not in screened(f"{key}\nnext")
    assert screened(f"{key}\nnext").endswith("next")
    assert RANDOM not in screened(key[:70])  # truncated
