"""Tokens and passwords, kept out of what is printed and written. Pure."""

import re

MASK = "***"
# The hub, OpenAI, GitHub, GitLab, AWS and Slack, whose tokens are known by their beginnings
KNOWN = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{16,}|\bAKIA[A-Z0-9]{16}\b"
)
USER_OF_URL = re.compile(r"(?<=://)[^\s/@:]*:?[^\s/@]+(?=@)")
NAMED = re.compile(
    r"(?i)(?P<name>\b(?:[a-z]+_)*(?:token|api_?key|passw(?:or)?d|secret|signature|credential)[\"']?"
    r"\s?[=:]\s?[\"']?)(?P<value>[^\s\"'&;,)}\]]{8,})"
)
# What a tokenizer calls tokens, whose values are of the vocabulary: eos_token=<|im_end|>
OF_TOKENIZER = re.compile(
    r"(?i)(?:^|_)(?:bos|eos|eot|unk|sep|pad|cls|mask|image|audio|video|boi|eoi)_token\b"
)
OF_VOCABULARY = re.compile(r"<\|[^\s|<>]+\|>")  # a form that no service gives its tokens
PER_TOKEN = re.compile(r"(?i)(?:^|_)per_token\b")
NUMBER = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?")


def mask_secrets(text: str) -> str:
    """Return a text with *** in place of what looks like a token or a password.

    >>> mask_secrets("https://me:pass@host/x?api_key=0123456789&n=1")
    'https://***@host/x?api_key=***&n=1'
    >>> mask_secrets("eos_token=<|im_end|>")
    'eos_token=<|im_end|>'
    """
    text = USER_OF_URL.sub(MASK, KNOWN.sub(MASK, text))
    return NAMED.sub(_mask_value, text)


def _mask_value(found: re.Match[str]) -> str:
    """Return a name with *** for its value; both if the value is none of a service."""
    name, value = found["name"], found["value"]
    is_word = OF_TOKENIZER.search(name) or ("token" in name and OF_VOCABULARY.fullmatch(value))
    is_rate = PER_TOKEN.search(name) and NUMBER.fullmatch(value)
    return found[0] if is_word or is_rate else name + MASK


def holds_credential(text: str) -> bool:
    """Return whether a setting holds a token, or a URL with a user or a password."""
    is_url = "://" in text
    is_named = is_url and mask_secrets(text) != text
    return bool(KNOWN.search(text) or USER_OF_URL.search(text) or is_named)
