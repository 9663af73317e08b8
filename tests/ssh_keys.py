"""Pairs of keys, as ``ssh-keygen`` makes them."""

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def make_key(place):
    """Write a key as ``ssh-keygen -t ed25519`` does."""
    key, ssh = Ed25519PrivateKey.generate(), serialization.PrivateFormat.OpenSSH
    place.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, ssh, serialization.NoEncryption())
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    place.with_name(f"{place.name}.pub").write_bytes(public)
    return place
