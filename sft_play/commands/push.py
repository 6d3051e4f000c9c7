"""`make push`: an export to the Hugging Face hub, private unless PUBLIC=1. Loads no torch.

The token is the one of `hf auth login`, or HF_TOKEN of the environment; never of a command line,
which other users of the machine can read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.commands import exports
from sft_play.config import targets
from sft_play.config.messages import refuse
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault, first_line
from sft_play.reporting.model_card import HUB_ID
from sft_play.runs import seal

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def push(folder: Path) -> list[str]:
    """Upload the files of an export; typed again, it goes on where it was cut off.

    Raises: ConfigError, CheckpointError for a damaged folder, EnvironmentFault.
    """
    words = exports.words()
    repo = words.text("REPO")
    is_public = words.choice("PUBLIC", ("0", "1")) == "1"
    refuse([*words.problems, *problems_with(repo, words.environ)])
    damage = seal.find_damage(folder, allows_more=False)
    if damage is not None:
        raise CheckpointError(f"{folder}: {damage}; make export writes it anew")
    import httpx
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        raise EnvironmentFault(f"REPO={repo}: no token of the hub; type hf auth login")
    api = HfApi()
    try:
        found = api.create_repo(repo, private=not is_public, exist_ok=True)
        refuse_public_repo(api, repo, is_public)
        message = f"{folder.name} of run {folder.parent.parent.name}"
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        raise EnvironmentFault(f"REPO={repo}: the hub refuses ({first_line(error)})") from None
    except (ConnectionError, TimeoutError, httpx.HTTPError) as error:
        raise EnvironmentFault(
            f"REPO={repo}: the hub cannot be reached ({first_line(error)}); the same command goes "
            "on where it was cut off"
        ) from None
    kind = "public" if is_public else "private"
    return [f"pushed {folder} to {found} ({kind}, commit {done.oid[:12]})"]


def problems_with(repo: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the words of a push."""
    problems = []
    if repo is None:
        problems.append("REPO: write the repository on the hub, such as REPO=name/model")
    elif not HUB_ID.fullmatch(repo):
        problems.append(f"REPO={repo}: write owner/name, such as REPO=name/model")
    given = environ.get(targets.GIVEN, "").split()
    for name in TOKENS:
        if name in given:
            problems.append(
                f"{name}: other users can read a command line; type hf auth login, and make that "
                "token invalid"
            )
    return problems


def refuse_public_repo(api: Any, repo: str, is_public: bool) -> None:
    """Raise ConfigError where a repository that exists is public, and that was not asked for."""
    if not is_public and not api.repo_info(repo).private:
        raise ConfigError(f"REPO={repo} is public; PUBLIC=1 says that this is meant")
