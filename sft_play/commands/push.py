"""`make push`: a repository of the hub becomes an export, in one commit. Loads no torch.

MANIFEST.json in the repository lists what an earlier push wrote: that is replaced or removed.
Nothing else is touched, such as a README.md that was edited on the hub. The token is that of
`hf auth login`, or HF_TOKEN of the environment. It is never read from a command line, which other
users of the machine can see.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from sft_play.commands import use
from sft_play.commands.call import Call
from sft_play.commands.exports import chosen_export, require_package
from sft_play.config.messages import refuse
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault, first_line
from sft_play.reporting.model_card import HUB_ID
from sft_play.runs import seal

NEEDED_TO_SIGN = ("model_signing", "OpenSSL")
SIGNATURE = "model.sig"
# Files of a repository that belong to its owner, even if the export has one of the same name
DOCUMENTS = re.compile(r"(.*/)?(\.gitattributes|LICENSE.*|NOTICE.*|.*\.(md|pdf|png|jpe?g|gif|svg))")
# Files that programs load with a model's weights, whoever wrote them
LOADED = re.compile(r"[^/]+\.(safetensors|bin|pt|gguf|json|jinja|model|txt|sig)")


def push(call: Call) -> list[str]:
    """Upload an export to the hub, private unless PUBLIC=1; when repeated, it resumes.

    With SIGN its signature is uploaded with it, as model.sig.

    Raises: ConfigError, CheckpointError for a damaged folder, EnvironmentFault.
    """
    import httpx

    run = use.chosen_run(call)
    folder = chosen_export(call, run)
    words = call.words
    repo = words.text("REPO")
    is_public = words.choice("PUBLIC", ("0", "1")) == "1"
    if repo is None:
        words.problems.append("REPO: write the repository on the hub, such as REPO=name/model")
    elif not HUB_ID.fullmatch(repo):
        words.problems.append(f"REPO={repo}: write owner/name, such as REPO=name/model")
    refuse(words.problems)
    with use.used_alone(run, "push"):
        damage = seal.find_damage(folder)
        if damage is not None:
            raise CheckpointError(f"{folder}: {damage}; make export writes it again")
        if get_token() is None:
            raise EnvironmentFault(f"REPO={repo}: no token of the hub; type hf auth login")
        api = HfApi()
        key = words.text("SIGN")
        signature = None if key is None else sign(folder, key)
        try:
            found = api.create_repo(repo, private=not is_public, exist_ok=True)
            if not is_public and not api.repo_info(repo).private:
                raise ConfigError(f"REPO={repo} is public; type PUBLIC=1 if that is intended")
            change = RepositoryChange.of(api, repo, folder, signature)
            commit = change.commit(api, repo)
        except HfHubHTTPError as error:
            raise EnvironmentFault(f"REPO={repo}: the hub refuses ({first_line(error)})") from None
        except (ConnectionError, TimeoutError, httpx.HTTPError) as error:
            raise EnvironmentFault(
                f"REPO={repo}: the hub cannot be reached ({first_line(error)}); the same command "
                "resumes the upload"
            ) from None
    kind = "public" if is_public else "private"
    return [*change.lines(), f"pushed {folder} to {found} ({kind}, commit {commit[:12]})"]


@dataclass(frozen=True)
class RepositoryChange:
    """What a push changes in a repository."""

    folder: Path
    manifest: seal.Manifest  # of the export
    signature: bytes | None
    parent: str | None  # the commit that is changed; the hub refuses if there is a newer one
    removed: tuple[str, ...]  # files of an earlier push that the export does not have
    kept: tuple[str, ...]  # files of the export that the repository has from its owner

    @classmethod
    def of(cls, api: HfApi, repo: str, folder: Path, signature: bytes | None) -> "RepositoryChange":
        """Return the change that makes a repository the export.

        Raises: ConfigError for files of others that the export would replace, or that programs
        would load with it.
        """
        manifest = seal.Manifest.read(folder)
        ours = {*manifest.entries, seal.NAME, *([SIGNATURE] if signature else [])}
        parent = api.repo_info(repo).sha
        files = {
            file.path: file
            for file in api.list_repo_tree(repo, recursive=True, revision=parent)
            if isinstance(file, RepoFile)
        }
        earlier = set(_earlier(api, repo, parent, files))
        foreign = sorted(files.keys() - earlier)
        kept = tuple(name for name in foreign if name in ours and DOCUMENTS.fullmatch(name))
        others = [
            name
            for name in foreign
            if not DOCUMENTS.fullmatch(name) and (name in ours or LOADED.fullmatch(name))
        ]
        if others:
            raise ConfigError(
                f"REPO={repo} has {len(others)} files that no push wrote, or that were edited "
                f"since: {', '.join(others)}. Remove them on the hub, or name another REPO"
            )
        if kept and signature:
            raise ConfigError(
                f"SIGN: {', '.join(kept)} of REPO={repo} is not of a push, so a signature of the "
                "export would not fit; remove it on the hub, or push without SIGN"
            )
        return cls(folder, manifest, signature, parent, tuple(sorted(earlier - ours)), kept)

    def commit(self, api: HfApi, repo: str) -> str:
        """Make the change in one commit; return its id."""
        message = f"{self.folder.name} of run {self.folder.parent.parent.name}"
        operations = list(self._operations())
        return api.create_commit(
            repo, operations, commit_message=message, parent_commit=self.parent
        ).oid

    def _operations(self) -> Iterator[CommitOperationAdd | CommitOperationDelete]:
        for name in self.removed:
            yield CommitOperationDelete(name)
        for name in self.manifest.entries:
            if name not in self.kept:
                yield CommitOperationAdd(name, self.folder / name)
        yield CommitOperationAdd(seal.NAME, self.manifest.without(self.kept).encode())
        if self.signature is not None:
            yield CommitOperationAdd(SIGNATURE, self.signature)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        lines = []
        if self.removed:
            lines.append(f"removed what an earlier push wrote: {', '.join(self.removed)}")
        if self.kept:
            lines.append(f"kept as it is on the hub: {', '.join(self.kept)}")
        return lines


def _earlier(api: HfApi, repo: str, commit: str, files: dict[str, RepoFile]) -> Iterator[str]:
    """Yield the files of a repository that an earlier push wrote and nobody has edited since."""
    if seal.NAME not in files:
        return
    with tempfile.TemporaryDirectory() as temporary:

        def download(name: str) -> Path:
            return Path(api.hf_hub_download(repo, name, revision=commit, local_dir=temporary))

        try:
            entries = seal.Manifest.read(download(seal.NAME).parent).entries
        except (EntryNotFoundError, ValueError, KeyError, TypeError):
            return  # it is not ours
        yield from (name for name in (seal.NAME, SIGNATURE) if name in files)
        for name in entries.keys() & files.keys():
            file, entry = files[name], entries[name]
            if file.size != entry.size:
                continue
            digest = file.lfs and file.lfs.sha256
            if digest is None:
                digest = seal.digest_of(seal.FileSlice(download(name), 0, file.size))
            if digest == entry.digests[0] or entry.part_bytes:
                yield name


def sign(folder: Path, key: str) -> bytes:
    """Return OpenSSF's signature of all files of a folder, by a key's file or, for 1, by sigstore.

    Raises: ConfigError for a key that cannot be used; EnvironmentFault without model-signing.
    """
    require_package(NEEDED_TO_SIGN, "model-signing pyOpenSSL", f"SIGN={key}")
    from model_signing.signing import Config

    with tempfile.TemporaryDirectory() as temporary:
        signature = Path(temporary) / SIGNATURE
        try:
            if key == "1":
                signer = Config().use_sigstore_signer()
            else:
                signer = Config().use_elliptic_key_signer(private_key=key)
            signer.sign(folder, signature)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"SIGN={key}: this key cannot sign ({first_line(error)}). Write 1 for sigstore, or "
                "the file of an elliptic key: "
                "openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
            ) from None
        return signature.read_bytes()
