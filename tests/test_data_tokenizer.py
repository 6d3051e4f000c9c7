"""sft_play.data.tokenizer: which chat template a run has."""

import errno

import pytest
from transformers import AutoTokenizer

from sft_play.config.schema import Config
from sft_play.data.templates import DEFAULT_TEMPLATE
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError, ExitClass, SftPlayError


def template(base, setting: str | None) -> str:
    return load_tokenizer(
        Config.model_validate({"model": {"name": str(base), "chat_template": setting}})
    ).chat_template


def test_the_template_is_the_tokenizers_the_built_in_one_or_that_of_a_file(
    tiny_base, tokenizer, tmp_path
):
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0]['content'] }}")
    assert template(tiny_base, None) == tokenizer.chat_template
    assert template(tiny_base, "default") == DEFAULT_TEMPLATE != tokenizer.chat_template
    assert template(tiny_base, str(own)) == own.read_text()


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff", "not UTF-8")])
def test_a_template_that_cannot_be_read_is_named(tiny_base, tmp_path, content, reason):
    if content:
        (tmp_path / "own.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model.chat_template=.*own.jinja: {reason}"):
        template(tiny_base, str(tmp_path / "own.jinja"))


def test_a_full_disk_of_the_hubs_cache_is_no_fault_of_the_tokenizers_files(monkeypatch):
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/tokenizer.json")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fill)
    with pytest.raises(SftPlayError, match=r"/cache/tokenizer.json; free some space") as caught:
        load_tokenizer(Config.model_validate({"model": {"name": "owner/name"}}))
    assert caught.value.exit_class == ExitClass.DISK_FULL
