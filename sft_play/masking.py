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


def mask_secrets(text: str) -> str:
    """Return a text with *** in place of what looks like a token or a password.

    >>> mask_secrets("https://me:pass@host/x?api_key=0123456789&n=1")
    'https://***@host/x?api_key=***&n=1'
    """
    text = USER_OF_URL.sub(MASK, KNOWN.sub(MASK, text))
    return NAMED.sub(lambda found: found["name"] + MASK, text)


def holds_credential(text: str) -> bool:
    """Return whether a setting holds a token, or a URL with a user or a password."""
    is_url = "://" in text
    return bool(KNOWN.search(text) or USER_OF_URL.search(text) or (is_url and NAMED.search(text)))
