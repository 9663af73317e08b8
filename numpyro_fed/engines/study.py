"""Carrier of files: a study is a folder, on a shared disk or sent as it is by any other means.

The coordinator writes ``SILO/0001.msg``, ``SILO/0002.msg`` and so on. The silo ``SILO`` answers
each in turn, ``SILO/0001.reply``. Both sign what they write. All files are written as a whole, with
a checksum, so that one that was cut off on the way is seen. ``study.json`` names the study.

A coordinator that is started again writes the same messages. So it needs no checkpoint: replies
that are there count at once, and it goes on where the first one is missing.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from numpyro_fed.privacy.extra import of_extra
from numpyro_fed.privacy.own_keys import hashed
from numpyro_fed.rounds.files import locked, read_sealed, write_sealed, write_whole
from numpyro_fed.rounds.serialization import pack, unpack

MESSAGE, REPLY = "study message", "study reply"
_SUFFIX = {MESSAGE: ".msg", REPLY: ".reply"}


def file_name(kind: str, number: int) -> str:
    """Return the name of the file of a silo's message, or of its reply."""
    return f"{number:04d}{_SUFFIX[kind]}"


class NotYet(BaseException):
    """Replies that are missing, where the coordinator does not wait.

    It is no error: fits keep errors with what they have so far, and let this pass.
    """


class Letter(NamedTuple):
    """Message to a silo, or its reply.

    :param kind: :data:`MESSAGE` or :data:`REPLY`.
    :param study: name of the study, which the coordinator has drawn.
    :param silo: name of the silo.
    :param number: number of the message to this silo, from 1.
    :param body: the bytes of the message, or of the answer.
    :param about: hash of the message that is answered; empty in a message.
    """

    kind: str
    study: str
    silo: str
    number: int
    body: bytes
    about: str = ""

    @property
    def digest(self) -> str:
        """Hash of all parts, which is signed."""
        texts = (self.kind, self.study, self.silo, str(self.number), self.about)
        return hashed(*(text.encode() for text in texts), self.body)

    @property
    def place(self) -> str:
        """Path of its file in the study's folder."""
        return f"{self.silo}/{file_name(self.kind, self.number)}"


def ssh_keys() -> ModuleType:
    """Return the module that reads keys of ``ssh-keygen``.

    :raises ImportError: without cryptography, with the mend.
    """
    return of_extra("a study in a folder", "cryptography.hazmat.primitives.serialization")


def _how(key: object, place: Path) -> tuple:
    """Return what a key's ``sign`` and ``verify`` need beside the data.

    :raises ValueError: for a key of another kind.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return (ec.ECDSA(SHA256()),)
    if isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        return ()
    raise ValueError(f"{place}: expected a key of ssh-keygen -t ed25519 or ecdsa")


def signed(key: Path, digest: str) -> bytes:
    """Return the signature of a hash by a private key that ``ssh-keygen`` made.

    :raises ValueError: for a file that is no such key, without a passphrase.
    """
    try:
        private = ssh_keys().load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{key}: expected a private key without passphrase, of ssh-keygen -t ed25519 "
            f"({type(error).__name__})"
        ) from error
    return private.sign(digest.encode(), *_how(private, key))


def is_signed(key: Path, digest: str, signature: bytes) -> bool:
    """Return whether the owner of a public key has signed a hash.

    :raises ValueError: for a file that is no public key of ``ssh-keygen``.
    """
    try:
        public = ssh_keys().load_ssh_public_key(key.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}: expected a public key, of ssh-keygen -t ed25519 ({type(error).__name__})"
        ) from error
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, digest.encode(), *_how(public, key))
    except InvalidSignature:
        return False
    return True


def write_letter(folder: Path, letter: Letter, key: Path) -> Path:
    """Sign a letter, write it into a study's folder, and return its place."""
    place = folder / letter.place
    place.parent.mkdir(parents=True, exist_ok=True)
    signature = np.frombuffer(signed(key, letter.digest), np.uint8)
    data = {**letter._asdict(), "body": np.frombuffer(letter.body, np.uint8), "by": signature}
    write_sealed(place, pack(data), letter.kind)
    return place


class Opened(NamedTuple):
    """Letter of a file, and its signature, which is not checked."""

    letter: Letter
    signature: bytes


def open_letter(place: Path, kind: str) -> Opened:
    """Return the letter in a file, whoever has signed it.

    :param kind: :data:`MESSAGE` or :data:`REPLY`.
    :raises ValueError: for a file that is no such letter, or was cut off.
    """
    data = unpack(read_sealed(place, kind), keys=False)
    parts = [("study", str), ("silo", str), ("number", int), ("about", str)]
    if (
        not isinstance(data, dict)
        or not all(type(data.get(name)) is expected for name, expected in parts)
        or not all(getattr(data.get(n), "dtype", None) == np.uint8 for n in ("body", "by"))
    ):
        raise ValueError(f"{place}: expected a {kind}, got other parts; ask for it again")
    body, named = data["body"].tobytes(), {name: data[name] for name, _ in parts}
    return Opened(Letter(kind, body=body, **named), data["by"].tobytes())


