from __future__ import annotations

import pytest

from mens_exp.config.model import TokenizerConfig
from mens_exp.errors import ConfigError
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.tokenizer.templates import read_template

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_file_that_is_named_wins_over_the_models_own(written):
    """The record says where the template came from."""
    (written / "chat_template.jinja").write_text("own", "utf-8")
    file = written / "mine.jinja"
    file.write_text(TEMPLATE, "utf-8")
    config = TokenizerConfig(name="hf", chat_template=str(file))
    tokenizer = HfTokenizer.from_directory(written, config)
    assert (tokenizer.chat_template, tokenizer.template_source) == (TEMPLATE, "a file")
    assert HfTokenizer.from_directory(written).chat_template == "own"


def test_absent_file_is_refused_with_the_nearest(tmp_path):
    """The error exits with code 2 and names the setting."""
    (tmp_path / "llama3.jinja").write_text(TEMPLATE, "utf-8")
    with pytest.raises(ConfigError) as caught:
        read_template(str(tmp_path / "lama3.jinja"))
    assert (caught.value.where, caught.value.exit_code) == ("tokenizer.chat_template", 2)
    assert "the nearest there is llama3.jinja" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff", "it is not UTF-8"), (b"{% for m in %}", "is not a chat template")],
)
def test_file_that_is_no_template_is_refused(tmp_path, content, reason):
    """The error comes before the template is used."""
    file = tmp_path / "a.jinja"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_template(str(file))


def test_directory_is_no_template(tmp_path):
    """The system's message is passed on."""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path))


def test_configuration_allows_control_text(written):
    """It is off by default."""
    asked = TokenizerConfig(name="hf", allow_control_text=True)
    plain, allowed = (HfTokenizer.from_directory(written, c) for c in (None, asked))
    assert (plain.guard("<|im_end|>"), allowed.guard("<|im_end|>"))[1] == "<|im_end|>"
    assert plain.guard("<|im_end|>") != "<|im_end|>"
