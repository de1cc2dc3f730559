"""`SHA256SUMS` beside an artefact, and its signature: who made these files, and are they whole.

The file has the form of `sha256sum`, so that `sha256sum --check SHA256SUMS` reads it without this
library. A signature is made by a key of the user's with `ssh-keygen -Y sign`: the keys that people
have for Git and for servers, and no new dependency.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .._records import PARTIAL, inside, sha256_of_file, write_whole
from ..errors import FormatError, HydraError, MissingDependencyError

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
NAMESPACE = "hydra-ensembles"
"""What a signature is for: one made for another purpose with the same key does not pass."""

_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*)")
_SIGNER = "signer"


def write_sums(folder: str | Path, *, key: str | os.PathLike[str] | None = None) -> Path:
    """Write the SHA-256 of every file of a folder; sign the list when a private key is given.

    Args:
        folder: The artefact; hidden files and files in the making are left out.
        key: Of ssh (ed25519, say). It is asked for its passphrase by ssh-keygen, if it has one.
    """
    home = Path(folder)
    names = sorted(
        path.relative_to(home).as_posix()
        for path in home.rglob("*")
        if path.is_file() and not _is_left_out(path.relative_to(home))
    )
    lines = [f"{sha256_of_file(inside(home, name))}  {name}\n" for name in names]
    (home / SIGNATURE).unlink(missing_ok=True)  # of an older list
    write_whole(home / SUMS, "".join(lines))
    if key is not None:
        _sign(home, Path(key).expanduser())
    return home / SUMS


def _is_left_out(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or path.suffix == PARTIAL or path.as_posix() in (SUMS, SIGNATURE)


def read_sums(folder: str | Path) -> dict[str, str]:
    """Return the SHA-256 of every file by name; raise for a line that is none of ours."""
    path = inside(folder, SUMS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise FormatError(f"Cannot read {path} ({error}). Copy or export it again.") from None
    found = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise FormatError(
                f"{path}: line {number} is {line!r:.60}, expected a SHA-256, two spaces and the "
                "name of a file in the folder. Copy or export it again."
            )
        found[match[2]] = match[1]
    return found


def check_sums(folder: str | Path) -> dict[str, str | None]:
    """Compare every file with `SHA256SUMS`; return what is wrong with each, or None."""
    home, found = Path(folder), {}
    for name, digest in read_sums(home).items():
        problem = None
        try:
            path = inside(home, name)
            if not path.is_file():
                problem = "is missing"
            elif sha256_of_file(path) != digest:
                problem = f"does not have its SHA-256 in {SUMS}: truncated, replaced or changed"
        except (FormatError, OSError) as error:
            problem = str(error)
        found[name] = problem
    return found


def check_signature(folder: str | Path, public_key: str | Path | None = None) -> str:
    """Check the signature of `SHA256SUMS`; return who signed it, as ssh-keygen says.

    Args:
        folder: The artefact.
        public_key: The file of the key that must have signed it. Without one only damage is
            found: anybody can sign with a key of their own.

    Raises:
        FormatError: It is not signed, or by another key, or the list was changed.
    """
    home = Path(folder)
    sums, signature = inside(home, SUMS), inside(home, SIGNATURE)
    if not signature.is_file():
        raise FormatError(f"{home} has no {SIGNATURE}: nobody signed it.")
    if public_key is None:
        return _verified(["-Y", "check-novalidate"], signature, sums)
    try:
        words = Path(public_key).expanduser().read_text(encoding="utf-8").split()
        kind, key = words[:2]
    except (OSError, ValueError) as error:
        raise FormatError(f"{public_key} is not a public key of ssh ({error}).") from None
    with tempfile.TemporaryDirectory() as scratch:
        allowed = Path(scratch) / "allowed"
        allowed.write_text(f'{_SIGNER} namespaces="{NAMESPACE}" {kind} {key}\n', encoding="utf-8")
        return _verified(["-Y", "verify", "-f", str(allowed), "-I", _SIGNER], signature, sums)


def _sign(home: Path, key: Path) -> None:
    if not key.is_file():
        raise HydraError(f"There is no key {key} to sign with: make one with ssh-keygen.")
    code, said = _ssh_keygen("-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key), str(home / SUMS))
    if code or not (home / SIGNATURE).is_file():
        raise HydraError(f"Cannot sign with {key}: {said}.")


def _verified(arguments: list[str], signature: Path, sums: Path) -> str:
    content = sums.read_bytes()
    code, said = _ssh_keygen(*arguments, "-n", NAMESPACE, "-s", str(signature), content=content)
    if code:
        raise FormatError(
            f"The signature of {sums} is not right ({said}): the list was changed after it was "
            "signed, or another key signed it. Do not use the folder; get it again."
        )
    return said


def _ssh_keygen(*arguments: str, content: bytes = b"") -> tuple[int, str]:
    """Run ssh-keygen; return its exit code and what it says, in one line."""
    program = shutil.which("ssh-keygen")
    if program is None:
        raise MissingDependencyError("Signatures need ssh-keygen (OpenSSH 8.1 or later).")
    run = subprocess.run([program, *arguments], input=content, capture_output=True, timeout=300)
    said = (run.stdout + b" " + run.stderr).decode(errors="replace")
    return run.returncode, " ".join(said.split())[:200]