def read_letter(place: Path, kind: str, key: Path, sender: str) -> Letter:
    """Return the letter in a file.

    :param kind: :data:`MESSAGE` or :data:`REPLY`.
    :param key: the sender's public key.
    :param sender: whom an error names.
    :raises ValueError: for a file that is no such letter, was cut off, or has another's signature.
    """
    letter, signature = open_letter(place, kind)
    if not is_signed(key, letter.digest, signature):
        raise ValueError(
            f"{place}: expected the signature of {sender}, got another's; was it changed, or is "
            f"{key} another key?"
        )
    return letter


class StudyFolder:
    """Transport at the coordinator: messages and replies are files in a folder.

    :param folder: the study's folder, which is made if it does not exist.
    :param names: names of all silos.
    :param key: the coordinator's private key, of ``ssh-keygen``.
    :param keys: folder with the silos' public keys, ``NAME.pub``.
    :param waits: whether to wait for replies that are missing.
    :param say: gets a line of text where replies are missing, or are refused.
    :param pause: seconds between two looks for replies.
    :ivar server: number of the server, the same whenever the study goes on.
    :raises ValueError: for a folder of a study with other silos, and for a missing key.
    :raises ImportError: without cryptography.

    A reply is refused if it is of another study, another silo or another message, is cut off or not
    signed by its silo. The coordinator says so, and waits for another one.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        key: Path,
        keys: Path,
        *,
        waits: bool = True,
        say: Callable[[str], None] = print,
        pause: float = 1.0,
    ) -> None:
        ssh_keys()  # before anything is written
        self.folder, self.names, self.key, self.keys = folder, tuple(names), key, keys
        self.waits, self.say, self.pause = waits, say, pause
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / "study.json"
        with locked(place, wait=True):
            if not place.exists():
                about = {"study": secrets.token_hex(8), "silos": list(names)}
                write_whole(place, json.dumps({**about, "server": secrets.randbits(31)}).encode())
        about = json.loads(place.read_text())
        if about["silos"] != list(names):
            raise ValueError(
                f"{place}: expected the silos {list(names)}, got a study of {about['silos']}; give "
                "another folder"
            )
        missing = [str(keys / f"{n}.pub") for n in names if not (keys / f"{n}.pub").is_file()]
        if missing:
            raise ValueError(f"there are no files {missing}; expected each silo's public key")
        self.study, self.server = about["study"], int(about["server"])
        self._made = dict.fromkeys(names, 0)
        self._said: set[str] = set()

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        """Write the messages that are not there yet, and return all replies.

        :raises ValueError: if a message that is there is another one.
        :raises NotYet: if replies are missing, and it does not wait.
        """
        sent = {name: self._sent(name, body) for name, body in messages.items()}
        replies: dict[str, bytes] = {}
        while True:
            for name, letter in sent.items():
                if name not in replies and (found := self._reply(letter)) is not None:
                    replies[name] = found
            missing = [letter for name, letter in sent.items() if name not in replies]
            if not missing:
                return replies
            waits = ", ".join(m._replace(kind=REPLY).place for m in missing)
            if not self.waits:
                raise NotYet(f"it needs {waits} in {self.folder}; bring the messages to the silos")
            self._say_once(f"{time.strftime('%H:%M:%S')}  waits for {waits}", waits)
            time.sleep(self.pause)

    def _sent(self, name: str, body: bytes) -> Letter:
        """Write a message, or find it written."""
        self._made[name] += 1
        letter = Letter(MESSAGE, self.study, name, self._made[name], body)
        place = self.folder / letter.place
        if not place.exists():
            write_letter(self.folder, letter, self.key)
            return letter
        if open_letter(place, MESSAGE).letter != letter:
            raise ValueError(
                f"{place} is another message than this run's: the study began with another model, "
                "seed or method, other versions, or on another kind of machine; expected the same, "
                "or a new folder"
            )
        return letter

    def _reply(self, letter: Letter) -> bytes | None:
        """Return the answer to a message, or ``None`` where no file is one."""
        place = self.folder / letter._replace(kind=REPLY).place
        if not place.exists():
            return None
        try:
            key = self.keys / f"{letter.silo}.pub"
            reply = read_letter(place, REPLY, key, f"silo {letter.silo!r}")
            for part, expected in (
                ("study", self.study),
                ("silo", letter.silo),
                ("number", letter.number),
                ("about", letter.digest),
            ):
                if getattr(reply, part) != expected:
                    raise ValueError(
                        f"{place}: expected {part} {expected}, got {getattr(reply, part)}; it "
                        "answers another message"
                    )
        except ValueError as error:
            self._say_once(str(error), f"{error} {place.stat().st_mtime}")
            return None
        return reply.body

    def _say_once(self, text: str, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.say(text)
