"""Upload an ensemble to the hub: the folder of `save_pretrained`, in one commit."""

from __future__ import annotations

import tempfile
from typing import Any

from ..errors import HydraError
from .saving import save


def push(
    ensemble: Any,
    repo: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    message: str,
) -> str:
    """Upload an ensemble and return the commit's address; see `HydraEnsemble.push_to_hub`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save(ensemble, folder, name=repo)
        try:
            name = api.create_repo(repo, private=private, exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name, folder_path=folder, revision=revision, commit_message=message
            )
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
            raise HydraError(
                f"Cannot give the ensemble to the hub as {repo!r} ({type(error).__name__}: "
                f"{str(error)[:300]}). Check the name (owner/name), the network and that you are "
                "logged in (hf auth login) with a token that may write; or call save_pretrained() "
                "and upload the folder."
            ) from error
    return str(commit.commit_url)
